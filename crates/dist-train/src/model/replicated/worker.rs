//! What a slot of a replicated model works on, and how it trains on its part of a batch.

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

/// A model on the variables of a slot, and what is stored until the next update.
#[derive(Debug)]
pub(super) struct Worker<M> {
    pub(super) model: M,
    /// The model on the same variables, by which nothing is recorded for a backward pass.
    pub(super) evaluated: M,
    /// The variables that are trained.
    pub(super) trained: Vec<Var>,
    /// The positions in `trained` of those that the slot updates, and in the slot.
    pub(super) owned: Vec<(usize, usize)>,
    /// The types in which their summed gradients are stored.
    pub(super) sum_dtypes: Vec<DType>,
    pub(super) precision: Precision,
    /// Whether any variable is of half precision.
    pub(super) has_halves: bool,
    /// The gradients of batches since the last update, for each variable that is trained; none at all
    /// before the first.
    pub(super) grads: Vec<Option<Tensor>>,
    /// Copies of the buffers as they were before the batch that is in flight, with their positions.
    pub(super) buffers_before: Vec<(usize, Tensor)>,
}

impl<M> Worker<M> {
    /// Copies the buffers, which the forward pass may change.
    pub(super) fn copy_buffers<O>(&mut self, slot: &Slot<O>, buffers: &[usize]) -> Result<()> {
        let copy = |&var: &usize| Ok((var, slot.vars[var].var.as_detached_tensor().copy()?));
        self.buffers_before = buffers.iter().map(copy).collect::<Result<_>>()?;
        Ok(())
    }

    /// Gives the buffers the values that they were copied with.
    pub(super) fn restore_buffers<O>(&mut self, slot: &Slot<O>) -> Result<()> {
        self.buffers_before.drain(..).try_for_each(|(var, before)| slot.vars[var].var.set(&before))
    }

    /// Differentiates the loss of this slot's part of a batch, and stores the gradients or updates
    /// the slot by them. Returns what the whole mesh knows of the batch, or of the update.
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

    /// Sums the gradients of the slot's own variables over all slots, and updates these variables by
    /// `factor` times the sums. Returns the norm of all gradients before they are clipped.
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
        // One slot reports those of each parameter, so they have the same bits however variables are
        // divided among slots, devices and processes.
        let squares = agreement::combined(ctx, &slot.local_squares(&sums)?)?;
        slot.update_all(rules, &squares, sums, factor)
    }

    /// Returns the sums over all slots of some gradients, of which all slots know whether any has
    /// one.
    fn sums(
        &self,
        ctx: &Replica,
        grads: Vec<Option<Tensor>>,
        somewhere: &[bool],
        wanted: &[usize],
    ) -> Result<Vec<Option<Tensor>>> {
        let sums = sums_of(ctx, &self.trained, grads, somewhere, wanted, self.precision)?;
        let stored = |(sum, &var): (Option<Tensor>, &usize)| {
            sum.map(|sum| sum.to_dtype(self.sum_dtypes[var])).transpose()
        };
        sums.into_iter().zip(wanted).map(stored).collect()
    }

    /// Returns the loss of the whole batch, with what came with it here, and its gradients of all
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

/// Gives every buffer of a slot its mean over the slots, weighted by their rows. Integers, which
/// count batches, are the largest.
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

/// Returns what a slot adds to the mean of a buffer.
fn buffer_share(buffer: &Var, share: f64) -> Result<Tensor> {
    let buffer = widened(&buffer.as_detached_tensor())?;
    // What a shard of padding alone has made of it may be anything.
    if share == 0.0 { buffer.zeros_like() } else { buffer * share }
}
