//! Training of one slot of a replicated model on its shards of batches.

use std::mem;

use candle_core::{DType, Result, Tensor, Var};
use candle_nn::Optimizer;
use pmap_mesh::{ALL, Replica};

use crate::{
    agreement,
    error::training::TrainingError,
    grad::{differentiate, sum_grads, widen},
    loss::Loss,
    model::{pass::BatchOutcome, slot::Slot},
    optim::clip,
    precision::Precision,
    step::{
        batch::{Batch, add_grads, agree_without_totals},
        rules::{Goal, Report, Rules},
    },
};

/// The model of a slot, with the state that it keeps until the next update.
#[derive(Debug)]
pub(super) struct Worker<M> {
    pub(super) model: M,
    /// The model on the same variables, for evaluation: it records no operations.
    pub(super) eval_model: M,
    /// The trained variables as the model computes with them: the rounded copies, if there are any.
    pub(super) trained: Vec<Var>,
    /// The variables that this slot updates, each by its indices in `trained` and in the slot.
    pub(super) owned: Vec<(usize, usize)>,
    /// The storage dtype of the reduced gradient of each trained variable.
    pub(super) sum_dtypes: Vec<DType>,
    pub(super) precision: Precision,
    /// Whether any variable has half precision.
    pub(super) has_halves: bool,
    /// Accumulated gradients since the last update, one per trained variable; empty if no batch was
    /// accumulated.
    pub(super) grads: Vec<Option<Tensor>>,
    /// Copies of the buffers from before the current batch, with the buffers' indices in the slot.
    pub(super) buffers_before: Vec<(usize, Tensor)>,
}

impl<M> Worker<M> {
    /// Copies the buffers at these indices, which the forward pass may change.
    pub(super) fn copy_buffers<O>(&mut self, slot: &Slot<O>, buffers: &[usize]) -> Result<()> {
        self.buffers_before = buffers
            .iter()
            .map(|&var| Ok((var, slot.vars[var].var.as_detached_tensor().copy()?)))
            .collect::<Result<_>>()?;
        Ok(())
    }

    /// Restores the buffers from their copies.
    pub(super) fn restore_buffers<O>(&mut self, slot: &Slot<O>) -> Result<()> {
        self.buffers_before.drain(..).try_for_each(|(var, before)| slot.vars[var].var.set(&before))
    }

    /// Differentiates the loss of this slot's shard of a batch, and stores the gradients or updates
    /// the slot with them. Returns the outcome of the batch or update, which all replicas agree on.
    pub(super) fn train<O: Optimizer>(
        &mut self,
        ctx: &Replica,
        rules: &Rules,
        slot: &mut Slot<O>,
        loss: Loss<Vec<Tensor>>,
    ) -> Result<BatchOutcome> {
        let accumulated = mem::take(&mut self.grads);
        let (shard, batch) = Batch::agree(ctx, rules, loss, slot.begin())?;
        let batch_grads = differentiate(shard, &self.trained, batch.scale, self.has_halves)?;
        average_buffers(ctx, rules, slot)?;
        let grads = add_grads(accumulated, batch_grads)?;
        if rules.goal == Goal::Accumulate {
            let (totals, report, aux) = batch.into_accumulated();
            slot.totals = Some(totals);
            self.grads = grads;
            return Ok((report, aux));
        }
        let grad_norm = self.update(ctx, rules, slot, grads, batch.factor())?;
        Ok(batch.into_update(grad_norm))
    }

    /// Sums the gradients over all slots, and updates the variables that this slot owns with
    /// gradients of `factor` times the sums. Returns the gradient norm before clipping.
    fn update<O: Optimizer>(
        &self,
        ctx: &Replica,
        rules: &Rules,
        slot: &mut Slot<O>,
        grads: Vec<Option<Tensor>>,
        factor: f64,
    ) -> Result<f64> {
        let has_grad_here: Vec<bool> = grads.iter().map(Option::is_some).collect();
        let has_grad_anywhere = agreement::any(ctx, &has_grad_here)?;
        rules.check_used(&has_grad_anywhere)?;
        let wanted: Vec<usize> = self.owned.iter().map(|&(trained, _)| trained).collect();
        let wanted_sums = self.sum_grads(ctx, grads, &has_grad_anywhere, &wanted)?;
        let mut sums = Vec::with_capacity(wanted.len());
        for (&(_, var), sum) in self.owned.iter().zip(wanted_sums) {
            if let Some(sum) = sum {
                sums.push((var, sum));
            }
        }
        // One slot reports the squared norm of each parameter, so the result has the same bits for
        // any division of variables among slots, devices and processes.
        let squared_norms = agreement::sum_disjoint(ctx, &slot.local_squared_norms(&sums)?)?;
        slot.update_all(rules, &squared_norms, sums, factor)
    }

