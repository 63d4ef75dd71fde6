//! Collectives that are under way while their replica computes.

use std::{
    collections::BTreeMap,
    fmt,
    sync::{Arc, Mutex},
};

use candle_core::{Result, Tensor};

use crate::{engine::PendingCollective, error::call::CollectiveCall, sync::lock};

/// A collective that was started: its result is to be waited for.
///
/// Several may be under way at a time, and be waited for in any order. All members of a group start
/// them in one order: the n-th collective that each starts or calls along the same axes is one.
/// (Over NCCL in one order along all axes together, as its operations run one after the other.) A
/// collective that one member starts and another one calls, `start_psum` and `psum`, is a
/// [`CollectiveError::Mismatch`](crate::CollectiveError::Mismatch); over NCCL, where the two do not
/// meet, both wait until their deadline.
///
/// What was handed in must not be written to in place until [`wait`](Self::wait) has returned.
///
/// A collective under way shares the fate of its call: a replica that fails or returns early ends
/// this wait too. One that is dropped without having been waited for is an error when the function
/// returns, [`CollectiveError::NeverAwaited`](crate::CollectiveError::NeverAwaited).
#[must_use = "a collective that was started must be waited for, or its call fails"]
pub struct Pending<T> {
    underway: Box<dyn PendingCollective>,
    finish: Box<dyn FnOnce(Vec<Tensor>) -> Result<T> + Send>,
}

impl<T> Pending<T> {
    pub(crate) fn new(
        underway: Box<dyn PendingCollective>,
        finish: impl FnOnce(Vec<Tensor>) -> Result<T> + Send + 'static,
    ) -> Self {
        Self { underway, finish: Box::new(finish) }
    }

    /// Returns the result, when all members of the group have started the collective.
    ///
    /// # Errors
    ///
    /// As [`Replica::psum`](crate::Replica::psum).
    pub fn wait(self) -> Result<T> {
        (self.finish)(self.underway.wait()?)
    }
}

impl<T> fmt::Debug for Pending<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pending").field("underway", &self.underway).finish_non_exhaustive()
    }
}

/// What a replica has started and not waited for.
///
/// Noted here and not where handles are dropped: a replica that fails drops its handles too, and
/// its own error counts.
#[derive(Debug, Default)]
pub(crate) struct Outstanding(Mutex<Calls>);

#[derive(Debug, Default)]
struct Calls {
    n_started: u64,
    by_number: BTreeMap<u64, Arc<CollectiveCall>>,
}

impl Outstanding {
    /// The first collective that nobody has waited for.
    pub(crate) fn first(&self) -> Option<Arc<CollectiveCall>> {
        lock(&self.0).by_number.values().next().cloned()
    }

    /// Notes a collective until it is waited for.
    pub(crate) fn note(
        self: &Arc<Self>,
        call: &Arc<CollectiveCall>,
        underway: Box<dyn PendingCollective>,
    ) -> Box<dyn PendingCollective> {
        let mut calls = lock(&self.0);
        let number = calls.n_started;
        calls.n_started += 1;
        calls.by_number.insert(number, Arc::clone(call));
        Box::new(Noted { underway, outstanding: Arc::clone(self), number })
    }
}

/// A collective that is noted until it is waited for.
#[derive(Debug)]
struct Noted {
    underway: Box<dyn PendingCollective>,
    outstanding: Arc<Outstanding>,
    number: u64,
}

impl PendingCollective for Noted {
    fn wait(self: Box<Self>) -> Result<Vec<Tensor>> {
        lock(&self.outstanding.0).by_number.remove(&self.number);
        self.underway.wait()
    }
}
