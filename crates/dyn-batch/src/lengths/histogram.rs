//! Histograms of lengths, and counting sort by length.

#![expect(
    clippy::cast_possible_truncation,
    reason = "sequences in memory are counted, and lengths are compared with `TABLE_LEN`"
)]

use std::{collections::BTreeMap, ops::Range};

/// The sequences of one length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LengthRun {
    pub(crate) length: u64,
    pub(crate) count: u64,
}

/// Lengths below this bound have an entry in a table; longer lengths have an entry in a map.
const TABLE_LEN: u64 = 1 << 20;

/// The number of sequences of each length.
#[derive(Clone, Debug, Default)]
pub(crate) struct LengthHistogram {
    runs: Vec<LengthRun>,
}

impl LengthHistogram {
    /// Counts lengths.
    pub(crate) fn new(lengths: impl Iterator<Item = u64>) -> Self {
        let mut counter = LengthCounter::default();
        for length in lengths {
            counter.add(length);
        }
        counter.finish()
    }

    /// Returns the runs in ascending order of their lengths.
    pub(crate) fn runs(&self) -> &[LengthRun] {
        &self.runs
    }

    /// Returns the number of sequences.
    pub(crate) fn count(&self) -> u64 {
        self.runs.iter().map(|run| run.count).sum()
    }

    /// Returns the histogram of the sequences at these positions in the sorted order.
    pub(crate) fn range(&self, range: Range<usize>) -> Self {
        let mut runs = Vec::new();
        let mut run_start = 0;
        for &LengthRun { length, count } in &self.runs {
            let first = run_start.max(range.start as u64);
            run_start += count;
            let end = run_start.min(range.end as u64);
            if first < end {
                runs.push(LengthRun { length, count: end - first });
            }
        }
        Self { runs }
    }
}

/// A histogram under construction.
#[derive(Debug, Default)]
pub(crate) struct LengthCounter {
    short: Vec<u64>,
    long: BTreeMap<u64, u64>,
}

impl LengthCounter {
    #[inline]
    pub(crate) fn add(&mut self, length: u64) {
        match self.short.get_mut(length as usize) {
            Some(count) if length < TABLE_LEN => *count += 1,
            Some(_) | None => self.add_outside_table(length),
        }
    }

    /// Counts a length beyond the table, which grows if the length is short.
    #[cold]
    fn add_outside_table(&mut self, length: u64) {
        if length < TABLE_LEN {
            self.short.resize((length as usize + 1).next_power_of_two(), 0);
            self.short[length as usize] += 1;
        } else {
            *self.long.entry(length).or_default() += 1;
        }
    }

    pub(crate) fn finish(self) -> LengthHistogram {
        let short = (0..).zip(self.short).filter(|(_, count)| *count > 0);
        LengthHistogram {
            runs: short
                .chain(self.long)
                .map(|(length, count)| LengthRun { length, count })
                .collect(),
        }
    }
}

/// The table entry of a length that does not occur.
const NO_SLOT: u32 = u32::MAX;

/// The position of the next sequence of each length in the sorted order; equal lengths keep their
/// order. There must be fewer than 2^32 sequences.
#[derive(Debug)]
pub(crate) struct SortSlots {
    short: Vec<u32>,
    long: BTreeMap<u64, u32>,
}

impl SortSlots {
    pub(crate) fn new(histogram: &LengthHistogram) -> Self {
        let mut slots = Self { short: Vec::new(), long: BTreeMap::new() };
        let mut next = 0;
        for run in histogram.runs() {
            if run.length < TABLE_LEN {
                slots.short.resize(run.length as usize, NO_SLOT);
                slots.short.push(next);
            } else {
                slots.long.insert(run.length, next);
            }
            next += run.count as u32;
        }
        slots
    }

    /// Returns the position of the next sequence of this length, which must have been counted.
    #[inline]
    #[expect(
        clippy::expect_used,
        reason = "`SequenceLengths` must return equal lengths in each pass"
    )]
    pub(crate) fn take(&mut self, length: u64) -> usize {
        let next = if length < TABLE_LEN {
            self.short.get_mut(length as usize)
        } else {
            self.long.get_mut(&length)
        };
        let next = next.expect("sorted sequences were counted");
        let slot = *next;
        *next += 1;
        slot as usize
    }
}
