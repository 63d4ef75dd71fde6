//! Sums and maxima over fixed lanes.
//!
//! Element i belongs to lane i modulo their number; the lanes are then added pairwise. So the order of
//! the additions, and with it the bits of a sum, depends on the length alone, not on the width of
//! the processor's vectors.
//!
//! The lanes of a sum are an array that is replaced as a whole. The compiler does not vectorize
//! some loops that add to one lane after the other.

use std::array;

use super::float::Float;

/// The number of lanes: enough to fill two of the widest vectors, so that additions do not wait for
/// each other.
const LANES: usize = 32;

/// The number of lanes of each of several dot products.
const PRODUCT_LANES: usize = 16;

/// Returns the sum of `f` over a slice.
#[inline(always)]
pub(crate) fn sum1<T: Float>(x: &[T], f: impl Fn(T) -> T) -> T {
    let mut lanes = [T::ZERO; LANES];
    let (chunks, rest) = x.as_chunks::<LANES>();
    for x in chunks {
        lanes = array::from_fn(|lane| lanes[lane] + f(x[lane]));
    }
    for (lane, &x) in lanes.iter_mut().zip(rest) {
        *lane += f(x);
    }
    fold(lanes, |a, b| a + b)
}

/// Returns the sum of `f` over two slices of equal length.
#[inline(always)]
pub(crate) fn sum2<T: Float>(x: &[T], y: &[T], f: impl Fn(T, T) -> T) -> T {
    let mut lanes = [T::ZERO; LANES];
    let ((x, x_rest), (y, y_rest)) = (x.as_chunks::<LANES>(), y.as_chunks::<LANES>());
    for (x, y) in x.iter().zip(y) {
        lanes = array::from_fn(|lane| lanes[lane] + f(x[lane], y[lane]));
    }
    for ((lane, &x), &y) in lanes.iter_mut().zip(x_rest).zip(y_rest) {
        *lane += f(x, y);
    }
    fold(lanes, |a, b| a + b)
}

/// Returns the sum of `f` over three slices of equal length.
#[inline(always)]
pub(crate) fn sum3<T: Float>(x: &[T], y: &[T], z: &[T], f: impl Fn(T, T, T) -> T) -> T {
    let mut lanes = [T::ZERO; LANES];
    let ((x, x_rest), (y, y_rest)) = (x.as_chunks::<LANES>(), y.as_chunks::<LANES>());
    let (z, z_rest) = z.as_chunks::<LANES>();
    for ((x, y), z) in x.iter().zip(y).zip(z) {
        lanes = array::from_fn(|lane| lanes[lane] + f(x[lane], y[lane], z[lane]));
    }
    for (((lane, &x), &y), &z) in lanes.iter_mut().zip(x_rest).zip(y_rest).zip(z_rest) {
        *lane += f(x, y, z);
    }
    fold(lanes, |a, b| a + b)
}

/// Returns the dot products of `x` with some rows of its length.
///
/// Each has [`PRODUCT_LANES`] lanes, fewer than a sum, so that those of four rows fit into registers.
#[inline(always)]
pub(crate) fn dot_products<T: Float, const N: usize>(x: &[T], rows: [&[T]; N]) -> [T; N] {
    let mut lanes = [[T::ZERO; PRODUCT_LANES]; N];
    let (x, x_rest) = x.as_chunks::<PRODUCT_LANES>();
    let rows = rows.map(|row| row.as_chunks::<PRODUCT_LANES>());
    for (number, x) in x.iter().enumerate() {
        for (lanes, (row, _)) in lanes.iter_mut().zip(&rows) {
            let row = &row[number];
            *lanes = array::from_fn(|lane| lanes[lane] + x[lane] * row[lane]);
        }
    }
    for (lanes, (_, rest)) in lanes.iter_mut().zip(rows) {
        for ((lane, &x), &item) in lanes.iter_mut().zip(x_rest).zip(rest) {
            *lane += x * item;
        }
    }
    lanes.map(|lanes| fold(lanes, |a, b| a + b))
}

/// Returns the largest number of a slice, ignoring NaN; −∞ if it is empty.
#[inline(always)]
pub(crate) fn max<T: Float>(x: &[T]) -> T {
    let mut lanes = [-T::INFINITY; LANES];
    let (chunks, rest) = x.as_chunks::<LANES>();
    for chunk in chunks {
        for (lane, &x) in lanes.iter_mut().zip(chunk) {
            *lane = lane.max_ignoring_nan(x);
        }
    }
    for (lane, &x) in lanes.iter_mut().zip(rest) {
        *lane = lane.max_ignoring_nan(x);
    }
    fold(lanes, T::max_ignoring_nan)
}

/// Joins the upper half of the lanes with the lower half, repeatedly, until one lane is left.
#[inline(always)]
fn fold<T: Float, const N: usize>(mut lanes: [T; N], join: impl Fn(T, T) -> T) -> T {
    let mut width = N / 2;
    while width > 0 {
        for lane in 0..width {
            lanes[lane] = join(lanes[lane], lanes[lane + width]);
        }
        width /= 2;
    }
    lanes[0]
}

#[cfg(test)]
#[allow(clippy::float_cmp, reason = "sums of integers are exact")]
mod tests {
    use super::*;

    #[test]
    fn sums_and_maxima_match_naive_loops() {
        for len in 0..200_u32 {
            // Integers, so that every order of additions gives the same sum.
            let x: Vec<f32> = (0..len).map(|i| (i * 7 % 31) as f32 - 15.0).collect();
            let y: Vec<f32> = (0..len).map(|i| (i * 5 % 17) as f32).collect();
            let naive = |f: &dyn Fn(usize) -> f32| (0..x.len()).map(f).sum::<f32>();
            assert_eq!(sum1(&x, |x| x + 1.0), naive(&|i| x[i] + 1.0));
            assert_eq!(sum2(&x, &y, |x, y| x * y), naive(&|i| x[i] * y[i]));
            assert_eq!(sum3(&x, &y, &x, |x, y, z| x * y - z), naive(&|i| x[i] * y[i] - x[i]));
            let products_of = |n| naive(&|i| x[i] * y[i] * n);
            let double: Vec<f32> = y.iter().map(|y| y * 2.0).collect();
            assert_eq!(dot_products(&x, [&y, &double]), [products_of(1.0), products_of(2.0)]);
            assert_eq!(max(&x), x.iter().copied().fold(f32::NEG_INFINITY, f32::max));
        }
    }

    #[test]
    fn maximum_ignores_nan() {
        assert_eq!(max(&[f32::NAN, 1.0, f32::NAN]), 1.0);
        assert_eq!(max(&[f32::NAN]), f32::NEG_INFINITY);
    }
}
