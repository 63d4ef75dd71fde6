//! Progress of training: the part of a checkpoint that is not tensors.

use std::collections::BTreeMap;

use core_types::Seed;
use serde::{Deserialize, Serialize};

use crate::schedule::Schedule;

/// The position of a training run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Progress {
    /// Number of updates.
    pub(crate) steps: u64,
    /// Number of batches so far; the random numbers of a batch depend on this number.
    pub(crate) batches: u64,
    pub(crate) seed: Seed,
}

impl Progress {
    /// Returns the seed and position of the random numbers of the next batch.
    pub(crate) fn stream(&self) -> (Seed, u64) {
        (self.seed, self.batches)
    }

    /// Returns the seed and position of the random numbers of evaluations before the next update.
    pub(crate) fn evaluation_stream(&self) -> (Seed, u64) {
        const EVALUATION: u64 = u64::MAX;
        (self.seed.derive(EVALUATION), self.steps)
    }
}

/// The state of training that a checkpoint stores in addition to tensors.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct TrainerState {
    #[serde(flatten)]
    pub(crate) progress: Progress,
    /// The learning rate of each group, without the schedule's factor.
    pub(crate) learning_rates: BTreeMap<String, f64>,
    pub(crate) schedule: Schedule,
}
