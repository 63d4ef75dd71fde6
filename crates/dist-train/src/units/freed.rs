//! Memory of parameters in kept graphs, freed between forward and backward pass.

use std::{
    collections::BTreeMap,
    mem,
    sync::{Mutex, PoisonError},
};

use candle_core::{Result, Var};

use crate::units::swap_storage::{free_storage, swap_storage};

/// Parameters shared by the graphs of one process's slots during a batch.
///
/// The CPU slots of a shard group share gathered parameters; on other devices each slot has its
/// own. The last sharing slot to leave a unit's forward pass frees the memory. In the backward
/// pass, the first slot to re-enter the unit restores it. This is safe because gathering is
/// collective: when one slot has gathered again, all have, so none is still in the forward pass.
#[derive(Debug, Default)]
pub(crate) struct FreedParams(Mutex<BTreeMap<UnitPass, PassProgress>>);

/// A pass through a unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct UnitPass {
    /// The first of the slots that share its parameters.
    pub(crate) first: usize,
    /// Number of earlier passes with kept graphs of these slots in this batch, which identifies the
    /// pass because all slots enter the same units in the same order.
    pub(crate) n_before: usize,
}

#[derive(Debug, Default)]
struct PassProgress {
    n_left: usize,
    is_filled: bool,
}

impl FreedParams {
    /// Records that a slot left the forward pass, and frees the parameters if it is the last of
    /// `n_sharing` slots.
    pub(crate) fn leave<'a>(
        &self,
        pass: UnitPass,
        n_sharing: usize,
        shared: impl Iterator<Item = &'a Var>,
    ) -> Result<()> {
        self.with(pass, |progress| {
            progress.n_left += 1;
            let is_last = progress.n_left == n_sharing;
            shared.filter(|_| is_last).try_for_each(|var| free_storage(var))
        })
    }

    /// Restores the memory of parameters, given as pairs of freed and newly gathered variables,
    /// unless another slot already did.
    pub(crate) fn restore<'a>(
        &self,
        pass: UnitPass,
        mut shared: impl Iterator<Item = (&'a Var, &'a Var)>,
    ) -> Result<()> {
        self.with(pass, |progress| {
            if mem::replace(&mut progress.is_filled, true) {
                return Ok(());
            }
            shared.try_for_each(|(var, again)| swap_storage(var, again))
        })
    }

    /// Runs `f` under the lock. The lock covers the exchange of memory, so that a slot that finds
    /// it restored can read it. Poisoning is ignored: a panic under the lock ends the step on all
    /// slots.
    fn with<R>(&self, pass: UnitPass, f: impl FnOnce(&mut PassProgress) -> R) -> R {
        let mut passes = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        f(passes.entry(pass).or_default())
    }
}
