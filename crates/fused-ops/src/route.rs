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
    pub(crate) fn new(op: &'static str, inputs: &[Named<'_>]) -> Result<Self> {
        Self::with_parameters(op, inputs, &[])
    }

    /// Returns the route of inputs and of parameters that may be f32 where the inputs have half
    /// precision.
    pub(crate) fn with_parameters(
        op: &'static str,
        inputs: &[Named<'_>],
        parameters: &[Named<'_>],
    ) -> Result<Self> {
        let (_, first) = inputs[0];
        let inputs_of_type = inputs.iter().map(|input| (input, false));
        let parameters = parameters.iter().map(|parameter| (parameter, is_half(first.dtype())));
        for (&(input, tensor), may_be_f32) in inputs_of_type.chain(parameters) {
            let device = first.device().location();
            let other_device = tensor.device().location();
            if device != other_device {
                return Err(Error::Device { op, first: device, other: other_device });
            }
            let is_f32 = may_be_f32 && tensor.dtype() == DType::F32;
            if tensor.dtype() != first.dtype() && !is_f32 {
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

/// A tensor with its name in errors.
pub(crate) type Named<'a> = (&'static str, &'a Tensor);

/// Returns true for half precision.
pub(crate) fn is_half(dtype: DType) -> bool {
    matches!(dtype, DType::F16 | DType::BF16)
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

/// Calls `$fused::<T>` for the type of the inputs, or evaluates the composed form. A parameter after
/// the inputs may be f32 where they have half precision.
///
/// Inputs in half precision are converted to f32 by candle's differentiable conversion, so that
/// their gradients have half precision too.
macro_rules! route {
    (
        $op:expr, [$($input:ident),+ $(; $parameter:ident)?],
        $fused:ident($($argument:expr),*),
        $composed:expr $(,)?
    ) => {
        match $crate::route::Route::with_parameters(
            $op,
            &[$((stringify!($input), $input)),+],
            &[$((stringify!($parameter), $parameter))?],
        )? {
            $crate::route::Route::F32 => $fused::<f32>($($argument),*),
            $crate::route::Route::F64 => $fused::<f64>($($argument),*),
            $crate::route::Route::Half(half) => {
                $(let $input = &$input.to_dtype(candle_core::DType::F32)?;)+
                $(let $parameter = &$parameter.to_dtype(candle_core::DType::F32)?;)?
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

/// Returns an error if `value` is not a finite number above 0.
pub(crate) fn check_positive(op: &'static str, name: &str, value: f64) -> Result<()> {
    if value > 0.0 && value.is_finite() {
        return Ok(());
    }
    Err(Error::out_of_range(op, name, &value, "a finite number above 0"))
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
