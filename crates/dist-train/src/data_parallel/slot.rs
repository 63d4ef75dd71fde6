//! What one worker keeps between steps, and how it trains on its part of a batch.

use std::{
    mem,
    sync::{Mutex, MutexGuard, PoisonError},
};

use candle_core::{Result, Tensor, Var};
use candle_nn::Optimizer;
use pmap_mesh::{ALL, Replica, TensorTree};

use crate::{
    agreement,
    error::training::TrainingError,
    grad::{differentiate, has_halves, sums_of, widened},
    loss::Loss,
    optim::clip,
    step::{
        batch::{Batch, Totals, added},
        rules::{Report, Rules, Then},
        update::{clipped, norm, update},
    },
};

/// What one worker keeps between steps.
#[derive(Debug)]
pub(super) struct Slot<M, O> {
    pub(super) model: M,
    /// All variables that it uses, in the order of names.
    pub(super) vars: Vec<Var>,
    /// Those of them that are trained.
    pub(super) trained: Vec<Var>,
    /// The positions in `trained` of those that it updates.
    pub(super) owned: Vec<usize>,
    /// Whether its variables are those of the first set of the whole mesh.
    pub(super) is_first_set: bool,
    /// The positions in `vars` of those that it writes to checkpoints.
    pub(super) saved: Vec<usize>,
    /// The positions in `vars` of those that it reads from checkpoints.
    pub(super) loaded: Vec<usize>,
    /// An optimizer for each group, in their order.
    pub(super) optimizers: Vec<GroupOptimizer<O>>,
    /// What is known of the batches since the last update.
    pub(super) totals: Option<Totals>,
    /// Their gradients on this slot, for each variable that is trained; none at all before the first.
    pub(super) grads: Vec<Option<Tensor>>,
    /// Copies of the buffers as they were before the step or evaluation that is under way.
    pub(super) buffers_before: Vec<(usize, Tensor)>,
}

/// The optimizer of a group's variables that one slot updates.
#[derive(Debug)]
pub(super) struct GroupOptimizer<O> {
    /// The positions of its variables among all, in the order in which it was given them.
    pub(super) vars: Vec<usize>,
    pub(super) optimizer: O,
}

/// Locks what a worker keeps. A step locks a slot in the slot's own worker alone, and everything
/// else between steps, so that nobody waits.
///
/// A loss or an optimizer may panic while it holds the lock. That fails the step like an error, and
/// a failed step leaves a slot that can be used: gradients are taken out before they change, and
/// variables may be changed in part by an optimizer's error as well. So a poisoned lock says
/// nothing that the caller was not told, and refusing it would end training where an error does
/// not.
pub(super) fn lock<T>(slot: &Mutex<T>) -> MutexGuard<'_, T> {
    slot.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<M, O> Slot<M, O> {
    /// The optimizer that updates a variable, if this slot does, and the variable's position in it.
    pub(super) fn optimizer_of(&self, var: usize) -> Option<(&O, usize)> {
        self.optimizers.iter().find_map(|group| {
            let position = group.vars.iter().position(|&other| other == var)?;
            Some((&group.optimizer, position))
        })
    }

    /// Copies the buffers, which the forward pass may change.
    pub(super) fn begin(&mut self, buffers: &[usize]) -> Result<()> {
        let copy = |&var: &usize| Ok((var, self.vars[var].as_detached_tensor().copy()?));
        self.buffers_before = buffers.iter().map(copy).collect::<Result<_>>()?;
        Ok(())
    }

    /// Forgets what a step that succeeded has no use for.
    pub(super) fn commit(&mut self) {
        self.buffers_before.clear();
    }

    /// Takes back what a step that failed may have changed on some slots and not on others.
    pub(super) fn roll_back(&mut self) -> Result<()> {
        self.forget();
        self.take_back_buffers()
    }

    /// Drops what was accumulated.
    pub(super) fn forget(&mut self) {
        self.totals = None;
        self.grads.clear();
    }

    /// Gives the buffers the values that they had at the beginning.
    pub(super) fn take_back_buffers(&mut self) -> Result<()> {
        self.buffers_before.drain(..).try_for_each(|(var, before)| self.vars[var].set(&before))
    }

    /// Gives every buffer its mean over the slots, weighted by their rows. Integers, which count
    /// batches, are the largest.
    fn average_buffers(&self, ctx: &Replica, rules: &Rules) -> Result<()> {
        let (floats, counts): (Vec<usize>, Vec<usize>) =
            rules.buffers.iter().partition(|&&var| self.vars[var].dtype().is_float());
        for var in counts {
            let buffer = &self.vars[var];
            buffer.set(&ctx.pmax(&buffer.as_detached_tensor(), ALL)?)?;
        }
        if floats.is_empty() {
            return Ok(());
        }
        let share = ctx.weight() / ctx.count() as f64;
        let shares = floats.iter().map(|&var| self.buffer_share(var, share));
        let all: Vec<usize> = (0..floats.len()).collect();
        let means = ctx.psum_list(shares.collect::<Result<_>>()?, &all, ALL)?;
        for (&var, mean) in floats.iter().zip(means) {
            if !rules.allow_non_finite && !clip::squares(&mean)?.is_finite() {
                let name = rules.inventory.name(var).to_owned();
                return Err(rules.refusal.agreed(TrainingError::NonFiniteBuffer { name }));
            }
            self.vars[var].set(&mean.to_dtype(self.vars[var].dtype())?)?;
        }
        Ok(())
    }

    /// What this slot adds to the mean of a buffer.
    fn buffer_share(&self, var: usize, share: f64) -> Result<Tensor> {
        let buffer = widened(&self.vars[var].as_detached_tensor())?;
        // What a shard of padding alone has made of it may be anything.
        if share == 0.0 { buffer.zeros_like() } else { buffer * share }
    }
}

