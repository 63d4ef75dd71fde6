//! Lengths counted, and sequences sorted by them.

#![expect(
    clippy::cast_possible_truncation,
    reason = "counts, places and table entries fit the memory that holds them"
)]

use std::{collections::BTreeMap, ops::Range};

/// Sequences of one length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Run {
    pub(crate) length: u64,
    pub(crate) count: u64,
}

/// Lengths up to here are counted in a table, longer ones in a map.
const TABLE: u64 = 1 << 20;

/// How many sequences there are of each length.
#[derive(Clone, Debug, Default)]
pub(crate) struct Histogram {
    runs: Vec<Run>,
}

impl Histogram {
    pub(crate) fn new(lengths: impl Iterator<Item = u64>) -> Self {
        let mut counter = Counter::default();
        lengths.for_each(|length| counter.add(length));
        counter.finish()
    }

    /// One run for each length that occurs, ascending.
    pub(crate) fn runs(&self) -> &[Run] {
        &self.runs
    }

    pub(crate) fn count(&self) -> u64 {
        self.runs.iter().map(|run| run.count).sum()
    }

    /// The sequences at these places, if all are sorted.
    pub(crate) fn range(&self, places: Range<usize>) -> Self {
        let (start, end) = (places.start as u64, places.end as u64);
        let runs = self.runs.iter().scan(0, |below, &Run { length, count }| {
            let (first, last) = (start.max(*below), end.min(*below + count));
            *below += count;
            Some(Run { length, count: last.saturating_sub(first) })
        });
        Self { runs: runs.filter(|run| run.count > 0).collect() }
    }
}

/// A histogram in the making.
#[derive(Debug, Default)]
pub(crate) struct Counter {
    short: Vec<u64>,
    long: BTreeMap<u64, u64>,
}

impl Counter {
    #[inline]
    pub(crate) fn add(&mut self, length: u64) {
        match self.short.get_mut(length as usize) {
            Some(count) if length < TABLE => *count += 1,
            Some(_) | None => self.add_new(length),
        }
    }

    #[cold]
    fn add_new(&mut self, length: u64) {
        if length < TABLE {
            self.short.resize((length as usize + 1).next_power_of_two(), 0);
            self.short[length as usize] += 1;
        } else {
            *self.long.entry(length).or_default() += 1;
        }
    }

    pub(crate) fn finish(self) -> Histogram {
        let short = (0..).zip(self.short).filter(|(_, count)| *count > 0);
        Histogram {
            runs: short.chain(self.long).map(|(length, count)| Run { length, count }).collect(),
        }
    }
}

/// What stands in the table for a length that does not occur.
const NO_SLOT: u32 = u32::MAX;

/// Where the next sequence of each length goes if all are sorted by length, and by their order
/// among equals; for fewer than 2^32 sequences.
#[derive(Debug)]
pub(crate) struct Slots {
    short: Vec<u32>,
    long: BTreeMap<u64, u32>,
}

impl Slots {
    pub(crate) fn new(histogram: &Histogram) -> Self {
        let mut slots = Self { short: Vec::new(), long: BTreeMap::new() };
        let mut next = 0;
        for run in histogram.runs() {
            if run.length < TABLE {
                slots.short.resize(run.length as usize, NO_SLOT);
                slots.short.push(next);
            } else {
                slots.long.insert(run.length, next);
            }
            next += run.count as u32;
        }
        slots
    }

    /// The slot of the next sequence of this length, one of those that were counted.
    #[inline]
    #[expect(clippy::expect_used, reason = "lengths are the same each time, or nothing is sorted")]
    pub(crate) fn take(&mut self, length: u64) -> usize {
        let next = if length < TABLE {
            self.short.get_mut(length as usize)
        } else {
            self.long.get_mut(&length)
        };
        let next = next.expect("the sequences that are sorted are those that were counted");
        let slot = *next;
        *next += 1;
        slot as usize
    }
}
