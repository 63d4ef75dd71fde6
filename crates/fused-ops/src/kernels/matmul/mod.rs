//! Matrix products of strided views.
//!
//! The bits of an element depend on its row of the first factor and its column of the second alone: not
//! on the other rows and columns, nor on the number of threads.

#![allow(unsafe_code, reason = "the loops take addresses and strides, which the views here check")]

mod blocks;
mod tile;

use self::{blocks::Product, tile::Factor};
use super::{arch, float::Float, memory};

/// A matrix in a slice.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MatrixView<'a, T> {
    data: &'a [T],
    layout: MatrixLayout,
}

/// The layout of a matrix, relative to its first element.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MatrixLayout {
    pub(crate) rows: usize,
    pub(crate) columns: usize,
    pub(crate) row_stride: usize,
    pub(crate) column_stride: usize,
}

impl MatrixLayout {
    /// Returns the layout of rows whose starts are `stride` elements apart.
    pub(crate) fn rows(rows: usize, columns: usize, stride: usize) -> Self {
        Self { rows, columns, row_stride: stride, column_stride: 1 }
    }

    /// Returns the number of elements from the first to the last of the matrix, with any gaps.
    fn extent(self) -> usize {
        if self.rows == 0 || self.columns == 0 {
            return 0;
        }
        (self.rows - 1) * self.row_stride + (self.columns - 1) * self.column_stride + 1
    }

    fn transposed(self) -> Self {
        let Self { rows, columns, row_stride, column_stride } = self;
        Self { rows: columns, columns: rows, row_stride: column_stride, column_stride: row_stride }
    }
}

impl<'a, T: Float> MatrixView<'a, T> {
    /// Returns a matrix at the start of `data`, which must contain its last element.
    pub(crate) fn new(data: &'a [T], layout: MatrixLayout) -> Self {
        assert!(layout.extent() <= data.len(), "a matrix reaches beyond its data");
        Self { data, layout }
    }

    /// Returns a matrix of adjacent rows at the start of `data`.
    pub(crate) fn contiguous(data: &'a [T], rows: usize, columns: usize) -> Self {
        Self::new(data, MatrixLayout::rows(rows, columns, columns))
    }

    pub(crate) fn rows(self) -> usize {
        self.layout.rows
    }

    pub(crate) fn t(self) -> Self {
        Self { data: self.data, layout: self.layout.transposed() }
    }

    fn factor(self) -> Factor<T> {
        let MatrixLayout { row_stride, column_stride, .. } = self.layout;
        Factor { start: self.data.as_ptr(), row_stride, column_stride }
    }
}

/// The threads that a product may use.
#[derive(Clone, Copy, Debug)]
pub(crate) enum ProductThreads {
    /// Only the calling thread, because the other threads are busy.
    One,
    /// All of the caller's pool.
    Pool,
}

/// Returns `a` · `b` in row-major order, computed on all threads of the pool.
pub(crate) fn product<T: Float>(a: MatrixView<'_, T>, b: MatrixView<'_, T>) -> Vec<T> {
    let rows = a.layout.rows;
    let columns = b.layout.columns;
    let layout = MatrixLayout::rows(rows, columns, columns);
    // SAFETY: the vector has room for rows · columns elements at these strides, and all of them are
    // written.
    unsafe {
        memory::vec_written_by(rows * columns, |out| {
            multiply(out, layout, a, b, StoreMode::Set, T::ONE, ProductThreads::Pool);
        })
    }
}

/// The treatment of the result's previous elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StoreMode {
    /// They are overwritten.
    Set,
    /// The product is added to them.
    Add,
}

/// Writes or adds `scale` · `a` · `b` to a matrix at the start of `out`.
pub(crate) fn multiply_into<T: Float>(
    out: &mut [T],
    layout: MatrixLayout,
    a: MatrixView<'_, T>,
    b: MatrixView<'_, T>,
    store: StoreMode,
    scale: T,
) {
    assert!(layout.extent() <= out.len(), "a product reaches beyond its memory");
    // SAFETY: the slice reaches to the last element, and all of it may be read and written.
    unsafe { multiply(out.as_mut_ptr(), layout, a, b, store, scale, ProductThreads::One) }
}

