//! A linear layer in one step: product, bias, activation.

use candle_core::{Shape, Tensor};

use crate::{
    autograd::{Backward, CpuSlice, cpu_tensor, record},
    composed,
    config::Activation,
    error::{Error, Result},
    kernels::{
        activation,
        float::Float,
        linear::{add_bias, sum_rows},
        matmul::{MatrixView, ProductThreads, product, product_of_rows},
    },
    route::{check_shape, last_dim, route},
};

const OP: &str = "linear";

/// Returns activation(x·weightᵀ + bias).
///
/// Bias and activation are applied to the product in place. The gradients of weight and bias
/// are written in the layout of the parameters, without a transposition.
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
    let inputs = last_dim(OP, "x", x)?;
    check_layer(OP, ("weight", weight), ("bias", bias), inputs)?;
    let Some(bias) = bias else {
        return route!(
            "linear",
            [x, weight],
            fused(&[x, weight], activation),
            composed::linear(x, weight, None, activation),
        );
    };
    route!(
        "linear",
        [x, weight, bias],
        fused(&[x, weight, bias], activation),
        composed::linear(x, weight, Some(bias), activation),
    )
}

/// Checks the shapes of a layer with this number of inputs, and returns the number of outputs.
pub(crate) fn check_layer(
    op: &'static str,
    (weight_name, weight): (&'static str, &Tensor),
    (bias_name, bias): (&'static str, Option<&Tensor>),
    inputs: usize,
) -> Result<usize> {
    let outputs = check_weight(op, weight_name, weight, inputs)?;
    if let Some(bias) = bias {
        check_shape(op, bias_name, bias, &[outputs])?;
    }
    Ok(outputs)
}

/// Checks the shape of a layer without a bias, and returns the number of outputs.
pub(crate) fn check_weight(
    op: &'static str,
    name: &'static str,
    weight: &Tensor,
    inputs: usize,
) -> Result<usize> {
    let Some(&outputs) = weight.dims().first() else {
        let expected = format!("[outputs, {inputs}]");
        return Err(Error::Shape { op, input: name, found: Vec::new(), expected });
    };
    check_shape(op, name, weight, &[outputs, inputs])?;
    Ok(outputs)
}

/// Applies the layer. `inputs` are x, the weight and, if there is one, the bias.
fn fused<T: Float>(inputs: &[&Tensor], activation: Option<Activation>) -> Result<Tensor> {
    let contiguous: Vec<_> =
        inputs.iter().map(|input| input.contiguous()).collect::<Result<_, _>>()?;
    let inputs: Vec<_> = contiguous.iter().collect();
    let affine = AffineLayer::new(inputs[1], inputs.get(2).copied());
    let pre_activation =
        affine.forward::<T>(CpuSlice::new(inputs[0]).as_slice()?, n_rows(inputs[0]))?;
    let shape = affine.output_shape(inputs[0]);
    let tracked = inputs.iter().any(|input| input.track_op());
    let (y, saved) = activate(pre_activation, activation, tracked);
    record(&inputs, y, shape, Linear { saved })
}

/// Returns the number of rows: the product of all dimensions but the last, since rows may have
/// width 0.
pub(crate) fn n_rows(x: &Tensor) -> usize {
    x.dims()[..x.rank() - 1].iter().product()
}

/// The function x·weightᵀ + bias, with contiguous tensors.
#[derive(Clone, Debug)]
pub(crate) struct AffineLayer {
    /// [outputs, inputs]
    weight: Tensor,
    /// \[outputs\]
    bias: Option<Tensor>,
}

impl AffineLayer {
    pub(crate) fn new(weight: &Tensor, bias: Option<&Tensor>) -> Self {
        Self { weight: weight.clone(), bias: bias.cloned() }
    }

    /// Returns the weight, and the bias if there is one.
    pub(crate) fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        [&self.weight].into_iter().chain(&self.bias)
    }

    /// Returns the shape of the result for `x` [.., inputs].
    pub(crate) fn output_shape(&self, x: &Tensor) -> Shape {
        Shape::from([&x.dims()[..x.rank() - 1], &self.weight.dims()[..1]].concat())
    }

    /// Returns x·weightᵀ + bias for the rows of `x`.
    pub(crate) fn forward<T: Float>(&self, x: &[T], rows: usize) -> Result<Vec<T>> {
        let (outputs, inputs) = self.weight.dims2()?;
        let weight = CpuSlice::new(&self.weight);
        let weight = MatrixView::contiguous(weight.as_slice()?, outputs, inputs);
        let mut y = product_of_rows(x, inputs, rows, weight.t());
        if let Some(bias) = &self.bias {
            add_bias(&mut y, CpuSlice::new(bias).as_slice()?);
        }
        Ok(y)
    }

    /// Returns the gradients of x, the weight and, if there is one, the bias, for the result's `grad`.
    pub(crate) fn backward<T: Float>(&self, x: &Tensor, grad: &[T]) -> Result<Vec<Option<Tensor>>> {
        let rows = n_rows(x);
        let grad_x = x.track_op().then(|| cpu_tensor(self.backward_x(grad, rows)?, x.shape()));
        let mut all = vec![grad_x.transpose()?];
        all.extend(self.backward_parameters(CpuSlice::new(x).as_slice()?, grad, rows)?);
        Ok(all)
    }

    /// Returns the gradient of x, for the result's `grad`.
    pub(crate) fn backward_x<T: Float>(&self, grad: &[T], rows: usize) -> Result<Vec<T>> {
        let (outputs, inputs) = self.weight.dims2()?;
        let weight = CpuSlice::new(&self.weight);
        let weight = MatrixView::contiguous(weight.as_slice()?, outputs, inputs);
        Ok(product_of_rows(grad, outputs, rows, weight))
    }

    /// Returns the gradients of the weight and, if there is one, the bias. Frozen parameters are
    /// skipped, which saves a product.
    pub(crate) fn backward_parameters<T: Float>(
        &self,
        x: &[T],
        grad: &[T],
        rows: usize,
    ) -> Result<Vec<Option<Tensor>>> {
        let (outputs, inputs) = self.weight.dims2()?;
        let grad_weight = self.weight.track_op().then(|| {
            let grads = MatrixView::contiguous(grad, rows, outputs);
            let x = MatrixView::contiguous(x, rows, inputs);
            cpu_tensor(product(grads.t(), x, ProductThreads::Pool), self.weight.shape())
        });
        let mut all = vec![grad_weight.transpose()?];
        if let Some(bias) = &self.bias {
            let grad_bias =
                bias.track_op().then(|| cpu_tensor(sum_rows(grad, outputs), bias.shape()));
            all.push(grad_bias.transpose()?);
        }
        Ok(all)
    }
}

/// Values stored for the gradient of an activation.
pub(crate) enum SavedActivation<T> {
    /// Nothing, because there is no activation.
    Identity,
    /// Nothing, because the output is enough: for ReLU, it is positive where the input is. An
    /// untracked activation of any kind also stores nothing.
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
        Some(activation) if activation == Activation::Relu || !is_tracked => {
            activation::forward_in_place(activation, &mut input);
            (input, SavedActivation::Relu)
        }
        Some(activation) => {
            let output = activation::forward(activation, &input);
            (output, SavedActivation::Input(activation, input))
        }
    }
}

struct Linear<T> {
    saved: SavedActivation<T>,
}

impl<T: Float> Linear<T> {
    /// Returns the gradient of x·weightᵀ + bias, or `None` without an activation: then it is
    /// `grad`.
    fn pre_activation_grad(&self, y: &Tensor, grad: &[T]) -> Result<Option<Vec<T>>> {
        Ok(match &self.saved {
            SavedActivation::Identity => None,
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
        AffineLayer::new(inputs[1], inputs.get(2).copied()).backward(inputs[0], affine_grad)
    }
}
