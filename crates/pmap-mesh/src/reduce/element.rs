//! The number types that can be reduced, and the operations on them.

use candle_core::{Result, WithDType};
use half::{bf16, f16};

/// A number that can be reduced, with the type of its partial sums.
///
/// Halves are summed in single precision and rounded once; integers wrap, as in candle.
pub(super) trait ReduceElement: WithDType {
    type Sum: Copy;
    fn widen(self) -> Self::Sum;
    fn plus(sum: Self::Sum, next: Self::Sum) -> Self::Sum;
    fn larger(sum: Self::Sum, next: Self::Sum) -> Self::Sum;
    fn smaller(sum: Self::Sum, next: Self::Sum) -> Self::Sum;
    /// Divides a float by `count`, for the mean. Integers have no mean and are rejected earlier;
    /// here they stay unchanged.
    fn divide(sum: Self::Sum, count: usize) -> Self::Sum;
    /// Returns the bits of the number, zero-extended.
    fn bits(self) -> u64;
    /// Calls `add` with the items as partial sums. If the item type is not the sum type, `add` gets
    /// a copy, whose sums are then rounded back into `items`.
    fn with_sums(
        items: &mut [Self],
        add: impl FnOnce(&mut [Self::Sum]) -> Result<()>,
    ) -> Result<()>;
}

macro_rules! float_arithmetic {
    ($sum:ty) => {
        fn plus(sum: $sum, next: $sum) -> $sum {
            sum + next
        }
        // Keep a NaN, like the maximum of candle and JAX.
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

/// Implements the partial sums of a type that is also its sum type.
macro_rules! sum_in_own_type {
    () => {
        type Sum = Self;
        fn widen(self) -> Self {
            self
        }
        fn with_sums(
            items: &mut [Self],
            add: impl FnOnce(&mut [Self]) -> Result<()>,
        ) -> Result<()> {
            add(items)
        }
    };
}

macro_rules! float_element {
    ($($type:ty),+) => {$(
        impl ReduceElement for $type {
            sum_in_own_type!();
            float_arithmetic!($type);
        }
    )+};
}

macro_rules! half_element {
    ($($type:ty),+) => {$(
        impl ReduceElement for $type {
            type Sum = f32;
            fn widen(self) -> f32 {
                self.to_f32()
            }
            fn with_sums(
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
        impl ReduceElement for $type {
            sum_in_own_type!();
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
