//! The choice between the kernels, in one of two types, and candle's operations.

use candle_core::{DType, Tensor};

use crate::error::{Error, Result};

/// The implementation that runs an operation.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Route {
    /// The f32 kernels.
    F32,
    /// The f64 kernels.
    F64,
    /// The f32 kernels, for inputs of this type; the result is rounded to it once.
    Half(DType),
    /// candle's differentiable operations, on a device without kernels of this crate.
    Composed,
}

impl Route {
    /// Returns the route of inputs, each with its name: they must have one floating type and lie on
    /// one device.
    pub(crate) fn new(op: &'static str, inputs: &[(&'static str, &Tensor)]) -> Result<Self> {
        let (_, first) = inputs[0];
        for &(input, tensor) in inputs {
            let device = first.device().location();
            let other_device = tensor.device().location();
            if device != other_device {
                return Err(Error::Device { op, first: device, other: other_device });
            }
            if tensor.dtype() != first.dtype() {
                let found = tensor.dtype();
                let expected = first.dtype().as_str();
                return Err(Error::DType { op, input, found, expected });
            }
        }
        let route = match first.dtype() {
            DType::F32 => Self::F32,
            DType::F64 => Self::F64,
            half @ (DType::F16 | DType::BF16) => Self::Half(half),
            found => {
                let expected = "f16, bf16, f32 or f64";
                return Err(Error::DType { op, input: inputs[0].0, found, expected });
            }
        };
        Ok(if has_kernels(first) { route } else { Self::Composed })
    }
}

/// Returns whether the operations of this tensor have kernels.
fn has_kernels(x: &Tensor) -> bool {
    #[cfg(test)]
    if ARE_COMPOSED.get() {
        return false;
    }
    x.device().is_cpu()
}

#[cfg(test)]
thread_local! {
    /// Whether all operations of this thread are composed, as on a device without kernels.
    pub(crate) static ARE_COMPOSED: std::cell::Cell<bool> = const { std::cell::Cell::new(false) };
}

/// Calls `$fused::<T>` for the type of the inputs, or evaluates the composed form.
///
/// Inputs in half precision are converted to f32 by candle's differentiable conversion, so that
/// their gradients have half precision too.
macro_rules! route {
    (
        $op:literal, [$($input:ident),+],
        $fused:ident($($argument:expr),*),
        $composed:expr $(,)?
    ) => {
        match $crate::route::Route::new($op, &[$((stringify!($input), $input)),+])? {
            $crate::route::Route::F32 => $fused::<f32>($($argument),*),
            $crate::route::Route::F64 => $fused::<f64>($($argument),*),
            $crate::route::Route::Half(half) => {
                $(let $input = &$input.to_dtype(candle_core::DType::F32)?;)+
                Ok($fused::<f32>($($argument),*)?.to_dtype(half)?)
            }
            $crate::route::Route::Composed => Ok($composed?),
        }
    };
}

pub(crate) use route;

/// Returns an error if `tensor` does not have the shape `expected`.
pub(crate) fn check_shape(
    op: &'static str,
    input: &'static str,
    tensor: &Tensor,
    expected: &[usize],
) -> Result<()> {
    if tensor.dims() == expected {
        return Ok(());
    }
    Err(Error::Shape {
        op,
        input,
        found: tensor.dims().to_vec(),
        expected: format!("{expected:?}"),
    })
}

/// Returns the size of the last dimension; fails for a scalar.
pub(crate) fn last_dim(op: &'static str, input: &'static str, tensor: &Tensor) -> Result<usize> {
    tensor.dims().last().copied().ok_or_else(|| Error::Shape {
        op,
        input,
        found: Vec::new(),
        expected: "at least one dimension".to_owned(),
    })
}
