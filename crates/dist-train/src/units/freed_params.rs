//! Memory of parameters in kept graphs, which is freed between the forward and the backward pass.

use std::{
    collections::BTreeMap,
    mem,
    sync::{Mutex, PoisonError},
};

use candle_core::{Result, Var};

use crate::units::swap_storage::{free_storage, swap_storage};

/// Parameters shared by the graphs of one process's slots during a batch.
///
/// The CPU slots of a shard group share gathered parameters; on devices other than the CPU, each
/// slot has its own. The last sharing slot to leave a unit's forward pass frees the memory. In the
/// backward pass, the first slot to re-enter the unit restores it. This is safe because gathering
/// is collective: when one slot has gathered the unit again, all slots have, so no slot is still in
/// the forward pass.
#[derive(Debug, Default)]
pub(crate) struct FreedParams(Mutex<BTreeMap<UnitPass, PassProgress>>);

/// Identifies a pass of some slots through a unit during a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct UnitPass {
    /// The first of the slots that share the unit's parameters.
    pub(crate) first: usize,
    /// Number of earlier passes with freed parameters in this batch. It is the same on all sharing
    /// slots, because they enter the same units in the same order.
    pub(crate) n_before: usize,
}

#[derive(Debug, Default)]
struct PassProgress {
    /// Number of slots that have left the forward pass.
    n_left: usize,
    /// Whether the memory was restored for the backward pass.
    is_restored: bool,
}

impl FreedParams {
    /// Records that a slot left the forward pass, and frees the parameters if it is the last of
    /// `n_sharing` slots.
    pub(crate) fn leave<'a>(
        &self,
        pass: UnitPass,
        n_sharing: usize,
        mut shared: impl Iterator<Item = &'a Var>,
    ) -> Result<()> {
        self.with(pass, |progress| {
            progress.n_left += 1;
            if progress.n_left != n_sharing {
                return Ok(());
            }
            shared.try_for_each(|var| free_storage(var))
        })
    }

    /// Restores the memory of parameters, given as pairs of freed and newly gathered variables,
    /// unless another slot has already done so.
    pub(crate) fn restore<'a>(
        &self,
        pass: UnitPass,
        mut shared: impl Iterator<Item = (&'a Var, &'a Var)>,
    ) -> Result<()> {
        self.with(pass, |progress| {
            if mem::replace(&mut progress.is_restored, true) {
                return Ok(());
            }
            shared.try_for_each(|(freed, gathered)| swap_storage(freed, gathered))
        })
    }

    /// Runs `f` on the progress of a pass, under the lock. The lock is held while memory is
    /// exchanged, so a slot that finds the memory marked as restored can read it. Poisoning is
    /// ignored: a panic under the lock ends the step on all slots.
    fn with<R>(&self, pass: UnitPass, f: impl FnOnce(&mut PassProgress) -> R) -> R {
        let mut passes = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        f(passes.entry(pass).or_default())
    }
}
