//! The state of a batch's backward pass on one slot, and optimizers that run inside it.

use std::collections::{BTreeMap, BTreeSet};

use candle_core::{Result, Tensor};
use pmap_mesh::Replica;

use crate::{
    sharded::units::PendingReduce,
    step::rules::Rules,
    units::{accumulation::UnreducedGrads, model::Model},
};

/// The state of a batch's backward pass on one slot. The forward pass already records the entered
/// units in it.
#[derive(Debug, Default)]
pub(crate) struct BackwardState {
    /// Units that the loss entered.
    pub(crate) entered_units: BTreeSet<String>,
    /// Number of passes through each unit with gradients that must still be reduced.
    pub(crate) expected: BTreeMap<String, usize>,
    /// Number of passes with a kept graph and freed parameters.
    n_freed: usize,
    /// Whether the step has started the backward pass. If a unit is differentiated before, the loss
    /// itself calls `backward`.
    pub(crate) has_started: bool,
    /// Whether the slot's shard of the batch has no weight.
    pub(crate) is_empty: bool,
    /// The remaining factor of the gradients: with half precision, the differentiated loss is
    /// multiplied by only a part of its factor.
    pub(crate) rest: f64,
    /// Gradients that are not yet summed over the slots.
    pub(crate) unreduced: UnreducedGrads,
    /// The reduction in flight, which overlaps with the backward pass.
    pub(crate) in_flight: Option<PendingReduce>,
    /// Reduced gradients, by the index of this slot's shard.
    pub(crate) sums: BTreeMap<usize, Tensor>,
    /// Names of the parameters with a gradient on this slot.
    pub(crate) used: BTreeSet<String>,
    /// Parameters with gradients that were taken for an update, as indices among the trained
    /// parameters.
    taken: BTreeSet<usize>,
}

impl BackwardState {
    /// Starts the backward pass, with the unreduced gradients of earlier batches.
    pub(crate) fn begin(&mut self, unreduced: UnreducedGrads, is_empty: bool, rest: f64) {
        self.used.extend(unreduced.grads.keys().cloned());
        self.unreduced = unreduced;
        self.is_empty = is_empty;
        self.rest = rest;
        self.has_started = true;
    }

    /// Returns the number of the next pass with freed parameters.
    pub(crate) fn next_freed_pass(&mut self) -> usize {
        self.n_freed += 1;
        self.n_freed - 1
    }

    /// Records that the gradients of one pass through a unit are reduced.
    #[expect(clippy::expect_used, reason = "each backward pass has a recorded forward pass")]
    pub(crate) fn leave(&mut self, unit: &str) {
        *self.expected.get_mut(unit).expect("the pass was recorded") -= 1;
    }

    /// Adds the reduced gradients of one pass through a unit. A unit may have several passes, so a
    /// shard may have a sum already.
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

    /// Takes the parameters of a unit whose sums are final, because all passes through all units of
    /// the parameter are reduced.
    pub(crate) fn take_ready(&mut self, model: &Model, unit: &str) -> ReadyGrads {
        let mut ready = Vec::new();
        for (trained, member) in model.units[unit].trained() {
            let mut units = model.units_of(&member.names.name);
            if units.all(|unit| self.expected.get(unit).is_none_or(|&passes| passes == 0)) {
                ready.push(trained);
            }
        }
        self.take(model, ready)
    }

    /// Takes the parameters that were not taken during the backward pass.
    pub(crate) fn take_rest(&mut self, model: &Model) -> ReadyGrads {
        let all = 0..model.inventory.roles.trained().len();
        let rest = all.filter(|trained| !self.taken.contains(trained)).collect();
        self.take(model, rest)
    }

    /// Marks parameters as taken, and returns whether each has a gradient.
    fn take(&mut self, model: &Model, trained: Vec<usize>) -> ReadyGrads {
        self.taken.extend(&trained);
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

/// Parameters with final gradients.
pub(crate) struct ReadyGrads {
    /// The parameters, as indices among the trained parameters.
    pub(crate) trained: Vec<usize>,
    /// For each of these parameters, whether it has a gradient on this slot.
    pub(crate) used: Vec<bool>,
}

/// An updater of a slot's shards during the backward pass. It is a trait object, because operations
/// in candle's graph cannot be generic over the type of the optimizer.
pub(crate) trait UpdatesInBackward: Send + Sync {
    /// Updates the shards of the `ready` parameters, and removes their sums from `sums`.
    ///
    /// # Errors
    ///
    /// Returns an error on all slots, before these parameters change, if a gradient is missing or
    /// not finite.
    fn update(
        &self,
        ctx: &Replica,
        rules: &Rules,
        ready: &ReadyGrads,
        sums: &mut BTreeMap<usize, Tensor>,
    ) -> Result<()>;

    /// Makes a step of the optimizers without any gradient, at the end of the pass.
    fn finish(&self) -> Result<()>;
}
