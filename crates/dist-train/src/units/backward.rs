//! How far the backward pass of a batch is on one slot, and optimizers that run inside of it.

use std::collections::{BTreeMap, BTreeSet};

use candle_core::{Result, Tensor};
use pmap_mesh::Replica;

use crate::{
    sharded::units::PendingReduce,
    step::rules::Rules,
    units::{
        accumulation::UnreducedGrads,
        model::{Model, UnitMember},
    },
};

/// How far the backward pass of a batch is on one slot, from the first unit that its loss enters.
#[derive(Debug, Default)]
pub(crate) struct BackwardState {
    /// The units that the loss has entered.
    pub(crate) entered: BTreeSet<String>,
    /// How many passes through each unit are recorded whose sums are to come.
    pub(crate) expected: BTreeMap<String, usize>,
    /// How many passes have kept graphs whose parameters are emptied.
    n_emptied: usize,
    /// Whether it has begun: a loss that differentiates for itself would have gradients summed.
    pub(crate) is_under_way: bool,
    /// Whether nothing of the batch is here.
    pub(crate) is_empty: bool,
    /// What gradients are multiplied by: in halves the loss has a part of its factor alone.
    pub(crate) rest: f64,
    /// What is not summed yet.
    pub(crate) whole: UnreducedGrads,
    /// The unit whose gradients are being summed while the backward pass goes on.
    pub(crate) under_way: Option<PendingReduce>,
    /// The sums over all slots, by the position of this slot's part.
    pub(crate) sums: BTreeMap<usize, Tensor>,
    /// The parameters that have a gradient on this slot.
    used: BTreeSet<String>,
    /// The positions of the parameters that were updated already, among those that are trained.
    updated: BTreeSet<usize>,
}

impl BackwardState {
    /// Begins, with gradients that were kept of the batches before.
    pub(crate) fn begin(&mut self, whole: UnreducedGrads, is_empty: bool, rest: f64) {
        self.used.extend(whole.grads.keys().cloned());
        self.whole = whole;
        self.is_empty = is_empty;
        self.rest = rest;
        self.is_under_way = true;
    }

    /// The number of the next pass whose parameters are emptied.
    pub(crate) fn next_emptied(&mut self) -> usize {
        self.n_emptied += 1;
        self.n_emptied - 1
    }

    /// Notes that there are gradients of these parameters.
    pub(crate) fn mark_used<'a>(&mut self, used: impl IntoIterator<Item = &'a String>) {
        self.used.extend(used.into_iter().cloned());
    }

    /// Notes that the gradients of one of the passes through a unit are summed.
    #[expect(clippy::expect_used, reason = "a unit's backward pass is that of a recorded one")]
    pub(crate) fn leave(&mut self, unit: &str) {
        *self.expected.get_mut(unit).expect("the pass was recorded") -= 1;
    }

    /// Adds the sums of one pass through a unit: it may be entered several times.
    pub(crate) fn add(&mut self, sums: Vec<(usize, Tensor)>) -> Result<()> {
        for (part, sum) in sums {
            let sum = match self.sums.remove(&part) {
                Some(before) => (before + sum)?,
                None => sum,
            };
            self.sums.insert(part, sum);
        }
        Ok(())
    }

    /// The parameters of a unit to whose sums nothing more will be added: all passes through all of
    /// their units are summed.
    pub(crate) fn known(&mut self, model: &Model, unit: &str) -> ReadyGrads {
        let is_done = |unit: &String| self.expected.get(unit).is_none_or(|&passes| passes == 0);
        let is_known = |member: &UnitMember| model.units_of(&member.names.name).all(is_done);
        let known = model.units[unit].trained().filter(|(_, member)| is_known(member));
        let trained = known.map(|(trained, _)| trained).collect();
        self.taken(model, trained)
    }

    /// The parameters that were not updated during the backward pass.
    pub(crate) fn rest_of(&mut self, model: &Model) -> ReadyGrads {
        let all = 0..model.inventory.roles.trained().len();
        let rest = all.filter(|trained| !self.updated.contains(trained)).collect();
        self.taken(model, rest)
    }

    fn taken(&mut self, model: &Model, trained: Vec<usize>) -> ReadyGrads {
        self.updated.extend(&trained);
        let flags = self.used_flags(model);
        ReadyGrads { used: trained.iter().map(|&trained| flags[trained]).collect(), trained }
    }

    /// Whether each trained variable of the model has a gradient here, in the order of names.
    pub(crate) fn used_flags(&self, model: &Model) -> Vec<bool> {
        let trained = model.inventory.roles.trained();
        trained.iter().map(|&var| self.used.contains(model.inventory.name(var))).collect()
    }
}

/// Parameters whose gradients are known while the backward pass is under way.
pub(crate) struct ReadyGrads {
    /// Their positions among the parameters that are trained.
    pub(crate) trained: Vec<usize>,
    /// Whether each has a gradient on this slot.
    pub(crate) used: Vec<bool>,
}

/// Who updates a slot's parts of parameters during the backward pass. (The operations of candle's
/// graph know of no type of optimizer.)
pub(crate) trait UpdatesInBackward: Send + Sync {
    /// Updates the parts of the parameters that are known by their sums, which it takes.
    ///
    /// # Errors
    ///
    /// If a gradient is missing or not finite, on all slots and before these parameters change.
    fn update(
        &self,
        ctx: &Replica,
        rules: &Rules,
        known: &ReadyGrads,
        sums: &mut BTreeMap<usize, Tensor>,
    ) -> Result<()>;

    /// Ends the pass: an optimizer none of whose parameters has a gradient makes its step as well.
    fn finish(&self) -> Result<()>;
}
