//! A linear layer, its sum with the residual and the norm of the sum in one step, as between
//! attention and the feed-forward network.

use candle_core::{DType, Tensor};

use crate::{
    affine::{AffineLayer, n_rows},
    autograd::{CpuSlice, MultiBackward, cpu_tensor, record_many},
    composed,
    error::Result,
    kernels::{
        float::Float,
        norm::{self, Norm},
    },
    route::{Route, check_shape, last_dim},
};

const OP: &str = "linear_add_rms_norm";
const NAMES: [&str; 2] = ["weight", "bias"];

/// Returns `residual` + x·weightᵀ and its [`rms_norm`](crate::rms_norm()):
/// [`linear`](crate::linear()) and [`add_rms_norm`](crate::add_rms_norm) in one, as between attention
/// and the feed-forward network of a Llama.
///
/// The product stays out of candle's graph, since no gradient needs it.
///
/// # Shapes
///
/// `x` [.., inputs], `weight` [hidden, inputs], `residual` [.., hidden], `norm_weight` \[hidden\];
/// both results have the shape of `residual`: the sum, then its norm.
///
/// # Determinism
///
/// Like [`linear`](crate::linear()). In `f32` and `f64` the results have the same bits as the two
/// operations. In `f16` and `bf16` the fused kernels round once, and the two operations twice.
///
/// # Errors
///
/// The errors of [`linear`](crate::linear()) and [`add_rms_norm`](crate::add_rms_norm).
///
/// # Examples
///
/// ```
/// use candle_core::{Device, Tensor};
/// use fused_ops::linear_add_rms_norm;
///
/// let x = Tensor::new(&[[2.0_f32]], &Device::Cpu)?;
/// let weight = Tensor::new(&[[1.0_f32], [2.0]], &Device::Cpu)?;
/// let residual = Tensor::new(&[[1.0_f32, -1.0]], &Device::Cpu)?;
/// let norm_weight = Tensor::new(&[1.0_f32, 2.0], &Device::Cpu)?;
/// let (sum, norm) = linear_add_rms_norm(&x, &weight, &residual, &norm_weight, 0.0)?;
/// assert_eq!(sum.to_vec2::<f32>()?, [[3.0, 3.0]]);
/// assert_eq!(norm.to_vec2::<f32>()?, [[1.0, 2.0]]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn linear_add_rms_norm(
    x: &Tensor,
    weight: &Tensor,
    residual: &Tensor,
    norm_weight: &Tensor,
    epsilon: f64,
) -> Result<(Tensor, Tensor)> {
    apply(x, &AffineLayer::new(weight, None), residual, norm_weight, epsilon)
}

/// Applies a layer with or without an adapter, and adds and normalizes.
pub(crate) fn apply(
    x: &Tensor,
    layer: &AffineLayer,
    residual: &Tensor,
    norm_weight: &Tensor,
    epsilon: f64,
) -> Result<(Tensor, Tensor)> {
    let hidden = layer.check(OP, NAMES, x, last_dim(OP, "x", x)?)?;
    let sum_shape = [&x.dims()[..x.rank() - 1], &[hidden]].concat();
    check_shape(OP, "residual", residual, &sum_shape)?;
    check_shape(OP, "norm_weight", norm_weight, &[hidden])?;
    let inputs = [("x", x), ("residual", residual)];
    let inputs: Vec<_> = inputs.into_iter().chain(layer.named(NAMES)).collect();
    let inputs_of_norm = [residual, norm_weight];
    match Route::with_parameters(OP, &inputs, &[("norm_weight", norm_weight)])? {
        Route::F32 => fused::<f32>(x, layer, inputs_of_norm, epsilon),
        Route::F64 => fused::<f64>(x, layer, inputs_of_norm, epsilon),
        Route::Half(half) => {
            let [x, residual, norm_weight] =
                [x, residual, norm_weight].map(|input| input.to_dtype(DType::F32));
            let (sum, norm) =
                fused::<f32>(&x?, &layer.to_f32()?, [&residual?, &norm_weight?], epsilon)?;
            Ok((sum.to_dtype(half)?, norm.to_dtype(half)?))
        }
        Route::Composed => {
            let sum = (layer.composed(x)? + residual)?;
            let norm = composed::norm(Norm::Rms, &sum, norm_weight, None, epsilon)?;
            Ok((sum, norm))
        }
    }
}

