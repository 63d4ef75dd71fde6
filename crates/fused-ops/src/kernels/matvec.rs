//! Products of weights with a few rows, at the speed of memory: each weight is read once, in place.
//!
//! `gemm` copies blocks of a weight before it multiplies them, which pays off only if many rows use
//! the copy.

use pulp::NullaryFnOnce;
use rayon::prelude::*;

use super::{float::Float, lanes::sum2, parallel::rows_per_block, vectorized};

/// Rows of a weight, and their products with all rows of an input.
struct WeightBlock<'a, T> {
    weight: &'a [T],
    /// [rows of the weight, rows of the input].
    out: &'a mut [T],
}

/// Returns weight·xᵀ, [outputs, rows of x], for each weight and its number of outputs.
///
/// An element has the bits of the lanes' sum, whatever the other rows and the number of threads.
pub(crate) fn products<T: Float>(x: &[T], rows: usize, weights: &[(&[T], usize)]) -> Vec<Vec<T>> {
    let mut results: Vec<_> =
        weights.iter().map(|(_, outputs)| vec![T::ZERO; outputs * rows]).collect();
    if x.is_empty() {
        return results;
    }
    let width = x.len() / rows;
    let mut blocks = Vec::new();
    let block_rows = rows_per_block(width);
    for (&(weight, _), out) in weights.iter().zip(&mut results) {
        let outs = out.chunks_mut(block_rows * rows);
        let pairs = weight.chunks(block_rows * width).zip(outs);
        blocks.extend(pairs.map(|(weight, out)| WeightBlock { weight, out }));
    }
    // One call for all weights, because waking the other threads takes as long as a small product.
    blocks.into_par_iter().for_each(|WeightBlock { weight, out }| {
        vectorized(MultiplyRows { weight, x, width, out });
    });
    results
}

struct MultiplyRows<'a, T> {
    weight: &'a [T],
    x: &'a [T],
    width: usize,
    out: &'a mut [T],
}

impl<T: Float> NullaryFnOnce for MultiplyRows<'_, T> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        let rows = self.x.len() / self.width;
        for (weight, out) in self.weight.chunks_exact(self.width).zip(self.out.chunks_mut(rows)) {
            for (x, out) in self.x.chunks_exact(self.width).zip(out) {
                *out = sum2(weight, x, |weight, x| weight * x);
            }
        }
    }
}
