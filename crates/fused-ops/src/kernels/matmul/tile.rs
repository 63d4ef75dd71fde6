//! Tiles: small blocks of a product that the processor sums in registers.
//!
//! Element (r, c) of a tile is the sum over k of `a[r, k]` · `b[k, c]`, by fused multiply-additions if the
//! processor has them. Its order depends on the number of products alone, so its bits do not depend on
//! its place in the tile, on the shape of the tile, or on the width of vectors.

#![allow(
    unsafe_code,
    reason = "tiles are read and written through addresses, without bounds checks"
)]

use std::ops::RangeInclusive;

use pulp::Simd;

use crate::kernels::{float::Float, vectors::Vectors};

/// Rows of a tile.
pub(super) const TILE_ROWS: usize = 6;

/// Vectors in a row of a tile. With six rows, a tile, a row of `b` and an element of `a` fit into 16
/// registers.
const TILE_VECTORS: usize = 2;

/// The products that are added between two checks of the loop. With one, a loop takes a sixth longer on
/// a core that others use too.
const UNROLLED: usize = 4;

/// The products that are added one by one: half of a sum, but within these limits. Sums of such runs have
/// smaller errors than one long sum.
const RUN: RangeInclusive<usize> = 16..=128;

type TileRow<T, S> = [<T as Vectors>::Vector<S>; TILE_VECTORS];

type Tile<T, S> = [TileRow<T, S>; TILE_ROWS];

/// Returns the number of columns of a tile.
#[inline(always)]
pub(super) const fn tile_columns<T: Float, S: Simd>() -> usize {
    size_of::<TileRow<T, S>>() / size_of::<T>()
}

/// A matrix at an address: element (r, c) is `row_stride` · r + `column_stride` · c elements after the
/// first.
#[derive(Clone, Copy, Debug)]
pub(super) struct Factor<T> {
    pub(super) start: *const T,
    pub(super) row_stride: usize,
    pub(super) column_stride: usize,
}

impl<T> Factor<T> {
    /// Returns the matrix from this row and column on.
    #[inline(always)]
    pub(super) fn from(self, row: usize, column: usize) -> Self {
        let offset = row * self.row_stride + column * self.column_stride;
        Self { start: self.start.wrapping_add(offset), ..self }
    }
}

/// A place for a tile: adjacent elements of `rows` rows, or of their first `columns` columns.
#[derive(Clone, Copy, Debug)]
pub(super) struct TileOutput<T> {
    pub(super) start: *mut T,
    pub(super) row_stride: usize,
    pub(super) rows: usize,
    pub(super) columns: usize,
}

/// Writes `scale` times the sums of a tile, or adds them.
///
/// # Safety
///
/// `a` must have [`TILE_ROWS`] rows of `depth` elements, and `b` `depth` adjacent rows as wide as a tile;
/// all of them must be readable. The elements of `out` must be writable, and readable if `adds`.
#[inline(always)]
pub(super) unsafe fn multiply_tile<T: Float, S: Simd>(
    simd: S,
    out: TileOutput<T>,
    a: Factor<T>,
    b: *const T,
    depth: usize,
    (scale, adds): (T, bool),
) {
    // SAFETY: as the caller promises. A tile is an array, so its rows have `columns` elements.
    unsafe {
        prefetch(&out);
        let sums = sums(simd, a, b, depth);
        for (row, sums) in sums.iter().enumerate().take(out.rows) {
            let place = out.start.add(row * out.row_stride);
            if out.columns == tile_columns::<T, S>() {
                store_row(simd, place, sums, (scale, adds));
                continue;
            }
            let sums = (&raw const *sums).cast::<T>();
            for column in 0..out.columns {
                let old = if adds { *place.add(column) } else { T::ZERO };
                *place.add(column) = (*sums.add(column) * scale + T::ZERO) + old;
            }
        }
    }
}

