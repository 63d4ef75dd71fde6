//! The number types of kernels, [`f32`] and [`f64`], with functions that the compiler can
//! vectorize.

#![allow(clippy::excessive_precision, reason = "constants are written in full, and rounded once")]

use std::ops::Neg;

use candle_core::WithDType;

use super::vectors::Vectors;

/// A number type that kernels compute with.
///
/// The functions are branch-free sequences of separately rounded operations without calls. So the
/// compiler can vectorize loops over them, and each lane has the same bits as a scalar.
pub(crate) trait Float: WithDType + Neg<Output = Self> + Vectors {
    const ZERO: Self;
    const ONE: Self;
    const INFINITY: Self;

    /// Rounds a number to this type.
    fn round_from_f64(value: f64) -> Self;
    fn sqrt(self) -> Self;
    fn ln(self) -> Self;
    fn abs(self) -> Self;

    /// Returns e to the power of `self`, within 2 units in the last place of the exact result.
    ///
    /// A result below about 2^−125 (f64: 2^−1021) is 0; NaN stays NaN.
    /// [`exp_in_place`](super::exponential::exp_in_place) takes half the time for many numbers.
    #[inline(always)]
    fn exp(self) -> Self {
        let (rest, half_power) = self.exp_parts();
        self.exp_of_parts(Self::exp_tail(rest), rest, half_power)
    }

    /// Returns the hyperbolic tangent, within 4 units in the last place of the exact result.
    #[inline(always)]
    fn tanh(self) -> Self {
        let double = -(self.abs() + self.abs());
        let (rest, half_power) = double.exp_parts();
        let power = half_power + half_power;
        // e^−2|x| − 1, without the cancellation of a difference of the two.
        let fall = power * (rest + Self::exp_tail(rest) * rest * rest) + (power - Self::ONE);
        let size = -fall / (fall + Self::ONE + Self::ONE);
        if self < Self::ZERO { -size } else { size }
    }

    /// Returns the number less a multiple of ln 2, and half of 2 to the power of that multiple.
    fn exp_parts(self) -> (Self, Self);

    /// Returns (e^`rest` − 1 − `rest`) / `rest`², by a polynomial.
    fn exp_tail(rest: Self) -> Self;

    /// Returns e to the power of `self` from its parts and the tail of its rest.
    fn exp_of_parts(self, tail: Self, rest: Self, half_power: Self) -> Self;

    /// Returns −z², or a number with the exponential 0 for `z` beyond the range of
    /// [`half_erfc`](Self::half_erfc).
    fn bell_exponent(z: Self) -> Self;

    /// Returns half of the complementary error function of `z` ≥ 0, where `bell` is the exponential of
    /// its [`bell_exponent`](Self::bell_exponent).
    ///
    /// It is within 2·10⁻⁸ + a few roundings of the exact result (f64: 2·10⁻¹⁸), relative to e^(−z²).
    fn half_erfc(z: Self, bell: Self) -> Self;

    /// Returns the smaller of two numbers; `self` if it is NaN.
    #[inline(always)]
    fn at_most(self, limit: Self) -> Self {
        if self > limit { limit } else { self }
    }

    /// Returns the larger of two numbers; `self` if it is NaN.
    #[inline(always)]
    fn at_least(self, limit: Self) -> Self {
        if self < limit { limit } else { self }
    }

    /// Returns the larger of two numbers; ignores a NaN in `other`.
    #[inline(always)]
    fn max_ignoring_nan(self, other: Self) -> Self {
        if other > self { other } else { self }
    }
}

/// Evaluates the polynomial with these coefficients, highest power first.
#[inline(always)]
fn polynomial<T: Float, const N: usize>(coefficients: &[T; N], x: T) -> T {
    let mut sum = coefficients[0];
    for &coefficient in &coefficients[1..] {
        sum = sum * x + coefficient;
    }
    sum
}

