//! Root-mean-square and layer normalization over the last dimension.
//!
//! [`rms_norm`]: Zhang and Sennrich, "Root Mean Square Layer Normalization", arXiv 1910.07467;
//! [`layer_norm`]: Ba, Kiros and Hinton, "Layer Normalization", arXiv 1607.06450. candle-nn's
//! `ops::rms_norm` and `ops::layer_norm` compute the same, but have no backward.

use candle_core::{DType, Tensor};

use crate::{
    autograd::{Backward, CpuSlice, MultiBackward, cpu_tensor, record, record_many},
    composed,
    error::Result,
    kernels::{
        float::Float,
        norm::{self, Norm},
    },
    route::{Route, check_shape, last_dim, route},
};

/// Divides each row by the root of its mean square, then multiplies it by `weight`.
///
/// `epsilon` is added to the mean square, so that a row of zeros stays a row of zeros. Beside `x` of
/// half precision, `weight` may be `f32`: the product is rounded once, so Gemma's weight 1 + w, computed
/// in `f32`, keeps its digits.
///
/// # Shapes
///
/// `x` [.., hidden], `weight` \[hidden\]; the result has the shape of `x`.
///
/// # Determinism
///
/// The same bits on every processor and for any number of threads. The bits of a row do not depend
/// on the other rows. The gradient of `weight` is summed in blocks of rows whose size depends on
/// `hidden` alone.
///
/// # Errors
///
/// [`Shape`](crate::Error::Shape) if `weight` is not as long as a row,
/// [`DType`](crate::Error::DType) if the two differ in dtype (but for a weight in `f32`) or are not
/// floating-point, and [`Device`](crate::Error::Device) if they are on different devices.
///
/// # Examples
///
/// ```
/// use candle_core::{Device, Tensor, Var};
///
/// let x = Var::new(&[[3.0_f32, 4.0, 0.0, 0.0]], &Device::Cpu)?;
/// let weight = Var::new(&[1.0_f32, 1.0, 1.0, 2.0], &Device::Cpu)?;
/// let y = fused_ops::rms_norm(&x, &weight, 0.0)?;
/// assert_eq!(y.to_vec2::<f32>()?, [[1.2, 1.6, 0.0, 0.0]]); // the root of (9 + 16) / 4 is 2.5
///
/// let grads = y.sum_all()?.backward()?;
/// assert_eq!(grads.get(&weight).unwrap().to_vec1::<f32>()?, [1.2, 1.6, 0.0, 0.0]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn rms_norm(x: &Tensor, weight: &Tensor, epsilon: f64) -> Result<Tensor> {
    check_shape("rms_norm", "weight", weight, &[last_dim("rms_norm", "x", x)?])?;
    route!(
        "rms_norm",
        [x; weight],
        normalize(&[x, weight], Norm::Rms, epsilon),
        composed::norm(Norm::Rms, x, weight, None, epsilon),
    )
}

/// Subtracts each row's mean, divides by its standard deviation, multiplies by `weight` and adds
/// `bias`.
///
/// `epsilon` is added to the variance, which is the mean of the squared differences from the mean,
/// not the unbiased estimate.
///
/// # Shapes
///
/// `x` [.., hidden], `weight` and `bias` \[hidden\]; the result has the shape of `x`.
///
/// # Determinism
///
/// Like [`rms_norm`].
///
/// # Errors
///
/// [`Shape`](crate::Error::Shape) if `weight` or `bias` is not as long as a row,
/// [`DType`](crate::Error::DType) if the inputs differ in dtype or are not floating-point, and
/// [`Device`](crate::Error::Device) if they are on different devices.
///
/// # Examples
///
/// ```
/// use candle_core::{DType, Device, Tensor};
///
/// let x = Tensor::new(&[[1.0_f64, 3.0], [-5.0, 5.0]], &Device::Cpu)?;
/// let (weight, bias) = (x.ones_like()?.get(0)?, Tensor::new(&[10.0_f64, 20.0], &Device::Cpu)?);
/// let y = fused_ops::layer_norm(&x, &weight, Some(&bias), 0.0)?;
/// assert_eq!(y.to_vec2::<f64>()?, [[9.0, 21.0], [9.0, 21.0]]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn layer_norm(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    epsilon: f64,
) -> Result<Tensor> {
    let hidden = [last_dim("layer_norm", "x", x)?];
    check_shape("layer_norm", "weight", weight, &hidden)?;
    let Some(bias) = bias else {
        return route!(
            "layer_norm",
            [x, weight],
            normalize(&[x, weight], Norm::Layer, epsilon),
            composed::norm(Norm::Layer, x, weight, None, epsilon),
        );
    };
    check_shape("layer_norm", "bias", bias, &hidden)?;
    route!(
        "layer_norm",
        [x, weight, bias],
        normalize(&[x, weight, bias], Norm::Layer, epsilon),
        composed::norm(Norm::Layer, x, weight, Some(bias), epsilon),
    )
}

