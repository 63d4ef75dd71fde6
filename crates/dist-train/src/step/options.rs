//! Options of a builder for every step.

use pmap_mesh::{P, PMap, Replica, Specs, TensorTree, Uneven};

use crate::{
    error::{Error, Result},
    optim::clip,
    schedule::Schedule,
};

/// Options of a builder for every step.
#[derive(Clone, Debug)]
pub(crate) struct StepOptions {
    pub(crate) in_axes: Specs,
    pub(crate) uneven: Uneven,
    /// Whether each process passes different rows.
    pub(crate) local_batches: bool,
    pub(crate) max_norm: Option<f64>,
    pub(crate) schedule: Schedule,
    pub(crate) allow_non_finite: bool,
}

impl Default for StepOptions {
    fn default() -> Self {
        Self {
            in_axes: Some(0).into(),
            uneven: Uneven::default(),
            local_batches: false,
            max_norm: None,
            schedule: Schedule::constant(),
            allow_non_finite: false,
        }
    }
}

impl StepOptions {
    /// Rejects invalid settings.
    pub(crate) fn check(&self) -> Result<()> {
        self.max_norm.map_or(Ok(()), clip::check_max_norm)?;
        self.schedule.check()
    }

    /// Configures a call so that it splits batches by these options. Its replicas must return equal
    /// results.
    pub(crate) fn configure<I, A, F>(&self, call: PMap<I, A, F>) -> PMap<I, A, F>
    where
        I: TensorTree,
        A: TensorTree,
        F: Fn(&Replica, I) -> candle_core::Result<A> + Send + Sync,
    {
        let call = if self.local_batches { call.local_arguments() } else { call };
        call.in_axes(self.in_axes.clone())
            .uneven(self.uneven)
            .out_axes(P::replicate())
            .trust_replicated()
    }
}

/// Rejects learning rates that optimizers reject, or that JSON cannot represent in a checkpoint.
pub(crate) fn check_rate(learning_rate: f64) -> Result<()> {
    Error::check_at_least_zero("the learning rate", learning_rate)
}