/// Writes or adds `a` · `b` to a matrix at the start of `out`, on all threads of the pool.
pub(crate) fn multiply_in_pool<T: Float>(
    out: &mut [T],
    layout: MatrixLayout,
    a: MatrixView<'_, T>,
    b: MatrixView<'_, T>,
    store: StoreMode,
) {
    assert!(layout.extent() <= out.len(), "a product reaches beyond its memory");
    // SAFETY: as in `multiply_into`.
    unsafe { multiply(out.as_mut_ptr(), layout, a, b, store, T::ONE, ProductThreads::Pool) }
}

/// Writes or adds `scale` · `a` · `b` to the matrix at `out`.
///
/// # Safety
///
/// All elements of the matrix must be writable, and readable if the product is added to them. No
/// other thread may access them meanwhile, and no two elements may share an address.
pub(super) unsafe fn multiply<T: Float>(
    out: *mut T,
    layout: MatrixLayout,
    a: MatrixView<'_, T>,
    b: MatrixView<'_, T>,
    store: StoreMode,
    scale: T,
    threads: ProductThreads,
) {
    assert!(
        a.layout.rows == layout.rows
            && b.layout.columns == layout.columns
            && a.layout.columns == b.layout.rows,
        "a product of matrices that do not fit"
    );
    let has_rows =
        layout.column_stride == 1 && (layout.rows <= 1 || layout.row_stride >= layout.columns);
    assert!(
        has_rows,
        "the elements of a row of a product must be adjacent, and rows must not overlap"
    );
    let product = Product {
        start: out,
        rows: layout.rows,
        columns: layout.columns,
        row_stride: layout.row_stride,
        scale,
        adds: store == StoreMode::Add,
    };
    // SAFETY: `MatrixView` has checked that the factors lie in their slices, and the caller that the
    // result lies in its memory. The three sizes fit.
    unsafe { blocks::multiply(product, a.factor(), b.factor(), a.layout.columns, threads, arch()) };
}

#[cfg(test)]
mod tests {
    use std::ops::Range;

    use pulp::Arch;

    use super::*;
    use crate::kernels::linear::low_rank::transposed;

    fn numbers(n: usize) -> Vec<f64> {
        (0..n).map(|i| (i * 7 % 23) as f64 - 11.0).collect()
    }

    /// Returns `a` · `b` by a naive loop.
    fn naive(a: &[f64], b: &[f64], (rows, columns, depth): (usize, usize, usize)) -> Vec<f64> {
        let places = (0..rows).flat_map(|r| (0..columns).map(move |c| (r, c)));
        let sum = |(r, c)| (0..depth).map(|k| a[r * depth + k] * b[k * columns + c]).sum();
        places.map(sum).collect()
    }

    /// Returns `old` + 2 · `a` · `b`.
    fn added<T: Float>(
        old: &[T],
        a: MatrixView<'_, T>,
        b: MatrixView<'_, T>,
        arch: Arch,
    ) -> Vec<T> {
        let mut sums = old.to_vec();
        let [rows, columns] = [a.layout.rows, b.layout.columns];
        let out = Product {
            start: sums.as_mut_ptr(),
            rows,
            columns,
            row_stride: columns,
            scale: T::ONE + T::ONE,
            adds: true,
        };
        assert_eq!(sums.len(), rows * columns);
        let depth = a.layout.columns;
        // SAFETY: the result has as many elements.
        unsafe { blocks::multiply(out, a.factor(), b.factor(), depth, ProductThreads::One, arch) };
        sums
    }

    #[test]
    fn products_match_the_naive_loop() {
        let small = (0..6).flat_map(|m| (0..6).flat_map(move |n| (0..6).map(move |k| (m, n, k))));
        // Around the sizes of tiles, runs and blocks.
        let large =
            [(7, 17, 33), (48, 64, 9), (49, 65, 8), (100, 31, 513), (6, 1030, 5), (13, 9, 1025)];
        for (m, n, k) in small.chain(large) {
            let (a, b, old) = (numbers(m * k), numbers(k * n), numbers(m * n));
            let expected = naive(&a, &b, (m, n, k));
            let [a_t, b_t] = [(&a, k), (&b, n)].map(|(x, width)| transposed(x, width.max(1)));
            let a_views =
                [MatrixView::contiguous(&a, m, k), MatrixView::contiguous(&a_t, k, m).t()];
            let b_views =
                [MatrixView::contiguous(&b, k, n), MatrixView::contiguous(&b_t, n, k).t()];
            for (a, b) in a_views.into_iter().flat_map(|a| b_views.map(|b| (a, b))) {
                assert_eq!(product(a, b), expected, "{m} {n} {k}");
                for arch in [arch(), Arch::Scalar] {
                    let sums = added(&old, a, b, arch);
                    let expected = old.iter().zip(&expected).map(|(old, x)| old + 2.0 * x);
                    assert!(sums.into_iter().eq(expected), "{m} {n} {k}");
                }
            }
        }
    }

