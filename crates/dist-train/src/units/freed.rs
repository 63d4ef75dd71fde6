//! Parameters that the graphs of units hold, emptied between the forward and the backward pass.

use std::{
    collections::BTreeMap,
    mem,
    sync::{Mutex, PoisonError},
};

use candle_core::{Result, Var};

use crate::units::swap_storage::{free_storage, swap_storage};

/// What the slots of a process tell each other of the parameters that their graphs have in common,
/// while a batch is differentiated.
///
/// On a processor the slots of a shard group share what is gathered, and on other devices each has
/// its own. The last of those that share it to leave a unit's forward pass frees it. The first to
/// come back has gathered it again, as have the others, since they take part: none of them still is
/// in the forward pass.
#[derive(Debug, Default)]
pub(crate) struct FreedParams(Mutex<BTreeMap<Pass, Progress>>);

/// A pass through a unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Pass {
    /// The first of the slots that share its parameters.
    pub(crate) first: usize,
    /// How many passes that keep their graphs these slots have begun before, in this batch: all of
    /// them enter the same units in the same order.
    pub(crate) n_before: usize,
}

#[derive(Debug, Default)]
struct Progress {
    n_left: usize,
    is_filled: bool,
}

impl FreedParams {
    /// Notes that a slot has left the forward pass, and frees the parameters if it was the last of
    /// `n_sharing`.
    pub(crate) fn leave<'a>(
        &self,
        pass: Pass,
        n_sharing: usize,
        shared: impl Iterator<Item = &'a Var>,
    ) -> Result<()> {
        self.with(pass, |progress| {
            progress.n_left += 1;
            let is_last = progress.n_left == n_sharing;
            shared.filter(|_| is_last).try_for_each(|var| free_storage(var))
        })
    }

    /// Gives the parameters, each beside what was gathered of it again, their memory back, unless
    /// another slot has.
    pub(crate) fn restore<'a>(
        &self,
        pass: Pass,
        mut shared: impl Iterator<Item = (&'a Var, &'a Var)>,
    ) -> Result<()> {
        self.with(pass, |progress| {
            if mem::replace(&mut progress.is_filled, true) {
                return Ok(());
            }
            shared.try_for_each(|(var, again)| swap_storage(var, again))
        })
    }

    /// The lock is held while memory is exchanged, so that whoever finds it given back can read it.
    /// A slot that panics with it has ended the step for all.
    fn with<R>(&self, pass: Pass, f: impl FnOnce(&mut Progress) -> R) -> R {
        let mut passes = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        f(passes.entry(pass).or_default())
    }
}
