//! A model with a shard of every parameter on each slot; units are gathered where a loss enters
//! them.

mod accumulated;
pub(crate) mod build;
mod in_backward;

use std::{
    mem,
    sync::{Arc, Mutex, OnceLock},
};

use candle_core::{Result as CandleResult, Tensor};
use candle_nn::Optimizer;
use pmap_mesh::{DeviceMesh, Replica};

use self::accumulated::Accumulated;
use crate::{
    agreement,
    error::{Result, training::TrainingError},
    loss::Loss,
    model::{
        pass::{BatchOutcome, ShardLossFn, ShardUse},
        slot::{SharedSlot, lock},
    },
    step::{
        batch::agree_alone,
        rules::{Goal, Report, Rules},
    },
    units::{
        Units,
        accumulation::UnreducedGrads,
        backward::UpdatesInBackward,
        model::Model,
        prefetch::Order,
        session::{PassContext, Session},
        swap_storage::reads_freed_memory,
    },
};

/// A sharded model, with the accumulated gradients of this process's slots.
#[derive(Debug)]
pub(crate) struct Sharded {
    pub(crate) model: Arc<Model>,
    accumulated: Vec<Mutex<Accumulated>>,
}

impl Sharded {
    /// Checks that shards stored by several slots are equal.
    pub(crate) fn check_in_sync(&self, mesh: &DeviceMesh) -> Result<()> {
        build::check_replicas_equal(mesh, &self.model)
    }

    /// Drops accumulated gradients.
    pub(crate) fn discard_accumulated(&self) {
        self.accumulated.iter().for_each(|slot| *lock(slot) = Accumulated::default());
    }
}

/// The sums of a slot, one per variable.
type SlotSums = Vec<Option<Tensor>>;

/// A batch in progress on the slots.
pub(crate) struct ShardedPass<'a, O> {
    layout: &'a Sharded,
    slots: &'a [SharedSlot<O>],
    common: Arc<PassContext>,
    /// The order in which the first slot of this process gathered units.
    order: OnceLock<Order>,
    entered: OnceLock<Vec<String>>,
    /// Whether any slot has a gradient of each trained parameter and, below, the sums of this
    /// process's slots; set by a differentiated batch.
    used: OnceLock<Vec<bool>>,
    sums: Vec<Mutex<SlotSums>>,
}

impl<'a, O> ShardedPass<'a, O> {
    pub(crate) fn new(
        layout: &'a Sharded,
        slots: &'a [SharedSlot<O>],
        rules: Rules,
    ) -> Result<Self, TrainingError> {
        if rules.goal == Goal::Accumulate && layout.model.updates_in_backward {
            return Err(TrainingError::NeedsAllGradients { option: "accumulate" });
        }
        Ok(Self {
            layout,
            slots,
            common: PassContext::new(&layout.model, rules),
            order: OnceLock::new(),
            entered: OnceLock::new(),
            used: OnceLock::new(),
            sums: slots.iter().map(|_| Mutex::default()).collect(),
        })
    }

    pub(crate) fn rules(&self) -> &Rules {
        &self.common.rules
    }

    /// Records state for later batches, or drops accumulated gradients if the batch failed.
    pub(crate) fn end(&self, is_ok: bool) {
        let model = &self.layout.model;
        let goal = self.rules().goal;
        if goal == Goal::Differentiate || (!is_ok && goal.differentiates()) {
            self.layout.discard_accumulated();
            self.slots.iter().for_each(|slot| lock(slot).totals = None);
        } else if goal.differentiates() {
            self.slots.iter().for_each(|slot| lock(slot).is_half_updated = false);
        }
        let order = self.order.get().filter(|_| is_ok).cloned();
        model.note_order(goal.differentiates(), order);
        if let (Goal::Update, true, Some(units)) = (goal, is_ok, self.entered.get()) {
            model.note_repeatable(units.clone());
        }
    }

    /// Returns the full gradients of all trained parameters, after a differentiated batch.
    #[expect(clippy::expect_used, reason = "every replica of a call that succeeded has left it")]
    pub(crate) fn gradients(&self) -> Result<Vec<Option<Tensor>>> {
        let Model { vars, inventory, .. } = &*self.layout.model;
        let sums: Vec<SlotSums> =
            self.sums.iter().map(|sums| mem::take(&mut *lock(sums))).collect();
        let used = self.used.get().cloned().expect("a batch that was differentiated has left it");
        let mut gradients = Vec::with_capacity(used.len());
        for (param, used) in inventory.roles.trained().into_iter().zip(used) {
            if !used {
                gradients.push(None);
                continue;
            }
            // If a parameter is used, every slot has sums for all its shards.
            let name = inventory.name(param);
            gradients.push(Some(vars.gather_with(name, |slot, part| sums[slot][part].clone())?));
        }
        Ok(gradients)
    }
}

