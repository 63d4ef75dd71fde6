//! All sequences of a data set, arranged in batches: what sorting and packing do alike.

#![allow(
    clippy::cast_possible_truncation,
    reason = "at most 2^32 sequences are arranged together, and tables are as long"
)]

use std::ops::Range;

use crate::{
    config::{Cut, DynamicBatchStrategy, Packing},
    error::{Error, Result},
    limits::Limits,
    pack,
    sort::{
        cut::Groups,
        histogram::{Histogram, Run, Slots},
    },
};

/// Sequences by name, and batches of them.
#[derive(Debug, Default)]
pub(crate) struct Arrangement {
    pub(crate) names: Vec<u32>,
    pub(crate) batches: Vec<Planned>,
    /// How many sequences are in no batch, because they cannot fill up the multiple.
    pub(crate) dropped: u64,
}

/// A batch whose sequences stand in a list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Planned {
    pub(crate) places: Range<u32>,
    pub(crate) padded_length: u64,
    pub(crate) real_tokens: u64,
}

impl Planned {
    pub(crate) fn len(&self) -> usize {
        (self.places.end - self.places.start) as usize
    }
}

/// Returns how a strategy that needs to see all sequences arranges them; `None` for the others.
pub(crate) fn of_whole_set(strategy: &DynamicBatchStrategy) -> Option<Whole> {
    match strategy {
        DynamicBatchStrategy::Sorted { window: None, cut } => Some(Whole::Sorted(*cut)),
        DynamicBatchStrategy::Pack(packing @ (Packing::BestFit | Packing::MinimumSlack)) => {
            Some(Whole::Packed(*packing))
        }
        _ => None,
    }
}

/// A strategy that needs to see all sequences.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Whole {
    Sorted(Cut),
    Packed(Packing),
}

impl Whole {
    /// Arranges sequences, given by name and length, which are admitted; equal ones stay in order.
    /// If it is known where sorted ones are to be cut, then there.
    pub(crate) fn arrange<I>(
        self,
        histogram: &Histogram,
        sequences: I,
        limits: &Limits,
        known: Option<Vec<usize>>,
    ) -> Result<Arrangement>
    where
        I: Iterator<Item = (u32, u64)>,
    {
        let count = histogram.count();
        if u32::try_from(count).is_err() {
            return Err(Error::TooManySequences { count, limit: u32::MAX.into() });
        }
        let sorted = sort(histogram, sequences);
        Ok(match self {
            Self::Sorted(cut) => sorted_batches(histogram, sorted, cut, limits, known),
            Self::Packed(packing) => rows(histogram, &sorted, packing, limits),
        })
    }
}

/// The names of the sequences, from the shortest to the longest.
pub(crate) fn sort(histogram: &Histogram, sequences: impl Iterator<Item = (u32, u64)>) -> Vec<u32> {
    let (mut slots, mut sorted) = (Slots::new(histogram), vec![0; histogram.count() as usize]);
    for (name, length) in sequences {
        if let Some(slot) = slots.take(length).and_then(|slot| sorted.get_mut(slot)) {
            *slot = name;
        }
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
    let ends = known.filter(|ends| groups.allows(ends)).unwrap_or_else(|| groups.cut(cut));
    let ends = ends.into_iter().map(|end| kept + end * group_len);
    let ends = (kept > 0).then_some(kept).into_iter().chain(ends);
    let batches = batches_of(histogram.range(dropped..len).runs(), ends, limits);
    sorted.drain(..dropped);
    Arrangement { names: sorted, batches, dropped: dropped as u64 }
}

fn rows(histogram: &Histogram, sorted: &[u32], packing: Packing, limits: &Limits) -> Arrangement {
    let row = limits.empty_row();
    let rows = pack::assign(histogram, row, packing);
    let (mut next, mut start) = (Vec::with_capacity(rows.left.len()), 0);
    let batches = rows.left.iter().map(|left| {
        let places = start..start + (row.sequences - left.sequences) as u32;
        start = places.end;
        next.push(start);
        Planned { places, padded_length: row.tokens, real_tokens: row.tokens - left.tokens }
    });
    let batches = batches.collect();
    // Rows are filled from their ends, by ascending length, so that the longest comes first.
    let mut names = vec![0; sorted.len()];
    for (&row, &name) in rows.row_of.iter().rev().zip(sorted) {
        next[row as usize] -= 1;
        names[next[row as usize] as usize] = name;
    }
    Arrangement { names, batches, dropped: 0 }
}

/// The batches of sorted sequences that end at these places.
fn batches_of(runs: &[Run], ends: impl Iterator<Item = usize>, limits: &Limits) -> Vec<Planned> {
    let (mut runs, mut left, mut start) = (runs.iter(), Run { length: 0, count: 0 }, 0);
    let batches = ends.map(|end| {
        let (mut missing, mut real_tokens) = ((end - start) as u64, 0);
        while missing > 0 {
            if left.count == 0 {
                left = runs.next().copied().unwrap_or(Run { length: left.length, count: missing });
            }
            let taken = missing.min(left.count);
            real_tokens += taken * left.length;
            (missing, left.count) = (missing - taken, left.count - taken);
        }
        let places = start as u32..end as u32;
        start = end;
        Planned { places, padded_length: limits.padded_length(left.length), real_tokens }
    });
    batches.collect()
}
