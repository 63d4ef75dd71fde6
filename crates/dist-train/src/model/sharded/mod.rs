//! Models with a shard of every parameter on each slot. A loss gathers the parameters of a unit
//! when it enters the unit.

mod accumulated;
pub(crate) mod build;
mod in_backward;

use std::{
    mem,
    sync::{Arc, Mutex, OnceLock},
};

use candle_core::{Result as CandleResult, Tensor};
use candle_nn::Optimizer;
use pmap_mesh::Replica;

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
        batch::agree_without_totals,
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
    /// Drops accumulated gradients.
    pub(crate) fn discard_accumulated(&self) {
        self.accumulated.iter().for_each(|slot| *lock(slot) = Accumulated::default());
    }
}

/// The reduced gradients of a slot, one per variable.
type SlotSums = Vec<Option<Tensor>>;

/// A batch in progress on the slots.
pub(crate) struct ShardedPass<'a, O> {
    layout: &'a Sharded,
    slots: &'a [SharedSlot<O>],
    common: Arc<PassContext>,
    /// The gather order of the first slot of this process.
    order: OnceLock<Order>,
    /// The units that an update entered.
    entered_units: OnceLock<Vec<String>>,
    /// For each trained parameter, whether any slot has a gradient; set by a batch with
    /// [`Goal::Differentiate`].
    used: OnceLock<Vec<bool>>,
    /// The reduced gradients of each slot of this process; set like `used`.
    sums: Vec<Mutex<SlotSums>>,
}

impl<'a, O> ShardedPass<'a, O> {
    pub(crate) fn new(
        layout: &'a Sharded,
        slots: &'a [SharedSlot<O>],
        rules: Rules,
    ) -> Result<Self, TrainingError> {
        if rules.goal == Goal::Accumulate && layout.model.updates_in_backward {
            return Err(TrainingError::needs_all_gradients("accumulate"));
        }
        Ok(Self {
            layout,
            slots,
            common: PassContext::new(&layout.model, rules),
            order: OnceLock::new(),
            entered_units: OnceLock::new(),
            used: OnceLock::new(),
            sums: slots.iter().map(|_| Mutex::default()).collect(),
        })
    }

    pub(crate) fn rules(&self) -> &Rules {
        &self.common.rules
    }

    /// Ends a batch. Drops accumulated gradients after [`Goal::Differentiate`], and after a failed
    /// accumulation or update. Records the order of units for later batches.
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
        if is_ok && let Some(units) = self.entered_units.get() {
            model.repeatable().extend(units.iter().cloned());
        }
    }

    /// Returns the full gradients of all trained parameters, after a batch with
    /// [`Goal::Differentiate`].
    #[expect(clippy::expect_used, reason = "every replica of a successful call has set the flags")]
    pub(crate) fn gradients(&self) -> Result<Vec<Option<Tensor>>> {
        let Model { vars, inventory, .. } = &*self.layout.model;
        let sums: Vec<SlotSums> =
            self.sums.iter().map(|sums| mem::take(&mut *lock(sums))).collect();
        let used = self.used.get().expect("a differentiated batch has set the used parameters");
        let mut gradients = Vec::with_capacity(used.len());
        for (param, &is_used) in inventory.roles.trained().into_iter().zip(used) {
            if !is_used {
                gradients.push(None);
                continue;
            }
            // If a parameter is used, every slot has sums for all its shards.
            let name = inventory.name(param);
            let sum = |local_slot: usize, shard_idx: usize| sums[local_slot][shard_idx].clone();
            gradients.push(Some(vars.gather_with(name, sum)?));
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
        let goal = self.rules().goal;
        let updates = (self.layout.model.updates_in_backward && goal == Goal::Update)
            .then(|| Arc::clone(slot) as Arc<dyn UpdatesInBackward>);
        let session = Session::new(ctx, &self.common, updates, false)?;
        let shard_loss = run_loss(&session, loss)?;
        if !goal.differentiates() {
            session.finish_gathering()?;
        }
        if goal == Goal::Update {
            self.entered_units.get_or_init(|| session.entered_units());
        }
        let result = self.compute(ctx, &session, slot, shard_loss);
        // Other shard groups may have gathered units in another order, but all slots expect the
        // order of the first slot in later batches.
        if ctx.local_index() == 0 {
            self.order.get_or_init(|| session.order());
        }
        let outcome = self.rules().errors.none_if_agreed(result)?;
        session.abandon()?;
        Ok(outcome)
    }

    /// Evaluates or differentiates the loss of a slot's shard, depending on the goal of the batch.
    fn compute(
        &self,
        ctx: &Replica,
        session: &Session,
        slot: &SharedSlot<O>,
        shard_loss: Loss<Vec<Tensor>>,
    ) -> CandleResult<BatchOutcome> {
        let rules = self.rules();
        match rules.goal {
            Goal::Evaluate | Goal::Measure => {
                session.check_order()?;
                let (loss, aux) =
                    shard_loss.evaluate(ctx, rules.allow_non_finite, &rules.errors)?;
                Ok((Report { loss, grad_norm: 0.0 }, aux))
            }
            Goal::Differentiate => self.differentiate(ctx, session, shard_loss),
            Goal::Accumulate | Goal::Update => {
                let mut accumulated = lock(&self.layout.accumulated[ctx.local_index()]);
                accumulated::train(slot, &mut accumulated, ctx, session, rules, shard_loss)
            }
        }
    }

    /// Differentiates the batch, and stores the gradients of this slot's shards.
    fn differentiate(
        &self,
        ctx: &Replica,
        session: &Session,
        shard_loss: Loss<Vec<Tensor>>,
    ) -> CandleResult<BatchOutcome> {
        let rules = self.rules();
        session.check_order()?;
        let (shard, loss, aux) = agree_without_totals(ctx, rules, shard_loss)?;
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
        let shard_loss = loss(&Units::sharded(Arc::clone(session)), shard_use)?;
        session.check_outside(&shard_loss)?;
        Ok(shard_loss)
    };
    if !session.may_free_untrained() {
        return run(session, ShardUse::Last);
    }
    match run(session, ShardUse::Repeated) {
        // The loss read a freed parameter of a unit that keeps its graph. candle's error does not
        // name the parameter. So the loss runs again without freeing parameters, and normally fails
        // with an error that names it. All replicas do so, because all of them read the same
        // parameter.
        Err(error) if reads_freed_memory(&error) => {
            session.abandon()?;
            drop(run(&session.search_session()?, ShardUse::Last)?);
            Err(error)
        }
        outcome => outcome,
    }
}