impl<O: Optimizer + Send + 'static> ShardedPass<'_, O> {
    /// Computes a replica's shard of the batch. Returns `None` if all replicas reject it.
    pub(crate) fn replica(
        &self,
        ctx: &Replica,
        loss: &mut ShardLossFn<'_, Units>,
    ) -> CandleResult<Option<BatchOutcome>> {
        let slot = &self.slots[ctx.local_index()];
        let updates = self.layout.model.updates_in_backward && self.rules().goal == Goal::Update;
        let updates = updates.then(|| Arc::clone(slot) as Arc<dyn UpdatesInBackward>);
        let session = Session::new(ctx, &self.common, updates)?;
        let loss = run_loss(&session, loss)?;
        if !self.rules().goal.differentiates() {
            session.finish_gathering()?;
        }
        if self.rules().goal == Goal::Update {
            self.entered.get_or_init(|| session.entered());
        }
        let outcome = self.compute(ctx, &session, slot, loss);
        // Other shard groups may gather in other orders, but they all expect the first slot's
        // order.
        if ctx.local_index() == 0 {
            self.order.get_or_init(|| session.order());
        }
        let outcome = self.rules().refusal.outcome(outcome)?;
        session.abandon()?;
        Ok(outcome)
    }

    fn compute(
        &self,
        ctx: &Replica,
        session: &Session,
        slot: &SharedSlot<O>,
        loss: Loss<Vec<Tensor>>,
    ) -> CandleResult<BatchOutcome> {
        let rules = self.rules();
        match rules.goal {
            Goal::Evaluate | Goal::Measure => {
                session.check_order()?;
                let (loss, aux) = loss.evaluate(ctx, rules.allow_non_finite, &rules.refusal)?;
                Ok((Report { loss, grad_norm: 0.0 }, aux))
            }
            Goal::Differentiate => self.differentiate(ctx, session, loss),
            Goal::Accumulate | Goal::Update => {
                let accumulated = &mut *lock(&self.layout.accumulated[ctx.local_index()]);
                accumulated::train(slot, accumulated, ctx, session, rules, loss)
            }
        }
    }

    /// Differentiates the batch, and stores this slot's shard of the gradients.
    fn differentiate(
        &self,
        ctx: &Replica,
        session: &Session,
        loss: Loss<Vec<Tensor>>,
    ) -> CandleResult<BatchOutcome> {
        let rules = self.rules();
        session.check_order()?;
        let (shard, loss, aux) = agree_alone(ctx, rules, loss)?;
        let gradients = session.differentiate(shard, loss.weight(), UnreducedGrads::default())?;
        let used = agreement::any(ctx, &gradients.used)?;
        self.used.get_or_init(|| used);
        *lock(&self.sums[ctx.local_index()]) = gradients.sums;
        Ok((Report { loss, grad_norm: 0.0 }, aux))
    }
}

/// Returns the loss of a replica's shard of a batch.
///
/// # Errors
///
/// Returns the errors of the loss, and [`TrainingError::ParameterOutsideUnit`].
fn run_loss(
    session: &Arc<Session>,
    loss: &mut ShardLossFn<'_, Units>,
) -> CandleResult<Loss<Vec<Tensor>>> {
    let mut run = |session: &Arc<Session>, shard_use| {
        let loss = loss(&Units::sharded(Arc::clone(session)), shard_use)?;
        session.check_outside(&loss)?;
        Ok(loss)
    };
    if !session.may_free_unproven() {
        return run(session, ShardUse::Last);
    }
    match run(session, ShardUse::Repeated) {
        // The loss read a freed parameter of a unit that keeps its graph. candle's error does not
        // name it, so the loss runs again without freeing parameters to find it. All replicas do
        // so, because all of them read the same parameter.
        Err(error) if reads_freed_memory(&error) => {
            session.abandon()?;
            let _unchanged = run(&session.search()?, ShardUse::Last)?;
            Err(error)
        }
        outcome => outcome,
    }
}
