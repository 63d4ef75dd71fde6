//! Pending collectives, which proceed while their replica computes.

use std::{
    collections::BTreeMap,
    fmt,
    sync::{Arc, Mutex},
};

use candle_core::{Result, Tensor};

use crate::{engine::PendingCollective, error::call::CollectiveCall, sync::lock};

/// A started collective; [`wait`](Self::wait) returns its result.
///
/// Several collectives may be pending at a time, and a program may wait for them in any order. All
/// members of a group start them in the same order: the n-th collective that each member starts or
/// calls along the same axes is one. (Over NCCL the order counts along all axes together, because
/// its operations run one after another.) If one member starts a collective and another calls it,
/// `start_psum` and `psum`, the call fails with
/// [`CollectiveError::Mismatch`](crate::CollectiveError::Mismatch); over NCCL both wait until their
/// deadline.
///
/// Do not write to the arguments in place until [`wait`](Self::wait) has returned.
///
/// A pending collective fails with its call: a replica that fails or returns early ends the wait
/// too. If it is dropped without a wait, the function's return fails with
/// [`CollectiveError::NeverAwaited`](crate::CollectiveError::NeverAwaited).
#[must_use = "wait for a started collective, or its call fails"]
pub struct Pending<T> {
    collective: Box<dyn PendingCollective>,
    finish: Box<dyn FnOnce(Vec<Tensor>) -> Result<T> + Send>,
}

impl<T> Pending<T> {
    pub(crate) fn new(
        collective: Box<dyn PendingCollective>,
        finish: impl FnOnce(Vec<Tensor>) -> Result<T> + Send + 'static,
    ) -> Self {
        Self { collective, finish: Box::new(finish) }
    }

    /// Returns the result after all members of the group have started the collective.
    ///
    /// # Errors
    ///
    /// The errors of [`Replica::psum`](crate::Replica::psum).
    pub fn wait(self) -> Result<T> {
        (self.finish)(self.collective.wait()?)
    }
}

impl<T> fmt::Debug for Pending<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pending").field("collective", &self.collective).finish_non_exhaustive()
    }
}

/// The collectives that a replica has started and not waited for.
///
/// The list is kept here and not by the handles' destructors: a failing replica drops its handles
/// too, and must report its own error.
#[derive(Debug, Default)]
pub(crate) struct OutstandingCollectives(Mutex<OutstandingCalls>);

#[derive(Debug, Default)]
struct OutstandingCalls {
    n_started: u64,
    by_number: BTreeMap<u64, Arc<CollectiveCall>>,
}

impl OutstandingCollectives {
    /// Returns the first collective that was never waited for.
    pub(crate) fn first(&self) -> Option<Arc<CollectiveCall>> {
        lock(&self.0).by_number.values().next().cloned()
    }

    /// Tracks a collective until it is waited for.
    pub(crate) fn track(
        self: &Arc<Self>,
        call: &Arc<CollectiveCall>,
        collective: Box<dyn PendingCollective>,
    ) -> Box<dyn PendingCollective> {
        let mut calls = lock(&self.0);
        let number = calls.n_started;
        calls.n_started += 1;
        calls.by_number.insert(number, Arc::clone(call));
        Box::new(TrackedCollective { collective, outstanding: Arc::clone(self), number })
    }
}

/// A collective that is tracked until it is waited for.
#[derive(Debug)]
struct TrackedCollective {
    collective: Box<dyn PendingCollective>,
    outstanding: Arc<OutstandingCollectives>,
    number: u64,
}

impl PendingCollective for TrackedCollective {
    fn wait(self: Box<Self>) -> Result<Vec<Tensor>> {
        lock(&self.outstanding.0).by_number.remove(&self.number);
        self.collective.wait()
    }
}
