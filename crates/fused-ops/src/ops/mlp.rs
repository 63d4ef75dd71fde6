//! A transformer's feed-forward network in one step: linear, activation, linear.

use candle_core::{DType, Tensor};

use crate::{
    affine::{AffineLayer, n_rows},
    autograd::{Backward, CpuSlice, cpu_tensor, record},
    composed,
    config::Activation,
    error::Result,
    kernels::{activation as kernel, float::Float},
    ops::linear::{SavedActivation, activate},
    route::{Route, last_dim},
};

const OP: &str = "mlp";
const UP: [&str; 2] = ["up_weight", "up_bias"];
const DOWN: [&str; 2] = ["down_weight", "down_bias"];

/// Returns down(activation(up(x))): two [`linear`](crate::linear()) layers. The wide middle stays
/// out of candle's graph.
///
/// candle's backward allocates zeros for the first gradient of every tensor and adds to them. Here
/// the middle, the widest tensor of a block, has only one gradient, and the activation's slope is
/// multiplied into it in place.
///
/// # Shapes
///
/// `x` [.., inputs], `up_weight` [width, inputs], `up_bias` \[width\], `down_weight` [outputs,
/// width], `down_bias` \[outputs\]; the result is [.., outputs].
///
/// # Determinism
///
/// Like [`linear`](crate::linear()).
///
/// # Errors
///
/// The errors of [`linear`](crate::linear()).
///
/// # Examples
///
/// ```
/// use candle_core::{Device, Tensor};
/// use fused_ops::{Activation, mlp};
///
/// let x = Tensor::new(&[[1.0_f32, 2.0]], &Device::Cpu)?;
/// let up = Tensor::new(&[[3.0_f32, 4.0], [-5.0, 1.0]], &Device::Cpu)?;
/// let down = Tensor::new(&[[2.0_f32, 7.0]], &Device::Cpu)?;
/// let bias = Tensor::new(&[0.5_f32], &Device::Cpu)?;
/// let y = mlp(&x, &up, None, Activation::Relu, &down, Some(&bias))?;
/// assert_eq!(y.to_vec2::<f32>()?, [[22.5]]); // relu turns 11 and -3 into 11 and 0
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn mlp(
    x: &Tensor,
    up_weight: &Tensor,
    up_bias: Option<&Tensor>,
    activation: Activation,
    down_weight: &Tensor,
    down_bias: Option<&Tensor>,
) -> Result<Tensor> {
    let up = AffineLayer::new(up_weight, up_bias);
    apply(x, &up, activation, &AffineLayer::new(down_weight, down_bias))
}

/// Applies two layers with or without adapters.
pub(crate) fn apply(
    x: &Tensor,
    up: &AffineLayer,
    activation: Activation,
    down: &AffineLayer,
) -> Result<Tensor> {
    let width = up.check(OP, UP, x, last_dim(OP, "x", x)?)?;
    down.check(OP, DOWN, x, width)?;
    let named = [("x", x)].into_iter().chain(up.named(UP)).chain(down.named(DOWN));
    match Route::new(OP, &named.collect::<Vec<_>>())? {
        Route::F32 => fused::<f32>(x, up, activation, down),
        Route::F64 => fused::<f64>(x, up, activation, down),
        Route::Half(half) => {
            let x = x.to_dtype(DType::F32)?;
            Ok(fused::<f32>(&x, &up.to_f32()?, activation, &down.to_f32()?)?.to_dtype(half)?)
        }
        Route::Composed => Ok(down.composed(&composed::activation(&up.composed(x)?, activation)?)?),
    }
}

fn fused<T: Float>(
    x: &Tensor,
    up: &AffineLayer,
    activation: Activation,
    down: &AffineLayer,
) -> Result<Tensor> {
    let x = x.contiguous()?;
    let up = up.contiguous()?;
    let down = down.contiguous()?;
    let inputs: Vec<&Tensor> = [&x].into_iter().chain(up.tensors()).chain(down.tensors()).collect();
    let tracked = inputs.iter().any(|input| input.track_op());

    let rows = n_rows(&x);
    let pre_activation = up.forward::<T>(CpuSlice::new(&x).as_slice()?, rows)?;
    let (middle, saved) = activate(pre_activation, Some(activation), tracked);
    let y = down.forward(&middle, rows)?;
    let shape = down.output_shape(&x);
    if !tracked {
        return cpu_tensor(y, &shape);
    }
    let backward = Mlp { up: up.clone(), middle, saved, down: down.clone() };
    record(&inputs, y, shape, backward)
}

struct Mlp<T> {
    up: AffineLayer,
    /// The output of the activation.
    middle: Vec<T>,
    saved: SavedActivation<T>,
    down: AffineLayer,
}

impl<T: Float> Mlp<T> {
    /// Converts the gradient of the activation's output to the gradient of its input.
    fn multiply_by_slope(&self, grad: &mut [T]) {
        match &self.saved {
            SavedActivation::Identity => {}
            SavedActivation::Untracked => unreachable!("only tracked operations are recorded"),
            SavedActivation::Relu => {
                kernel::backward_in_place(Activation::Relu, &self.middle, grad);
            }
            SavedActivation::Input(activation, input) => {
                kernel::backward_in_place(*activation, input, grad);
            }
        }
    }
}

impl<T: Float> Backward for Mlp<T> {
    const NAME: &'static str = "fused-mlp";

    fn backward(
        &self,
        inputs: &[&Tensor],
        _: &Tensor,
        grad: &Tensor,
    ) -> Result<Vec<Option<Tensor>>> {
        let x = inputs[0];
        let rows = n_rows(x);
        let grad_slice = CpuSlice::new(grad);
        let grad_y = self.down.output_grad(grad_slice.as_slice()?, rows)?;
        let mut grad_middle = self.down.backward_x(&grad_y)?;
        self.multiply_by_slope(&mut grad_middle);
        let grad_middle = self.up.output_grad(&grad_middle, rows)?;
        let grad_x = x.track_op().then(|| cpu_tensor(self.up.backward_x(&grad_middle)?, x.shape()));
        let x = CpuSlice::new(x);
        // In the order of the inputs.
        let mut all = vec![grad_x.transpose()?];
        all.extend(self.up.backward_parameters(x.as_slice()?, &grad_middle)?);
        all.extend(self.down.backward_parameters(&self.middle, &grad_y)?);
        Ok(all)
    }
}
