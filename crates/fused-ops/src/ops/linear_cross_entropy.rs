//! The head of a language model and its loss in one step.
//!
//! The logits of one block of rows exist at a time, and their gradients replace them and are multiplied
//! at once, so neither are ever whole in memory (Liger Kernel, arXiv 2410.10989). All blocks share one
//! buffer. Rows of weight 0 are not multiplied.

use std::sync::{Mutex, PoisonError};

use candle_core::{DType, Shape, Tensor};

use crate::{
    affine::AffineLayer,
    autograd::{Backward, CpuSlice, record},
    composed,
    error::Result,
    kernels::{
        cross_entropy::{self, LossRule, RowTarget},
        float::Float,
        matmul::{MatrixLayout, MatrixView, StoreMode, multiply_in_pool},
        parallel::{ELEMENTS_PER_BLOCK, map_chunks},
    },
    ops::cross_entropy::{CrossEntropy, CrossEntropyConfig, WeightedTargets},
    route::{Route, check_shape, last_dim},
    weight::{grad_of, input_grad, write_times_weight},
};

const OP: &str = "linear_cross_entropy";

/// Logits per block: 8 MiB in single precision.
const LOGITS_PER_BLOCK: usize = 1 << 21;

/// The fewest rows per block. Each block reads the weight, and reads and writes its gradient, which
/// takes less time than the products of this many rows.
const FEWEST_ROWS: usize = 128;

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
    let sum = match Route::new(OP, &[("x", x), ("weight", weight)])? {
        Route::F32 => fused::<f32>(x, weight, targets),
        Route::F64 => fused::<f64>(x, weight, targets),
        Route::Half(_) => fused::<f32>(&x.to_dtype(DType::F32)?, weight, targets),
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

/// Computes in type `T`, the type of `x`. The weight may have half precision.
fn fused<T: Float>(x: &Tensor, weight: &Tensor, targets: WeightedTargets) -> Result<Tensor> {
    let inputs = [&x.contiguous()?, &weight.contiguous()?];
    let rule = targets.rule::<T>(weight.dims()[0]);
    let head = LinearCrossEntropy { targets: targets.rows, rule, grads: Mutex::new(None) };
    let (sum, grads) = head.losses_and_grads(inputs)?;
    *head.grads.lock().unwrap_or_else(PoisonError::into_inner) = Some(grads);
    record(&inputs, vec![T::round_from_f64(sum)], Shape::from(()), head)
}

struct LinearCrossEntropy<T> {
    targets: Vec<RowTarget>,
    rule: LossRule<T>,
    /// The gradients of the sum, until the first backward pass takes them.
    grads: Mutex<Option<HeadGrads<T>>>,
}

/// The gradients of the summed losses, if they are wanted.
struct HeadGrads<T> {
    /// [rows, hidden]
    x: Option<Vec<T>>,
    /// [classes, hidden]
    weight: Option<Vec<T>>,
}

impl<T: Float> LinearCrossEntropy<T> {
    /// Returns the sum of the losses, and the gradients of tracked inputs.
    fn losses_and_grads(&self, [x, weight]: [&Tensor; 2]) -> Result<(f64, HeadGrads<T>)> {
        let zeros = |like: &Tensor| like.track_op().then(|| vec![T::ZERO; like.elem_count()]);
        let mut grads = HeadGrads { x: zeros(x), weight: zeros(weight) };
        let (classes, hidden) = weight.dims2()?;
        let x = CpuSlice::new(x);
        let x = x.as_slice()?;
        let counted: Vec<usize> =
            (0..self.targets.len()).filter(|&row| self.targets[row].weight != 0.0).collect();
        let block_rows = self.rows_per_block().min(counted.len());
        let mut logits = vec![T::ZERO; block_rows * classes];
        let mut sum = 0.0;
        for rows in counted.chunks(block_rows.max(1)) {
            let x: Vec<&[T]> = rows.iter().map(|&row| &x[row * hidden..][..hidden]).collect();
            let logits = &mut logits[..rows.len() * classes];
            sum += self.add_block(rows, &x.concat(), weight, logits, &mut grads)?;
        }
        Ok((sum, grads))
    }

    /// Returns the sum of the losses of some rows `x`, and adds their gradients. Overwrites `logits`.
    fn add_block(
        &self,
        rows: &[usize],
        x: &[T],
        weight: &Tensor,
        logits: &mut [T],
        grads: &mut HeadGrads<T>,
    ) -> Result<f64> {
        let (classes, hidden) = weight.dims2()?;
        let targets: Vec<RowTarget> = rows.iter().map(|&row| self.targets[row]).collect();
        write_times_weight(weight, x, rows.len(), logits)?;
        if let Some(map) = self.rule.map {
            map.apply(logits);
        }
        let (sum, log_sums) = cross_entropy::forward(logits, &targets, &self.rule);
        if grads.x.is_none() && grads.weight.is_none() {
            return Ok(sum);
        }
        cross_entropy::backward_in_place(logits, &targets, &log_sums, &self.rule);
        if let Some(all) = &mut grads.x {
            let block = input_grad(weight, logits, rows.len())?;
            for (grad, &row) in block.chunks(hidden.max(1)).zip(rows) {
                all[row * hidden..][..hidden].copy_from_slice(grad);
            }
        }
        if let Some(all) = &mut grads.weight {
            let layout = MatrixLayout::rows(classes, hidden, hidden);
            let grad = MatrixView::contiguous(logits, rows.len(), classes);
            let x = MatrixView::contiguous(x, rows.len(), hidden);
            multiply_in_pool(all, layout, grad.t(), x, StoreMode::Add);
        }
        Ok(sum)
    }

    /// Returns the rows of a block, which depend on the shapes alone.
    fn rows_per_block(&self) -> usize {
        (LOGITS_PER_BLOCK / self.rule.classes.max(1)).max(FEWEST_ROWS)
    }
}

impl<T: Float> HeadGrads<T> {
    /// Multiplies both gradients by `factor`.
    fn scale(&mut self, factor: T) {
        for grads in [&mut self.x, &mut self.weight].into_iter().flatten() {
            map_chunks(grads, ELEMENTS_PER_BLOCK, |_, block| {
                for grad in block {
                    *grad *= factor;
                }
            });
        }
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
            None => self.losses_and_grads([inputs[0], inputs[1]])?.1,
        };
        grads.scale(CpuSlice::new(grad).as_slice::<T>()?[0]);
        [grads.x, grads.weight]
            .into_iter()
            .zip(inputs)
            .map(|(grad, input)| grad.map(|grad| grad_of(input, grad)).transpose())
            .collect()
    }
}
