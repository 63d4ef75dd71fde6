//! Samples that cannot be read.

use core_types::Epoch;

use crate::error::BoxError;

/// The treatment of samples that cannot be read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum OnError {
    /// Their batch is an error. The next batch follows as usual.
    #[default]
    Stop,
    /// They are left out of their batch and counted. Each further sample after the limit makes its
    /// batch an error.
    ///
    /// The batch keeps its planned shape, with an empty row, so ranks have equal shapes and numbers
    /// of batches. A batch without any sample is an error.
    Skip {
        /// Maximum number of skipped samples of this rank, in all epochs.
        at_most: u64,
    },
}

/// A sample that could not be read.
#[derive(Debug)]
#[non_exhaustive]
pub struct SkippedSample {
    /// Epoch of the failed read.
    pub epoch: Epoch,
    /// Index in the data set.
    pub index: u64,
    /// Cause.
    pub error: BoxError,
}

/// The samples that a rank has skipped, up to the last batch that it has taken.
#[derive(Debug, Default)]
#[non_exhaustive]
pub struct SkippedSamples {
    /// Number of samples, also those before the loader was resumed.
    pub count: u64,
    /// The first hundred since the loader was created.
    pub samples: Vec<SkippedSample>,
}

impl SkippedSamples {
    const MAX_SAMPLES: usize = 100;

    pub(crate) fn push(&mut self, sample: SkippedSample) {
        self.count = self.count.saturating_add(1);
        if self.samples.len() < Self::MAX_SAMPLES {
            self.samples.push(sample);
        }
    }
}
