//! Models replicated on every device, kept equal by reducing gradients.

pub(crate) mod build;
mod sync;
pub(crate) mod vars;
mod worker;

use std::sync::{Mutex, OnceLock};

use candle_core::{Result as CandleResult, Tensor, Var};
use candle_nn::Optimizer;
use pmap_mesh::{DeviceMesh, Replica};

use self::worker::Worker;
use crate::{
    error::{Doing, Result},
    model::{
        pass::{BatchOutcome, ShardLossFn, ShardUse},
        slot::{SharedSlot, lock},
    },
    step::{
        inventory::Inventory,
        rules::{Goal, Report, Rules},
    },
};

/// The model replicas on the slots of this process.
#[derive(Debug)]
pub(crate) struct Replicated<M> {
    workers: Vec<Mutex<Worker<M>>>,
    /// Number of sets of variables in all processes.
    n_sets: usize,
}

impl<M> Replicated<M> {
    /// Checks that all devices have the same variables.
    pub(crate) fn check_in_sync<O>(
        &self,
        mesh: &DeviceMesh,
        inventory: &Inventory,
        slots: &[SharedSlot<O>],
    ) -> Result<()> {
        // A single set cannot differ from another.
        if self.n_sets == 1 && inventory.roles.buffers().is_empty() {
            return Ok(());
        }
        let slot_vars = |slot: &SharedSlot<O>| -> Vec<Var> {
            lock(slot).vars.iter().map(|var| var.var.clone()).collect()
        };
        let vars: Vec<Vec<Var>> = slots.iter().map(slot_vars).collect();
        let vars_by_slot: Vec<&[Var]> = vars.iter().map(Vec::as_slice).collect();
        sync::check(mesh, inventory, &sync::slot_fingerprints(&vars_by_slot)?)
    }

    /// Drops accumulated gradients.
    pub(crate) fn discard_accumulated(&self) {
        self.workers.iter().for_each(|worker| lock(worker).grads.clear());
    }
}

/// A batch in progress on the workers.
pub(crate) struct ReplicatedPass<'a, M, O> {
    layout: &'a Replicated<M>,
    slots: &'a [SharedSlot<O>],
    pub(crate) rules: Rules,
    /// The gradients of all trained parameters; set by a batch with [`Goal::Differentiate`].
    gradients: OnceLock<Vec<Option<Tensor>>>,
}

impl<'a, M, O> ReplicatedPass<'a, M, O> {
    pub(crate) fn new(layout: &'a Replicated<M>, slots: &'a [SharedSlot<O>], rules: Rules) -> Self {
        Self { layout, slots, rules, gradients: OnceLock::new() }
    }

    /// Ends a batch: keeps the changes of a successful update or accumulation, and reverts the
    /// changes of any other batch, which may have reached some slots only.
    pub(crate) fn end(&self, is_ok: bool) -> Result<()> {
        for (worker, slot) in self.layout.workers.iter().zip(self.slots) {
            let (mut worker, mut slot) = (lock(worker), lock(slot));
            if is_ok && matches!(self.rules.goal, Goal::Accumulate | Goal::Update) {
                worker.buffers_before.clear();
                slot.is_half_updated = false;
                continue;
            }
            if self.rules.goal.differentiates() {
                worker.grads.clear();
                slot.totals = None;
            }
            worker.restore_buffers(&slot).doing("restoring a buffer")?;
        }
        Ok(())
    }

    /// Returns the gradients of all trained parameters, after a differentiated batch.
    #[expect(clippy::expect_used, reason = "the first replica of a successful call has set them")]
    pub(crate) fn gradients(&self) -> Vec<Option<Tensor>> {
        self.gradients.get().cloned().expect("a differentiated batch has set the gradients")
    }
}

impl<M, O: Optimizer> ReplicatedPass<'_, M, O> {
    /// Computes a replica's shard of the batch. Returns `None` if all replicas reject it.
    pub(crate) fn replica(
        &self,
        ctx: &Replica,
        loss: &mut ShardLossFn<'_, M>,
    ) -> CandleResult<Option<BatchOutcome>> {
        let rules = &self.rules;
        let mut worker = lock(&self.layout.workers[ctx.local_index()]);
        let mut slot = lock(&self.slots[ctx.local_index()]);
        worker.copy_buffers(&slot, &rules.buffers)?;
        let result = match rules.goal {
            Goal::Evaluate | Goal::Measure => {
                let is_evaluation = rules.goal == Goal::Evaluate;
                let model = if is_evaluation { &worker.eval_model } else { &worker.model };
                loss(model, ShardUse::Last)?
                    .evaluate(ctx, rules.allow_non_finite, &rules.errors)
                    .map(|(loss, aux)| (Report { loss, grad_norm: 0.0 }, aux))
            }
            Goal::Differentiate => {
                let loss = loss(&worker.model, ShardUse::Last)?;
                worker.gradients(ctx, rules, loss).map(|(outcome, gradients)| {
                    self.gradients.get_or_init(|| gradients);
                    outcome
                })
            }
            Goal::Accumulate | Goal::Update => {
                let loss = loss(&worker.model, ShardUse::Last)?;
                worker.train(ctx, rules, &mut slot, loss)
            }
        };
        rules.errors.none_if_agreed(result)
    }
}
