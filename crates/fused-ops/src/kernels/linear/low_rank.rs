//! Products with a matrix of few rows, as in low-rank adapters.
//!
//! They read each row once and compute little with it. [`matmul`](crate::kernels::matmul) packs its
//! factors first, which takes longer than the product if the matrix has only a few rows.

use std::array;

use pulp::NullaryFnOnce;

use crate::kernels::{
    float::Float,
    lanes::dot_products,
    matmul::{MatrixLayout, MatrixView, StoreMode, multiply_in_pool, product},
    parallel::{block_of, map_chunks, rows_per_block},
    vectorized,
};

/// The largest rank for the loops here; `matmul` is faster for more.
const MAX_RANK: usize = 16;

/// The rows that a loop reads at once: enough that it does not wait for its stores.
const GROUP: usize = 4;

/// The fewest rows, and the most blocks of rows, that are summed separately.
const FEWEST_SUMMED: usize = 256;
const MAX_BLOCKS: usize = 8;

/// A matrix [rank, width] of adjacent rows.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LowRankMatrix<'a, T> {
    items: &'a [T],
    rank: usize,
    width: usize,
}

impl<'a, T: Float> LowRankMatrix<'a, T> {
    pub(crate) fn new(items: &'a [T], rank: usize, width: usize) -> Self {
        assert_eq!(items.len(), rank * width, "a matrix of another size");
        Self { items, rank, width }
    }

    fn view(self) -> MatrixView<'a, T> {
        MatrixView::contiguous(self.items, self.rank, self.width)
    }

    /// Returns x·selfᵀ [rows, rank] for the rows of `x`.
    pub(crate) fn reduce(self, x: &[T], rows: usize) -> Vec<T> {
        let Self { items, rank, width } = self;
        if rank > MAX_RANK {
            return product(MatrixView::contiguous(x, rows, width), self.view().t());
        }
        let mut low = vec![T::ZERO; rows * rank];
        if width > 0 && rank > 0 {
            let block_rows = rows_per_block(width);
            map_chunks(&mut low, block_rows * rank, |block, low| {
                let x = block_of(x, block, block_rows * width);
                vectorized(ReduceRows { x, low, items, width, rank });
            });
        }
        low
    }

    /// Adds low·self to the rows of `y`, where `low` is [rows, rank].
    pub(crate) fn expand_add(self, y: &mut [T], low: &[T], rows: usize) {
        let Self { items, rank, width } = self;
        if rank > MAX_RANK {
            let low = MatrixView::contiguous(low, rows, rank);
            let layout = MatrixLayout::rows(rows, width, width);
            multiply_in_pool(y, layout, low, self.view(), StoreMode::Add);
        } else if width > 0 && rank > 0 {
            let block_rows = rows_per_block(width);
            map_chunks(y, block_rows * width, |block, y| {
                let low = block_of(low, block, block_rows * rank);
                vectorized(ExpandRows { y, low, items, width, rank });
            });
        }
    }
}

/// Returns lowᵀ·x [rank, width] for `low` [rows, rank] and the rows of `x`.
pub(crate) fn sum_products<T: Float>(
    low: &[T],
    rank: usize,
    x: &[T],
    width: usize,
    rows: usize,
) -> Vec<T> {
    if rank > MAX_RANK {
        let low = MatrixView::contiguous(low, rows, rank);
        return product(low.t(), MatrixView::contiguous(x, rows, width));
    }
    let block_rows = rows.div_ceil(MAX_BLOCKS).max(FEWEST_SUMMED);
    let n_blocks = rows.div_ceil(block_rows).max(1);
    let mut sums = vec![T::ZERO; n_blocks * rank * width];
    if sums.is_empty() {
        return sums;
    }
    map_chunks(&mut sums, rank * width, |block, sums| {
        let low = block_of(low, block, block_rows * rank);
        let x = block_of(x, block, block_rows * width);
        vectorized(SumProducts { sums, low, x, width, rank });
    });
    let (first, others) = sums.split_at_mut(rank * width);
    for other in others.chunks_exact(rank * width) {
        for (sum, &other) in first.iter_mut().zip(other) {
            *sum += other;
        }
    }
    sums.truncate(rank * width);
    sums
}

/// Returns a matrix of rows of `columns` elements, transposed.
pub(crate) fn transposed<T: Float>(items: &[T], columns: usize) -> Vec<T> {
    let column = |column| items.iter().skip(column).step_by(columns).copied();
    (0..columns).flat_map(column).collect()
}

struct ReduceRows<'a, T> {
    x: &'a [T],
    low: &'a mut [T],
    items: &'a [T],
    width: usize,
    rank: usize,
}

