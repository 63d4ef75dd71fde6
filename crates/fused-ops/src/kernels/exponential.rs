//! Exponentials of many numbers.

use pulp::NullaryFnOnce;

use super::{float::Float, vectorized};

/// Numbers in a loop. The compiler unrolls loops over 64 numbers as a whole, which takes twice the time.
const PART: usize = 128;

/// Replaces each number by its exponential, with the bits of [`Float::exp`].
///
/// In one loop each exponential is a chain of some thirty operations, and a processor overlaps few such
/// chains. Three loops with shorter chains take some 0.6 of the time. This function is never inlined,
/// since its loops would share registers with those of a caller.
#[inline(never)]
pub(super) fn exp_in_place<T: Float>(x: &mut [T]) {
    vectorized(ExpInPlace(x));
}

struct ExpInPlace<'a, T>(&'a mut [T]);

impl<T: Float> NullaryFnOnce for ExpInPlace<'_, T> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        let [mut rests, mut half_powers, mut tails] = [[T::ZERO; PART]; 3];
        for x in self.0.chunks_mut(PART) {
            let parts = rests.iter_mut().zip(&mut half_powers);
            for (&mut x, (rest, half_power)) in x.iter_mut().zip(parts) {
                (*rest, *half_power) = x.exp_parts();
            }
            for (tail, &rest) in tails[..x.len()].iter_mut().zip(&rests) {
                *tail = T::exp_tail(rest);
            }
            let parts = tails.iter().zip(&rests).zip(&half_powers);
            for (x, ((&tail, &rest), &half_power)) in x.iter_mut().zip(parts) {
                *x = x.exp_of_parts(tail, rest, half_power);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use candle_core::WithDType;

    use super::*;

    fn assert_same_bits<T: Float>(x: Vec<T>) {
        let mut found = x.clone();
        exp_in_place(&mut found);
        for (x, found) in x.into_iter().zip(found) {
            let [found, expected] = [found, Float::exp(x)].map(WithDType::to_f64);
            // The language leaves the bits of NaN open.
            let is_same =
                found.to_bits() == expected.to_bits() || found.is_nan() && expected.is_nan();
            assert!(is_same, "{found} instead of {expected}");
        }
    }

    #[test]
    fn exponentials_have_the_bits_of_single_ones() {
        let special = [f64::NAN, f64::INFINITY, -f64::INFINITY, 0.0, -86.6, -86.7, 88.8, -709.0];
        for n in [0, 1, 7, PART - 1, PART, PART + 1, 5 * PART + 3] {
            let spread = (0..n).map(|i| (i * 37 % 1000) as f64 / 5.0 - 100.0);
            let x: Vec<f64> = special.into_iter().chain(spread).collect();
            assert_same_bits(x.iter().map(|&x| f32::round_from_f64(x)).collect());
            assert_same_bits(x);
        }
    }
}
