//! Matrix products of strided views, by the crate `gemm`.
//!
//! `gemm` divides the work among threads only along rows and columns of the result, so the bits do
//! not depend on the number of threads.

#![allow(unsafe_code, reason = "`gemm` takes addresses and strides, which the views here check")]

use std::borrow::Cow;

use gemm::Parallelism;

use super::{float::Float, memory};

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

    /// Returns the first rows of the matrix.
    pub(crate) fn first_rows(self, rows: usize) -> Self {
        assert!(rows <= self.layout.rows, "a matrix has fewer rows");
        Self { layout: MatrixLayout { rows, ..self.layout }, ..self }
    }

    pub(crate) fn t(self) -> Self {
        Self { data: self.data, layout: self.layout.transposed() }
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

impl ProductThreads {
    fn parallelism(self) -> Parallelism {
        match self {
            Self::Pool if rayon::current_num_threads() > 1 => {
                Parallelism::Rayon(rayon::current_num_threads())
            }
            Self::One | Self::Pool => Parallelism::None,
        }
    }
}

/// Returns `a` · `b` in row-major order.
pub(crate) fn product<T: Float>(
    a: MatrixView<'_, T>,
    b: MatrixView<'_, T>,
    threads: ProductThreads,
) -> Vec<T> {
    let rows = a.layout.rows;
    let columns = b.layout.columns;
    let layout = MatrixLayout::rows(rows, columns, columns);
    // SAFETY: the vector has room for rows · columns elements at these strides, and all of them are
    // written.
    unsafe {
        memory::vec_written_by(rows * columns, |out| {
            multiply(out, layout, a, b, StoreMode::Set, T::ONE, threads);
        })
    }
}

/// Returns the product of some rows of `width` elements with `b`. Each row has the same bits as in
/// a larger product.
///
/// `gemm` sums small products in a different order. So a few rows are multiplied together with rows
/// of zeros, which are then dropped.
pub(crate) fn product_of_rows<T: Float>(
    x: &[T],
    width: usize,
    rows: usize,
    b: MatrixView<'_, T>,
) -> Vec<T> {
    let columns = b.layout.columns;
    let padded_rows = padded_rows(rows, columns);
    if rows == padded_rows {
        return product(MatrixView::contiguous(x, rows, width), b, ProductThreads::Pool);
    }
    let mut padded = x.to_vec();
    padded.resize(padded_rows * width, T::ZERO);
    let mut y =
        product(MatrixView::contiguous(&padded, padded_rows, width), b, ProductThreads::Pool);
    y.truncate(rows * columns);
    y
}

/// Adds the product of some rows of `width` elements with `b` to the rows of `out`. Each row has the
/// same bits as among more rows.
pub(crate) fn add_product_of_rows<T: Float>(
    out: &mut Vec<T>,
    x: &[T],
    width: usize,
    rows: usize,
    b: MatrixView<'_, T>,
) {
    let columns = b.layout.columns;
    let padded_rows = padded_rows(rows, columns);
    let mut padded = Cow::from(x);
    if rows < padded_rows {
        padded.to_mut().resize(padded_rows * width, T::ZERO);
        out.resize(padded_rows * columns, T::ZERO);
    }
    let layout = MatrixLayout::rows(padded_rows, columns, columns);
    let x = MatrixView::contiguous(&padded, padded_rows, width);
    multiply_in_pool(out, layout, x, b, StoreMode::Add);
    out.truncate(rows * columns);
}

/// Returns the number of rows with which `rows` rows are multiplied, for a result of this many
/// columns.
pub(crate) fn padded_rows(rows: usize, columns: usize) -> usize {
    if rows == 0 { 0 } else { rows.max(fewest_rows(columns)) }
}

/// Returns the number of rows from which `gemm` has a single summation order. It has special cases
/// for one row, for results of up to 256 elements, and, with a different split of long sums, for up
/// to 64 rows and columns.
fn fewest_rows(columns: usize) -> usize {
    let small = if columns <= 64 { 65 } else { 2 };
    257_usize.div_ceil(columns.max(1)).max(small)
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
    // SAFETY: `MatrixView` has checked that the factors lie in their slices, and the caller that the
    // result lies in its memory. The three have the sizes that `gemm` is told, and with
    // `StoreMode::Set` it reads no element of the result.
    unsafe {
        gemm::gemm(
            layout.rows,
            layout.columns,
            a.layout.columns,
            out,
            stride(layout.column_stride),
            stride(layout.row_stride),
            store == StoreMode::Add,
            a.data.as_ptr(),
            stride(a.layout.column_stride),
            stride(a.layout.row_stride),
            b.data.as_ptr(),
            stride(b.layout.column_stride),
            stride(b.layout.row_stride),
            T::ONE,
            scale,
            false,
            false,
            false,
            threads.parallelism(),
        );
    }
}

/// Converts a stride within a slice; it is never longer than the slice.
fn stride(elements: usize) -> isize {
    elements.cast_signed()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers(n: usize) -> Vec<f64> {
        (0..n).map(|i| (i * 7 % 23) as f64 - 11.0).collect()
    }

    #[test]
    fn products_match_the_naive_loop() {
        for (m, n, k) in
            (0..6).flat_map(|m| (0..6).flat_map(move |n| (0..6).map(move |k| (m, n, k))))
        {
            let a = numbers(m * k);
            let b = numbers(k * n);
            let mut expected: Vec<f64> = Vec::new();
            for (r, c) in (0..m).flat_map(|r| (0..n).map(move |c| (r, c))) {
                expected.push((0..k).map(|i| a[r * k + i] * b[c * k + i]).sum());
            }
            let a = MatrixView::contiguous(&a, m, k);
            let b = MatrixView::contiguous(&b, n, k).t();
            assert_eq!(product(a, b, ProductThreads::Pool), expected, "{m} {n} {k}");
        }
    }

    #[test]
    fn row_bits_are_independent_of_row_count() {
        let sizes = [1, 2, 5, 33, 64, 65, 128, 257, 300];
        for (n, k) in sizes.into_iter().flat_map(|n| [1, 2, 7, 129, 700].map(|k| (n, k))) {
            let x: Vec<f32> = (0..300 * k).map(|i| (i as f32 * 0.7).sin()).collect();
            let b: Vec<f32> = (0..n * k).map(|i| (i as f32 * 0.3).cos()).collect();
            let b = MatrixView::contiguous(&b, n, k).t();
            let whole = product_of_rows(&x, k, 300, b);
            for rows in [1, 2, 3, 7, 40, 64, 66, 200] {
                let start = 300 - rows;
                let part = product_of_rows(&x[start * k..], k, rows, b);
                assert!(part == whole[start * n..], "{rows} rows of {k}, {n} columns");
            }
        }
    }

    #[test]
    #[should_panic(expected = "beyond its data")]
    fn too_large_matrix_panics() {
        let _ = MatrixView::new(&[0.0_f32; 5], MatrixLayout::rows(2, 3, 3));
    }
}