impl<M, O: Optimizer> Slot<M, O> {
    /// Differentiates the loss of this slot's part of a batch, and does with the gradients what the
    /// rules say. Returns what the whole mesh knows of the batch, or of the update.
    pub(super) fn train<A: TensorTree>(
        &mut self,
        ctx: &Replica,
        rules: &Rules,
        loss: Loss<A>,
    ) -> Result<(Report, A)> {
        let before = mem::take(&mut self.grads);
        let (shard, batch) = Batch::agree(ctx, rules, loss, self.totals.take())?;
        let halves = has_halves(&self.vars);
        let grads = differentiate(shard, &self.trained, batch.scale, halves)?;
        self.average_buffers(ctx, rules)?;
        let grads = added(before, grads)?;
        match rules.then {
            Then::Keep => {
                let (totals, report, aux) = batch.kept();
                self.totals = Some(totals);
                self.grads = grads;
                Ok((report, aux))
            }
            Then::Update => {
                let grad_norm = self.update(ctx, rules, grads, batch.factor())?;
                Ok(batch.updated(grad_norm))
            }
        }
    }

    /// Sums the gradients of its own variables over all slots, and updates these variables by
    /// `factor` times the sums. Returns the norm of all gradients before they are clipped.
    fn update(
        &mut self,
        ctx: &Replica,
        rules: &Rules,
        grads: Vec<Option<Tensor>>,
        factor: f64,
    ) -> Result<f64> {
        let here: Vec<bool> = grads.iter().map(Option::is_some).collect();
        let somewhere = agreement::any(ctx, &here)?;
        rules.check_used(&somewhere)?;
        let sums = sums_of(ctx, &self.trained, grads, &somewhere, &self.owned)?;
        let norm = norm(rules, &self.squares(ctx, &sums)?, factor)?;
        let own = self.owned.iter().map(|&var| &self.trained[var]);
        let sums = own.zip(sums).filter_map(|(var, sum)| Some((var, sum?)));
        let optimizers = self.optimizers.iter_mut().map(|group| &mut group.optimizer);
        update(optimizers, sums, clipped(rules, norm, factor))?;
        Ok(norm)
    }

    /// The squares of the sums of each trained variable, of which the slots have their own.
    ///
    /// Those of each are told by one slot, so they are the same to the bit however variables are
    /// divided among slots, devices and processes.
    fn squares(&self, ctx: &Replica, sums: &[Option<Tensor>]) -> Result<Vec<f64>> {
        let mut here = vec![0.0; self.trained.len()];
        for (&var, sum) in self.owned.iter().zip(sums) {
            if let (true, Some(sum)) = (self.is_first_set, sum) {
                here[var] = clip::squares(sum)?;
            }
        }
        agreement::combined(ctx, &here)
    }
}
