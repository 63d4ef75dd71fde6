//! The state of a batch's backward pass on one slot, and optimizers that run inside it.

use std::collections::{BTreeMap, BTreeSet};

use candle_core::{Result, Tensor};
use pmap_mesh::Replica;

use crate::{
    sharded::units::PendingReduce,
    step::rules::Rules,
    units::{accumulation::UnreducedGrads, model::Model},
};

/// The state of a batch's backward pass on one slot, starting with the first unit in the forward
/// pass.
#[derive(Debug, Default)]
pub(crate) struct BackwardState {
    /// Units that the loss entered.
    pub(crate) entered: BTreeSet<String>,
    /// Number of recorded passes through each unit with gradients still to reduce.
    pub(crate) expected: BTreeMap<String, usize>,
    /// Number of passes with a kept graph and freed parameters.
    n_freed: usize,
    /// Whether the step has started the backward pass. It detects losses that call `backward`
    /// themselves.
    pub(crate) is_under_way: bool,
    /// Whether the slot's shard of the batch has no weight.
    pub(crate) is_empty: bool,
    /// Factor for the gradients: with half precision, the loss carries only a part of its factor.
    pub(crate) rest: f64,
    /// Unreduced gradients.
    pub(crate) whole: UnreducedGrads,
    /// The reduction in flight, which overlaps with the backward pass.
    pub(crate) under_way: Option<PendingReduce>,
    /// Reduced gradients, by the index of this slot's shard.
    pub(crate) sums: BTreeMap<usize, Tensor>,
    /// Parameters with a gradient on this slot.
    used: BTreeSet<String>,
    /// Indices of the parameters already updated, among the trained parameters.
    updated: BTreeSet<usize>,
}

impl BackwardState {
    /// Starts the backward pass, with the unreduced gradients of earlier batches.
    pub(crate) fn begin(&mut self, whole: UnreducedGrads, is_empty: bool, rest: f64) {
        self.used.extend(whole.grads.keys().cloned());
        self.whole = whole;
        self.is_empty = is_empty;
        self.rest = rest;
        self.is_under_way = true;
    }

    /// Returns the number of the next pass with freed parameters.
    pub(crate) fn next_freed(&mut self) -> usize {
        self.n_freed += 1;
        self.n_freed - 1
    }

    /// Records that these parameters have gradients.
    pub(crate) fn mark_used<'a>(&mut self, used: impl IntoIterator<Item = &'a String>) {
        self.used.extend(used.into_iter().cloned());
    }

    /// Records that the gradients of one pass through a unit are reduced.
    #[expect(clippy::expect_used, reason = "each backward pass has a recorded forward pass")]
    pub(crate) fn leave(&mut self, unit: &str) {
        *self.expected.get_mut(unit).expect("the pass was recorded") -= 1;
    }

    /// Adds the sums of one pass through a unit, which may be entered several times.
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

    /// Takes the parameters of a unit with final sums: all passes through all units of the
    /// parameter are reduced.
    pub(crate) fn known(&mut self, model: &Model, unit: &str) -> ReadyGrads {
        let mut known = Vec::new();
        for (trained, member) in model.units[unit].trained() {
            let mut units = model.units_of(&member.names.name);
            if units.all(|unit| self.expected.get(unit).is_none_or(|&passes| passes == 0)) {
                known.push(trained);
            }
        }
        self.taken(model, known)
    }

    /// Takes the parameters that were not updated during the backward pass.
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

    /// Returns for each trained variable, in the order of names, whether it has a gradient on this
    /// slot.
    pub(crate) fn used_flags(&self, model: &Model) -> Vec<bool> {
        let trained = model.inventory.roles.trained();
        trained.iter().map(|&var| self.used.contains(model.inventory.name(var))).collect()
    }
}

/// Parameters with final gradients before the end of the backward pass.
pub(crate) struct ReadyGrads {
    /// Their indices among the trained parameters.
    pub(crate) trained: Vec<usize>,
    /// Whether each has a gradient on this slot.
    pub(crate) used: Vec<bool>,
}

/// An updater of a slot's shards during the backward pass. A trait object hides the type of the
/// optimizer, which operations in candle's graph cannot be generic over.
pub(crate) trait UpdatesInBackward: Send + Sync {
    /// Updates the shards of parameters with final gradients, and removes the used sums.
    ///
    /// # Errors
    ///
    /// Returns an error on all slots, before these parameters change, if a gradient is missing or
    /// not finite.
    fn update(
        &self,
        ctx: &Replica,
        rules: &Rules,
        known: &ReadyGrads,
        sums: &mut BTreeMap<usize, Tensor>,
    ) -> Result<()>;

    /// Ends the pass: optimizers without any gradient make their step too.
    fn finish(&self) -> Result<()>;
}