/// Implements the parts of [`Float::exp`] and [`Float::half_erfc`] for a type.
macro_rules! float {
    (
        $float:ident, $bits:ident,
        // 1.5 · 2^(digits − 1): adding it rounds to an integer, which then stands in the lowest
        // bits.
        round: $round:expr,
        // ln 2 in two parts; products of the first with an exponent are exact.
        ln_2: ($ln_2_high:expr, $ln_2_low:expr),
        mantissa_bits: $mantissa_bits:literal, bias: $bias:literal,
        lowest: $lowest:expr, highest: $highest:expr,
        exp: $exp:expr,
        erfc: { center: $center:expr, largest: $largest:expr, coefficients: $erfc:expr },
    ) => {
        impl Float for $float {
            const ZERO: Self = 0.0;
            const ONE: Self = 1.0;
            const INFINITY: Self = $float::INFINITY;

            #[inline(always)]
            #[allow(
                clippy::cast_possible_truncation,
                clippy::cast_lossless,
                reason = "its purpose"
            )]
            fn round_from_f64(value: f64) -> Self {
                value as Self
            }

            #[inline(always)]
            fn sqrt(self) -> Self {
                $float::sqrt(self)
            }

            #[inline(always)]
            fn ln(self) -> Self {
                $float::ln(self)
            }

            #[inline(always)]
            fn abs(self) -> Self {
                $float::abs(self)
            }

            #[inline(always)]
            fn exp_parts(self) -> (Self, Self) {
                let x = self.at_least($lowest).at_most($highest);
                let rounded = x * std::$float::consts::LOG2_E + $round;
                let exponent = rounded - $round;
                let rest = (x - exponent * $ln_2_high) - exponent * $ln_2_low;
                // Half of the power of two, because the power overflows at 2^128 though the result
                // may still be finite.
                let half_power_bits =
                    rounded.to_bits().wrapping_sub($float::to_bits($round)).wrapping_add($bias - 1);
                (rest, $float::from_bits(half_power_bits << $mantissa_bits))
            }

            #[inline(always)]
            fn exp_tail(rest: Self) -> Self {
                polynomial(&$exp, rest)
            }

            #[inline(always)]
            fn exp_of_parts(self, tail: Self, rest: Self, half_power: Self) -> Self {
                let mantissa = $float::ONE + (rest + tail * rest * rest);
                let result = mantissa * half_power * 2.0;
                if self < $lowest { 0.0 } else { result }
            }

            #[inline(always)]
            fn bell_exponent(z: Self) -> Self {
                let z = z.at_most($largest);
                -(z * z)
            }

            #[inline(always)]
            fn half_erfc(z: Self, bell: Self) -> Self {
                let z = z.at_most($largest);
                let t = (z - $center) / (z + $center);
                bell * polynomial(&$erfc, t) / (1.0 + z)
            }
        }
    };
}

float! {
    f32, u32,
    round: 12_582_912.0,
    ln_2: (0.693_359_375, -2.121_944_4e-4),
    mantissa_bits: 23, bias: 127,
    lowest: -86.6, highest: 89.0,
    // Taylor coefficients from 1/7! to 1/2!: the next term is below 6e-9 where |rest| ≤ ln 2 / 2.
    exp: [1.0 / 5_040.0, 1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5],
    // Chebyshev fit of (1 + z) e^(z²) erfc(z) / 2 over t = (z − 2) / (z + 2), z from 0 to 10,
    // computed with 50 digits. Its error is at most 9.6e-9.
    erfc: {
        center: 2.0,
        largest: 10.0,
        coefficients: [
            -8.290_484e-5, -3.049_360_3e-4, 1.034_045_4e-4, 1.957_091e-3, -2.715_324e-4,
            -1.262_135_5e-2, 2.126_986_3e-2, 1.890_703_8e-2, -1.299_874_8e-1, 3.830_935_1e-1,
        ]
    },
}

float! {
    f64, u64,
    round: 6_755_399_441_055_744.0,
    ln_2: (0.693_147_180_369_123_8, 1.908_214_929_270_587_7e-10),
    mantissa_bits: 52, bias: 1023,
    lowest: -707.0, highest: 710.0,
    // Taylor coefficients from 1/13! to 1/2!: the next term is below 5e-18 where |rest| ≤ ln 2 / 2.
    exp: [
        1.0 / 6_227_020_800.0, 1.0 / 479_001_600.0, 1.0 / 39_916_800.0, 1.0 / 3_628_800.0,
        1.0 / 362_880.0, 1.0 / 40_320.0, 1.0 / 5_040.0, 1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0,
        1.0 / 6.0, 0.5,
    ],
    // The same fit as above over t = (z − 3) / (z + 3), z from 0 to 28. Its error is at most
    // 2.2e-18.
    erfc: {
        center: 3.0,
        largest: 28.0,
        coefficients: [
            -1.937_463_509_256_970_5e-10, -1.403_460_071_591_421_8e-9,
            -1.819_116_155_081_540_2e-9, 8.301_900_258_488_435e-9, 2.280_246_086_619_997_4e-8,
            -2.456_194_812_971_874_3e-8, -1.443_326_800_941_374_8e-7, 3.168_577_527_527_316_6e-8,
            7.930_554_053_755_571e-7, 1.294_985_855_164_466_7e-7, -4.494_555_267_197_334e-6,
            -7.568_687_083_992_521e-7, 2.805_957_173_866_581e-5, -1.027_588_194_116_616e-5,
            -1.836_442_213_419_467_6e-4, 3.229_071_130_516_274_5e-4, 8.092_845_616_584_335e-4,
            -4.875_344_647_321_545e-3, 1.097_888_200_643_673_3e-2, -1.190_195_655_429_579_1e-2,
            -5.117_694_449_506_845e-3, 4.951_037_683_971_942_7e-2, -0.115_463_666_541_904_58,
            0.358_002_302_362_779_9,
        ]
    },
}

