//! Detection of infinite numbers and NaN, which make a model unusable.

use candle_core::DType;

/// The numbers that a checkpoint may contain.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum AllowedValues {
    /// Only finite numbers.
    #[default]
    Finite,
    /// Any numbers, including infinities and NaN.
    Any,
}

impl AllowedValues {
    /// Returns the index of the first rejected item in `bytes`.
    pub(crate) fn first_rejected(self, dtype: DType, bytes: &[u8]) -> Option<usize> {
        match self {
            Self::Finite => first_non_finite(dtype, bytes),
            Self::Any => None,
        }
    }
}

/// Returns the index of the first item in `bytes` that is infinite or NaN: one with all exponent
/// bits set.
fn first_non_finite(dtype: DType, bytes: &[u8]) -> Option<usize> {
    match dtype {
        DType::F16 => first(bytes, |item| u16::from_le_bytes(item) & 0x7c00 == 0x7c00),
        DType::BF16 => first(bytes, |item| u16::from_le_bytes(item) & 0x7f80 == 0x7f80),
        DType::F32 => first(bytes, |item| u32::from_le_bytes(item) & 0x7f80_0000 == 0x7f80_0000),
        DType::F64 => first(bytes, |item| u64::from_le_bytes(item) >> 52 & 0x7ff == 0x7ff),
        // This dtype has no infinities, and one NaN pattern for each sign.
        DType::F8E4M3 => first(bytes, |[item]| item & 0x7f == 0x7f),
        // Integers, and dtypes with items that share bytes, which candle does not write.
        _ => None,
    }
}

/// Returns the index of the first item of `N` bytes for which `rejects` is true.
fn first<const N: usize>(bytes: &[u8], rejects: impl Fn([u8; N]) -> bool) -> Option<usize> {
    let (items, _) = bytes.as_chunks();
    // No early exit, so that the loop compiles to vector instructions; most tensors have no such
    // item.
    if !items.iter().fold(false, |any, &item| any | rejects(item)) {
        return None;
    }
    items.iter().position(|&item| rejects(item))
}

#[cfg(test)]
mod tests {
    use candle_core::{Device, Tensor};

    use super::*;

    #[test]
    fn non_finite_numbers_are_found() {
        use DType::{BF16, F8E4M3, F16, F32, F64, I16, I32, I64, U8, U32};
        for dtype in [F16, BF16, F32, F64, F8E4M3] {
            for special in [f64::NAN, -f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
                // The dtype has no infinity, so this becomes its largest number.
                if dtype == F8E4M3 && special.is_infinite() {
                    continue;
                }
                let rejected = first_of(&[0.0, -1.5, 240.0, special, special], dtype);
                assert_eq!(rejected, Some(3), "{special} as {dtype:?}");
            }
            assert_eq!(first_of(&[0.0, -0.0, -1.5, 240.0], dtype), None, "{dtype:?}");
        }
        for dtype in [U8, U32, I16, I32, I64] {
            assert_eq!(first_non_finite(dtype, &[0xff; 64]), None, "{dtype:?}");
        }
        let smallest = f32::MIN_POSITIVE.to_le_bytes();
        assert_eq!(first_non_finite(F32, &smallest), None);
        for (dtype, largest) in [
            (F16, &[0xff, 0x7b][..]),
            (BF16, &[0x7f, 0x7f]),
            (F32, &f32::MAX.to_le_bytes()),
            (F64, &f64::MIN.to_le_bytes()),
            (F8E4M3, &[0x7e, 0xfe]),
        ] {
            assert_eq!(first_non_finite(dtype, largest), None, "{dtype:?}");
        }
        assert_eq!(AllowedValues::Any.first_rejected(F32, &[0xff; 8]), None);
        assert_eq!(AllowedValues::Finite.first_rejected(F32, &[0xff; 8]), Some(0));
    }

    fn first_of(numbers: &[f64], dtype: DType) -> Option<usize> {
        let tensor = Tensor::new(numbers, &Device::Cpu).unwrap().to_dtype(dtype).unwrap();
        let mut bytes = Vec::new();
        tensor.write_bytes(&mut bytes).unwrap();
        first_non_finite(dtype, &bytes)
    }
}