/// Writes or adds a whole row of a tile.
///
/// # Safety
///
/// A row of a tile at `place` must be writable, and readable if `adds`.
#[inline(always)]
unsafe fn store_row<T: Float, S: Simd>(
    simd: S,
    place: *mut T,
    sums: &TileRow<T, S>,
    (scale, adds): (T, bool),
) {
    let place = place.cast::<TileRow<T, S>>();
    let [zero, one, scale] = [T::ZERO, T::ONE, scale].map(|x| T::splat(simd, x));
    // SAFETY: as the caller promises; the vectors may have any address.
    unsafe {
        let mut row = if adds { place.read_unaligned() } else { [zero; TILE_VECTORS] };
        for (x, &sum) in row.iter_mut().zip(sums) {
            *x = T::mul_add(simd, T::mul_add(simd, sum, scale, zero), one, *x);
        }
        place.write_unaligned(row);
    }
}

/// Returns the sums of a tile.
///
/// # Safety
///
/// As for [`multiply_tile`].
#[inline(always)]
unsafe fn sums<T: Float, S: Simd>(simd: S, a: Factor<T>, b: *const T, depth: usize) -> Tile<T, S> {
    let run = depth.div_ceil(2).clamp(*RUN.start(), *RUN.end());
    // SAFETY: as the caller promises.
    let mut sums = unsafe { sums_of_run(simd, a, b, run.min(depth)) };
    let one = T::splat(simd, T::ONE);
    for first in (0..depth).step_by(run).skip(1) {
        let a = a.from(0, first);
        let b = b.wrapping_add(first * tile_columns::<T, S>());
        // SAFETY: as the caller promises.
        let part = unsafe { sums_of_run(simd, a, b, run.min(depth - first)) };
        for (sum, &x) in sums.as_flattened_mut().iter_mut().zip(part.as_flattened()) {
            *sum = T::mul_add(simd, x, one, *sum);
        }
    }
    sums
}

/// Returns the sums of a few products for each element of a tile.
///
/// # Safety
///
/// As for [`multiply_tile`].
#[inline(always)]
unsafe fn sums_of_run<T: Float, S: Simd>(
    simd: S,
    mut a: Factor<T>,
    mut b: *const T,
    depth: usize,
) -> Tile<T, S> {
    let width = tile_columns::<T, S>();
    let mut sums = [[T::splat(simd, T::ZERO); TILE_VECTORS]; TILE_ROWS];
    // SAFETY: the loops read `depth` elements of each row of `a`, and `depth` rows of `b`.
    unsafe {
        for _ in 0..depth / UNROLLED {
            for k in 0..UNROLLED {
                add_products(simd, &mut sums, a.from(0, k), b.add(k * width));
            }
            a = a.from(0, UNROLLED);
            b = b.add(UNROLLED * width);
        }
        for _ in 0..depth % UNROLLED {
            add_products(simd, &mut sums, a, b);
            a = a.from(0, 1);
            b = b.add(width);
        }
    }
    sums
}

/// Adds the products of a column of `a` and a row of `b`.
///
/// # Safety
///
/// Both must be readable.
#[inline(always)]
unsafe fn add_products<T: Float, S: Simd>(
    simd: S,
    sums: &mut Tile<T, S>,
    a: Factor<T>,
    b: *const T,
) {
    // SAFETY: as the caller promises; the vectors may have any address.
    let b = unsafe { b.cast::<TileRow<T, S>>().read_unaligned() };
    for (row, sums) in sums.iter_mut().enumerate() {
        // SAFETY: as the caller promises.
        let x = T::splat(simd, unsafe { *a.start.add(row * a.row_stride) });
        for (sum, &y) in sums.iter_mut().zip(&b) {
            *sum = T::mul_add(simd, x, y, *sum);
        }
    }
}

/// Fetches the rows of a tile while its sums are computed. Without this, writing them takes a third of
/// the time of a product with short sums.
#[inline(always)]
fn prefetch<T>(out: &TileOutput<T>) {
    #[cfg(target_arch = "x86_64")]
    for row in 0..out.rows {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        let start = out.start.wrapping_add(row * out.row_stride);
        for end in [start, start.wrapping_add(out.columns - 1)] {
            // SAFETY: prefetching has no effect on memory, at any address.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(end.cast_const().cast()) };
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = out;
}