#[cfg(test)]
#[allow(clippy::float_cmp, clippy::cast_possible_truncation, reason = "these are exact")]
mod tests {
    use super::*;

    /// Returns the distance between `expected` and `found`, in units in the last place.
    fn ulps(found: f64, expected: f64, digits: i32) -> f64 {
        let exponent = expected.abs().log2().floor();
        (found - expected).abs() / (exponent - f64::from(digits - 1)).exp2()
    }

    #[test]
    fn exp_f32_is_within_two_ulps() {
        let mut worst = 0.0_f64;
        for step in -866_000..887_000 {
            let x = step as f32 * 1e-4;
            worst = worst.max(ulps(f64::from(Float::exp(x)), f64::from(x).exp(), 24));
        }
        assert!(worst < 2.0, "{worst}");
    }

    #[test]
    fn exp_f64_is_within_two_ulps() {
        let mut worst = 0.0_f64;
        for step in -70_600..70_900 {
            let x = f64::from(step) * 0.010_007;
            if x < 709.7 {
                worst = worst.max(ulps(Float::exp(x), libm::exp(x), 53));
            }
        }
        assert!(worst < 2.0, "{worst}");
    }

    #[test]
    fn exp_out_of_range() {
        assert_eq!(Float::exp(f32::NEG_INFINITY), 0.0);
        assert_eq!(Float::exp(-86.7_f32), 0.0);
        assert_eq!(Float::exp(0.0_f32), 1.0);
        assert_eq!(Float::exp(88.8_f32), f32::INFINITY);
        assert_eq!(Float::exp(f32::INFINITY), f32::INFINITY);
        assert!(Float::exp(f32::NAN).is_nan());
        assert_eq!(Float::exp(f64::NEG_INFINITY), 0.0);
        assert_eq!(Float::exp(-708.0_f64), 0.0);
        assert_eq!(Float::exp(710.0_f64), f64::INFINITY);
        assert_eq!(Float::exp(f64::INFINITY), f64::INFINITY);
        assert!(Float::exp(f64::NAN).is_nan());
    }

    fn half_erfc<T: Float>(z: T) -> T {
        T::half_erfc(z, Float::exp(T::bell_exponent(z)))
    }

    #[test]
    fn tanh_is_within_four_ulps() {
        let (mut single, mut double) = (0.0_f64, 0.0_f64);
        for step in 1..40_000 {
            // From 10^−6 to 30.
            let x = (f64::from(step) * 4.3e-4 - 13.8).exp();
            double = double.max(ulps(Float::tanh(x), libm::tanh(x), 53));
            let x = x as f32;
            single = single.max(ulps(f64::from(Float::tanh(x)), libm::tanh(x.into()), 24));
            assert_eq!(Float::tanh(-x), -Float::tanh(x));
        }
        assert!(single < 4.0 && double < 4.0, "{single}, {double}");
        assert_eq!(Float::tanh(f32::INFINITY), 1.0);
        assert_eq!(Float::tanh(0.0_f64), 0.0);
        assert!(Float::tanh(f64::NAN).is_nan());
    }

    #[test]
    fn half_erfc_meets_its_bound() {
        let mut single = 0.0_f64;
        let mut double = 0.0_f64;
        for step in 0..26_000 {
            let z = f64::from(step) * 1e-3;
            let bell = Float::exp(f64::bell_exponent(z));
            let half = f64::half_erfc(z, bell);
            double = double.max((half - libm::erfc(z) / 2.0).abs() / bell);
            let z = f64::from(z as f32);
            if z < 9.0 {
                let half = half_erfc(z as f32);
                // The bell itself is off by the rounding of z².
                let allowed = libm::exp(-z * z) * (1.0 + z * z);
                single = single.max((f64::from(half) - libm::erfc(z) / 2.0).abs() / allowed);
            }
        }
        assert!(single < 1.5e-7, "{single}");
        assert!(double < 2e-13, "{double}");
    }

    #[test]
    fn half_erfc_at_the_ends() {
        assert!((half_erfc(0.0_f32) - 0.5).abs() < 1e-7);
        assert_eq!(half_erfc(f32::INFINITY), 0.0);
        assert!(half_erfc(f32::NAN).is_nan());
        assert_eq!(half_erfc(f64::INFINITY), 0.0);
        assert!(half_erfc(f64::NAN).is_nan());
    }
}
