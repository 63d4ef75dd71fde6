//! All sequences of a data set, arranged in batches: what sorting and packing do alike.

#![allow(
    clippy::cast_possible_truncation,
    reason = "at most 2^32 sequences are arranged together, and tables are as long"
)]

use crate::{
    Cut, DynamicBatchStrategy, Error, Packing, Remainder, Result,
    cut::Groups,
    histogram::{Histogram, Slots},
    limits::Limits,
    pack::{self, Row},
};

/// Sequences by name, and where batches of them end.
#[derive(Debug, Default)]
pub(crate) struct Arrangement {
    pub(crate) names: Vec<u32>,
    pub(crate) ends: Vec<u32>,
    /// How many sequences are in no batch, because they cannot fill up the multiple.
    pub(crate) dropped: u64,
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
    /// Arranges sequences, given by name and length, which are admitted; equal ones stay in order. If it is known where
    /// sorted ones are to be cut, then there.
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
    let group_len = limits.group_len();
    // The shortest are those whose loss, or whose small batch, costs least.
    let surplus = sorted.len() % group_len;
    let longer = Groups::new(&histogram.range(surplus..sorted.len()), limits);
    let ends = known.filter(|ends| longer.allows(ends)).unwrap_or_else(|| longer.cut(cut));
    let mut ends: Vec<u32> = ends.into_iter().map(|end| (surplus + end * group_len) as u32).collect();
    let mut dropped = 0;
    if surplus > 0 && limits.config().remainder == Remainder::Keep {
        ends.insert(0, surplus as u32);
    } else if surplus > 0 {
        sorted.drain(..surplus);
        for end in &mut ends {
            *end -= surplus as u32;
        }
        dropped = surplus as u64;
    }
    Arrangement { names: sorted, ends, dropped }
}

fn rows(histogram: &Histogram, sorted: &[u32], packing: Packing, limits: &Limits) -> Arrangement {
    let row = Row { tokens: limits.max_tokens(), sequences: limits.max_batch_size() };
    let rows = pack::assign(histogram, row, packing);
    let mut ends = vec![0_u32; rows.count];
    rows.row_of.iter().for_each(|&row| ends[row as usize] += 1);
    let mut end = 0;
    for count in &mut ends {
        end += *count;
        *count = end;
    }
    // Rows are filled from their ends, by ascending length, so that the longest comes first.
    let (mut names, mut next) = (vec![0; sorted.len()], ends.clone());
    for (&row, &name) in rows.row_of.iter().rev().zip(sorted) {
        next[row as usize] -= 1;
        names[next[row as usize] as usize] = name;
    }
    Arrangement { names, ends, dropped: 0 }
}