/// Returns `x` + `residual` and the [`rms_norm`] of this sum, as at the start of a transformer's
/// next block.
///
/// The backward pass adds the gradient of the sum and the gradient through its norm in one loop.
///
/// # Shapes
///
/// `x` and `residual` [.., hidden], `weight` \[hidden\]; both results have the shape of `x`: the
/// sum, then its norm.
///
/// # Determinism
///
/// Like [`rms_norm`].
///
/// # Errors
///
/// The errors of [`rms_norm`]; [`Shape`](crate::Error::Shape) also if `residual` has another shape than
/// `x`.
///
/// # Examples
///
/// ```
/// use candle_core::{Device, Tensor};
///
/// let x = Tensor::new(&[[2.0_f32, 4.0]], &Device::Cpu)?;
/// let residual = Tensor::new(&[[1.0_f32, -1.0]], &Device::Cpu)?;
/// let weight = Tensor::new(&[1.0_f32, 2.0], &Device::Cpu)?;
/// let (sum, norm) = fused_ops::add_rms_norm(&x, &residual, &weight, 0.0)?;
/// assert_eq!(sum.to_vec2::<f32>()?, [[3.0, 3.0]]);
/// assert_eq!(norm.to_vec2::<f32>()?, [[1.0, 2.0]]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn add_rms_norm(
    x: &Tensor,
    residual: &Tensor,
    weight: &Tensor,
    epsilon: f64,
) -> Result<(Tensor, Tensor)> {
    check_shape("add_rms_norm", "residual", residual, x.dims())?;
    check_shape("add_rms_norm", "weight", weight, &[last_dim("add_rms_norm", "x", x)?])?;
    let inputs = [("x", x), ("residual", residual)];
    match Route::with_parameters("add_rms_norm", &inputs, &[("weight", weight)])? {
        Route::F32 => add_rms::<f32>(&[x, residual, weight], epsilon),
        Route::F64 => add_rms::<f64>(&[x, residual, weight], epsilon),
        Route::Half(half) => {
            // Both results are rounded once.
            let [x, residual, weight] =
                [x, residual, weight].map(|input| input.to_dtype(DType::F32));
            let (sum, y) = add_rms::<f32>(&[&x?, &residual?, &weight?], epsilon)?;
            Ok((sum.to_dtype(half)?, y.to_dtype(half)?))
        }
        Route::Composed => {
            let sum = (x + residual)?;
            let norm = composed::norm(Norm::Rms, &sum, weight, None, epsilon)?;
            Ok((sum, norm))
        }
    }
}

/// Normalizes x. `inputs` are x, the weight and, if there is one, the bias.
fn normalize<T: Float>(inputs: &[&Tensor], norm: Norm, epsilon: f64) -> Result<Tensor> {
    let contiguous: Vec<_> =
        inputs.iter().map(|input| input.contiguous()).collect::<Result<_, _>>()?;
    let inputs: Vec<_> = contiguous.iter().collect();
    let epsilon = T::round_from_f64(epsilon);
    let y = forward(&inputs, norm, epsilon)?;
    record(&inputs, y, inputs[0].shape().clone(), Normalize { norm, epsilon })
}

