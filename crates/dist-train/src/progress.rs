//! How far training is: what a checkpoint knows of it besides tensors.

use std::collections::BTreeMap;

use core_types::Seed;
use serde::{Deserialize, Serialize};

use crate::schedule::Schedule;

/// How far training is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Progress {
    /// The number of updates.
    pub(crate) steps: u64,
    /// The number of batches in them: random numbers depend on it.
    pub(crate) batches: u64,
    pub(crate) seed: Seed,
}

impl Progress {
    /// Returns the seed and position of the random numbers of the next batch.
    pub(crate) fn stream(&self) -> (Seed, u64) {
        (self.seed, self.batches)
    }

    /// Returns those of evaluations before the next update.
    pub(crate) fn evaluation_stream(&self) -> (Seed, u64) {
        const EVALUATION: u64 = u64::MAX;
        (self.seed.derive(EVALUATION), self.steps)
    }
}

/// What a checkpoint knows of training besides tensors.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct TrainerState {
    #[serde(flatten)]
    pub(crate) progress: Progress,
    /// The learning rate of each group, without the schedule's factor.
    pub(crate) learning_rates: BTreeMap<String, f64>,
    pub(crate) schedule: Schedule,
}
