//! Gradient clipping by norm, like PyTorch's `clip_grad_norm_`.

#![allow(clippy::inline_always, reason = "only inlined code has the instructions of its caller")]

use std::array;

use candle_core::{DType, Device, Result, Storage, Tensor};
use pulp::{Arch, NullaryFnOnce};

use crate::{
    error::{Error, Result as TrainResult},
    optim::update::items::Items,
};

/// Added to a norm before dividing by it, so that zero gradients are safe; PyTorch's value.
const EPSILON: f64 = 1e-6;

/// Number of items that are read at once.
const BLOCK: usize = 1 << 10;

/// Number of independent sums, so that an addition does not wait for the previous one.
const LANES: usize = 8;

/// Rejects maximum norms that are negative or NaN.
pub(crate) fn check_max_norm(max_norm: f64) -> TrainResult<()> {
    let name = "the largest norm of the gradients";
    Error::check_setting(max_norm >= 0.0, name, max_norm, "at least 0")
}

/// Returns the squared norm of a floating-point tensor, the sum of its squared items, in double
/// precision.
///
/// On the CPU, the rounding error of each addition is added back, so the order of the items affects
/// only the last digits of the sum. Nothing of the tensor's size is allocated.
pub(crate) fn squared_norm(tensor: &Tensor) -> Result<f64> {
    match tensor.device() {
        Device::Cpu => {
            let (storage, layout) = tensor.storage_and_layout();
            match &*storage {
                Storage::Cpu(storage) => {
                    Ok(Arch::new().dispatch(SquaredItems(Items::new(storage, layout)?)))
                }
                _ => candle_core::bail!("a CPU tensor has storage on another device"),
            }
        }
        Device::Cuda(_) => sum_by_rows(&tensor.to_dtype(DType::F64)?.sqr()?.flatten_all()?),
        // Metal has no double precision, and shares the CPU's memory.
        Device::Metal(_) => squared_norm(&tensor.to_device(&Device::Cpu)?),
    }
}

/// Returns the sum of a tensor of f64. On a GPU, candle computes each sum with one block of threads, so
/// many sums of rows come first.
fn sum_by_rows(x: &Tensor) -> Result<f64> {
    const ROW: usize = 4096;
    let n_rest = x.elem_count() % ROW;
    let n_whole = x.elem_count() - n_rest;
    if n_whole == 0 {
        return x.sum_all()?.to_scalar();
    }
    let mut sum = x.narrow(0, 0, n_whole)?.reshape(((), ROW))?.sum(1)?.sum_all()?;
    if n_rest > 0 {
        sum = (sum + x.narrow(0, n_whole, n_rest)?.sum_all()?)?;
    }
    sum.to_scalar()
}

/// Adds squares with the widest instructions that the processor has; they round alike.
struct SquaredItems<'a>(Items<'a>);

impl NullaryFnOnce for SquaredItems<'_> {
    type Output = f64;

    #[inline(always)]
    fn call(self) -> f64 {
        let Self(items) = self;
        let mut buffer = [0.0; BLOCK];
        let mut sums = CompensatedSums::<LANES>::default();
        for first in (0..items.len()).step_by(BLOCK) {
            let block = items.read(first..items.len().min(first + BLOCK), &mut buffer);
            let (chunks, rest) = block.as_chunks::<LANES>();
            for chunk in chunks {
                sums.add(chunk.map(|item| item * item));
            }
            // Zeros change no sum.
            let mut last = [0.0; LANES];
            last.iter_mut().zip(rest).for_each(|(square, item)| *square = item * item);
            sums.add(last);
        }
        let mut total = CompensatedSums::default();
        for (high, low) in sums.high.into_iter().zip(sums.low) {
            total.add([high]);
            total.low[0] += low;
        }
        let ([high], [low]) = (total.high, total.low);
        // An overflowed sum has no rounding error, and infinity minus infinity would be NaN.
        if high.is_finite() { high + low } else { high }
    }
}

/// Sums with the rounding errors of their additions (Ogita, Rump and Oishi, "Accurate Sum and Dot
/// Product", 2005, after Knuth).
struct CompensatedSums<const N: usize> {
    high: [f64; N],
    low: [f64; N],
}