    #[test]
    fn elements_between_rows_stay() {
        let (a, b) = (numbers(8 * 5), numbers(5 * 19));
        let mut out = vec![7.0; 7 * 23 + 19];
        let layout = MatrixLayout::rows(8, 19, 23);
        let (a, b) = (MatrixView::contiguous(&a, 8, 5), MatrixView::contiguous(&b, 5, 19));
        multiply_into(&mut out, layout, a, b, StoreMode::Set, 1.0);
        let expected = product(a, b);
        for (row, expected) in out.chunks(23).zip(expected.chunks(19)) {
            assert_eq!(&row[..19], expected);
            assert_eq!(&row[19..], &[7.0; 4][..row.len() - 19]);
        }
    }

    #[test]
    fn bits_depend_on_a_row_and_a_column_alone() {
        let sizes = [1, 2, 5, 33, 64, 65, 128, 257, 300];
        for (n, k) in sizes.into_iter().flat_map(|n| [1, 2, 7, 129, 700].map(|k| (n, k))) {
            let x: Vec<f32> = (0..300 * k).map(|i| (i as f32 * 0.7).sin()).collect();
            let b: Vec<f32> = (0..n * k).map(|i| (i as f32 * 0.3).cos()).collect();
            let b = MatrixView::contiguous(&b, n, k).t();
            let whole = product(MatrixView::contiguous(&x, 300, k), b);
            for rows in [1, 2, 3, 7, 40, 64, 66, 200] {
                let x = MatrixView::contiguous(&x[(300 - rows) * k..], rows, k);
                let part = product(x, b);
                assert!(part == whole[(300 - rows) * n..], "{rows} rows of {k}, {n} columns");
                let mut alone = vec![0.0; rows * n];
                let layout = MatrixLayout::rows(rows, n, n);
                multiply_into(&mut alone, layout, x, b, StoreMode::Set, 1.0);
                assert!(part == alone, "{rows} rows of {k}, {n} columns on one thread");
            }
        }
    }

    #[test]
    fn bits_are_those_of_fused_sums() {
        let x: Vec<f32> = (0..700).map(|i| (i as f32 * 0.7).sin()).collect();
        let y: Vec<f32> = (0..700).map(|i| (i as f32 * 0.3).cos()).collect();
        let found = |n| {
            let x = MatrixView::contiguous(&x[..n], 1, n);
            product(x, MatrixView::contiguous(&y[..n], n, 1))
        };
        let run = |ks: Range<usize>| ks.fold(0.0_f32, |sum, k| x[k].mul_add(y[k], sum));
        // Two blocks of at most 512, with two runs each.
        let block = |k| run(k..k + 175) + run(k + 175..k + 350);
        if !matches!(arch(), Arch::Scalar) {
            assert_eq!(found(700), [block(0) + block(350)]);
            // A run has at least 16 products.
            assert_eq!(found(20), [run(0..16) + run(16..20)]);
        }
    }

    #[test]
    fn nan_stays_in_its_row() {
        // Nine rows are a tile and a half, and all columns are one.
        let (mut x, weights) = (numbers(9 * 40), numbers(40));
        x[3 * 40 + 5] = f64::NAN;
        let layout = MatrixLayout { rows: 40, columns: 70, row_stride: 1, column_stride: 0 };
        let y = product(MatrixView::contiguous(&x, 9, 40), MatrixView::new(&weights, layout));
        for (row, y) in y.chunks(70).enumerate() {
            assert!(y.iter().all(|y| y.is_nan() == (row == 3)));
            assert!(y.iter().all(|x| x.to_bits() == y[0].to_bits()));
        }
    }

    #[test]
    #[should_panic(expected = "beyond its data")]
    fn too_large_matrix_panics() {
        let _ = MatrixView::new(&[0.0_f32; 5], MatrixLayout::rows(2, 3, 3));
    }
}
