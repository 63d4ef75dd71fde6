//! All sequences of a data set, arranged in batches: what sorting and packing do alike.

#![expect(
    clippy::cast_possible_truncation,
    reason = "at most 2^32 sequences are arranged together, and tables are as long"
)]

use std::ops::Range;

use crate::{
    config::Cut,
    error::{Error, Result},
    lengths::histogram::{Histogram, Run, Slots},
    limits::{Limits, Row},
    pack::{self, Rows},
    sort::cut::Groups,
};

/// Sequences, batch by batch.
#[derive(Debug, Default)]
pub(crate) struct Arrangement {
    /// The numbers by which the caller knows the sequences of all batches.
    pub(crate) ids: Vec<u32>,
    /// Where in [`ids`](Self::ids) each batch is.
    pub(crate) batches: Vec<PlannedBatch>,
    /// How many sequences are in no batch, because they cannot fill up the multiple.
    pub(crate) dropped: u64,
}

/// A batch whose sequences stand in a list, from a place to another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PlannedBatch {
    pub(crate) range: Range<u32>,
    pub(crate) padded_length: u64,
    pub(crate) real_tokens: u64,
}

impl PlannedBatch {
    pub(crate) fn len(&self) -> usize {
        (self.range.end - self.range.start) as usize
    }
}

/// How a strategy that needs to see all sequences arranges them.
#[derive(Clone, Copy, Debug)]
pub(crate) enum WholeSetStrategy {
    Sorted(Cut),
    BestFit,
    MinimumSlack,
}

impl WholeSetStrategy {
    /// Arranges sequences, given by number and length, which are admitted; equal ones stay in
    /// order. Sorted ones are cut at the `known` ends if these are within the limits.
    pub(crate) fn arrange(
        self,
        histogram: &Histogram,
        sequences: impl Iterator<Item = (u32, u64)>,
        limits: &Limits,
        known: Option<Vec<usize>>,
    ) -> Result<Arrangement> {
        let count = histogram.count();
        if u32::try_from(count).is_err() {
            return Err(Error::TooManySequences { count, limit: u32::MAX.into() });
        }
        let sorted = sort(histogram, sequences);
        Ok(match self {
            Self::Sorted(cut) => sorted_batches(histogram, sorted, cut, limits, known),
            Self::BestFit => rows(&pack::best_fit(histogram, limits.empty_row()), &sorted, limits),
            Self::MinimumSlack => {
                rows(&pack::minimum_slack(histogram, limits.empty_row()), &sorted, limits)
            }
        })
    }
}

/// The numbers of the sequences, from the shortest to the longest.
pub(crate) fn sort(histogram: &Histogram, sequences: impl Iterator<Item = (u32, u64)>) -> Vec<u32> {
    let mut slots = Slots::new(histogram);
    let mut sorted = vec![0; histogram.count() as usize];
    for (id, length) in sequences {
        sorted[slots.take(length)] = id;
    }
    sorted
}

fn sorted_batches(
    histogram: &Histogram,
    mut sorted: Vec<u32>,
    cut: Cut,
    limits: &Limits,
    known: Option<Vec<usize>>,
) -> Arrangement {
    // The surplus are the shortest, whose loss, or whose small batch, costs least.
    let (len, group_len) = (sorted.len(), limits.group_len());
    let (whole, kept) = limits.last(len);
    let (surplus, dropped) = (len - whole, len - whole - kept);
    let groups = Groups::new(&histogram.range(surplus..len), limits);
    let ends_of_groups = match known {
        Some(ends) if groups.allows(&ends) => ends,
        Some(_) | None => groups.cut(cut),
    };
    let first_end = (kept > 0).then_some(kept);
    let other_ends = ends_of_groups.into_iter().map(|end| kept + end * group_len);
    let ends = first_end.into_iter().chain(other_ends);
    let batches = batches_of(histogram.range(dropped..len).runs(), ends, limits);
    sorted.drain(..dropped);
    Arrangement { ids: sorted, batches, dropped: dropped as u64 }
}

/// The sequences of each row, by the rows of the sequences from the longest to the shortest.
fn rows(rows: &Rows, sorted: &[u32], limits: &Limits) -> Arrangement {
    let empty = limits.empty_row();
    let mut batches = Vec::with_capacity(rows.left.len());
    let mut start = 0;
    for &left in &rows.left {
        let end = start + (empty.sequences - left.sequences) as u32;
        batches.push(row(start..end, empty, left));
        start = end;
    }
    // Rows are filled from their ends, by ascending length, so that the longest comes first.
    let mut next: Vec<u32> = batches.iter().map(|batch| batch.range.end).collect();
    let mut ids = vec![0; sorted.len()];
    for (&row, &id) in rows.row_of.iter().rev().zip(sorted) {
        next[row as usize] -= 1;
        ids[next[row as usize] as usize] = id;
    }
    Arrangement { ids, batches, dropped: 0 }
}

fn row(range: Range<u32>, empty: Row, left: Row) -> PlannedBatch {
    PlannedBatch { range, padded_length: empty.tokens, real_tokens: empty.tokens - left.tokens }
}

/// The batches of sorted sequences that end at these places, the last of them where the runs do.
fn batches_of(
    runs: &[Run],
    ends: impl Iterator<Item = usize>,
    limits: &Limits,
) -> Vec<PlannedBatch> {
    let mut taker = Taker { runs: runs.iter(), open: Run { length: 0, count: 0 } };
    let mut start = 0;
    let batch = |end: usize| {
        let range = start as u32..end as u32;
        let real_tokens = taker.take((end - start) as u64);
        start = end;
        let padded_length = limits.padded_length(taker.open.length);
        PlannedBatch { range, padded_length, real_tokens }
    };
    ends.map(batch).collect()
}

/// Takes sorted sequences off their runs.
struct Taker<'a> {
    runs: std::slice::Iter<'a, Run>,
    /// The run of the last sequence, and what is left of it.
    open: Run,
}

impl Taker<'_> {
    /// Takes the next `count` sequences; returns the sum of their lengths.
    #[expect(clippy::expect_used, reason = "the last batch ends with the last run")]
    fn take(&mut self, count: u64) -> u64 {
        let mut missing = count;
        let mut tokens = 0;
        while missing > 0 {
            if self.open.count == 0 {
                self.open = *self.runs.next().expect("no batch ends behind the last sequence");
            }
            let taken = missing.min(self.open.count);
            tokens += taken * self.open.length;
            missing -= taken;
            self.open.count -= taken;
        }
        tokens
    }
}
