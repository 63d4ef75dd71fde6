//! A linear layer in one step: product, bias, activation.

pub(crate) mod grouped;

use candle_core::{DType, Tensor};

use crate::{
    affine::{AffineLayer, n_rows},
    autograd::{Backward, CpuSlice, record},
    composed,
    config::Activation,
    error::Result,
    kernels::{activation, float::Float},
    route::{Route, last_dim},
};

const OP: &str = "linear";
const NAMES: [&str; 2] = ["weight", "bias"];

/// Returns activation(x·weightᵀ + bias).
///
/// The kernels add the bias in place, and apply the activation in place unless its gradient needs its
/// input. The gradients of weight and bias are written in the layout of the parameters, without a
/// transposition.
///
/// # Shapes
///
/// `x` [.., inputs], `weight` [outputs, inputs], `bias` \[outputs\]; the result is [.., outputs].
///
/// # Determinism
///
/// On one processor model, results have the same bits for any number of threads, and for a row
/// alone or among other rows. Matrix products differ between processor models.
///
/// # Errors
///
/// [`Shape`](crate::Error::Shape) if the shapes of the inputs do not fit each other,
/// [`DType`](crate::Error::DType) and [`Device`](crate::Error::Device) if they differ in type or
/// device or have no floating type.
///
/// # Examples
///
/// ```
/// use candle_core::{Device, Tensor};
/// use fused_ops::{Activation, linear};
///
/// let x = Tensor::new(&[[1.0_f32, 2.0]], &Device::Cpu)?;
/// let weight = Tensor::new(&[[3.0_f32, 4.0], [-5.0, 1.0]], &Device::Cpu)?;
/// let bias = Tensor::new(&[0.5_f32, 0.5], &Device::Cpu)?;
/// let y = linear(&x, &weight, Some(&bias), Some(Activation::Relu))?;
/// assert_eq!(y.to_vec2::<f32>()?, [[11.5, 0.0]]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn linear(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    activation: Option<Activation>,
) -> Result<Tensor> {
    apply(x, &AffineLayer::new(weight, bias), activation)
}

/// Returns x·weightᵀ + bias + scale·(x·Aᵀ)·Bᵀ: a [`linear`] layer of a frozen weight with a trained
/// low-rank adapter (LoRA, Hu et al., arXiv 2106.09685).
///
/// The weight has no gradient, and no tensor of its size is made, forward or backward. Like PEFT it
/// multiplies by A and then by B. With the kernels, x·Aᵀ and the scaled product are not nodes of candle's
/// graph.
///
/// # Shapes
///
/// `x` [.., inputs], `weight` [outputs, inputs], `bias` \[outputs\], `a` [rank, inputs], `b`
/// [outputs, rank]; the result is [.., outputs].
///
/// # Dtypes
///
/// `weight` may have any floating type, such as the `bf16` of a file next to an `x` in `f32`. The
/// kernels convert 256 of its rows at a time (without rounding, unless `weight` is `f64` and `x` is not),
/// so no converted copy of the whole weight exists. On devices without kernels of this crate, one exists
/// during a product. If `x` has half precision, `a` and `b` may be `f32`; the result is computed in `f32`
/// and rounded once.
///
/// # Determinism
///
/// Like [`linear`].
///
/// # Errors
///
/// The errors of [`linear`].
///
/// # Examples
///
/// ```
/// use candle_core::{DType, Device, Tensor, Var};
/// use fused_ops::lora_linear;
///
/// let x = Tensor::new(&[[1.0_f32, 2.0]], &Device::Cpu)?;
/// let weight = Tensor::new(&[[3.0_f32, 4.0], [-5.0, 1.0]], &Device::Cpu)?.to_dtype(DType::BF16)?;
/// let a = Var::new(&[[1.0_f32, 1.0]], &Device::Cpu)?;
/// let b = Var::new(&[[0.0_f32], [2.0]], &Device::Cpu)?;
/// let y = lora_linear(&x, &weight, None, &a, &b, 0.5)?;
/// assert_eq!(y.to_vec2::<f32>()?, [[11.0, 0.0]]); // −3 + 0.5 · 3 · 2
/// let grads = y.sum_all()?.backward()?;
/// assert_eq!(grads.get(&b).unwrap().to_vec2::<f32>()?, [[1.5], [1.5]]);
/// assert!(grads.get(&weight).is_none());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn lora_linear(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    a: &Tensor,
    b: &Tensor,
    scale: f64,
) -> Result<Tensor> {
    apply(x, &AffineLayer::new(weight, bias).with_adapter(a, b, scale), None)
}

