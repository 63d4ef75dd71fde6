//! GELU, SiLU and ReLU, and SwiGLU and GEGLU, which gate by them.
//!
//! Hendrycks and Gimpel, "Gaussian Error Linear Units", arXiv 1606.08415; Ramachandran, Zoph and
//! Le, "Searching for Activation Functions", arXiv 1710.05941; Shazeer, "GLU Variants Improve
//! Transformer", arXiv 2002.05202.

use std::marker::PhantomData;

use candle_core::Tensor;

use crate::{
    autograd::{Backward, CpuSlice, cpu_tensor, record, record_unary},
    composed,
    config::Activation,
    error::Result,
    kernels::{activation as kernel, float::Float},
    route::{check_shape, route},
};

/// Applies GELU, x·Φ(x) with the distribution function Φ of the standard normal: candle's
/// `gelu_erf`.
///
/// # Shapes
///
/// Any; the result has the shape of `x`.
///
/// # Determinism
///
/// The same bits on every processor and for any number of threads.
///
/// # Errors
///
/// [`DType`](crate::Error::DType) if `x` has no floating type.
///
/// # Examples
///
/// ```
/// use candle_core::{Device, Tensor};
///
/// let y = fused_ops::gelu(&Tensor::new(&[-10.0_f64, 0.0, 1.0], &Device::Cpu)?)?.to_vec1::<f64>()?;
/// assert!(y[0].abs() < 1e-20 && y[1] == 0.0 && (y[2] - 0.841_344_746).abs() < 1e-9);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn gelu(x: &Tensor) -> Result<Tensor> {
    activate(x, Activation::Gelu)
}

/// Approximates [`gelu`] by a hyperbolic tangent: candle's `gelu`.
///
/// # Shapes
///
/// Any; the result has the shape of `x`.
///
/// # Determinism
///
/// Like [`gelu`].
///
/// # Errors
///
/// The errors of [`gelu`].
///
/// # Examples
///
/// ```
/// use candle_core::{Device, Tensor};
///
/// let y = fused_ops::gelu_tanh(&Tensor::new(&[0.0_f64, 1.0], &Device::Cpu)?)?.to_vec1::<f64>()?;
/// assert!(y[0] == 0.0 && (y[1] - 0.841_191_99).abs() < 1e-8);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn gelu_tanh(x: &Tensor) -> Result<Tensor> {
    activate(x, Activation::GeluTanh)
}

/// Applies SiLU, x / (1 + e^−x), also called swish.
///
/// # Shapes
///
/// Any; the result has the shape of `x`.
///
/// # Determinism
///
/// Like [`gelu`].
///
/// # Errors
///
/// The errors of [`gelu`].
///
/// # Examples
///
/// ```
/// use candle_core::{Device, Tensor};
///
/// let y = fused_ops::silu(&Tensor::new(&[0.0_f64, 1.0], &Device::Cpu)?)?.to_vec1::<f64>()?;
/// assert!(y[0] == 0.0 && (y[1] - 0.731_058_578_6).abs() < 1e-10);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn silu(x: &Tensor) -> Result<Tensor> {
    activate(x, Activation::Silu)
}

fn activate(x: &Tensor, activation: Activation) -> Result<Tensor> {
    route!("activation", [x], fused(x, activation), composed::activation(x, activation))
}

fn fused<T: Float>(x: &Tensor, activation: Activation) -> Result<Tensor> {
    let x = &x.contiguous()?;
    let y = kernel::forward::<T>(activation, CpuSlice::new(x).as_slice()?);
    record_unary(x, y, x.shape().clone(), move |x, _, grad| {
        Ok(kernel::backward(activation, x, grad))
    })
}

/// Returns silu(gate) · up, the middle of a gated feed-forward network.
///
/// # Shapes
///
/// `gate`, `up` and the result have one shape.
///
/// # Determinism
///
/// Like [`gelu`].
///
/// # Errors
///
/// [`Shape`](crate::Error::Shape) if the shapes differ, [`DType`](crate::Error::DType) and
/// [`Device`](crate::Error::Device) if the two differ in type or device or have no floating type.
///
/// # Examples
///
/// ```
/// use candle_core::{Device, Tensor};
///
/// let gate = Tensor::new(&[0.0_f64, 100.0], &Device::Cpu)?;
/// let up = Tensor::new(&[7.0_f64, 0.5], &Device::Cpu)?;
/// assert_eq!(fused_ops::swiglu(&gate, &up)?.to_vec1::<f64>()?, [0.0, 50.0]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn swiglu(gate: &Tensor, up: &Tensor) -> Result<Tensor> {
    gated("swiglu", Activation::Silu, gate, up)
}

/// Returns gelu(gate) · up, the middle of Gemma's feed-forward network, with the GELU of [`gelu_tanh`].
///
/// # Shapes
///
/// Like [`swiglu`].
///
/// # Determinism
///
/// Like [`gelu`].
///
/// # Errors
///
/// The errors of [`swiglu`].
///
/// # Examples
///
/// ```
/// use candle_core::{Device, Tensor};
///
/// let gate = Tensor::new(&[0.0_f64, 100.0], &Device::Cpu)?;
/// let up = Tensor::new(&[7.0_f64, 0.5], &Device::Cpu)?;
/// assert_eq!(fused_ops::geglu(&gate, &up)?.to_vec1::<f64>()?, [0.0, 50.0]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn geglu(gate: &Tensor, up: &Tensor) -> Result<Tensor> {
    gated("geglu", Activation::GeluTanh, gate, up)
}

fn gated(op: &'static str, form: Activation, gate: &Tensor, up: &Tensor) -> Result<Tensor> {
    check_shape(op, "up", up, gate.dims())?;
    route!(op, [gate, up], fused_gated(gate, up, form), composed::gated(form, gate, up))
}

fn fused_gated<T: Float>(gate: &Tensor, up: &Tensor, activation: Activation) -> Result<Tensor> {
    let gate = &gate.contiguous()?;
    let up = &up.contiguous()?;
    let y = {
        let [gate, up] = [gate, up].map(CpuSlice::new);
        kernel::gated::<T>(activation, gate.as_slice()?, up.as_slice()?)
    };
    let backward = Gated::<T> { activation, float: PhantomData };
    record(&[gate, up], y, gate.shape().clone(), backward)
}

struct Gated<T> {
    activation: Activation,
    float: PhantomData<T>,
}

impl<T: Float> Backward for Gated<T> {
    const NAME: &'static str = "fused-gate";

    fn backward(
        &self,
        inputs: &[&Tensor],
        _: &Tensor,
        grad: &Tensor,
    ) -> Result<Vec<Option<Tensor>>> {
        let gate = CpuSlice::new(inputs[0]);
        let up = CpuSlice::new(inputs[1]);
        let grad = CpuSlice::new(grad);
        let mut grad_up = grad.as_slice::<T>()?.to_vec();
        let [grad_gate, _] =
            kernel::gated_backward(self.activation, gate.as_slice()?, up.as_slice()?, &mut grad_up);
        let shape = inputs[0].shape();
        Ok(vec![Some(cpu_tensor(grad_gate, shape)?), Some(cpu_tensor(grad_up, shape)?)])
    }
}
