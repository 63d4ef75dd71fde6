//! Sorted sequences, cut into batches.
//!
//! A batch whose longest row has length p may hold r(p) rows, and a batch of longer ones never
//! more. So a batch may swap a sequence for a shorter one, and every set of batches can be turned
//! into as many that are intervals of the sorted sequences. Of these, taking as many of the longest
//! that are left as possible leaves the least to the others, and so does taking as many of the
//! shortest: both make the fewest batches there can be. fairseq's batches are the latter; the
//! greedy cut is whichever of the two has fewer padded tokens.

#![expect(
    clippy::cast_possible_truncation,
    reason = "at most 2^32 sequences are arranged together, and tables are as long"
)]

use crate::{
    config::Cut,
    lengths::histogram::Histogram,
    limits::Limits,
    sort::optimal::{self, Level},
};

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
        let count = histogram.count();
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
                let max_groups = max_groups.min(count) as usize;
                levels.push(Level { end, padded_length, max_groups });
                len = end;
            }
        }
        Self { levels, len }
    }

    /// Where batches end, ascending.
    pub(crate) fn cut(&self, cut: Cut) -> Vec<usize> {
        match cut {
            Cut::Greedy => self.greedy(),
            Cut::Optimal => optimal::ends(&self.levels),
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

    /// Batches that are full but for one, at that end where this costs less.
    fn greedy(&self) -> Vec<usize> {
        let (longest_first, shortest_first) = (self.longest_first(), self.shortest_first());
        let saves = self.padded_tokens(&shortest_first) < self.padded_tokens(&longest_first);
        if saves { shortest_first } else { longest_first }
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

    /// The padded tokens of batches that end here, per sequence of a group.
    fn padded_tokens(&self, ends: &[usize]) -> u128 {
        let mut levels = Lengths { levels: &self.levels, nth: 0 };
        let mut start = 0;
        let batches = ends.iter().map(|&end| {
            let tokens = (end - start) as u128 * u128::from(levels.of(end).padded_length);
            start = end;
            tokens
        });
        batches.sum()
    }
}

/// The level of each group in turn.
struct Lengths<'a> {
    levels: &'a [Level],
    nth: usize,
}

impl Lengths<'_> {
    /// The level of the last of `end` groups; `end` must not fall from one call to the next.
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
            let of_both = [groups.longest_first(), groups.shortest_first()]
                .map(|ends| price(&groups, &ends).unwrap());
            assert!(of_both.iter().all(|&(n_batches, _)| n_batches == best.0), "seed {seed}");
            assert_eq!(Some(&greedy), of_both.iter().min(), "seed {seed}");
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
