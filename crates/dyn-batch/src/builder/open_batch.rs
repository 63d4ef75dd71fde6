//! Batches that grow sequence by sequence.

use std::collections::VecDeque;

use crate::{
    batch::{Batch, Sequence},
    limits::BatchLimits,
};

/// A batch that is not full yet.
#[derive(Clone, Debug, Default)]
pub(crate) struct OpenBatch {
    sequences: Vec<Sequence>,
    longest: u64,
    /// Limit on the number of sequences; valid if there is a sequence.
    max_rows: u64,
}

impl OpenBatch {
    /// Adds a sequence, moving at most two full batches to `ready`.
    pub(crate) fn push(
        &mut self,
        sequence: Sequence,
        limits: &BatchLimits,
        ready: &mut VecDeque<Batch>,
    ) {
        if self.sequences.is_empty() || sequence.length > self.longest {
            self.set_longest(sequence.length, limits);
        }
        self.sequences.push(sequence);
        while let Some(size) = limits.full_size(self.sequences.len(), self.max_rows) {
            ready.push_back(self.close(size, limits));
        }
    }

    /// Sets the length of the longest sequence.
    fn set_longest(&mut self, longest: u64, limits: &BatchLimits) {
        self.longest = longest;
        self.max_rows = limits.max_rows(limits.padded_length(longest));
    }

    /// Closes a batch of the first `size` sequences; the remaining sequences open the next batch.
    fn close(&mut self, size: usize, limits: &BatchLimits) -> Batch {
        let batch = limits.batch(self.sequences.drain(..size));
        if let Some(longest) = self.sequences.iter().map(|sequence| sequence.length).max() {
            self.set_longest(longest, limits);
        }
        batch
    }

    /// Moves the last batches to `ready` and returns the number of dropped sequences.
    pub(crate) fn finish(mut self, limits: &BatchLimits, ready: &mut VecDeque<Batch>) -> u64 {
        let (n_in_groups, surplus) = limits.split_remainder(self.sequences.len());
        for size in [n_in_groups, surplus] {
            if size > 0 {
                ready.push_back(self.close(size, limits));
            }
        }
        self.sequences.len() as u64
    }
}
