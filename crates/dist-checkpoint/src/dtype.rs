//! Dtypes that both the planner and candle know.

use candle_core::DType;
use fsdp_plan::ElemType;

/// Returns the planner's type for a dtype of candle.
///
/// Both parse the names in safetensors headers, so no dtype is listed here.
pub fn elem_of(dtype: DType) -> Option<ElemType> {
    ElemType::from_name(&safetensors::Dtype::from(dtype).to_string())
}

/// Returns candle's dtype for a type of the planner; `None` if items share a byte.
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
    fn every_dtype_round_trips() {
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