    /// Sums the `wanted` gradients over all slots. `has_grad_anywhere` states for each trained
    /// variable whether any slot has a gradient; all slots have agreed on it.
    fn sum_grads(
        &self,
        ctx: &Replica,
        grads: Vec<Option<Tensor>>,
        has_grad_anywhere: &[bool],
        wanted: &[usize],
    ) -> Result<Vec<Option<Tensor>>> {
        let (vars, precision) = (&self.trained, self.precision);
        let sums = sum_grads(ctx, vars, grads, has_grad_anywhere, wanted, precision)?;
        sums.into_iter()
            .zip(wanted)
            .map(|(sum, &var)| sum.map(|sum| sum.to_dtype(self.sum_dtypes[var])).transpose())
            .collect()
    }

    /// Returns the loss of the whole batch, the attached tensors of this slot, and the gradients of
    /// all trained variables, summed over all slots.
    pub(super) fn gradients(
        &self,
        ctx: &Replica,
        rules: &Rules,
        loss: Loss<Vec<Tensor>>,
    ) -> Result<(BatchOutcome, Vec<Option<Tensor>>)> {
        let (shard, loss, aux) = agree_without_totals(ctx, rules, loss)?;
        let grads = differentiate(shard, &self.trained, loss.weight(), self.has_halves)?;
        let all: Vec<usize> = (0..self.trained.len()).collect();
        let has_grad_here: Vec<bool> = grads.iter().map(Option::is_some).collect();
        let has_grad_anywhere = agreement::any(ctx, &has_grad_here)?;
        let sums = self.sum_grads(ctx, grads, &has_grad_anywhere, &all)?;
        Ok(((Report { loss, grad_norm: 0.0 }, aux), sums))
    }
}

/// Sets every buffer of a slot to its mean over the slots, weighted by rows. Integer buffers, which
/// count batches, are set to their maximum.
fn average_buffers<O>(ctx: &Replica, rules: &Rules, slot: &Slot<O>) -> Result<()> {
    let buffer = |var: usize| &slot.vars[var].var;
    let (floats, counts): (Vec<usize>, Vec<usize>) =
        rules.buffers.iter().partition(|&&var| buffer(var).dtype().is_float());
    for var in counts {
        buffer(var).set(&ctx.pmax(&buffer(var).as_detached_tensor(), ALL)?)?;
    }
    if floats.is_empty() {
        return Ok(());
    }
    let share = ctx.weight() / ctx.count() as f64;
    let shares = floats.iter().map(|&var| buffer_share(buffer(var), share));
    let means = ctx.psum_list("buffers", &shares.collect::<Result<Vec<_>>>()?, ALL)?;
    for (&var, mean) in floats.iter().zip(means) {
        if !rules.allow_non_finite && !clip::squared_norm(&mean)?.is_finite() {
            let name = rules.inventory.name(var).to_owned();
            return Err(rules.errors.record_agreed(TrainingError::NonFiniteBuffer { name }));
        }
        buffer(var).set(&mean.to_dtype(buffer(var).dtype())?)?;
    }
    Ok(())
}

/// Returns a slot's contribution to the mean of a buffer; `share` is the slot's fraction of the
/// total weight.
fn buffer_share(buffer: &Var, share: f64) -> Result<Tensor> {
    let buffer = widen(&buffer.as_detached_tensor())?;
    // A shard of only padding may have produced any value.
    if share == 0.0 { buffer.zeros_like() } else { buffer * share }
}
