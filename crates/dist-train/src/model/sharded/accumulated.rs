//! Accumulated batches of a slot of a sharded model, and training on its shards of batches.

use std::{collections::BTreeSet, iter, mem, sync::Mutex};

use candle_core::{Result, Tensor};
use candle_nn::Optimizer;
use pmap_mesh::Replica;

use crate::{
    agreement,
    loss::Loss,
    model::{
        pass::BatchOutcome,
        slot::{Slot, lock},
    },
    step::{
        batch::{Batch, added},
        rules::{Goal, Rules},
        update::norm,
    },
    units::{
        accumulation::UnreducedGrads,
        session::{Gradients, Session},
    },
};

/// Accumulated batches of a slot.
#[derive(Debug, Default)]
pub(super) struct Accumulated {
    /// The sums over all slots of the gradients of each variable; empty before the first batch.
    sums: Vec<Option<Tensor>>,
    /// Unreduced gradients.
    unreduced: UnreducedGrads,
    /// Whether any of the batches has a gradient of each trained parameter.
    used: Vec<bool>,
    /// Units that the batches entered.
    entered: BTreeSet<String>,
}

/// Differentiates the loss of a slot's shard of a batch, and stores the gradients or updates the
/// slot with them. Returns the outcome of the batch or update, which all replicas agree on.
///
/// The slot is not locked during differentiation, because its shards may be updated inside the
/// backward pass.
pub(super) fn train<O: Optimizer>(
    slot: &Mutex<Slot<O>>,
    accumulated: &mut Accumulated,
    ctx: &Replica,
    session: &Session,
    rules: &Rules,
    loss: Loss<Vec<Tensor>>,
) -> Result<BatchOutcome> {
    let totals = lock(slot).begin();
    let unreduced = mem::take(&mut accumulated.unreduced);
    accumulated.entered.extend(session.entered());
    session.check_order()?;
    let (shard, batch) = Batch::agree(ctx, rules, loss, totals)?;
    session.check_entered(&accumulated.entered)?;
    let gradients = session.differentiate(shard, batch.scale, unreduced)?;
    let slot = &mut *lock(slot);
    if session.updates_in_backward() {
        *accumulated = Accumulated::default();
        return Ok(batch.updated(norm(rules, &slot.squares, 1.0)?));
    }
    accumulated.add(ctx, slot, gradients)?;
    if rules.goal == Goal::Accumulate {
        let (totals, report, aux) = batch.kept();
        slot.totals = Some(totals);
        return Ok((report, aux));
    }
    let Accumulated { sums, used, .. } = mem::take(accumulated);
    rules.check_used(&used)?;
    let sums = sums.into_iter().enumerate().filter_map(|(var, sum)| Some((var, sum?)));
    let sums: Vec<(usize, Tensor)> = sums.collect();
    // The squares are added up over the shards of a parameter in slot order. The result is the same
    // to the bit on all slots, but rounds differently in double precision than for a full
    // parameter.
    let squares = agreement::sums(ctx, &slot.local_squares(&sums)?)?;
    let grad_norm = slot.update_all(rules, &squares, sums, batch.factor())?;
    Ok(batch.updated(grad_norm))
}

impl Accumulated {
    /// Adds the gradients of a batch.
    fn add<O>(&mut self, ctx: &Replica, slot: &Slot<O>, gradients: Gradients) -> Result<()> {
        let used = agreement::any(ctx, &gradients.used)?;
        // If no slot has a gradient for a parameter, its sum consists of zeros from all slots.
        let is_used = |var: usize| slot.vars[var].trained.is_some_and(|trained| used[trained]);
        let sums = gradients.sums.into_iter().enumerate();
        let sums = sums.map(|(var, sum)| sum.filter(|_| is_used(var))).collect();
        self.sums = added(mem::take(&mut self.sums), sums)?;
        self.unreduced = gradients.whole;
        self.used = either(&self.used, used);
        Ok(())
    }
}

/// Returns the elementwise OR of two lists of flags; the first may be empty.
fn either(before: &[bool], flags: Vec<bool>) -> Vec<bool> {
    let was_set = before.iter().copied().chain(iter::repeat(false));
    flags.into_iter().zip(was_set).map(|(flag, before)| flag || before).collect()
}
