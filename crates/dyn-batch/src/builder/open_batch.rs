//! A batch that grows sequence by sequence until it is full.

use std::collections::VecDeque;

use crate::{
    batch::{Batch, Sequence},
    limits::Limits,
};

/// A batch that still grows.
#[derive(Clone, Debug, Default)]
pub(crate) struct OpenBatch {
    sequences: Vec<Sequence>,
    longest: u64,
    /// The most sequences it may hold; counts only if there are some.
    max_rows: u64,
}

impl OpenBatch {
    /// Adds a sequence; a batch that is full with it goes to `ready`, at most two.
    pub(crate) fn push(
        &mut self,
        sequence: Sequence,
        limits: &Limits,
        ready: &mut VecDeque<Batch>,
    ) {
        if self.sequences.is_empty() || sequence.length > self.longest {
            self.lengthen(sequence.length, limits);
        }
        self.sequences.push(sequence);
        while let Some(size) = limits.full(self.sequences.len(), self.max_rows) {
            ready.push_back(self.close(size, limits));
        }
    }

    fn lengthen(&mut self, longest: u64, limits: &Limits) {
        self.longest = longest;
        self.max_rows = limits.max_rows(limits.padded_length(longest));
    }

    /// Takes out the first `size` sequences; the others stay and open the next batch.
    fn close(&mut self, size: usize, limits: &Limits) -> Batch {
        let batch = limits.batch(self.sequences.drain(..size));
        let longest = self.sequences.iter().map(|sequence| sequence.length).max();
        if let Some(longest) = longest {
            self.lengthen(longest, limits);
        }
        batch
    }

    /// Makes the last batches; returns how many sequences are dropped.
    pub(crate) fn finish(mut self, limits: &Limits, ready: &mut VecDeque<Batch>) -> u64 {
        let (whole, surplus) = limits.last(self.sequences.len());
        for size in [whole, surplus].into_iter().filter(|&size| size > 0) {
            ready.push_back(self.close(size, limits));
        }
        self.sequences.len() as u64
    }
}