impl<const N: usize> Default for CompensatedSums<N> {
    fn default() -> Self {
        Self { high: [0.0; N], low: [0.0; N] }
    }
}

impl<const N: usize> CompensatedSums<N> {
    /// Adds a term to each sum. Arrays are replaced as a whole, which the compiler vectorizes.
    #[inline(always)]
    fn add(&mut self, terms: [f64; N]) {
        let before = self.high;
        let high: [f64; N] = array::from_fn(|lane| before[lane] + terms[lane]);
        let added: [f64; N] = array::from_fn(|lane| high[lane] - before[lane]);
        self.low = array::from_fn(|lane| {
            let error = (before[lane] - (high[lane] - added[lane])) + (terms[lane] - added[lane]);
            self.low[lane] + error
        });
        self.high = high;
    }
}

/// Returns the factor that scales gradients of norm `norm` down to at most `max_norm`; NaN if the
/// norm is NaN.
pub(crate) fn factor(norm: f64, max_norm: f64) -> f64 {
    (max_norm / (norm + EPSILON)).clamp(0.0, 1.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn assert_close(found: f64, expected: f64) {
        assert!((found - expected).abs() <= 1e-6 * expected.abs(), "{found} instead of {expected}");
    }

    fn squares_of(items: Vec<f64>, dtype: DType) -> f64 {
        let len = items.len();
        squared_norm(&Tensor::from_vec(items, len, &Device::Cpu).unwrap().to_dtype(dtype).unwrap())
            .unwrap()
    }

    #[test]
    fn squares_of_all_dtypes_are_exact_enough() {
        use DType::{BF16, F16, F32, F64};
        for dtype in [BF16, F16, F32, F64] {
            assert_close(squares_of(vec![1.0; 65_537], dtype), 65_537.0);
            assert_close(squares_of(vec![-600.0; 16], dtype), 16.0 * 360_000.0);
            assert_close(squares_of(vec![], dtype), 0.0);
        }
        assert!((squares_of(vec![1e20; 16], F32) / 16e40 - 1.0).abs() < 1e-6);
    }

    #[test]
    fn sums_are_rounded_once() {
        // In double precision 2^53 + 1 rounds to 2^53, so each 1 would be lost.
        let large = 2_f64.powi(26) * 2_f64.sqrt();
        for position in [0, 1, 500, 1023, 1024, 2999] {
            let mut items = vec![1.0; 3000];
            items[position] = large;
            let expected: f64 = large * large + 2999.0;
            let found = squares_of(items, DType::F64);
            assert_eq!(found.to_bits(), expected.to_bits(), "{position}");
        }
    }

    #[test]
    fn sums_by_rows_are_complete() {
        for len in [0, 5, 4096, 10_000] {
            let ones = Tensor::ones(len, DType::F64, &Device::Cpu).unwrap();
            assert_close(sum_by_rows(&ones).unwrap(), len as f64);
        }
    }

    #[test]
    fn non_finite_items_stay_non_finite() {
        for bad in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
            for position in [0, 9, 1999] {
                let mut items = vec![1.0; 2000];
                items[position] = bad;
                let squares = squares_of(items, DType::F32);
                assert_eq!(squares.is_nan(), bad.is_nan(), "{squares}");
                assert!(!squares.is_finite());
            }
        }
        assert!(squares_of(vec![1e200; 3], DType::F64).is_infinite());
        assert!(factor(f64::NAN, 1.0).is_nan());
        assert_close(factor(f64::INFINITY, 1.0), 0.0);
    }

    #[test]
    fn gradients_are_never_scaled_up() {
        assert_close(factor(8.0, 2.0), 0.25);
        assert_close(factor(1.0, 2.0), 1.0);
        assert_close(factor(0.0, 2.0), 1.0);
        assert_close(factor(0.0, 0.0), 0.0);
    }

    #[test]
    fn invalid_maximum_norms_are_rejected() {
        for max_norm in [-1.0, -1e-300, f64::NAN, f64::NEG_INFINITY] {
            assert!(check_max_norm(max_norm).is_err(), "{max_norm}");
        }
        for max_norm in [0.0, 1.0, f64::INFINITY] {
            assert!(check_max_norm(max_norm).is_ok(), "{max_norm}");
        }
    }
}