/// Returns x + residual and its norm. `inputs` are x, the residual and the weight.
fn add_rms<T: Float>(inputs: &[&Tensor; 3], epsilon: f64) -> Result<(Tensor, Tensor)> {
    let contiguous: Vec<_> =
        inputs.iter().map(|input| input.contiguous()).collect::<Result<_, _>>()?;
    let inputs: Vec<_> = contiguous.iter().collect();
    let shape = inputs[0].shape();
    let epsilon = T::round_from_f64(epsilon);
    let (sum, y) = {
        let slices: Vec<_> = inputs.iter().map(|input| CpuSlice::new(input)).collect();
        let sum = norm::add(slices[0].as_slice()?, slices[1].as_slice()?);
        let y = norm::forward(Norm::Rms, &sum, slices[2].as_slice()?, None, epsilon);
        (sum, y)
    };
    if !inputs.iter().any(|input| input.track_op()) {
        return Ok((cpu_tensor(sum, shape)?, cpu_tensor(y, shape)?));
    }
    let backward = AddRms { epsilon, weight: inputs[2].detach() };
    let [sum, y] = record_many(&inputs, [sum, y], shape, backward)?;
    Ok((sum, y))
}

struct AddRms<T> {
    epsilon: T,
    weight: Tensor,
}

impl<T: Float> MultiBackward<2> for AddRms<T> {
    const NAME: &'static str = "fused-add-norm";

    fn backward(
        &self,
        [sum, _]: &[Tensor; 2],
        [grad_sum, grad_norm]: [Option<Tensor>; 2],
    ) -> Result<Vec<Option<Tensor>>> {
        let Some(grad_norm) = grad_norm else {
            let grad_sum = grad_sum.map_or_else(|| sum.zeros_like(), Ok)?;
            return Ok(vec![
                Some(grad_sum.clone()),
                Some(grad_sum),
                Some(self.weight.zeros_like()?),
            ]);
        };
        let sum_slice = CpuSlice::new(sum);
        let weight = CpuSlice::new(&self.weight);
        let grad = CpuSlice::new(&grad_norm);
        let grad_sum_slice = grad_sum.as_ref().map(CpuSlice::new);
        let grads = norm::backward(
            Norm::Rms,
            sum_slice.as_slice()?,
            weight.as_slice()?,
            grad.as_slice()?,
            grad_sum_slice.as_ref().map(CpuSlice::as_slice).transpose()?,
            self.epsilon,
        );
        // x and the residual share one gradient.
        let grad = cpu_tensor(grads.x, sum.shape())?;
        let weight = cpu_tensor(grads.weight, self.weight.shape())?;
        Ok(vec![Some(grad.clone()), Some(grad), Some(weight)])
    }
}

fn forward<T: Float>(inputs: &[&Tensor], norm: Norm, epsilon: T) -> Result<Vec<T>> {
    let slices: Vec<_> = inputs.iter().map(|input| CpuSlice::new(input)).collect();
    let bias = slices.get(2).map(CpuSlice::as_slice).transpose()?;
    Ok(norm::forward(norm, slices[0].as_slice()?, slices[1].as_slice()?, bias, epsilon))
}

struct Normalize<T> {
    norm: Norm,
    epsilon: T,
}

impl<T: Float> Backward for Normalize<T> {
    const NAME: &'static str = "fused-norm";

    fn backward(
        &self,
        inputs: &[&Tensor],
        _: &Tensor,
        grad: &Tensor,
    ) -> Result<Vec<Option<Tensor>>> {
        let x = CpuSlice::new(inputs[0]);
        let weight = CpuSlice::new(inputs[1]);
        let grad = CpuSlice::new(grad);
        let x = x.as_slice()?;
        let weight = weight.as_slice()?;
        let grad = grad.as_slice()?;
        let grads = norm::backward(self.norm, x, weight, grad, None, self.epsilon);
        let mut all = vec![
            Some(cpu_tensor(grads.x, inputs[0].shape())?),
            Some(cpu_tensor(grads.weight, inputs[1].shape())?),
        ];
        if let Some(bias) = inputs.get(2) {
            all.push(Some(cpu_tensor(grads.bias, bias.shape())?));
        }
        Ok(all)
    }
}