/// Applies a layer with or without an adapter.
pub(crate) fn apply(
    x: &Tensor,
    layer: &AffineLayer,
    activation: Option<Activation>,
) -> Result<Tensor> {
    layer.check(OP, NAMES, x, last_dim(OP, "x", x)?)?;
    let inputs: Vec<_> = [("x", x)].into_iter().chain(layer.named(NAMES)).collect();
    match Route::new(OP, &inputs)? {
        Route::F32 => fused::<f32>(x, layer, activation),
        Route::F64 => fused::<f64>(x, layer, activation),
        Route::Half(half) => {
            let y = fused::<f32>(&x.to_dtype(DType::F32)?, &layer.to_f32()?, activation)?;
            Ok(y.to_dtype(half)?)
        }
        Route::Composed => {
            let y = layer.composed(x)?;
            Ok(match activation {
                Some(form) => composed::activation(&y, form)?,
                None => y,
            })
        }
    }
}

fn fused<T: Float>(
    x: &Tensor,
    layer: &AffineLayer,
    activation: Option<Activation>,
) -> Result<Tensor> {
    let x = x.contiguous()?;
    let layer = layer.contiguous()?;
    let inputs: Vec<_> = [&x].into_iter().chain(layer.tensors()).collect();
    let pre_activation = layer.forward::<T>(CpuSlice::new(&x).as_slice()?, n_rows(&x))?;
    let tracked = inputs.iter().any(|input| input.track_op());
    let (y, saved) = activate(pre_activation, activation, tracked);
    let backward = Linear { layer: layer.clone(), saved };
    record(&inputs, y, layer.output_shape(&x), backward)
}

/// Values stored for the gradient of an activation.
pub(crate) enum SavedActivation<T> {
    /// Nothing, because there is no activation.
    Identity,
    /// Nothing, because there is no gradient.
    Untracked,
    /// Nothing, because the output is enough: for ReLU, it is positive where the input is.
    Relu,
    /// The input of the activation.
    Input(Activation, Vec<T>),
}

/// Applies the activation, and returns its output and the values that its gradient needs.
pub(crate) fn activate<T: Float>(
    mut input: Vec<T>,
    activation: Option<Activation>,
    is_tracked: bool,
) -> (Vec<T>, SavedActivation<T>) {
    match activation {
        None => (input, SavedActivation::Identity),
        Some(activation) if !is_tracked => {
            activation::forward_in_place(activation, &mut input);
            (input, SavedActivation::Untracked)
        }
        Some(Activation::Relu) => {
            activation::forward_in_place(Activation::Relu, &mut input);
            (input, SavedActivation::Relu)
        }
        Some(activation) => {
            let output = activation::forward(activation, &input);
            (output, SavedActivation::Input(activation, input))
        }
    }
}

struct Linear<T> {
    layer: AffineLayer,
    saved: SavedActivation<T>,
}

impl<T: Float> Linear<T> {
    /// Returns the gradient of x·weightᵀ + bias, or `None` without an activation: then it is
    /// `grad`.
    fn pre_activation_grad(&self, y: &Tensor, grad: &[T]) -> Result<Option<Vec<T>>> {
        Ok(match &self.saved {
            SavedActivation::Identity => None,
            SavedActivation::Untracked => unreachable!("only tracked operations are recorded"),
            SavedActivation::Relu => {
                let y = CpuSlice::new(y);
                Some(activation::backward(Activation::Relu, y.as_slice()?, grad))
            }
            SavedActivation::Input(activation, input) => {
                Some(activation::backward(*activation, input, grad))
            }
        })
    }
}

impl<T: Float> Backward for Linear<T> {
    const NAME: &'static str = "fused-linear";

    fn backward(
        &self,
        inputs: &[&Tensor],
        y: &Tensor,
        grad: &Tensor,
    ) -> Result<Vec<Option<Tensor>>> {
        let grad_y = CpuSlice::new(grad);
        let pre_activation_grad = self.pre_activation_grad(y, grad_y.as_slice()?)?;
        let affine_grad = match &pre_activation_grad {
            None => grad_y.as_slice()?,
            Some(grad) => grad,
        };
        self.layer.backward(inputs[0], affine_grad)
    }
}
