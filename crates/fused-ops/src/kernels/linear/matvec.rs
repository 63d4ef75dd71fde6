//! Products of weights with a few rows, at the speed of memory: each weight is read once, in place.
//!
//! [`matmul`](crate::kernels::matmul) copies blocks of a weight before it multiplies them, which pays off
//! only if many rows use the copy.

use pulp::NullaryFnOnce;
use rayon::prelude::*;

use crate::kernels::{float::Float, vectorized};

/// The number of partial sums of a product: element i is added to sum i mod `LANES`.
const LANES: usize = 32;

/// The number of a weight's rows per block, whose partial sums are added up together. In a loop with
/// the sums of a single product, the compiler splits the vectors, which halves the speed.
const BLOCK_ROWS: usize = 16;

/// Returns weight·xᵀ, [outputs, rows of x], for each weight and its number of outputs.
///
/// The order of an element's sum depends on the width alone, like in [`lanes`](crate::kernels::lanes).
pub(crate) fn products<T: Float>(x: &[T], rows: usize, weights: &[(&[T], usize)]) -> Vec<Vec<T>> {
    let mut results: Vec<_> =
        weights.iter().map(|(_, outputs)| vec![T::ZERO; outputs * rows]).collect();
    if x.is_empty() {
        return results;
    }
    let width = x.len() / rows;
    let mut blocks = Vec::new();
    for (&(weight, _), out) in weights.iter().zip(&mut results) {
        let outs = out.chunks_mut(BLOCK_ROWS * rows);
        let pairs = weight.chunks(BLOCK_ROWS * width).zip(outs);
        blocks.extend(pairs.map(|(weight, out)| MultiplyRows { weight, x, width, out }));
    }
    // One call for all weights, because waking the other threads takes as long as a small product.
    blocks.into_par_iter().for_each(vectorized);
    results
}

/// Multiplies up to [`BLOCK_ROWS`] rows of a weight with all rows of an input.
struct MultiplyRows<'a, T> {
    weight: &'a [T],
    x: &'a [T],
    width: usize,
    /// [rows of the weight, rows of the input].
    out: &'a mut [T],
}

impl<T: Float> NullaryFnOnce for MultiplyRows<'_, T> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        let Self { weight, x, width, out } = self;
        let n_columns = x.len() / width;
        let mut sums = [[T::ZERO; LANES]; BLOCK_ROWS];
        for (column, x) in x.chunks_exact(width).enumerate() {
            for (weight, sums) in weight.chunks_exact(width).zip(&mut sums) {
                add_products(weight, x, sums);
            }
            halve::<_, 16>(&mut sums);
            halve::<_, 8>(&mut sums);
            halve::<_, 4>(&mut sums);
            halve::<_, 2>(&mut sums);
            for (out, sums) in out.chunks_exact_mut(n_columns).zip(&sums) {
                out[column] = sums[0] + sums[1];
            }
        }
    }
}

/// Replaces `sums` by the partial sums of a product.
#[inline(always)]
fn add_products<T: Float>(x: &[T], y: &[T], sums: &mut [T; LANES]) {
    let ((x, x_rest), (y, y_rest)) = (x.as_chunks::<LANES>(), y.as_chunks::<LANES>());
    let mut lanes = [T::ZERO; LANES];
    for (x, y) in x.iter().zip(y) {
        for ((lane, &x), &y) in lanes.iter_mut().zip(x).zip(y) {
            *lane += x * y;
        }
    }
    *sums = lanes;
    for ((sum, &x), &y) in sums.iter_mut().zip(x_rest).zip(y_rest) {
        *sum += x * y;
    }
}

/// Adds the second `HALF` partial sums of each product to the first.
#[inline(always)]
fn halve<T: Float, const HALF: usize>(sums: &mut [[T; LANES]; BLOCK_ROWS]) {
    for sums in sums {
        let (low, high) = sums.split_at_mut(HALF);
        for (low, &high) in low.iter_mut().zip(&*high) {
            *low += high;
        }
    }
}
