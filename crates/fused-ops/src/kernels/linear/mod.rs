//! The kernels of a linear layer other than the large product: products with few rows, the bias, and
//! the sums over rows for its gradient.

pub(crate) mod low_rank;
pub(crate) mod matvec;

use pulp::NullaryFnOnce;

use super::{
    float::Float,
    parallel::{map_chunks, rows_per_block},
    vectorized,
};

/// Adds `bias` to each row.
pub(crate) fn add_bias<T: Float>(rows: &mut [T], bias: &[T]) {
    map_chunks(rows, rows_per_block(bias.len()) * bias.len(), |_, rows| {
        vectorized(AddBias { rows, bias });
    });
}

struct AddBias<'a, T> {
    rows: &'a mut [T],
    bias: &'a [T],
}

impl<T: Float> NullaryFnOnce for AddBias<'_, T> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        for row in self.rows.chunks_exact_mut(self.bias.len()) {
            for (x, &bias) in row.iter_mut().zip(self.bias) {
                *x += bias;
            }
        }
    }
}

/// Returns the sum of all rows of `width` elements, summed in order within a block and then over
/// blocks.
pub(crate) fn sum_rows<T: Float>(rows: &[T], width: usize) -> Vec<T> {
    let mut sums = vec![T::ZERO; width];
    for block in rows.chunks((rows_per_block(width) * width).max(1)) {
        let mut part = vec![T::ZERO; width];
        vectorized(SumRows { rows: block, sums: &mut part });
        // Add the block's sums, as a single row.
        vectorized(SumRows { rows: &part, sums: &mut sums });
    }
    sums
}

struct SumRows<'a, T> {
    rows: &'a [T],
    sums: &'a mut [T],
}

impl<T: Float> NullaryFnOnce for SumRows<'_, T> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        if self.sums.is_empty() {
            return;
        }
        for row in self.rows.chunks_exact(self.sums.len()) {
            for (sum, &x) in self.sums.iter_mut().zip(row) {
                *sum += x;
            }
        }
    }
}
