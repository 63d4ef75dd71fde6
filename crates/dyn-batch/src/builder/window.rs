//! Sorting with bounded memory: a window of sequences for a number of batches.

use std::ops::Range;

use crate::{
    batch::{Batch, Sequence},
    builder::whole_set,
    config::Cut,
    lengths::histogram::LengthHistogram,
    limits::BatchLimits,
    sort::cut::SortedGroups,
};

/// The fill of one full batch, in fixed-point units.
const FULL_BATCH: u64 = 1 << 32;

/// Sequences that wait for a full window.
#[derive(Clone, Debug)]
pub(crate) struct SortWindow {
    cut: Cut,
    sequences: Vec<Sequence>,
    /// Number of batches that the sequences fill, in units of [`FULL_BATCH`].
    fill: u128,
    /// Fill at which the window is full.
    full: u128,
    /// Number of windows cut so far.
    n_cut: u64,
}

impl SortWindow {
    /// Creates a window of `batches` batches.
    pub(crate) fn new(batches: u64, cut: Cut) -> Self {
        // One more batch, for the sequences that stay for the next window.
        let full = (u128::from(batches) + 1) * u128::from(FULL_BATCH);
        Self { cut, sequences: Vec::new(), fill: 0, full, n_cut: 0 }
    }

    /// Adds a sequence and returns the batches of the window if it is full.
    pub(crate) fn push(&mut self, sequence: Sequence, limits: &BatchLimits) -> Vec<Batch> {
        self.sequences.push(sequence);
        self.fill += share(sequence, limits);
        if self.fill < self.full { Vec::new() } else { self.cut_full(limits) }
    }

    pub(crate) fn cut(&self) -> Cut {
        self.cut
    }

    /// Takes the sequences of the last window, which did not fill.
    pub(crate) fn take(&mut self) -> Vec<Sequence> {
        std::mem::take(&mut self.sequences)
    }

    /// Cuts full batches and keeps the other sequences for the next window: alternately the
    /// shortest and the longest, so that no length waits forever.
    fn cut_full(&mut self, limits: &BatchLimits) -> Vec<Batch> {
        let lengths = || self.sequences.iter().map(|sequence| sequence.length);
        let histogram = LengthHistogram::new(lengths());
        let sorted = whole_set::sort(&histogram, (0..).zip(lengths()));
        let full = self.full_batches(&histogram, sorted.len(), limits);
        let groups = SortedGroups::new(&histogram.range(full.clone()), limits);
        let mut start = full.start;
        let mut batches = Vec::new();
        for group_end in self.group_ends(&groups) {
            let end = full.start + group_end * limits.group_len();
            let positions = sorted[start..end].iter();
            let sequences = positions.map(|&position| self.sequences[position as usize]);
            batches.push(limits.batch(sequences));
            start = end;
        }
        self.keep(&[&sorted[..full.start], &sorted[full.end..]].concat(), limits);
        self.n_cut += 1;
        batches
    }

    /// Returns the range of the sorted sequences to cut now. The batch at the end that is kept may
    /// not be full, so its sequences stay, even if it is the only batch.
    fn full_batches(
        &self,
        histogram: &LengthHistogram,
        len: usize,
        limits: &BatchLimits,
    ) -> Range<usize> {
        let group_len = limits.group_len();
        let surplus = len % group_len;
        let groups = SortedGroups::new(&histogram.range(surplus..len), limits);
        if self.keeps_short() {
            match groups.longest_first().as_slice() {
                [end_of_shortest, ..] => surplus + end_of_shortest * group_len..len,
                [] => len..len,
            }
        } else {
            match groups.shortest_first().as_slice() {
                [.., start_of_longest, _] => surplus..surplus + start_of_longest * group_len,
                [] | [_] => surplus..surplus,
            }
        }
    }

    /// Returns true if this window keeps the shortest sequences for the next one, and false if it
    /// keeps the longest.
    fn keeps_short(&self) -> bool {
        self.n_cut % 2 == 0
    }

    /// Returns the ends of the batches, counted in groups.
    fn group_ends(&self, groups: &SortedGroups) -> Vec<usize> {
        match self.cut {
            // Cut from the same end as `full_batches`, so that all batches are full.
            Cut::Greedy if self.keeps_short() => groups.longest_first(),
            Cut::Greedy => groups.shortest_first(),
            Cut::Optimal => groups.batch_ends(Cut::Optimal),
        }
    }

    /// Keeps the sequences at these positions for the next window. Equal lengths stay in the order
    /// of arrival, before later ones.
    fn keep(&mut self, positions: &[u32], limits: &BatchLimits) {
        let kept = positions.iter().map(|&position| self.sequences[position as usize]);
        self.sequences = kept.collect();
        self.fill = self.sequences.iter().map(|&sequence| share(sequence, limits)).sum();
    }
}

/// Returns the smallest share of a batch that a sequence can fill: its share among sequences of the
/// same length.
fn share(sequence: Sequence, limits: &BatchLimits) -> u128 {
    // `rows` is at least one, because the sequence was admitted.
    let rows = limits.max_rows(limits.padded_length(sequence.length));
    u128::from(FULL_BATCH.div_ceil(rows))
}
