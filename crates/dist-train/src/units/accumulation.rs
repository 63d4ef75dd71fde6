//! Reduction of accumulated gradients.

use std::collections::{BTreeMap, BTreeSet};

use candle_core::{Result, Tensor};

/// The time at which a [sharded](crate::FullyShard) model reduces the gradients of [accumulated
/// batches](crate::DistributedModel::accumulate) over the slots.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Accumulation {
    /// In every batch: each slot stores its shards of the sums, as many bytes as its shards of the
    /// parameters. (ZeRO stages 2 and 3.)
    #[default]
    ReduceEach,
    /// Once, in the step: until then each slot stores full gradients, as many bytes as the full
    /// model, but less data is sent. The bits equal those of a [replicated](crate::DataParallel)
    /// model. (PyTorch's `set_requires_gradient_sync(False)`.)
    ReduceLast,
}

/// Unreduced gradients of full parameters on one slot.
#[derive(Debug, Default)]
pub(crate) struct UnreducedGrads {
    /// Gradients by parameter name.
    pub(crate) grads: BTreeMap<String, Tensor>,
    /// Units with gradients to reduce, the same on every slot. This slot may have no gradient for
    /// some of these units.
    pub(crate) units: BTreeSet<String>,
}

impl UnreducedGrads {
    /// Adds the gradients of one pass through a unit.
    pub(crate) fn add(&mut self, unit: &str, grads: BTreeMap<String, Tensor>) -> Result<()> {
        self.units.insert(unit.to_owned());
        for (name, grad) in grads {
            let sum = match self.grads.remove(&name) {
                Some(before) => (before + grad)?,
                None => grad,
            };
            self.grads.insert(name, sum);
        }
        Ok(())
    }
}
