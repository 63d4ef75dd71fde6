//! What optimizers calculate with: one number, or a tensor of them.

use std::convert::Infallible;

use candle_core::{CpuStorage, Error, Result, Tensor, WithDType, backend::BackendStorage, bail};

/// What a calculation with numbers `X` comes to, if it does not fail.
pub(in crate::optim) type Outcome<X, T = X> = std::result::Result<T, <X as Numbers>::Error>;

/// Numbers that an optimizer's rule is written for once: items that are updated in place, one by
/// one, and tensors on devices for which there are only candle's operations.
///
/// Every operation rounds its result, and none is fused with another, so both ways have the same
/// bits, whatever stands beside an item.
pub(in crate::optim) trait Numbers: Sized {
    /// Tensors may fail.
    type Error;

    /// The numbers times `mul`, plus `add`.
    fn affine(&self, mul: f64, add: f64) -> Outcome<Self>;

    /// The numbers times `mul`. As in candle zero is added, which takes the sign from zeros.
    fn scaled(&self, mul: f64) -> Outcome<Self> {
        self.affine(mul, 0.0)
    }

    fn plus(&self, other: &Self) -> Outcome<Self>;
    fn minus(&self, other: &Self) -> Outcome<Self>;
    fn over(&self, other: &Self) -> Outcome<Self>;
    fn squared(&self) -> Outcome<Self>;
    fn root(&self) -> Outcome<Self>;
}

/// A type that is calculated with on the processor.
pub(in crate::optim) trait Real: Numbers<Error = Infallible> + WithDType {
    /// The nearest number.
    fn from_f32(value: f32) -> Self;

    /// A storage of such numbers.
    ///
    /// # Errors
    ///
    /// If it has others.
    fn slice_mut(storage: &mut CpuStorage) -> Result<&mut [Self]>;
}

macro_rules! real {
    ($float:ty, $storage:ident) => {
        #[allow(
            clippy::inline_always,
            reason = "a loop has the instructions of the function that it is inlined into"
        )]
        #[allow(
            clippy::allow_attributes,
            clippy::cast_possible_truncation,
            reason = "a setting becomes the nearest number of the type"
        )]
        impl Numbers for $float {
            type Error = Infallible;

            #[inline(always)]
            fn affine(&self, mul: f64, add: f64) -> Outcome<Self> {
                Ok(self * mul as $float + add as $float)
            }

            #[inline(always)]
            fn plus(&self, other: &Self) -> Outcome<Self> {
                Ok(self + other)
            }

            #[inline(always)]
            fn minus(&self, other: &Self) -> Outcome<Self> {
                Ok(self - other)
            }

            #[inline(always)]
            fn over(&self, other: &Self) -> Outcome<Self> {
                Ok(self / other)
            }

            #[inline(always)]
            fn squared(&self) -> Outcome<Self> {
                Ok(self * self)
            }

            #[inline(always)]
            fn root(&self) -> Outcome<Self> {
                Ok(self.sqrt())
            }
        }

        impl Real for $float {
            #[inline(always)]
            fn from_f32(value: f32) -> Self {
                value.into()
            }

            fn slice_mut(storage: &mut CpuStorage) -> Result<&mut [Self]> {
                match storage {
                    CpuStorage::$storage(items) => Ok(items),
                    other => bail!(
                        "an optimizer's state is of {:?} instead of {:?}",
                        other.dtype(),
                        Self::DTYPE
                    ),
                }
            }
        }
    };
}

real!(f32, F32);
real!(f64, F64);

impl Numbers for Tensor {
    type Error = Error;

    fn affine(&self, mul: f64, add: f64) -> Result<Self> {
        self.affine(mul, add)
    }

    fn plus(&self, other: &Self) -> Result<Self> {
        self + other
    }

    fn minus(&self, other: &Self) -> Result<Self> {
        self - other
    }

    fn over(&self, other: &Self) -> Result<Self> {
        self / other
    }

    fn squared(&self) -> Result<Self> {
        self.sqr()
    }

    fn root(&self) -> Result<Self> {
        self.sqrt()
    }
}
