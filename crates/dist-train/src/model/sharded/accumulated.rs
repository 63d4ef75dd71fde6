//! Training of one slot of a sharded model on its shards of batches, and the batches that the slot
//! has accumulated.

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
        batch::{Batch, add_grads},
        rules::{Goal, Rules},
        update::global_norm,
    },
    units::{
        accumulation::UnreducedGrads,
        session::{Gradients, Session},
    },
};

/// Accumulated batches of a slot.
#[derive(Debug, Default)]
pub(super) struct Accumulated {
    /// The gradient of each variable, summed over all slots; empty before the first batch.
    sums: Vec<Option<Tensor>>,
    /// Gradients that are not yet summed over the slots.
    unreduced: UnreducedGrads,
    /// For each trained parameter, whether it has a gradient in any of the batches; empty before
    /// the first batch.
    used: Vec<bool>,
    /// Names of the units that the batches entered.
    entered_units: BTreeSet<String>,
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
    accumulated.entered_units.extend(session.entered_units());
    session.check_order()?;
    let (shard, batch) = Batch::agree(ctx, rules, loss, totals)?;
    session.check_entered(&accumulated.entered_units)?;
    let gradients = session.differentiate(shard, batch.scale, unreduced)?;
    let mut slot = lock(slot);
    if session.updates_in_backward() {
        *accumulated = Accumulated::default();
        return Ok(batch.into_update(global_norm(rules, &slot.squared_norms, 1.0)?));
    }
    accumulated.add(ctx, &slot, gradients)?;
    if rules.goal == Goal::Accumulate {
        let (totals, report, aux) = batch.into_accumulated();
        slot.totals = Some(totals);
        return Ok((report, aux));
    }
    let Accumulated { sums, used, .. } = mem::take(accumulated);
    rules.check_used(&used)?;
    let vars_and_sums = sums.into_iter().enumerate();
    let sums_by_var: Vec<(usize, Tensor)> =
        vars_and_sums.filter_map(|(var, sum)| Some((var, sum?))).collect();
    // The squared norms of a parameter's shards are added up in slot order. So the result is the
    // same to the bit on all slots, but its last digits may differ from the squared norm of the
    // full parameter.
    let squared_norms =
        agreement::sum_in_rank_order(ctx, &slot.local_squared_norms(&sums_by_var)?)?;
    let grad_norm = slot.update_all(rules, &squared_norms, sums_by_var, batch.factor())?;
    Ok(batch.into_update(grad_norm))
}

impl Accumulated {
    /// Adds the gradients of a batch.
    fn add<O>(&mut self, ctx: &Replica, slot: &Slot<O>, gradients: Gradients) -> Result<()> {
        let used = agreement::any(ctx, &gradients.used)?;
        // If no slot has a gradient for a parameter, its sum consists of zeros from all slots.
        let is_used =
            |var: usize| slot.vars[var].trained_index.is_some_and(|trained| used[trained]);
        let mut sums = gradients.sums;
        for (var, sum) in sums.iter_mut().enumerate() {
            if !is_used(var) {
                *sum = None;
            }
        }
        self.sums = add_grads(mem::take(&mut self.sums), sums)?;
        self.unreduced = gradients.unreduced;
        self.used = either(&self.used, used);
        Ok(())
    }
}

/// Returns the elementwise OR of two lists of flags; `before` may be empty.
fn either(before: &[bool], flags: Vec<bool>) -> Vec<bool> {
    let was_set = before.iter().copied().chain(iter::repeat(false));
    flags.into_iter().zip(was_set).map(|(flag, was_set)| flag || was_set).collect()
}
