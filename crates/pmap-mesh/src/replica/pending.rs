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
/// members of a group must start and call the collectives along the same axes in the same order.
/// (Over NCCL, all members must start and call the collectives along all axes in the same order,
/// because NCCL runs one operation after another.) If one member starts a collective with
/// `start_reduce_runs` and another calls `reduce_runs`, the call fails with
/// [`CollectiveError::Mismatch`](crate::CollectiveError::Mismatch); over NCCL both members wait
/// until their deadline.
///
/// Do not write to the arguments in place until [`wait`](Self::wait) has returned.
///
/// A pending collective fails with its call: a replica that fails or returns early also ends this
/// wait. If a program drops a pending collective without a wait, the call fails with
/// [`CollectiveError::NeverAwaited`](crate::CollectiveError::NeverAwaited) when the function
/// returns.
#[must_use = "wait for a started collective, or its call fails"]
pub struct Pending<T> {
    collective: Box<dyn PendingCollective>,
    finish: fn(Vec<Tensor>) -> Result<T>,
}

impl<T> Pending<T> {
    pub(crate) fn new(
        collective: Box<dyn PendingCollective>,
        finish: fn(Vec<Tensor>) -> Result<T>,
    ) -> Self {
        Self { collective, finish }
    }

    /// Waits until all members of the group have started the collective, and returns the result.
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

/// The collectives that a replica has started, and for which it has not waited.
///
/// The destructors of handles cannot detect such a collective, because a failing replica also drops
/// its handles, and must report its own error.
#[derive(Debug, Default)]
pub(crate) struct OutstandingCollectives(Mutex<OutstandingCalls>);

#[derive(Debug, Default)]
struct OutstandingCalls {
    n_started: u64,
    by_number: BTreeMap<u64, Arc<CollectiveCall>>,
}

impl OutstandingCollectives {
    /// Returns the first collective for which the replica has not waited.
    pub(crate) fn first(&self) -> Option<Arc<CollectiveCall>> {
        lock(&self.0).by_number.values().next().cloned()
    }

    /// Returns a handle of a collective, which is outstanding until the handle's `wait`.
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

/// The handle of a collective that is outstanding until `wait`.
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
