//! Gradients over a mesh: each replica differentiates the loss of its shard, and each slot gets
//! some of the summed gradients.

use std::{
    collections::BTreeMap,
    fmt,
    sync::{Arc, OnceLock},
};

use candle_core::{DType, Tensor, Var, backprop::GradStore};
use core_types::{WorldSize, balance};
use fused_ops::with_direct_grads;
use pmap_mesh::{ALL, DeviceMesh, Replica, TensorTree, Uneven};

use crate::{
    agreement,
    batch::{self, BatchShapes},
    error::{
        Doing, Result,
        training::{StepErrors, TrainingError},
    },
    loss::{Loss, ShardLoss},
    optim::clip,
    precision::{Precision, is_half, widened_dtype},
};

/// Computes a loss and its gradient for a batch split over the devices of a mesh; built by
/// [`value_and_grad`].
#[must_use = "nothing is computed until it is called"]
pub struct ValueAndGrad<I> {
    mesh: DeviceMesh,
    params: Vec<Var>,
    loss: Arc<BoxedLoss<I>>,
    uneven: Uneven,
}

type BoxedLoss<I> = Box<dyn Fn(&Replica, I) -> candle_core::Result<Loss> + Send + Sync>;

/// Returns a function that computes the loss of a batch and the gradient of `params`.
///
/// `loss` returns a [`Loss`], or a tensor: the mean over the rows of its shard, or over the first
/// [`Replica::valid_len`] of them if the shard may be padded. Every tensor of a batch is split
/// along dimension 0. The result is the loss of the whole batch and its gradient, even if shards
/// are uneven ([`ValueAndGrad::uneven`]).
///
/// The replicas share the variables that `loss` captures. If a variable is on another device than
/// the replica, move it with `to_device(&Device::Cpu)?.to_device(ctx.device())`, which passes
/// gradients on; candle's direct copies between GPUs are not reliable. To train on several devices,
/// with a copy of the model on each and an optimizer, see [`DataParallel`](crate::DataParallel).
///
/// # Determinism
///
/// Sums are formed in rank order. Results are identical to the bit on all meshes of one size; other
/// sizes round differently.
///
/// # Examples
///
/// ```
/// use candle_core::{DType, Device, Tensor, Var};
/// use candle_nn::{Optimizer, SGD};
/// use dist_train::value_and_grad;
/// use pmap_mesh::DeviceMesh;
///
/// let mesh = DeviceMesh::cpu(2)?;
/// let w = Var::zeros((1, 1), DType::F32, &Device::Cpu)?;
/// let model = w.clone();
/// let step = value_and_grad(&mesh, vec![w.clone()], move |_, (x, y): (Tensor, Tensor)| {
///     (x.matmul(&model)? - y)?.sqr()?.mean_all()
/// });
///
/// let x = Tensor::new(&[[1_f32], [2.], [3.], [4.]], &Device::Cpu)?;
/// let y = (&x * 3.)?;
/// let mut optimizer = SGD::new(vec![w.clone()], 0.05)?;
/// for _ in 0..50 {
///     let (_loss, grads) = step.call((x.clone(), y.clone()))?;
///     optimizer.step(&grads)?;
/// }
/// assert!((w.to_vec2::<f32>()?[0][0] - 3.).abs() < 1e-3);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn value_and_grad<I, L, F>(mesh: &DeviceMesh, params: Vec<Var>, loss: F) -> ValueAndGrad<I>
where
    I: TensorTree,
    L: Into<Loss>,
    F: Fn(&Replica, I) -> candle_core::Result<L> + Send + Sync + 'static,
{
    ValueAndGrad {
        mesh: mesh.clone(),
        params,
        loss: Arc::new(Box::new(move |ctx, shard| Ok(loss(ctx, shard)?.into()))),
        uneven: Uneven::default(),
    }
}

impl<I: TensorTree> ValueAndGrad<I> {
    /// Sets the treatment of a batch that does not divide evenly among the devices, like
    /// [`PMap::uneven`](pmap_mesh::PMap::uneven).
    pub fn uneven(self, uneven: Uneven) -> Self {
        Self { uneven, ..self }
    }

