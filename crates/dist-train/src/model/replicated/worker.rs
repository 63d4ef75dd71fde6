//! Training of one slot of a replicated model on its shards of batches.

use std::mem;

use candle_core::{DType, Result, Tensor, Var};
use candle_nn::Optimizer;
use pmap_mesh::{ALL, Replica};

use crate::{
    agreement,
    error::training::TrainingError,
    grad::{differentiate, sums_of, widened},
    loss::Loss,
    model::{pass::BatchOutcome, slot::Slot},
    optim::clip,
    precision::Precision,
    step::{
        batch::{Batch, added, agree_alone},
        rules::{Goal, Report, Rules},
    },
};

/// A model on the variables of a slot, with its state until the next update.
#[derive(Debug)]
pub(super) struct Worker<M> {
    pub(super) model: M,
    /// The model on the same variables, without recording operations.
    pub(super) evaluated: M,
    /// The trained variables.
    pub(super) trained: Vec<Var>,
    /// The variables that this slot updates: indices in `trained` and in the slot.
    pub(super) owned: Vec<(usize, usize)>,
    /// The dtypes in which their reduced gradients are stored.
    pub(super) sum_dtypes: Vec<DType>,
    pub(super) precision: Precision,
    /// Whether any variable has half precision.
    pub(super) has_halves: bool,
    /// Accumulated gradients since the last update, one per trained variable; empty before the
    /// first batch.
    pub(super) grads: Vec<Option<Tensor>>,
    /// Copies of the buffers from before the current batch, with their indices.
    pub(super) buffers_before: Vec<(usize, Tensor)>,
}

impl<M> Worker<M> {
    /// Copies the buffers, which the forward pass may change.
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
        let before = mem::take(&mut self.grads);
        let (shard, batch) = Batch::agree(ctx, rules, loss, slot.begin())?;
        let grads = differentiate(shard, &self.trained, batch.scale, self.has_halves)?;
        average_buffers(ctx, rules, slot)?;
        let grads = added(before, grads)?;
        if rules.goal == Goal::Accumulate {
            let (totals, report, aux) = batch.kept();
            slot.totals = Some(totals);
            self.grads = grads;
            return Ok((report, aux));
        }
        let grad_norm = self.update(ctx, rules, slot, grads, batch.factor())?;
        Ok(batch.updated(grad_norm))
    }

    /// Reduces the gradients over all slots, and updates the slot's own variables by `factor` times
    /// the sums. Returns the gradient norm before clipping.
    fn update<O: Optimizer>(
        &self,
        ctx: &Replica,
        rules: &Rules,
        slot: &mut Slot<O>,
        grads: Vec<Option<Tensor>>,
        factor: f64,
    ) -> Result<f64> {
        let here: Vec<bool> = grads.iter().map(Option::is_some).collect();
        let somewhere = agreement::any(ctx, &here)?;
        rules.check_used(&somewhere)?;
        let wanted: Vec<usize> = self.owned.iter().map(|&(trained, _)| trained).collect();
        let sums = self.sums(ctx, grads, &somewhere, &wanted)?;
        let own = self.owned.iter().zip(sums);
        let sums: Vec<_> = own.filter_map(|(&(_, var), sum)| Some((var, sum?))).collect();
        // One slot reports the squares of each parameter, so the result has the same bits for any
        // division of variables among slots, devices and processes.
        let squares = agreement::combined(ctx, &slot.local_squares(&sums)?)?;
        slot.update_all(rules, &squares, sums, factor)
    }

    /// Sums the `wanted` gradients over all slots, which have agreed on those that exist anywhere.
    fn sums(
        &self,
        ctx: &Replica,
        grads: Vec<Option<Tensor>>,
        somewhere: &[bool],
        wanted: &[usize],
    ) -> Result<Vec<Option<Tensor>>> {
        let sums = sums_of(ctx, &self.trained, grads, somewhere, wanted, self.precision)?;
        sums.into_iter()
            .zip(wanted)
            .map(|(sum, &var)| sum.map(|sum| sum.to_dtype(self.sum_dtypes[var])).transpose())
            .collect()
    }

    /// Returns the loss of the whole batch, the local attached tensors, and the gradients of all
    /// trained variables.
    pub(super) fn gradients(
        &self,
        ctx: &Replica,
        rules: &Rules,
        loss: Loss<Vec<Tensor>>,
    ) -> Result<(BatchOutcome, Vec<Option<Tensor>>)> {
        let (shard, loss, aux) = agree_alone(ctx, rules, loss)?;
        let grads = differentiate(shard, &self.trained, loss.weight(), self.has_halves)?;
        let all: Vec<usize> = (0..self.trained.len()).collect();
        let here: Vec<bool> = grads.iter().map(Option::is_some).collect();
        let sums = self.sums(ctx, grads, &agreement::any(ctx, &here)?, &all)?;
        Ok(((Report { loss, grad_norm: 0.0 }, aux), sums))
    }
}

/// Sets every buffer of a slot to its mean over the slots, weighted by rows. Integers, which count
/// batches, are set to the maximum.
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
    let all: Vec<usize> = (0..floats.len()).collect();
    let means = ctx.psum_list(shares.collect::<Result<_>>()?, &all, ALL)?;
    for (&var, mean) in floats.iter().zip(means) {
        if !rules.allow_non_finite && !clip::squares(&mean)?.is_finite() {
            let name = rules.inventory.name(var).to_owned();
            return Err(rules.refusal.agreed(TrainingError::NonFiniteBuffer { name }));
        }
        buffer(var).set(&mean.to_dtype(buffer(var).dtype())?)?;
    }
    Ok(())
}

/// Returns a slot's contribution to the mean of a buffer.
fn buffer_share(buffer: &Var, share: f64) -> Result<Tensor> {
    let buffer = widened(&buffer.as_detached_tensor())?;
    // A shard of only padding may have produced any value.
    if share == 0.0 { buffer.zeros_like() } else { buffer * share }
}
