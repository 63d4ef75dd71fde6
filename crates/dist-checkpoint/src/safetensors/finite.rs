//! Numbers that are not finite: a model that has one knows nothing any more.

use candle_core::DType;

/// Which numbers a checkpoint may hold.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Values {
    /// Finite numbers alone.
    #[default]
    Finite,
    /// Infinities and what is not a number, too.
    Any,
}

impl Values {
    /// The first item of `bytes` that is refused.
    pub(crate) fn first_refused(self, dtype: DType, bytes: &[u8]) -> Option<usize> {
        match self {
            Self::Finite => first_non_finite(dtype, bytes),
            Self::Any => None,
        }
    }
}

/// The first item of `bytes` that is infinite or not a number: one with all bits of the exponent
/// set.
fn first_non_finite(dtype: DType, bytes: &[u8]) -> Option<usize> {
    match dtype {
        DType::F16 => first(bytes, |item| u16::from_le_bytes(item) & 0x7c00 == 0x7c00),
        DType::BF16 => first(bytes, |item| u16::from_le_bytes(item) & 0x7f80 == 0x7f80),
        DType::F32 => first(bytes, |item| u32::from_le_bytes(item) & 0x7f80_0000 == 0x7f80_0000),
        DType::F64 => first(bytes, |item| u64::from_le_bytes(item) >> 52 & 0x7ff == 0x7ff),
        // It has no infinities, and a single bit pattern, beside its sign, that is not a number.
        DType::F8E4M3 => first(bytes, |[item]| item & 0x7f == 0x7f),
        // Integers, and types whose items share bytes, which candle does not write.
        _ => None,
    }
}

fn first<const N: usize>(bytes: &[u8], is_refused: impl Fn([u8; N]) -> bool) -> Option<usize> {
    let (items, _) = bytes.as_chunks();
    // Without a way out of the loop it is done by vectors of items; nearly always there is nothing.
    if !items.iter().fold(false, |any, &item| any | is_refused(item)) {
        return None;
    }
    items.iter().position(|&item| is_refused(item))
}

#[cfg(test)]
mod tests {
    use candle_core::{Device, Tensor};

    use super::*;

    #[test]
    fn what_is_not_finite_is_found_in_every_type() {
        use DType::{BF16, F8E4M3, F16, F32, F64, I16, I32, I64, U8, U32};
        for dtype in [F16, BF16, F32, F64, F8E4M3] {
            for special in [f64::NAN, -f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
                // It becomes the largest number of a type that has none.
                if dtype == F8E4M3 && special.is_infinite() {
                    continue;
                }
                let refused = first_of(&[0.0, -1.5, 240.0, special, special], dtype);
                assert_eq!(refused, Some(3), "{special} as {dtype:?}");
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
        assert_eq!(Values::Any.first_refused(F32, &[0xff; 8]), None);
        assert_eq!(Values::Finite.first_refused(F32, &[0xff; 8]), Some(0));
    }

    fn first_of(numbers: &[f64], dtype: DType) -> Option<usize> {
        let tensor = Tensor::new(numbers, &Device::Cpu).unwrap().to_dtype(dtype).unwrap();
        let mut bytes = Vec::new();
        tensor.write_bytes(&mut bytes).unwrap();
        first_non_finite(dtype, &bytes)
    }
}
