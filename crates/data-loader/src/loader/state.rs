//! The position of a loader, as plain data.

use core_types::Epoch;
use dist_sampler::SamplerState;
use dyn_batch::BatchState;
use serde::{Deserialize, Serialize};

/// The position of a loader behind the last batch that it has returned: a few numbers, which a
/// checkpoint saves.
///
/// [`DataLoader::state_dict`](crate::DataLoader::state_dict) creates it, and
/// [`DataLoader::load_state_dict`](crate::DataLoader::load_state_dict) continues from it, with any
/// number of workers and ranks. Ranks that have taken equally many batches have equal states, except
/// for the samples that they have skipped.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LoaderState {
    pub(crate) format_version: u32,
    pub(crate) position: LoaderPosition,
    /// Fingerprint of the data set, if it has one.
    pub(crate) fingerprint: Option<u64>,
    /// Number of samples that the rank has skipped.
    pub(crate) skipped: u64,
}

impl LoaderState {
    pub(crate) const VERSION: u32 = 1;

    /// Returns the epoch, or `None` before the first one.
    pub(crate) fn epoch(&self) -> Option<Epoch> {
        match &self.position {
            LoaderPosition::Start => None,
            LoaderPosition::Fixed { sampler, .. } => Some(sampler.epoch()),
            LoaderPosition::Dynamic(state) => Some(state.epoch),
        }
    }
}

/// The position in an epoch.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub(crate) enum LoaderPosition {
    /// Before the first epoch.
    Start,
    Fixed {
        batch_size: u64,
        sampler: SamplerState,
    },
    Dynamic(BatchState),
}
