//! Optimizers that run inside the backward pass: the gradients of one unit are there at a time.

use std::collections::BTreeMap;

use candle_core::{Result, Tensor};
use pmap_mesh::Replica;

use crate::step::rules::Rules;

/// Parameters whose gradients are known while the backward pass is under way.
pub(super) struct Known {
    /// Their positions among the parameters that are trained.
    pub(super) trained: Vec<usize>,
    /// Whether each has a gradient on this slot.
    pub(super) used: Vec<bool>,
}

/// Who updates a slot's parts of parameters during the backward pass. (The operations of candle's
/// graph know of no type of optimizer.)
pub(super) trait UpdatesInBackward: Send + Sync {
    /// Updates the parts of the parameters that are known by their sums, which it takes.
    ///
    /// # Errors
    ///
    /// If a gradient is missing or not finite, on all slots and before these parameters change.
    fn update(
        &self,
        ctx: &Replica,
        rules: &Rules,
        known: &Known,
        sums: &mut BTreeMap<usize, Tensor>,
    ) -> Result<()>;

    /// Ends the pass: an optimizer none of whose parameters has a gradient makes its step as well.
    fn finish(&self) -> Result<()>;
}