impl<T: Float> NullaryFnOnce for ReduceRows<'_, T> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        let rows = self.x.chunks_exact(self.width).zip(self.low.chunks_exact_mut(self.rank));
        let (groups, single) = self.items.split_at(self.rank / GROUP * GROUP * self.width);
        for (x, low) in rows {
            let (low_groups, low_rest) = low.as_chunks_mut::<GROUP>();
            let groups = groups.chunks_exact(GROUP * self.width);
            for (low, group) in low_groups.iter_mut().zip(groups) {
                *low =
                    dot_products(x, array::from_fn(|row| &group[row * self.width..][..self.width]));
            }
            for (low, item) in low_rest.iter_mut().zip(single.chunks_exact(self.width)) {
                [*low] = dot_products(x, [item]);
            }
        }
    }
}

struct ExpandRows<'a, T> {
    y: &'a mut [T],
    low: &'a [T],
    items: &'a [T],
    width: usize,
    rank: usize,
}

impl<T: Float> NullaryFnOnce for ExpandRows<'_, T> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        let rows = self.y.chunks_exact_mut(self.width).zip(self.low.chunks_exact(self.rank));
        for (y, low) in rows {
            add_combination(y, low, self.items);
        }
    }
}

struct SumProducts<'a, T> {
    sums: &'a mut [T],
    low: &'a [T],
    x: &'a [T],
    width: usize,
    rank: usize,
}

impl<T: Float> NullaryFnOnce for SumProducts<'_, T> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        let Self { sums, low, x, width, rank } = self;
        let groups = x.chunks(GROUP * width).zip(low.chunks(GROUP * rank));
        for (x, low) in groups {
            for (index, sums) in sums.chunks_exact_mut(width).enumerate() {
                let mut factors = [T::ZERO; GROUP];
                let n_rows = low.len() / rank;
                for (factor, low) in factors.iter_mut().zip(low.chunks_exact(rank)) {
                    *factor = low[index];
                }
                add_combination(sums, &factors[..n_rows], x);
            }
        }
    }
}

/// Adds a linear combination of rows to `y`.
#[inline(always)]
#[expect(clippy::many_single_char_names, reason = "four rows, and four factors")]
fn add_combination<T: Float>(y: &mut [T], factors: &[T], rows: &[T]) {
    let width = y.len();
    let (groups, rest) = factors.as_chunks::<GROUP>();
    let (grouped, single) = rows.split_at(groups.len() * GROUP * width);
    for (&[f, g, h, i], rows) in groups.iter().zip(grouped.chunks_exact(GROUP * width)) {
        let (a, rows) = rows.split_at(width);
        let (b, rows) = rows.split_at(width);
        let (c, d) = rows.split_at(width);
        for ((((y, &a), &b), &c), &d) in y.iter_mut().zip(a).zip(b).zip(c).zip(d) {
            *y += (a * f + b * g) + (c * h + d * i);
        }
    }
    for (&factor, row) in rest.iter().zip(single.chunks_exact(width)) {
        for (y, &item) in y.iter_mut().zip(row) {
            *y += item * factor;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers(n: usize) -> Vec<f64> {
        (0..n).map(|i| (i * 7 % 23) as f64 - 11.0).collect()
    }

    #[test]
    fn products_match_naive_loops() {
        for (rows, rank, width) in
            [(0, 3, 5), (1, 1, 1), (3, 0, 2), (5, 4, 0), (7, 9, 40), (600, 16, 33), (9, 17, 8)]
        {
            let (x, items, low) =
                (numbers(rows * width), numbers(rank * width), numbers(rows * rank));
            let matrix = LowRankMatrix::new(&items, rank, width);
            let mut reduced = Vec::new();
            let mut expanded = x.clone();
            let mut sums = vec![0.0; rank * width];
            for row in 0..rows {
                for r in 0..rank {
                    reduced
                        .push((0..width).map(|j| x[row * width + j] * items[r * width + j]).sum());
                    for j in 0..width {
                        expanded[row * width + j] += low[row * rank + r] * items[r * width + j];
                        sums[r * width + j] += low[row * rank + r] * x[row * width + j];
                    }
                }
            }
            let mut y = x.clone();
            matrix.expand_add(&mut y, &low, rows);
            assert_eq!((matrix.reduce(&x, rows), y), (reduced, expanded), "{rows} {rank} {width}");
            assert_eq!(sum_products(&low, rank, &x, width, rows), sums, "{rows} {rank} {width}");
        }
        assert_eq!(transposed(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0], 3), [1.0, 4.0, 2.0, 5.0, 3.0, 6.0]);
    }
}
