//! Sorting with bounded memory: a window of some batches' worth of sequences at a time.

#![allow(
    clippy::cast_possible_truncation,
    reason = "at most 2^32 sequences are arranged together, and tables are as long"
)]

use crate::{
    assembly::whole_set,
    batch::{Batch, Sequence},
    config::Cut,
    limits::Limits,
    sort::{cut::Groups, histogram::Histogram},
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
    /// at the long end in turn, so that no length waits for ever.
    fn cut_full(&mut self, limits: &Limits) -> Vec<Batch> {
        let histogram = Histogram::new(self.sequences.iter().map(|sequence| sequence.length));
        let sorted = whole_set::sort(
            &histogram,
            (0..).zip(self.sequences.iter().map(|sequence| sequence.length)),
        );
        let (len, group_len) = (sorted.len(), limits.group_len());
        let surplus = len % group_len;
        let groups = Groups::new(&histogram.range(surplus..len), limits);
        let at = |n_groups: usize| surplus + n_groups * group_len;
        let leaves_short = self.n_cut % 2 == 0;
        let full = if leaves_short {
            at(groups.longest_first().first().copied().unwrap_or(0))..len
        } else {
            surplus..at(groups.shortest_first().iter().rev().nth(1).copied().unwrap_or(0))
        };
        let groups = Groups::new(&histogram.range(full.clone()), limits);
        let ends = match self.cut {
            Cut::Greedy if !leaves_short => groups.shortest_first(),
            cut => groups.cut(cut),
        };
        let mut start = full.start;
        let batches = ends.into_iter().map(|end| {
            let places = &sorted[start..full.start + end * group_len];
            start += places.len();
            Batch::gather(places.iter().map(|&place| self.sequences[place as usize]), limits)
        });
        let batches = batches.collect();
        // In the order in which they came, so that equal ones leave in that order.
        let mut left: Vec<u32> =
            sorted[..full.start].iter().chain(&sorted[full.end..]).copied().collect();
        left.sort_unstable();
        self.sequences = left.iter().map(|&place| self.sequences[place as usize]).collect();
        self.fill = self.sequences.iter().map(|&sequence| share(sequence, limits)).sum();
        self.n_cut += 1;
        batches
    }
}

/// How much of a batch a sequence takes, at least: batches of sequences like this one would hold as
/// many as fit.
fn share(sequence: Sequence, limits: &Limits) -> u128 {
    let rows = limits.max_rows(limits.padded_length(sequence.length)).max(1);
    u128::from(ONE.div_ceil(rows))
}
