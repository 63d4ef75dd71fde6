//! The head of a language model and its loss in one step.

use std::sync::{Mutex, PoisonError};

use candle_core::{DType, Shape, Tensor};

use crate::{
    affine::AffineLayer,
    autograd::{Backward, CpuSlice, cpu_tensor, record},
    composed,
    error::Result,
    kernels::{
        float::Float,
        linear_cross_entropy::{HeadGrads, HeadRows},
    },
    ops::cross_entropy::{CrossEntropy, CrossEntropyConfig, WeightedTargets},
    route::{Route, check_shape, last_dim},
};

const OP: &str = "linear_cross_entropy";

/// Returns the cross-entropy of softmax(x·weightᵀ) and `targets`, in nats:
/// [`linear`](crate::linear()) and [`cross_entropy`](crate::cross_entropy()) in one, as at the end of
/// a language model.
///
/// Neither the logits nor their gradients are ever whole in memory: they are computed for a block of
/// rows at a time. The forward pass of tracked inputs also computes their gradients, as in Liger
/// Kernel (arXiv 2410.10989), which saves a product. Ignored rows are not multiplied.
///
/// # Shapes
///
/// `x` [.., hidden], `weight` [classes, hidden], `targets` [..] of type u8, u32 or i64; the sum is a
/// scalar, of type f32 for `x` of f16 and bf16. The logits are not rounded on the CPU; on other devices
/// they have the type of `x`, and are whole in memory.
///
/// # Determinism
///
/// Like [`linear`](crate::linear()). The blocks depend on the shapes alone. The logits of a row have
/// the bits of [`linear`](crate::linear()); the gradients differ from those of the two operations in
/// rounding, because the gradient of the sum is applied last.
///
/// # Errors
///
/// The errors of [`linear`](crate::linear()) and [`cross_entropy`](crate::cross_entropy()).
///
/// # Examples
///
/// ```
/// use candle_core::{Device, Tensor, Var};
/// use fused_ops::{CrossEntropyConfig, linear_cross_entropy};
///
/// let x = Tensor::new(&[[1.0_f64, 0.0], [0.5, 2.0]], &Device::Cpu)?;
/// let weight = Var::new(&[[0.0_f64, 0.0], [0.0, 0.0], [0.0, 0.0]], &Device::Cpu)?;
/// let targets = Tensor::new(&[2_u32, 0], &Device::Cpu)?;
/// let loss = linear_cross_entropy(&x, &weight, &targets, &CrossEntropyConfig::default())?;
/// assert!((loss.mean()?.to_scalar::<f64>()? - 3.0_f64.ln()).abs() < 1e-15);
/// let grads = loss.sum.backward()?;
/// assert_eq!(grads.get(&weight).map(Tensor::dims), Some(&[3, 2][..]));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn linear_cross_entropy(
    x: &Tensor,
    weight: &Tensor,
    targets: &Tensor,
    config: &CrossEntropyConfig,
) -> Result<CrossEntropy> {
    let layer = AffineLayer::new(weight, None);
    let classes = layer.check(OP, ["weight", "bias"], x, last_dim(OP, "x", x)?)?;
    check_shape(OP, "targets", targets, &x.dims()[..x.rank() - 1])?;
    let targets = WeightedTargets::read(OP, targets, config, classes)?;
    let total_weight = targets.total_weight();
    let single = |tensor: &Tensor| tensor.to_dtype(DType::F32);
    let sum = match Route::new(OP, &[("x", x), ("weight", weight)])? {
        Route::F32 => fused::<f32>(x, weight, targets),
        Route::F64 => fused::<f64>(x, weight, targets),
        Route::Half(_) => fused::<f32>(&single(x)?, &single(weight)?, targets),
        Route::Composed => composed_loss(x, weight, &targets),
    }?;
    Ok(CrossEntropy { sum, weight: total_weight })
}

fn composed_loss(x: &Tensor, weight: &Tensor, targets: &WeightedTargets) -> Result<Tensor> {
    let mut logits = composed::linear(x, weight, None, None)?;
    if logits.dtype() != DType::F64 {
        logits = logits.to_dtype(DType::F32)?;
    }
    targets.composed_loss(&logits)
}

fn fused<T: Float>(x: &Tensor, weight: &Tensor, targets: WeightedTargets) -> Result<Tensor> {
    let inputs = [&x.contiguous()?, &weight.contiguous()?];
    let (classes, hidden) = weight.dims2()?;
    let rule = targets.rule::<T>(classes);
    let head = LinearCrossEntropy {
        rows: HeadRows { hidden, targets: targets.rows, rule },
        grads: Mutex::new(None),
    };
    let (sum, grads) = head.losses_and_grads(&inputs)?;
    *head.grads.lock().unwrap_or_else(PoisonError::into_inner) = Some(grads);
    record(&inputs, vec![T::round_from_f64(sum)], Shape::from(()), head)
}

struct LinearCrossEntropy<T> {
    rows: HeadRows<T>,
    /// The gradients of the sum, until the first backward pass takes them.
    grads: Mutex<Option<HeadGrads<T>>>,
}

impl<T: Float> LinearCrossEntropy<T> {
    /// Returns the sum of the losses, and the gradients of tracked inputs.
    fn losses_and_grads(&self, inputs: &[&Tensor]) -> Result<(f64, HeadGrads<T>)> {
        let [x, weight] = [inputs[0], inputs[1]].map(CpuSlice::new);
        let is_wanted = [inputs[0].track_op(), inputs[1].track_op()];
        Ok(self.rows.losses_and_grads(x.as_slice()?, weight.as_slice()?, is_wanted))
    }
}

impl<T: Float> Backward for LinearCrossEntropy<T> {
    const NAME: &'static str = "fused-linear-cross-entropy";

    fn backward(
        &self,
        inputs: &[&Tensor],
        _: &Tensor,
        grad: &Tensor,
    ) -> Result<Vec<Option<Tensor>>> {
        let saved = self.grads.lock().unwrap_or_else(PoisonError::into_inner).take();
        let mut grads = match saved {
            Some(grads) => grads,
            // The graph is differentiated a second time.
            None => self.losses_and_grads(inputs)?.1,
        };
        grads.scale(CpuSlice::new(grad).as_slice::<T>()?[0]);
        [grads.x, grads.weight]
            .into_iter()
            .zip(inputs)
            .map(|(grad, input)| grad.map(|grad| cpu_tensor(grad, input.shape())).transpose())
            .collect()
    }
}
