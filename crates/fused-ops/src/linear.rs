//! A linear layer in one step: product, bias, activation.

use candle_core::{Shape, Tensor};

use crate::{
    autograd::{Backward, Reading, record, tensor},
    composed,
    config::Activation,
    error::{Error, Result},
    kernels::{
        activation,
        float::Float,
        linear::{add_bias, sum_rows},
        matmul::{Matrix, Threads, product, product_of_rows},
    },
    route::{check_shape, last_dim, route},
};

const OP: &str = "linear";

/// activation(x·weightᵀ + bias).
///
/// Bias and activation are applied to the product where it lies. The gradients of weight and bias
/// are written in the layout of the parameters, without a transposition.
///
/// # Shapes
///
/// `x` [.., inputs], `weight` [outputs, inputs], `bias` \[outputs\]; the result is [.., outputs].
///
/// # Determinism
///
/// The same bits for any number of threads, on one processor model, since matrix products differ
/// between them. A row has the same bits alone as among others.
///
/// # Errors
///
/// [`Shape`](crate::Error::Shape) if the inputs do not fit each other,
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
    let Some(&outputs) = weight.dims().first() else {
        let expected = format!("[outputs, {inputs}]");
        return Err(Error::Shape { op: OP, input: "weight", found: Vec::new(), expected });
    };
    check_shape(OP, "weight", weight, &[outputs, inputs])?;
    let Some(bias) = bias else {
        return route!(
            "linear",
            [x, weight],
            fused(&[x, weight], activation),
            composed::linear(x, weight, None, activation),
        );
    };
    check_shape(OP, "bias", bias, &[outputs])?;
    route!(
        "linear",
        [x, weight, bias],
        fused(&[x, weight, bias], activation),
        composed::linear(x, weight, Some(bias), activation),
    )
}

/// `inputs` are x, the weight and, if there is one, the bias.
fn fused<T: Float>(inputs: &[&Tensor], activation: Option<Activation>) -> Result<Tensor> {
    let inputs: Vec<_> = inputs.iter().map(|input| input.contiguous()).collect::<Result<_, _>>()?;
    let inputs: Vec<_> = inputs.iter().collect();
    let before = affine::<T>(&inputs)?;
    let dims = [&inputs[0].dims()[..inputs[0].rank() - 1], &inputs[1].dims()[..1]].concat();
    let tracked = inputs.iter().any(|input| input.track_op());
    let (y, slope) = activate(before, activation, tracked);
    record(&inputs, y, Shape::from(dims), Linear { slope })
}

/// x·weightᵀ + bias.
fn affine<T: Float>(inputs: &[&Tensor]) -> Result<Vec<T>> {
    let read: Vec<_> = inputs.iter().map(|input| Reading::new(input)).collect();
    let (outputs, width) = inputs[1].dims2()?;
    let rows = rows(inputs[0], width);
    let weight = Matrix::contiguous(read[1].all()?, outputs, width);
    let mut y = product_of_rows(read[0].all()?, width, rows, weight.t());
    if let Some(bias) = read.get(2) {
        add_bias(&mut y, bias.all()?);
    }
    Ok(y)
}

/// How many rows of `width` a tensor has; those of width 0 are counted by the other dimensions.
fn rows(x: &Tensor, width: usize) -> usize {
    debug_assert_eq!(x.dims().last(), Some(&width), "the last dimension has been checked");
    x.dims()[..x.rank() - 1].iter().product()
}

/// What the gradient of the activation is computed from.
enum Slope<T> {
    /// There is no activation.
    One,
    /// The result: that of ReLU is positive where its input is.
    Relu,
    /// What the activation was applied to.
    At(Activation, Vec<T>),
}

/// The activation, and what its gradient will need.
fn activate<T: Float>(
    mut before: Vec<T>,
    activation: Option<Activation>,
    tracked: bool,
) -> (Vec<T>, Slope<T>) {
    match activation {
        None => (before, Slope::One),
        Some(activation) if activation == Activation::Relu || !tracked => {
            activation::forward_in_place(activation, &mut before);
            (before, Slope::Relu)
        }
        Some(activation) => {
            (activation::forward(activation, &before), Slope::At(activation, before))
        }
    }
}

struct Linear<T> {
    slope: Slope<T>,
}

impl<T: Float> Linear<T> {
    /// The gradient of x·weightᵀ + bias, if it is not that of the result.
    fn before_activation(&self, y: &Tensor, grad: &[T]) -> Result<Option<Vec<T>>> {
        Ok(match &self.slope {
            Slope::One => None,
            Slope::Relu => {
                let y = Reading::new(y);
                Some(activation::backward(Activation::Relu, y.all()?, grad))
            }
            Slope::At(activation, before) => Some(activation::backward(*activation, before, grad)),
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
        let (outputs, width) = inputs[1].dims2()?;
        let rows = rows(inputs[0], width);
        let grad_read = Reading::new(grad);
        let before = self.before_activation(y, grad_read.all()?)?;
        let grad = match &before {
            None => grad_read.all()?,
            Some(before) => before,
        };
        let grads = Matrix::contiguous(grad, rows, outputs);
        let (x, weight) = (Reading::new(inputs[0]), Reading::new(inputs[1]));
        let x = Matrix::contiguous(x.all()?, rows, width);
        let weight = Matrix::contiguous(weight.all()?, outputs, width);

        let gradient = |of: usize, compute: &dyn Fn() -> Vec<T>| {
            // Data and frozen weights get none: a product less.
            let wanted = inputs[of].track_op();
            wanted.then(|| tensor(compute(), inputs[of].shape())).transpose()
        };
        let mut all = vec![
            gradient(0, &|| product_of_rows(grad, outputs, rows, weight))?,
            gradient(1, &|| product(grads.t(), x, Threads::Pool))?,
        ];
        if inputs.len() == 3 {
            all.push(gradient(2, &|| sum_rows(grad, outputs))?);
        }
        Ok(all)
    }
}