    /// Returns the loss of the batch and the gradients of the parameters. A parameter without a
    /// gradient on any replica is missing from the store. Gradients of half-precision parameters
    /// are in single precision, like [`AdamW`](crate::AdamW) and [`Sgd`](crate::Sgd) expect;
    /// candle's own optimizers need gradients of the parameter's dtype and so do not work with half
    /// precision.
    ///
    /// # Errors
    ///
    /// Returns [`Error::Training`](crate::Error::Training) if a loss is not a floating-point
    /// scalar, if a loss or a gradient is not finite, or if no shard has weight, and
    /// [`Error::Mesh`](crate::Error::Mesh) if [`PMap::call`](pmap_mesh::PMap::call) fails.
    #[expect(clippy::expect_used, reason = "a call that succeeded has run every replica")]
    #[track_caller]
    pub fn call(&self, batch: I) -> Result<(f64, GradStore)> {
        let sizes: Vec<u64> = self.params.iter().map(|var| var.elem_count() as u64).collect();
        // Every process gets the sums of all parameters, divided among its own slots.
        let owned = Arc::new(divide(&sizes, self.mesh.devices().len()));
        let outcome: Arc<StepOutcome> = Arc::default();
        let fingerprint = batch::shared_fingerprint(&self.mesh, &batch)?;
        let step = self.mesh.pmap({
            let shapes = BatchShapes::new(&batch);
            let loss = Arc::clone(&self.loss);
            let params = self.params.clone();
            let owned = Arc::clone(&owned);
            let outcome = Arc::clone(&outcome);
            move |ctx, shard: I| {
                let loss = shapes.explain(shard, |shard| loss(ctx, shard))?;
                let (shard_loss, _) = loss.of_batch(fingerprint).into_shard(ctx)?;
                let wanted = &owned[ctx.local_index()];
                let sums = sum_shard_grads(ctx, shard_loss, &params, wanted, &outcome);
                outcome.errors.none_if_agreed(sums)
            }
        });
        let step = step.in_axes(Some(0)).uneven(self.uneven);
        let StepOutcome { errors, mean_loss } = &*outcome;
        let results = step.call_sharded(batch).map(|results| {
            // If all replicas reject the step, none has sums.
            results.shards().iter().all(Option::is_some).then_some(results)
        });
        let results = errors.call_result(results)?;
        let mut sums = BTreeMap::new();
        for (owned, slot_sums) in owned.iter().zip(results.shards()) {
            for (&index, sum) in owned.iter().zip(slot_sums.iter().flatten()) {
                if let Some(sum) = sum {
                    sums.insert(index, sum);
                }
            }
        }
        let mut grads = GradStore::default();
        // In parameter order, so that every process reports the same error.
        for (index, sum) in sums {
            if !clip::squared_norm(sum).doing("reading a gradient")?.is_finite() {
                let shape = sum.dims().to_vec();
                return Err(TrainingError::NonFiniteGradient { index, shape }.into());
            }
            grads.insert(&self.params[index], sum.clone());
        }
        Ok((*mean_loss.get().expect("every replica has set the mean"), grads))
    }
}

impl<I> fmt::Debug for ValueAndGrad<I> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { mesh, params, uneven, .. } = self;
        let mut debug = f.debug_struct("ValueAndGrad");
        debug.field("mesh", mesh).field("params", params).field("uneven", uneven);
        debug.finish_non_exhaustive()
    }
}

/// What the replicas of a step have in common.
#[derive(Default)]
struct StepOutcome {
    errors: StepErrors,
    /// The mean loss of the batch.
    mean_loss: OnceLock<f64>,
}

/// Agrees on the loss of the batch, differentiates the loss of a shard, and sums the gradients of the
/// `wanted` parameters over all replicas.
fn sum_shard_grads(
    ctx: &Replica,
    mut shard_loss: ShardLoss,
    params: &[Var],
    wanted: &[usize],
    outcome: &StepOutcome,
) -> candle_core::Result<Vec<Option<Tensor>>> {
    let StepOutcome { errors, mean_loss } = outcome;
    let batch_loss = shard_loss.agree(ctx, false, errors)?.require_weight(errors)?;
    mean_loss.get_or_init(|| batch_loss.mean());
    let grads = differentiate(shard_loss, params, batch_loss.weight(), has_halves(params))?;
    let has_grad_here: Vec<bool> = grads.iter().map(Option::is_some).collect();
    let has_grad_anywhere = agreement::any(ctx, &has_grad_here)?;
    sum_grads(ctx, params, grads, &has_grad_anywhere, wanted, Precision::default())
}

/// Differentiates a shard's sum divided by `scale`. Returns the gradient of each variable, or
/// `None` if the loss does not depend on the variable. Half-precision gradients stay in single
/// precision. `halves` states whether any variable of the model, even a frozen variable, has half
/// precision.
///
/// The graph of the forward pass is freed before the gradients are reduced.
pub(crate) fn differentiate(
    shard: ShardLoss,
    vars: &[Var],
    scale: f64,
    halves: bool,
) -> candle_core::Result<Vec<Option<Tensor>>> {
    let halves = halves || is_half(shard.dtype());
    let is_empty = shard.is_empty();
    let (sum, remaining_factor) = shard.into_scaled_sum(scale, halves)?;
    let variables = vars.iter().map(Var::as_tensor);
    let mut store = with_direct_grads(variables, || sum.backward())?;
    drop(sum);
    let mut gradients = Vec::with_capacity(vars.len());
    for var in vars {
        gradients.push(match store.remove(var) {
            Some(gradient) => {
                Some(correct_gradient(widen(&gradient)?, is_empty, remaining_factor)?)
            }
            None => None,
        });
    }
    Ok(gradients)
}

