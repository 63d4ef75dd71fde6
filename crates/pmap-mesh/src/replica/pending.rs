//! Collectives that are under way while their replica computes.

use std::fmt;

use candle_core::{Result, Tensor};

use crate::engine::Underway;

/// A collective that was started: its result is to be waited for.
///
/// Several may be under way at a time, and be waited for in any order. All members of a group start
/// them in one order: the n-th collective that each starts or calls along the same axes is one.
/// What was handed in must not be written to in place until [`wait`](Self::wait) has returned.
///
/// A collective under way shares the fate of its call: a replica that fails or returns early ends
/// this wait too. One that is dropped without having been waited for is an error when the function
/// returns, [`CollectiveError::NotWaited`](crate::CollectiveError::NotWaited).
#[must_use = "a collective that was started must be waited for, or its call fails"]
pub struct Pending<T> {
    underway: Box<dyn Underway>,
    finish: Box<dyn FnOnce(Vec<Tensor>) -> Result<T> + Send>,
}

impl<T> Pending<T> {
    pub(crate) fn new(
        underway: Box<dyn Underway>,
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
