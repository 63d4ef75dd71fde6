//! Matrix products of strided views, by the crate `gemm`.
//!
//! `gemm` cuts its work for threads along rows and columns of the result only, so the bits do not depend on their number.

#![allow(
    unsafe_code,
    reason = "`gemm` takes addresses and strides; the views here have checked them"
)]

use gemm::Parallelism;

use super::{float::Float, memory};

/// A matrix whose elements lie in a slice.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Matrix<'a, T> {
    data: &'a [T],
    place: Place,
}

/// Where the elements of a matrix lie, counted in elements from its first.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place {
    pub(crate) rows: usize,
    pub(crate) columns: usize,
    pub(crate) row_stride: usize,
    pub(crate) column_stride: usize,
}

impl Place {
    /// Rows that follow one another with `stride` elements from start to start.
    pub(crate) fn rows(rows: usize, columns: usize, stride: usize) -> Self {
        Self { rows, columns, row_stride: stride, column_stride: 1 }
    }

    /// The elements from the first to the last.
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

impl<'a, T: Float> Matrix<'a, T> {
    /// A matrix at the start of `data`, which must reach to its last element.
    pub(crate) fn new(data: &'a [T], place: Place) -> Self {
        assert!(place.extent() <= data.len(), "a matrix reaches beyond its data");
        Self { data, place }
    }

    /// Rows one after another.
    pub(crate) fn contiguous(data: &'a [T], rows: usize, columns: usize) -> Self {
        Self::new(data, Place::rows(rows, columns, columns))
    }

    pub(crate) fn t(self) -> Self {
        Self { data: self.data, place: self.place.transposed() }
    }
}

/// Which threads a product may use.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Threads {
    /// That of the caller, who has work for the others.
    One,
    /// All of the caller's pool.
    Pool,
}

impl Threads {
    fn parallelism(self) -> Parallelism {
        match self {
            Self::Pool if rayon::current_num_threads() > 1 => {
                Parallelism::Rayon(rayon::current_num_threads())
            }
            Self::One | Self::Pool => Parallelism::None,
        }
    }
}

/// `a` · `b` as rows one after another.
///
/// One row is multiplied as two, since `gemm` adds up in another order for one: so a row has the same bits alone as among
/// others.
pub(crate) fn product<T: Float>(a: Matrix<'_, T>, b: Matrix<'_, T>, threads: Threads) -> Vec<T> {
    let (rows, columns) = (a.place.rows, b.place.columns);
    if a.place.columns == 0 {
        return vec![T::ZERO; rows * columns];
    }
    if rows == 1 {
        let twice = Matrix { data: a.data, place: Place { rows: 2, row_stride: 0, ..a.place } };
        let mut result = product(twice, b, threads);
        result.truncate(columns);
        return result;
    }
    let place = Place::rows(rows, columns, columns);
    // SAFETY: the vector has room for rows · columns elements at these strides, and all of them are written.
    unsafe {
        memory::vec_written_by(rows * columns, |out| {
            multiply(out, place, a, b, Store::Set, T::ONE, threads);
        })
    }
}

/// What happens to the elements that the result had.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Store {
    /// They are written over.
    Set,
    /// The product is added to them.
    Add,
}

/// Writes or adds `scale` · `a` · `b` to a matrix at the start of `out`.
pub(crate) fn multiply_into<T: Float>(
    out: &mut [T],
    place: Place,
    a: Matrix<'_, T>,
    b: Matrix<'_, T>,
    store: Store,
    scale: T,
) {
    assert!(place.extent() <= out.len(), "a product reaches beyond its memory");
    // SAFETY: the slice reaches to the last element, and all of it may be read and written.
    unsafe { multiply(out.as_mut_ptr(), place, a, b, store, scale, Threads::One) }
}

/// Writes or adds `scale` · `a` · `b` to the matrix at `out`.
///
/// # Safety
///
/// All elements of the matrix may be written, and read if the product is added to them. Nobody else reads or writes them
/// meanwhile, and no two of them share a place.
pub(super) unsafe fn multiply<T: Float>(
    out: *mut T,
    place: Place,
    a: Matrix<'_, T>,
    b: Matrix<'_, T>,
    store: Store,
    scale: T,
    threads: Threads,
) {
    assert!(
        a.place.rows == place.rows
            && b.place.columns == place.columns
            && a.place.columns == b.place.rows,
        "a product of matrices that do not fit"
    );
    // SAFETY: `Matrix` has checked that the factors lie in their slices, and the caller that the result lies in its
    // memory. The three have the sizes that `gemm` is told, and with `Store::Set` it reads no element of the result.
    unsafe {
        gemm::gemm(
            place.rows,
            place.columns,
            a.place.columns,
            out,
            stride(place.column_stride),
            stride(place.row_stride),
            store == Store::Add,
            a.data.as_ptr(),
            stride(a.place.column_stride),
            stride(a.place.row_stride),
            b.data.as_ptr(),
            stride(b.place.column_stride),
            stride(b.place.row_stride),
            T::ONE,
            scale,
            false,
            false,
            false,
            threads.parallelism(),
        );
    }
}

/// A stride within a slice, no longer than the slice.
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
    fn products_of_every_small_size_are_those_of_the_naive_loop() {
        for (m, n, k) in
            (0..6).flat_map(|m| (0..6).flat_map(move |n| (0..6).map(move |k| (m, n, k))))
        {
            let (a, b) = (numbers(m * k), numbers(k * n));
            let at = |r: usize, c: usize| (0..k).map(|i| a[r * k + i] * b[c * k + i]).sum::<f64>();
            let expected: Vec<f64> = (0..m * n).map(|i| at(i / n, i % n)).collect();
            let (a, b) = (Matrix::contiguous(&a, m, k), Matrix::contiguous(&b, n, k).t());
            assert_eq!(product(a, b, Threads::Pool), expected, "{m} {n} {k}");
        }
    }

    #[test]
    fn a_row_has_the_same_bits_alone_as_among_others() {
        for (m, n, k) in [(3, 5, 70), (40, 33, 129), (64, 48, 300), (2, 300, 7)] {
            let a: Vec<f32> = (0..m * k).map(|i| (i as f32 * 0.7).sin()).collect();
            let b: Vec<f32> = (0..n * k).map(|i| (i as f32 * 0.3).cos()).collect();
            let b = Matrix::contiguous(&b, n, k).t();
            let whole = product(Matrix::contiguous(&a, m, k), b, Threads::One);
            for row in 0..m {
                let alone = Matrix::contiguous(&a[row * k..][..k], 1, k);
                assert_eq!(product(alone, b, Threads::One), whole[row * n..][..n]);
            }
        }
    }

    #[test]
    #[should_panic(expected = "beyond its data")]
    fn a_matrix_larger_than_its_data_is_refused() {
        let _ = Matrix::new(&[0.0_f32; 5], Place::rows(2, 3, 3));
    }
}
