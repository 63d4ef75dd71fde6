//! Sorted sequences, cut into batches.
//!
//! A batch whose longest row has length p may hold r(p) rows, and a batch of longer ones never
//! more. So a batch may swap a sequence for a shorter one, and every set of batches can be turned
//! into as many that are intervals of the sorted sequences. Of these, taking as many of the longest
//! that are left as possible leaves the least to the others: the greedy cut makes the fewest
//! batches there can be.

#![expect(
    clippy::cast_possible_truncation,
    reason = "at most 2^32 sequences are arranged together, and tables are as long"
)]

use std::ops::{Add, Mul};

use crate::{
    config::Cut,
    limits::Limits,
    sort::{histogram::Histogram, minima::row_minima},
};

/// Groups of sequences with the same padded length, by the longest of each group.
#[derive(Clone, Copy, Debug)]
struct Level {
    /// The number of groups up to the last of these.
    end: usize,
    padded_length: u64,
    /// The most groups in a batch whose longest group is one of these.
    max_groups: usize,
}

/// Sorted groups that wait to be cut; positions count groups, from the shortest.
#[derive(Debug)]
pub(crate) struct Groups {
    levels: Vec<Level>,
    /// The number of groups.
    len: usize,
}

impl Groups {
    /// The sequences of a histogram in groups; its number of sequences must be a multiple of
    /// theirs.
    pub(crate) fn new(histogram: &Histogram, limits: &Limits) -> Self {
        let group_len = limits.group_len() as u64;
        let mut levels = Vec::new();
        let mut n_sequences = 0;
        let mut len = 0;
        for run in histogram.runs() {
            n_sequences += run.count;
            let end = (n_sequences / group_len) as usize;
            if end > len {
                let padded_length = limits.padded_length(run.length);
                // No batch holds more than all groups, of which there are fewer than 2^32.
                let max_groups = limits.max_rows(padded_length) / group_len;
                let max_groups = max_groups.min(histogram.count()) as usize;
                levels.push(Level { end, padded_length, max_groups });
                len = end;
            }
        }
        Self { levels, len }
    }

    /// Where batches end, ascending.
    pub(crate) fn cut(&self, cut: Cut) -> Vec<usize> {
        match cut {
            Cut::Greedy => self.longest_first(),
            Cut::Optimal => self.optimal(),
        }
    }

    /// Whether these are ends of batches of all groups, each within the limits.
    pub(crate) fn allows(&self, ends: &[usize]) -> bool {
        let mut start = 0;
        let mut nth = 0;
        for &end in ends {
            while self.levels.get(nth).is_some_and(|level| level.end < end) {
                nth += 1;
            }
            let Some(level) = self.levels.get(nth) else { return false };
            if end <= start || end - start > level.max_groups {
                return false;
            }
            start = end;
        }
        start == self.len
    }

    /// Batches that take as many of the longest groups as they can; the shortest one gets what is
    /// left.
    pub(crate) fn longest_first(&self) -> Vec<usize> {
        let (mut ends, mut end) = (Vec::new(), self.len);
        for (nth, level) in self.levels.iter().enumerate().rev() {
            let start = if nth == 0 { 0 } else { self.levels[nth - 1].end };
            while end > start {
                ends.push(end);
                end = end.saturating_sub(level.max_groups);
            }
        }
        ends.reverse();
        ends
    }

    /// Batches that take as many of the shortest groups as they can; the longest one gets what is
    /// left.
    pub(crate) fn shortest_first(&self) -> Vec<usize> {
        let (mut ends, mut start, mut end) = (Vec::new(), 0_usize, 0);
        for level in &self.levels {
            // The open batch goes on into the next level if it has room for all of this one.
            loop {
                end = end.max(level.end.min(start.saturating_add(level.max_groups)));
                if end == level.end {
                    break;
                }
                ends.push(end);
                start = end;
            }
        }
        if end > start {
            ends.push(end);
        }
        ends
    }

    /// Of all cuts into the fewest batches the one with the fewest padded tokens.
    ///
    /// The prefixes of the groups that need n batches follow those that need n − 1. The last batch
    /// of each of the former begins where one of the latter ends. The best such place is a totally
    /// monotone choice: a longer group costs more for every other group in its batch.
    fn optimal(&self) -> Vec<usize> {
        let Some(longest) = self.levels.last() else { return Vec::new() };
        // Costs in 64 bits take half of the time.
        match longest.padded_length.checked_mul(self.len as u64 + 1) {
            Some(_) => self.optimal_in::<u64>(),
            None => self.optimal_in::<u128>(),
        }
    }

