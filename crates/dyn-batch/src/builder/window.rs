//! Sorting with bounded memory: a window of some batches' worth of sequences at a time.

use std::ops::Range;

use crate::{
    batch::{Batch, Sequence},
    builder::sorted_set as whole_set,
    config::Cut,
    lengths::histogram::Histogram,
    limits::Limits,
    sort::cut::Groups,
};

/// One batch, as a share of which sequences are counted.
const ONE: u64 = 1 << 32;

/// Sequences that wait until there are enough of them.
#[derive(Clone, Debug)]
pub(crate) struct Window {
    cut: Cut,
    sequences: Vec<Sequence>,
    /// How many batches they make, in parts of [`ONE`].
    fill: u128,
    /// At how many the window is full.
    full: u128,
    n_cut: u64,
}

impl Window {
    /// A window of so many batches.
    pub(crate) fn new(batches: u64, cut: Cut) -> Self {
        // One more for the sequences that move on.
        let full = (u128::from(batches) + 1) * u128::from(ONE);
        Self { cut, sequences: Vec::new(), fill: 0, full, n_cut: 0 }
    }

    /// Adds a sequence; returns the batches of a window that is full with it.
    pub(crate) fn push(&mut self, sequence: Sequence, limits: &Limits) -> Vec<Batch> {
        self.sequences.push(sequence);
        self.fill += share(sequence, limits);
        if self.fill < self.full { Vec::new() } else { self.cut_full(limits) }
    }

    pub(crate) fn cut(&self) -> Cut {
        self.cut
    }

    /// Takes out the sequences of the window that did not become full.
    pub(crate) fn take(&mut self) -> Vec<Sequence> {
        std::mem::take(&mut self.sequences)
    }

    /// Cuts full batches and leaves the others to the next window: those at the short end and those
    /// at the long end in turn, so that no length waits forever.
    fn cut_full(&mut self, limits: &Limits) -> Vec<Batch> {
        let lengths = || self.sequences.iter().map(|sequence| sequence.length);
        let histogram = Histogram::new(lengths());
        let sorted = whole_set::sort(&histogram, (0..).zip(lengths()));
        let full = self.full_batches(&histogram, sorted.len(), limits);
        let groups = Groups::new(&histogram.range(full.clone()), limits);
        let mut start = full.start;
        let mut batches = Vec::new();
        for end in self.ends(&groups) {
            let end = full.start + end * limits.group_len();
            let places = sorted[start..end].iter();
            batches.push(limits.batch(places.map(|&place| self.sequences[place as usize])));
            start = end;
        }
        self.keep(&[&sorted[..full.start], &sorted[full.end..]].concat(), limits);
        self.n_cut += 1;
        batches
    }

    /// Which of the sorted sequences are cut now. The batch that takes what is left by the others
    /// may not be full, so it waits; if it is the only one, then all do.
    fn full_batches(&self, histogram: &Histogram, len: usize, limits: &Limits) -> Range<usize> {
        let group_len = limits.group_len();
        let surplus = len % group_len;
        let groups = Groups::new(&histogram.range(surplus..len), limits);
        let at = |n_groups: usize| surplus + n_groups * group_len;
        if self.leaves_short() {
            match groups.longest_first().as_slice() {
                [end_of_shortest, ..] => at(*end_of_shortest)..len,
                [] => len..len,
            }
        } else {
            match groups.shortest_first().as_slice() {
                [.., start_of_longest, _] => surplus..at(*start_of_longest),
                [] | [_] => surplus..surplus,
            }
        }
    }

    fn leaves_short(&self) -> bool {
        self.n_cut % 2 == 0
    }

    /// Where the batches of groups end.
    fn ends(&self, groups: &Groups) -> Vec<usize> {
        match self.cut {
            Cut::Greedy if self.leaves_short() => groups.longest_first(),
            // Cut from the side where the last batch was found to be full.
            Cut::Greedy => groups.shortest_first(),
            Cut::Optimal => groups.cut(Cut::Optimal),
        }
    }

    /// Leaves the sequences at these places for the next window. Equal ones are in the order in which
    /// they came, and before those that are yet to come.
    fn keep(&mut self, places: &[u32], limits: &Limits) {
        self.sequences = places.iter().map(|&place| self.sequences[place as usize]).collect();
        self.fill = self.sequences.iter().map(|&sequence| share(sequence, limits)).sum();
    }
}

/// How much of a batch a sequence takes, at least: batches of sequences like this one would hold as
/// many as fit.
fn share(sequence: Sequence, limits: &Limits) -> u128 {
    // At least one, since the sequence was admitted.
    let rows = limits.max_rows(limits.padded_length(sequence.length));
    u128::from(ONE.div_ceil(rows))
}
