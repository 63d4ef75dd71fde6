//! The numbers that can be reduced, and how two of them become one.

use candle_core::{Result, WithDType};
use half::{bf16, f16};

/// A number that can be reduced, in the type that its sums are kept in.
///
/// Halves are added up in single precision and rounded once; integers wrap, as candle's do.
pub(super) trait Element: WithDType {
    type Sum: Copy;
    fn widen(self) -> Self::Sum;
    fn plus(sum: Self::Sum, next: Self::Sum) -> Self::Sum;
    fn larger(sum: Self::Sum, next: Self::Sum) -> Self::Sum;
    fn smaller(sum: Self::Sum, next: Self::Sum) -> Self::Sum;
    /// Means are for floats; an integer stays as it is, and is refused earlier.
    fn divide(sum: Self::Sum, count: usize) -> Self::Sum;
    /// Its bits, and zeros above them.
    fn bits(self) -> u64;
    /// Has `add` change items as sums: where they lie if they are, or else in a copy of them, which
    /// is rounded when all is added.
    fn as_sums(items: &mut [Self], add: impl FnOnce(&mut [Self::Sum]) -> Result<()>) -> Result<()>;
}

macro_rules! float_arithmetic {
    ($sum:ty) => {
        fn plus(sum: $sum, next: $sum) -> $sum {
            sum + next
        }
        // A NaN stays, as in candle's and JAX's maximum.
        fn larger(sum: $sum, next: $sum) -> $sum {
            if next > sum || next.is_nan() { next } else { sum }
        }
        fn smaller(sum: $sum, next: $sum) -> $sum {
            if next < sum || next.is_nan() { next } else { sum }
        }
        fn divide(sum: $sum, count: usize) -> $sum {
            sum / count as $sum
        }
        fn bits(self) -> u64 {
            self.to_bits().into()
        }
    };
}

/// A type that is its own sum.
macro_rules! its_own_sum {
    () => {
        type Sum = Self;
        fn widen(self) -> Self {
            self
        }
        fn as_sums(items: &mut [Self], add: impl FnOnce(&mut [Self]) -> Result<()>) -> Result<()> {
            add(items)
        }
    };
}

macro_rules! float_element {
    ($($type:ty),+) => {$(
        impl Element for $type {
            its_own_sum!();
            float_arithmetic!($type);
        }
    )+};
}

macro_rules! half_element {
    ($($type:ty),+) => {$(
        impl Element for $type {
            type Sum = f32;
            fn widen(self) -> f32 {
                self.to_f32()
            }
            fn as_sums(
                items: &mut [Self],
                add: impl FnOnce(&mut [f32]) -> Result<()>,
            ) -> Result<()> {
                let mut sums: Vec<f32> = items.iter().map(|item| item.widen()).collect();
                add(&mut sums)?;
                items.iter_mut().zip(sums).for_each(|(item, sum)| *item = Self::from_f32(sum));
                Ok(())
            }
            float_arithmetic!(f32);
        }
    )+};
}

macro_rules! integer_element {
    ($($type:ty as $unsigned:ty),+) => {$(
        impl Element for $type {
            its_own_sum!();
            fn plus(sum: $type, next: $type) -> $type {
                sum.wrapping_add(next)
            }
            fn larger(sum: $type, next: $type) -> $type {
                sum.max(next)
            }
            fn smaller(sum: $type, next: $type) -> $type {
                sum.min(next)
            }
            fn divide(sum: $type, _: usize) -> $type {
                sum
            }
            fn bits(self) -> u64 {
                <$unsigned>::from_ne_bytes(self.to_ne_bytes()).into()
            }
        }
    )+};
}

float_element!(f32, f64);
half_element!(bf16, f16);
integer_element!(u8 as u8, u32 as u32, i16 as u16, i32 as u32, i64 as u64);
