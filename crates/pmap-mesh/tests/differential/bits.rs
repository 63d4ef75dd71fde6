//! Numbers of every dtype as bits, and the arithmetic that reductions promise: in rank order,
//! halves in single precision with one rounding, wrapping integers.

use candle_core::DType;
use half::{bf16, f16};

use crate::differential::random::Random;

/// The dtypes that can be reduced.
pub(crate) const REDUCIBLE: [DType; 9] = [
    DType::F32,
    DType::F64,
    DType::BF16,
    DType::F16,
    DType::U8,
    DType::U32,
    DType::I16,
    DType::I32,
    DType::I64,
];

/// A reduction of several numbers to one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FoldOp {
    Sum,
    Mean,
    Max,
    Min,
}

macro_rules! fold_of_floats {
    ($name:ident, $type:ty) => {
        fn $name(fold: FoldOp, bits: &[u64], number: impl Fn(u64) -> $type) -> $type {
            let mut numbers = bits.iter().map(|bits| number(*bits));
            let first = numbers.next().unwrap();
            numbers.fold(first, |so_far, next| match fold {
                FoldOp::Sum | FoldOp::Mean => so_far + next,
                FoldOp::Max | FoldOp::Min if so_far.is_nan() || next.is_nan() => <$type>::NAN,
                // Of two zeros, keep the first, whatever its sign.
                FoldOp::Max => {
                    if next > so_far {
                        next
                    } else {
                        so_far
                    }
                }
                FoldOp::Min => {
                    if next < so_far {
                        next
                    } else {
                        so_far
                    }
                }
            }) / if fold == FoldOp::Mean { bits.len() as $type } else { 1.0 }
        }
    };
}

fold_of_floats!(fold_of_f32, f32);
fold_of_floats!(fold_of_f64, f64);

/// Folds numbers of type `dtype`, all given and returned as bits.
pub(crate) fn folded(dtype: DType, fold: FoldOp, bits: &[u64]) -> u64 {
    match dtype {
        DType::F64 => fold_of_f64(fold, bits, f64::from_bits).to_bits(),
        DType::F32 => u64::from(fold_of_f32(fold, bits, single).to_bits()),
        DType::F16 => {
            let sum = fold_of_f32(fold, bits, |x| f16::from_bits(word(x)).to_f32());
            u64::from(f16::from_f32(sum).to_bits())
        }
        DType::BF16 => {
            let sum = fold_of_f32(fold, bits, |x| bf16::from_bits(word(x)).to_f32());
            u64::from(bf16::from_f32(sum).to_bits())
        }
        _ => fold_integers(dtype, fold, bits),
    }
}

fn fold_integers(dtype: DType, fold: FoldOp, bits: &[u64]) -> u64 {
    let numbers = bits.iter().map(|bits| integer(dtype, *bits));
    let folded = match fold {
        FoldOp::Sum => numbers.sum(),
        FoldOp::Max => numbers.max().unwrap(),
        FoldOp::Min => numbers.min().unwrap(),
        FoldOp::Mean => panic!("integers have no mean"),
    };
    // Drop the high bits, so that the sum wraps.
    u64::try_from(folded & i128::from(mask(dtype))).unwrap()
}

fn integer(dtype: DType, bits: u64) -> i128 {
    let is_signed = matches!(dtype, DType::I16 | DType::I32 | DType::I64);
    let is_negative = is_signed && bits >> (8 * dtype.size_in_bytes() - 1) == 1;
    i128::from(bits) - if is_negative { 1 << (8 * dtype.size_in_bytes()) } else { 0 }
}

/// Returns the mask of a dtype's bits.
fn mask(dtype: DType) -> u64 {
    u64::MAX >> (64 - 8 * dtype.size_in_bytes())
}

/// Returns true if two numbers are equal to the bit, or both are NaN of any kind.
pub(crate) fn same(dtype: DType, left: u64, right: u64) -> bool {
    left == right || is_nan(dtype, left) && is_nan(dtype, right)
}

fn is_nan(dtype: DType, bits: u64) -> bool {
    match dtype {
        DType::F64 => f64::from_bits(bits).is_nan(),
        DType::F32 => single(bits).is_nan(),
        DType::F16 => f16::from_bits(word(bits)).is_nan(),
        DType::BF16 => bf16::from_bits(word(bits)).is_nan(),
        _ => false,
    }
}

fn single(bits: u64) -> f32 {
    f32::from_bits(u32::try_from(bits).unwrap())
}

fn word(bits: u64) -> u16 {
    u16::try_from(bits).unwrap()
}

/// Returns a float of any sign and of many magnitudes, so that the order of a sum matters, or an
/// integer of any bits, so that sums wrap.
pub(crate) fn ordinary(dtype: DType, random: &mut Random) -> u64 {
    if !matches!(dtype, DType::F64 | DType::F32 | DType::F16 | DType::BF16) {
        return random.word() & mask(dtype);
    }
    let magnitude = random.pick(&[0.02, 0.3, 1.0, 7.0, 50.0, 300.0]);
    from_f64(dtype, random.unit() * magnitude)
}

/// Returns a special value.
///
/// Negative infinity is left out: the sign of the NaN that infinities of both signs add up to is
/// unspecified.
pub(crate) fn extreme(dtype: DType, random: &mut Random) -> u64 {
    let largest = random.pick(&[0, mask(dtype), mask(dtype) >> 1, (mask(dtype) >> 1) + 1]);
    let float = random.pick(&[0.0, -0.0, f64::NAN, f64::INFINITY, 1e-40, 6e-8, -1.0, 3.0]);
    match dtype {
        DType::F64 | DType::F32 | DType::F16 | DType::BF16 => from_f64(dtype, float),
        _ => largest,
    }
}

/// Returns the nearest number of a float dtype.
#[allow(clippy::cast_possible_truncation, reason = "the conversion rounds on purpose")]
fn from_f64(dtype: DType, x: f64) -> u64 {
    match dtype {
        DType::F64 => x.to_bits(),
        DType::F32 => u64::from((x as f32).to_bits()),
        DType::F16 => u64::from(f16::from_f64(x).to_bits()),
        _ => u64::from(bf16::from_f64(x).to_bits()),
    }
}
