//! Arrangement of a whole data set into batches, common to sorting and packing.

#![expect(
    clippy::cast_possible_truncation,
    reason = "at most 2^32 sequences are arranged together, and no table has more entries"
)]

use std::ops::Range;

use crate::{
    config::Cut,
    error::{Error, Result},
    lengths::histogram::{LengthHistogram, LengthRun, SortSlots},
    limits::BatchLimits,
    pack::{self, PackedRows},
    sort::cut::SortedGroups,
};

/// The sequences of each batch.
#[derive(Debug, Default)]
pub(crate) struct BatchArrangement {
    /// Numbers of the sequences, batch by batch.
    pub(crate) ids: Vec<u32>,
    /// Ranges of the batches in [`ids`](Self::ids).
    pub(crate) batches: Vec<PlannedBatch>,
    /// Number of surplus sequences that are in no batch: too few for one more group of
    /// `batch_size_multiple`.
    pub(crate) dropped: u64,
}

/// A batch as a range of a list of sequences.
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

/// A strategy that needs all sequences at once.
#[derive(Clone, Copy, Debug)]
pub(crate) enum WholeSetStrategy {
    Sorted(Cut),
    BestFit,
    MinimumSlack,
}

impl WholeSetStrategy {
    /// Arranges admitted sequences, given by number and length. Sequences of equal length keep
    /// their order.
    ///
    /// `known_group_ends` are the ends of sorted batches, counted in groups and without the
    /// surplus. They are used if they respect the limits.
    pub(crate) fn arrange(
        self,
        histogram: &LengthHistogram,
        sequences: impl Iterator<Item = (u32, u64)>,
        limits: &BatchLimits,
        known_group_ends: Option<Vec<usize>>,
    ) -> Result<BatchArrangement> {
        let count = histogram.count();
        if u32::try_from(count).is_err() {
            return Err(Error::TooManySequences { count, limit: u32::MAX.into() });
        }
        let sorted = sort(histogram, sequences);
        Ok(match self {
            Self::Sorted(cut) => arrange_sorted(histogram, sorted, cut, limits, known_group_ends),
            Self::BestFit => arrange_rows(&pack::best_fit(histogram, limits), &sorted, limits),
            Self::MinimumSlack => {
                arrange_rows(&pack::minimum_slack(histogram, limits), &sorted, limits)
            }
        })
    }
}

/// Returns the numbers of the sequences from the shortest to the longest; equal lengths keep their
/// order.
pub(crate) fn sort(
    histogram: &LengthHistogram,
    sequences: impl Iterator<Item = (u32, u64)>,
) -> Vec<u32> {
    let mut slots = SortSlots::new(histogram);
    let mut sorted = vec![0; histogram.count() as usize];
    for (id, length) in sequences {
        sorted[slots.take(length)] = id;
    }
    sorted
}

/// Cuts the sequences `sorted` from the shortest to the longest into batches.
fn arrange_sorted(
    histogram: &LengthHistogram,
    mut sorted: Vec<u32>,
    cut: Cut,
    limits: &BatchLimits,
    known_group_ends: Option<Vec<usize>>,
) -> BatchArrangement {
    // The surplus consists of the shortest sequences, because dropping them or giving them a small
    // batch costs least.
    let len = sorted.len();
    let (n_in_groups, n_kept) = limits.split_remainder(len);
    let n_surplus = len - n_in_groups;
    let n_dropped = n_surplus - n_kept;
    let groups = SortedGroups::new(&histogram.range(n_surplus..len), limits);
    let group_ends = match known_group_ends {
        Some(ends) if groups.allows(&ends) => ends,
        Some(_) | None => groups.batch_ends(cut),
    };
    let mut ends = Vec::with_capacity(group_ends.len() + 1);
    if n_kept > 0 {
        ends.push(n_kept);
    }
    for end in group_ends {
        ends.push(n_kept + end * limits.group_len());
    }
    let batches = plan_batches(histogram.range(n_dropped..len).runs(), &ends, limits);
    sorted.drain(..n_dropped);
    BatchArrangement { ids: sorted, batches, dropped: n_dropped as u64 }
}

/// Arranges packed rows; `sorted` are the sequences from the shortest to the longest.
fn arrange_rows(rows: &PackedRows, sorted: &[u32], limits: &BatchLimits) -> BatchArrangement {
    let empty = limits.empty_row();
    let mut batches = Vec::with_capacity(rows.free_space.len());
    let mut start = 0;
    for &free_space in &rows.free_space {
        let end = start + (empty.sequences - free_space.sequences) as u32;
        let real_tokens = empty.tokens - free_space.tokens;
        batches.push(PlannedBatch { range: start..end, padded_length: empty.tokens, real_tokens });
        start = end;
    }
    // Rows are filled from their ends in ascending order of length, so that the longest sequence
    // comes first.
    let mut row_cursors: Vec<u32> = batches.iter().map(|batch| batch.range.end).collect();
    let mut ids = vec![0; sorted.len()];
    // `row_of` goes from the longest sequence to the shortest, so it is reversed to match `sorted`.
    for (&row, &id) in rows.row_of.iter().rev().zip(sorted) {
        let cursor = &mut row_cursors[row as usize];
        *cursor -= 1;
        ids[*cursor as usize] = id;
    }
    BatchArrangement { ids, batches, dropped: 0 }
}

/// Plans batches of sorted sequences, given the end of each batch; the last one ends with the runs.
fn plan_batches(runs: &[LengthRun], ends: &[usize], limits: &BatchLimits) -> Vec<PlannedBatch> {
    let mut taker = RunTaker { runs: runs.iter(), current: LengthRun { length: 0, count: 0 } };
    let mut batches = Vec::with_capacity(ends.len());
    let mut start = 0;
    for &end in ends {
        let (real_tokens, longest) = taker.take((end - start) as u64);
        let padded_length = limits.padded_length(longest);
        let range = start as u32..end as u32;
        batches.push(PlannedBatch { range, padded_length, real_tokens });
        start = end;
    }
    batches
}

/// A cursor that takes sorted sequences from their runs.
struct RunTaker<'a> {
    runs: std::slice::Iter<'a, LengthRun>,
    /// The remainder of the run of the last sequence.
    current: LengthRun,
}

impl RunTaker<'_> {
    /// Takes the next `count` sequences. Returns the sum of their lengths and the length of the
    /// longest sequence, which is the last one.
    #[expect(clippy::expect_used, reason = "the last batch ends with the last run")]
    fn take(&mut self, count: u64) -> (u64, u64) {
        let mut n_missing = count;
        let mut tokens = 0;
        while n_missing > 0 {
            if self.current.count == 0 {
                self.current = *self.runs.next().expect("no batch ends after the last sequence");
            }
            let n_taken = n_missing.min(self.current.count);
            tokens += n_taken * self.current.length;
            n_missing -= n_taken;
            self.current.count -= n_taken;
        }
        (tokens, self.current.length)
    }
}
