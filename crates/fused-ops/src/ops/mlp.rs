//! A transformer's feed-forward network in one step: linear, activation, linear.

use candle_core::Tensor;

use crate::{
    autograd::{CpuSlice, MultiBackward, cpu_tensor, record_many},
    composed,
    config::Activation,
    error::Result,
    kernels::{activation as kernel, float::Float},
    ops::linear::{AffineLayer, SavedActivation, activate, check_layer, n_rows},
    route::{Route, last_dim},
};

const OP: &str = "mlp";

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
    let inputs = last_dim(OP, "x", x)?;
    let width = check_layer(OP, ("up_weight", up_weight), ("up_bias", up_bias), inputs)?;
    check_layer(OP, ("down_weight", down_weight), ("down_bias", down_bias), width)?;

    let mut named_inputs = vec![("x", x), ("up_weight", up_weight), ("down_weight", down_weight)];
    named_inputs.extend(up_bias.map(|bias| ("up_bias", bias)));
    named_inputs.extend(down_bias.map(|bias| ("down_bias", bias)));
    let layers =
        MlpLayers { x, up: (up_weight, up_bias), activation, down: (down_weight, down_bias) };
    match Route::new(OP, &named_inputs)? {
        Route::F32 => layers.fused::<f32>(),
        Route::F64 => layers.fused::<f64>(),
        Route::Half(half) => layers.fused_in_f32(half),
        Route::Composed => {
            let middle = composed::linear(x, up_weight, up_bias, Some(activation))?;
            Ok(composed::linear(&middle, down_weight, down_bias, None)?)
        }
    }
}

/// The inputs, with checked shapes. Each layer has a weight and may have a bias.
#[derive(Clone, Copy)]
struct MlpLayers<'a> {
    x: &'a Tensor,
    up: (&'a Tensor, Option<&'a Tensor>),
    activation: Activation,
    down: (&'a Tensor, Option<&'a Tensor>),
}

impl MlpLayers<'_> {
    fn fused<T: Float>(self) -> Result<Tensor> {
        let x = self.x.contiguous()?;
        let up = contiguous_layer(self.up)?;
        let down = contiguous_layer(self.down)?;
        let inputs: Vec<&Tensor> =
            [&x].into_iter().chain(up.tensors()).chain(down.tensors()).collect();
        let tracked = inputs.iter().any(|input| input.track_op());

        let rows = n_rows(&x);
        let pre_activation = up.forward::<T>(CpuSlice::new(&x).as_slice()?, rows)?;
        let (middle, saved) = activate(pre_activation, Some(self.activation), tracked);
        let y = down.forward(&middle, rows)?;
        let shape = down.output_shape(&x);
        if !tracked {
            return cpu_tensor(y, &shape);
        }
        let is_x_tracked = x.track_op();
        let backward =
            Mlp { x: x.detach(), is_x_tracked, up: up.clone(), middle, saved, down: down.clone() };
        let [y] = record_many(&inputs, [y], &shape, backward)?;
        Ok(y)
    }

    /// Computes like [`fused`](Self::fused), and rounds the result to `half` once.
    fn fused_in_f32(self, half: candle_core::DType) -> Result<Tensor> {
        let to_f32 = |tensor: &Tensor| tensor.to_dtype(candle_core::DType::F32);
        let layer_to_f32 = |(weight, bias): (&Tensor, Option<&Tensor>)| {
            candle_core::Result::Ok((to_f32(weight)?, bias.map(to_f32).transpose()?))
        };
        let x = to_f32(self.x)?;
        let (up_weight, up_bias) = layer_to_f32(self.up)?;
        let (down_weight, down_bias) = layer_to_f32(self.down)?;
        let layers = MlpLayers {
            x: &x,
            up: (&up_weight, up_bias.as_ref()),
            activation: self.activation,
            down: (&down_weight, down_bias.as_ref()),
        };
        Ok(layers.fused::<f32>()?.to_dtype(half)?)
    }
}

fn contiguous_layer((weight, bias): (&Tensor, Option<&Tensor>)) -> Result<AffineLayer> {
    let bias = bias.map(Tensor::contiguous).transpose()?;
    Ok(AffineLayer::new(&weight.contiguous()?, bias.as_ref()))
}

struct Mlp<T> {
    x: Tensor,
    is_x_tracked: bool,
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
            SavedActivation::Relu => {
                kernel::backward_in_place(Activation::Relu, &self.middle, grad);
            }
            SavedActivation::Input(activation, input) => {
                kernel::backward_in_place(*activation, input, grad);
            }
        }
    }
}

impl<T: Float> MultiBackward<1> for Mlp<T> {
    const NAME: &'static str = "fused-mlp";

    fn backward(
        &self,
        [y]: &[Tensor; 1],
        [grad]: [Option<Tensor>; 1],
    ) -> Result<Vec<Option<Tensor>>> {
        let grad = grad.map_or_else(|| y.zeros_like(), Ok)?;
        let rows = n_rows(&self.x);
        let grad_y = CpuSlice::new(&grad);
        let mut grad_middle = self.down.backward_x(grad_y.as_slice()?, rows)?;
        self.multiply_by_slope(&mut grad_middle);
        let grad_x = self
            .is_x_tracked
            .then(|| cpu_tensor(self.up.backward_x(&grad_middle, rows)?, self.x.shape()));
        let x = CpuSlice::new(&self.x);
        // In the order of the inputs.
        let mut all = vec![grad_x.transpose()?];
        all.extend(self.up.backward_parameters(x.as_slice()?, &grad_middle, rows)?);
        all.extend(self.down.backward_parameters(&self.middle, grad_y.as_slice()?, rows)?);
        Ok(all)
    }
}
