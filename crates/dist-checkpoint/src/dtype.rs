//! The types of items that the planner and candle both know.

use candle_core::DType;
use fsdp_plan::ElemType;

/// Returns the planner's word for a type of candle.
///
/// Both know the names in safetensors headers, so no type is listed here.
pub fn elem_of(dtype: DType) -> Option<ElemType> {
    ElemType::from_name(&safetensors::Dtype::from(dtype).to_string())
}

/// Returns candle's type of such items, unless several of them share a byte.
pub fn dtype_of(elem: ElemType) -> Option<DType> {
    use DType::{BF16, F8E4M3, F16, F32, F64, I16, I32, I64, U8, U32};
    [U8, U32, I16, I32, I64, BF16, F16, F32, F64, F8E4M3]
        .into_iter()
        .find(|&dtype| elem_of(dtype) == Some(elem))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_dtype_of_candle_is_known_and_those_of_variables_come_back() {
        use DType::{
            BF16, F4, F6E2M3, F6E3M2, F8E4M3, F8E8M0, F16, F32, F64, I16, I32, I64, U8, U32,
        };
        for dtype in [U8, U32, I16, I32, I64, BF16, F16, F32, F64, F8E4M3] {
            assert_eq!(elem_of(dtype).and_then(dtype_of), Some(dtype));
        }
        for dtype in [F6E2M3, F6E3M2, F4, F8E8M0] {
            assert_eq!(elem_of(dtype).and_then(dtype_of), None, "{dtype:?}");
            assert!(elem_of(dtype).is_some(), "{dtype:?}");
        }
    }
}