    fn optimal_in<C>(&self) -> Vec<usize>
    where
        C: Copy + Ord + From<u64> + Add<Output = C> + Mul<Output = C>,
    {
        let n_groups = self.len;
        let mut starts = vec![0_u32; n_groups + 1];
        // The prefixes that need the batches so far, and the padded lengths of their groups as one
        // number each.
        let (mut shorter, mut shorter_cost) = (0..1, vec![C::from(0)]);
        let mut lengths = Lengths { levels: &self.levels, nth: 0 };
        let mut rows: Vec<Level> = Vec::new();
        while shorter.end <= n_groups {
            rows.clear();
            let first = shorter.end;
            rows.extend((first..=n_groups).map_while(|end| {
                let level = lengths.of(end);
                (end.saturating_sub(level.max_groups) < first).then_some(level)
            }));
            let mut costs = vec![C::from(0); rows.len()];
            let candidates = |row: usize| {
                (first + row).saturating_sub(rows[row].max_groups).max(shorter.start)..first
            };
            let cost = |row: usize, start: usize| {
                let n_groups = C::from((first + row - start) as u64);
                shorter_cost[start - shorter.start] + n_groups * C::from(rows[row].padded_length)
            };
            row_minima(
                0..rows.len(),
                shorter.clone(),
                &candidates,
                &cost,
                &mut |row, start, cost| {
                    costs[row] = cost;
                    starts[first + row] = start as u32;
                },
            );
            shorter = first..first + rows.len();
            shorter_cost = costs;
        }
        let ends = std::iter::successors(Some(n_groups), |&end| Some(starts[end] as usize));
        let mut ends: Vec<usize> = ends.take_while(|&end| end > 0).collect();
        ends.reverse();
        ends
    }
}

/// The level of each group in turn.
struct Lengths<'a> {
    levels: &'a [Level],
    nth: usize,
}

impl Lengths<'_> {
    /// The level of the last of `end` groups; `end` must not descend by more than one level.
    fn of(&mut self, end: usize) -> Level {
        while self.levels[self.nth].end < end {
            self.nth += 1;
        }
        self.levels[self.nth]
    }
}

#[cfg(test)]
mod tests {
    use core_types::Seed;

    use super::*;
    use crate::config::{BatchConfig, Cost, DynamicBatchStrategy};

    /// Every way to cut the groups, as number of batches and padded tokens.
    fn brute_force(groups: &Groups) -> (usize, u64) {
        let n = groups.len;
        let cuts = (0..1_u32 << (n - 1)).map(|cuts| {
            let inner = (1..n).filter(|end| cuts >> (end - 1) & 1 == 1);
            inner.chain([n]).collect::<Vec<_>>()
        });
        cuts.filter_map(|ends| price(groups, &ends)).min().unwrap()
    }

    /// The batches and their padded tokens by group, or `None` if one is over a limit.
    fn price(groups: &Groups, ends: &[usize]) -> Option<(usize, u64)> {
        let (mut start, mut tokens) = (0, 0);
        for &end in ends {
            let level = groups.levels.iter().find(|level| end <= level.end).unwrap();
            if end - start > level.max_groups {
                return None;
            }
            tokens += (end - start) as u64 * level.padded_length;
            start = end;
        }
        (start == groups.len).then_some((ends.len(), tokens))
    }

    #[test]
    fn cuts_are_as_good_as_the_best_of_all() {
        for seed in 0..600_u64 {
            let draw = |i: u64| Seed::new(seed).derive(i).as_u64();
            let multiple = 1 + draw(0) % 3;
            let n_groups = 1 + draw(1) % 12;
            let mut config = BatchConfig::default()
                .with_strategy(DynamicBatchStrategy::Sorted { window: None, cut: Cut::Optimal })
                .with_batch_size_multiple(multiple)
                .with_length_multiple(1 + draw(2) % 4)
                .with_max_tokens(multiple * (40 + draw(3) % 100));
            if seed % 3 == 0 {
                config = config.with_max_cost(multiple * 5000, Cost::ATTENTION);
            }
            let limits = Limits::new(config).unwrap();
            let lengths = (0..n_groups * multiple).map(|i| draw(i + 9) % (5 + seed % 30));
            let groups = Groups::new(&Histogram::new(lengths), &limits);
            let best = brute_force(&groups);
            let mut ends = groups.cut(Cut::Optimal);
            assert_eq!(price(&groups, &ends), Some(best), "seed {seed}");
            assert!(groups.allows(&ends));
            ends.remove(ends.len() / 2);
            assert_eq!(groups.allows(&ends), price(&groups, &ends).is_some(), "{ends:?}");
            let greedy = price(&groups, &groups.cut(Cut::Greedy)).unwrap();
            assert_eq!(greedy.0, best.0, "seed {seed}");
            assert!(price(&groups, &groups.shortest_first()).is_some(), "seed {seed}");
        }
    }

    #[test]
    fn nothing_is_cut_into_nothing() {
        let limits = Limits::new(BatchConfig::default().with_max_tokens(5)).unwrap();
        let groups = Groups::new(&Histogram::default(), &limits);
        for ends in [groups.cut(Cut::Greedy), groups.cut(Cut::Optimal), groups.shortest_first()] {
            assert!(ends.is_empty());
        }
    }
}