/// Multiplies a gradient of a shard's backward pass by `remaining_factor`, which the differentiated
/// sum does not include. Replaces non-finite gradients of a shard without weight.
pub(crate) fn correct_gradient(
    gradient: Tensor,
    is_empty: bool,
    remaining_factor: f64,
) -> candle_core::Result<Tensor> {
    let gradient = if is_empty { finite_or_zeros(gradient)? } else { gradient };
    scale_gradient(gradient, remaining_factor)
}

/// Multiplies a gradient by a factor, without a pass over it if the factor is 1, as in most steps.
#[expect(clippy::float_cmp, reason = "1 is exact, and the product by it the gradient itself")]
pub(crate) fn scale_gradient(gradient: Tensor, factor: f64) -> candle_core::Result<Tensor> {
    if factor == 1.0 { Ok(gradient) } else { gradient * factor }
}

/// Returns the gradient of a shard without weight, or zeros if any item is not finite.
///
/// A shard without weight gets gradients only through collectives, from other replicas. If its own
/// loss is a mean over zero rows, its gradients are NaN instead, and count as zeros.
fn finite_or_zeros(gradient: Tensor) -> candle_core::Result<Tensor> {
    let sum: f64 = gradient.sum_all()?.to_dtype(DType::F64)?.to_scalar()?;
    if sum.is_finite() { Ok(gradient) } else { gradient.zeros_like() }
}

/// Converts a gradient to its accumulation dtype.
pub(crate) fn widen(gradient: &Tensor) -> candle_core::Result<Tensor> {
    gradient.to_dtype(widened_dtype(gradient.dtype()))
}

pub(crate) fn has_halves(vars: &[Var]) -> bool {
    vars.iter().any(|var| is_half(var.dtype()))
}

/// Sums the gradients of the `wanted` variables over all replicas. A sum is `None` if no replica
/// has the gradient; otherwise a replica without the gradient contributes zeros.
/// `has_grad_anywhere` states for each variable whether any replica has a gradient; all replicas
/// have agreed on it.
pub(crate) fn sum_grads(
    ctx: &Replica,
    vars: &[Var],
    grads: Vec<Option<Tensor>>,
    has_grad_anywhere: &[bool],
    wanted: &[usize],
    precision: Precision,
) -> candle_core::Result<Vec<Option<Tensor>>> {
    let convert = |(var, grad): (&Var, Option<Tensor>)| {
        grad.map(|grad| grad.to_dtype(precision.reduce_dtype(var.dtype()))).transpose()
    };
    let mut grads: Vec<Option<Tensor>> =
        vars.iter().zip(grads).map(convert).collect::<candle_core::Result<_>>()?;
    if ctx.count() == 1 {
        // A sum copies even a single summand, which would need the memory of the gradients twice.
        return Ok(wanted.iter().map(|&var| grads[var].take()).collect());
    }
    let mut summands = Vec::new();
    // The position of each variable's gradient in `summands`.
    let mut positions = vec![None; vars.len()];
    for (n, (var, gradient)) in vars.iter().zip(grads).enumerate() {
        if has_grad_anywhere[n] {
            positions[n] = Some(summands.len());
            summands.push(match gradient {
                Some(gradient) => gradient,
                None => {
                    Tensor::zeros(var.shape(), precision.reduce_dtype(var.dtype()), var.device())?
                }
            });
        }
    }
    let sums = ctx.psum_list("gradients", &summands, ALL)?;
    Ok(wanted.iter().map(|&var| positions[var].map(|n| sums[n].clone())).collect())
}

/// Divides items of the given `sizes` among `n_owners` slots so that their loads are nearly even,
/// and returns the indices of each slot's items.
pub(crate) fn divide(sizes: &[u64], n_owners: usize) -> Vec<Vec<usize>> {
    #[expect(clippy::expect_used, reason = "owners are slots of one mesh: 1 to 1024 of them")]
    let owners = WorldSize::new(n_owners as u64).expect("a mesh has 1 to 1024 slots");
    let mut owned = vec![Vec::new(); n_owners];
    for (var, owner) in balance::longest_first(sizes, owners).into_iter().enumerate() {
        owned[owner].push(var);
    }
    owned
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn items_have_one_owner_and_even_loads() {
        assert_eq!(divide(&[5, 1, 9, 3, 3, 1], 2), [vec![1, 2, 5], vec![0, 3, 4]]);
        assert_eq!(divide(&[1], 3), [vec![0], vec![], vec![]]);
        assert_eq!(divide(&[], 2), [vec![], vec![]] as [Vec<usize>; 2]);
    }
}
