//! Arithmetic of optimizers, on single numbers or tensors.

use std::convert::Infallible;

use candle_core::{CpuStorage, Error, Result, Tensor, WithDType, backend::BackendStorage, bail};

/// The result of arithmetic on numbers `X`.
pub(in crate::optim) type Outcome<X, T = X> = std::result::Result<T, <X as Numbers>::Error>;

/// The operations in which an optimizer's rule is written once: for single items updated in place,
/// and for tensors on devices that only support candle's operations.
///
/// Every operation rounds its result and none is fused with another, so both implementations give
/// identical bits at any position.
pub(in crate::optim) trait Numbers: Sized {
    /// The error of an operation; infallible except for tensors.
    type Error;

    /// Returns `self * mul + add`.
    fn affine(&self, mul: f64, add: f64) -> Outcome<Self>;

    /// Returns `self * mul + 0`. Like in candle, adding zero removes the sign of negative zeros.
    fn scaled(&self, mul: f64) -> Outcome<Self> {
        self.affine(mul, 0.0)
    }

    fn plus(&self, other: &Self) -> Outcome<Self>;
    fn minus(&self, other: &Self) -> Outcome<Self>;
    fn over(&self, other: &Self) -> Outcome<Self>;
    fn squared(&self) -> Outcome<Self>;
    fn root(&self) -> Outcome<Self>;
}

/// A dtype for arithmetic on the CPU.
pub(in crate::optim) trait Real: Numbers<Error = Infallible> + WithDType {
    /// Converts to the nearest number.
    fn from_f32(value: f32) -> Self;

    /// Returns the items of a storage of this dtype.
    ///
    /// # Errors
    ///
    /// Returns an error if the storage has another dtype.
    fn slice_mut(storage: &mut CpuStorage) -> Result<&mut [Self]>;
}

macro_rules! real {
    ($float:ty, $storage:ident) => {
        #[allow(clippy::inline_always, reason = "inlined into the loop so that it vectorizes")]
        #[allow(
            clippy::allow_attributes,
            clippy::cast_possible_truncation,
            reason = "settings are rounded to the dtype"
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
                        "optimizer state has dtype {:?} instead of {:?}",
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