fn fused<T: Float>(
    x: &Tensor,
    layer: &AffineLayer,
    [residual, norm_weight]: [&Tensor; 2],
    epsilon: f64,
) -> Result<(Tensor, Tensor)> {
    let x = x.contiguous()?;
    let layer = layer.contiguous()?;
    let (residual, norm_weight) = (residual.contiguous()?, norm_weight.contiguous()?);
    let epsilon = T::round_from_f64(epsilon);
    let product = layer.forward::<T>(CpuSlice::new(&x).as_slice()?, n_rows(&x))?;
    let sum = norm::add(&product, CpuSlice::new(&residual).as_slice()?);
    drop(product);
    let y = norm::forward(Norm::Rms, &sum, CpuSlice::new(&norm_weight).as_slice()?, None, epsilon);
    let shape = residual.shape();
    let inputs: Vec<_> =
        [&x].into_iter().chain(layer.tensors()).chain([&residual, &norm_weight]).collect();
    if !inputs.iter().any(|input| input.track_op()) {
        return Ok((cpu_tensor(sum, shape)?, cpu_tensor(y, shape)?));
    }
    let (x, layer, norm_weight) = (x.clone(), layer.clone(), norm_weight.detach());
    let backward = LinearAddRmsNorm { x, layer, norm_weight, epsilon };
    let [sum, y] = record_many(&inputs, [sum, y], shape, backward)?;
    Ok((sum, y))
}

struct LinearAddRmsNorm<T> {
    x: Tensor,
    layer: AffineLayer,
    norm_weight: Tensor,
    epsilon: T,
}

impl<T: Float> LinearAddRmsNorm<T> {
    /// Returns the gradient of the sum and the gradient of the norm's weight, from the gradients of
    /// the two results.
    fn sum_and_weight_grads(
        &self,
        sum: &Tensor,
        [grad_sum, grad_norm]: [Option<Tensor>; 2],
    ) -> Result<(Tensor, Tensor)> {
        let Some(grad_norm) = grad_norm else {
            let grad_sum = grad_sum.map_or_else(|| sum.zeros_like(), Ok)?;
            return Ok((grad_sum, self.norm_weight.zeros_like()?));
        };
        let grad_sum = grad_sum.as_ref().map(CpuSlice::new);
        let grads = norm::backward(
            Norm::Rms,
            CpuSlice::new(sum).as_slice()?,
            CpuSlice::new(&self.norm_weight).as_slice()?,
            CpuSlice::new(&grad_norm).as_slice()?,
            grad_sum.as_ref().map(CpuSlice::as_slice).transpose()?,
            self.epsilon,
        );
        Ok((cpu_tensor(grads.x, sum.shape())?, cpu_tensor(grads.weight, self.norm_weight.shape())?))
    }
}

impl<T: Float> MultiBackward<2> for LinearAddRmsNorm<T> {
    const NAME: &'static str = "fused-linear-add-rms-norm";

    fn backward(
        &self,
        [sum, _]: &[Tensor; 2],
        grads: [Option<Tensor>; 2],
    ) -> Result<Vec<Option<Tensor>>> {
        let (grad_sum, grad_norm_weight) = self.sum_and_weight_grads(sum, grads)?;
        let mut all = self.layer.backward::<T>(&self.x, CpuSlice::new(&grad_sum).as_slice()?)?;
        all.extend([Some(grad_sum), Some(grad_norm_weight)]);
        Ok(all)
    }
}
