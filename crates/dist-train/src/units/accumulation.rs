//! When the gradients of accumulated batches are summed over the slots.

use std::collections::{BTreeMap, BTreeSet};

use candle_core::{Result, Tensor};

/// When a [sharded](crate::FullyShard) model sums the gradients of [accumulated
/// batches](crate::DistributedModel::accumulate) over the slots.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Accumulation {
    /// In every batch: a slot keeps its part of the sums, as many bytes as its parts of the
    /// parameters. (ZeRO stages 2 and 3.)
    #[default]
    ReduceEach,
    /// In the step, once: until then each slot keeps whole gradients, as many bytes as the whole
    /// model, and less is sent. The bits are those of a
    /// [replicated](crate::DataParallel) model. (PyTorch's
    /// `set_requires_gradient_sync(False)`.)
    ReduceLast,
}

/// Gradients of whole parameters on one slot, which are not summed yet.
#[derive(Debug, Default)]
pub(crate) struct UnreducedGrads {
    /// By the names of parameters.
    pub(crate) grads: BTreeMap<String, Tensor>,
    /// The units that have left them, the same on every slot: there is a sum to be made of each,
    /// though this slot may have no gradient for it.
    pub(crate) units: BTreeSet<String>,
}

impl UnreducedGrads {
    /// Adds what a pass through a unit leaves.
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
