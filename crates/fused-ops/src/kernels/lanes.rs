//! Sums and maxima over fixed lanes.
//!
//! Element i belongs to lane i mod [`LANES`]; the lanes are then added pairwise. So the order of
//! the additions, and with it the bits of a sum, depends on the length alone, not on the width of
//! the processor's vectors.

use super::float::Float;

/// The number of lanes: enough to fill two of the widest vectors, so that additions do not wait for
/// each other.
const LANES: usize = 32;

/// Returns the sum of `f` over a slice.
#[inline(always)]
pub(crate) fn sum1<T: Float>(x: &[T], f: impl Fn(T) -> T) -> T {
    let mut lanes = [T::ZERO; LANES];
    let (chunks, rest) = x.as_chunks::<LANES>();
    for chunk in chunks {
        for (lane, &x) in lanes.iter_mut().zip(chunk) {
            *lane += f(x);
        }
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
        for ((lane, &x), &y) in lanes.iter_mut().zip(x).zip(y) {
            *lane += f(x, y);
        }
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
        for (((lane, &x), &y), &z) in lanes.iter_mut().zip(x).zip(y).zip(z) {
            *lane += f(x, y, z);
        }
    }
    for (((lane, &x), &y), &z) in lanes.iter_mut().zip(x_rest).zip(y_rest).zip(z_rest) {
        *lane += f(x, y, z);
    }
    fold(lanes, |a, b| a + b)
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
fn fold<T: Float>(mut lanes: [T; LANES], join: impl Fn(T, T) -> T) -> T {
    let mut width = LANES / 2;
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
            assert_eq!(max(&x), x.iter().copied().fold(f32::NEG_INFINITY, f32::max));
        }
    }

    #[test]
    fn maximum_ignores_nan() {
        assert_eq!(max(&[f32::NAN, 1.0, f32::NAN]), 1.0);
        assert_eq!(max(&[f32::NAN]), f32::NEG_INFINITY);
    }
}
