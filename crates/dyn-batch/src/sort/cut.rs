//! Cuts of sorted sequences into batches.
//!
//! A batch whose longest row has length p may have r(p) rows, and r never grows with p. So a batch
//! stays within its limit if one of its sequences is exchanged for a shorter one. By such
//! exchanges, any division into batches becomes a division into as many batches, each of which is
//! an interval of the sorted sequences. Taking as many of the longest remaining sequences as
//! possible leaves the fewest to the other batches, and so does taking as many of the shortest:
//! both make the fewest batches. fairseq takes the shortest; the greedy cut takes whichever gives
//! fewer padded tokens.

#![expect(
    clippy::cast_possible_truncation,
    reason = "at most 2^32 sequences are arranged together, and no table has more entries"
)]

use crate::{
    config::Cut,
    lengths::histogram::LengthHistogram,
    limits::BatchLimits,
    sort::optimal::{self, LengthLevel},
};

/// Sorted groups of sequences; positions count groups, from the shortest.
#[derive(Debug)]
pub(crate) struct SortedGroups {
    levels: Vec<LengthLevel>,
    /// Number of groups.
    len: usize,
}

impl SortedGroups {
    /// Groups the sequences of a histogram; their number must be a multiple of the group size.
    pub(crate) fn new(histogram: &LengthHistogram, limits: &BatchLimits) -> Self {
        let group_len = limits.group_len() as u64;
        let count = histogram.count();
        let mut levels = Vec::new();
        let mut n_sequences = 0;
        let mut len = 0;
        for run in histogram.runs() {
            n_sequences += run.count;
            // A group has the length of its longest sequence, so it belongs to the run in which it
            // is complete. A run that completes no group has no level.
            let end = (n_sequences / group_len) as usize;
            if end > len {
                let padded_length = limits.padded_length(run.length);
                // No batch has more groups than there are, which is less than 2^32.
                let max_groups = limits.max_rows(padded_length) / group_len;
                let max_groups = max_groups.min(count) as usize;
                levels.push(LengthLevel { end, padded_length, max_groups });
                len = end;
            }
        }
        Self { levels, len }
    }

    /// Returns the ends of the batches, ascending.
    pub(crate) fn batch_ends(&self, cut: Cut) -> Vec<usize> {
        match cut {
            Cut::Greedy => self.greedy(),
            Cut::Optimal => optimal::optimal_ends(&self.levels),
        }
    }

    /// Returns true if these ends cut all groups into batches within the limits.
    pub(crate) fn allows(&self, ends: &[usize]) -> bool {
        let mut start = 0;
        let mut levels = self.levels.iter().peekable();
        for &end in ends {
            while levels.next_if(|level| level.end < end).is_some() {}
            let Some(level) = levels.peek() else { return false };
            if end <= start || end - start > level.max_groups {
                return false;
            }
            start = end;
        }
        start == self.len
    }

    /// Cuts full batches from the end that gives fewer padded tokens; one batch may not be full.
    fn greedy(&self) -> Vec<usize> {
        let longest_first = self.longest_first();
        let shortest_first = self.shortest_first();
        if self.padded_tokens(&shortest_first) < self.padded_tokens(&longest_first) {
            shortest_first
        } else {
            longest_first
        }
    }

    /// Cuts batches of as many of the longest groups as possible; the shortest batch gets the rest.
    pub(crate) fn longest_first(&self) -> Vec<usize> {
        let mut ends = Vec::new();
        let mut end = self.len;
        for (index, level) in self.levels.iter().enumerate().rev() {
            let start = if index == 0 { 0 } else { self.levels[index - 1].end };
            while end > start {
                ends.push(end);
                end = end.saturating_sub(level.max_groups);
            }
        }
        ends.reverse();
        ends
    }

    /// Cuts batches of as many of the shortest groups as possible; the longest batch gets the rest.
    pub(crate) fn shortest_first(&self) -> Vec<usize> {
        let mut ends = Vec::new();
        let mut start = 0_usize;
        let mut end = 0;
        for level in &self.levels {
            // The open batch continues in the next level if all of this one fits.
            loop {
                let limit = start.saturating_add(level.max_groups).min(level.end);
                // A shorter level may have allowed more groups.
                end = end.max(limit);
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

    /// Returns the padded tokens of batches with these ends, divided by the size of a group, which
    /// does not matter when cuts are compared.
    fn padded_tokens(&self, ends: &[usize]) -> u128 {
        let mut tokens = 0;
        let mut start = 0;
        let mut level = 0;
        for &end in ends {
            while self.levels[level].end < end {
                level += 1;
            }
            tokens += (end - start) as u128 * u128::from(self.levels[level].padded_length);
            start = end;
        }
        tokens
    }
}

#[cfg(test)]
mod tests {
    use core_types::Seed;

    use super::*;
    use crate::config::{BatchConfig, Cost, DynamicBatchStrategy};

    /// Tries every cut of the groups; returns the smallest number of batches, then of padded
    /// tokens.
    fn brute_force(groups: &SortedGroups) -> (usize, u64) {
        let n = groups.len;
        let mut prices = Vec::new();
        for cuts in 0..1_u32 << (n - 1) {
            let inner = (1..n).filter(|end| cuts >> (end - 1) & 1 == 1);
            prices.extend(price(groups, &inner.chain([n]).collect::<Vec<_>>()));
        }
        prices.into_iter().min().unwrap()
    }

    /// Returns the number of batches and their padded tokens per group, or `None` if one exceeds a
    /// limit.
    fn price(groups: &SortedGroups, ends: &[usize]) -> Option<(usize, u64)> {
        let mut start = 0;
        let mut tokens = 0;
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
    fn cuts_match_exhaustive_search() {
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
            let limits = BatchLimits::new(config).unwrap();
            let lengths = (0..n_groups * multiple).map(|i| draw(i + 9) % (5 + seed % 30));
            let groups = SortedGroups::new(&LengthHistogram::new(lengths), &limits);
            let best = brute_force(&groups);
            let mut ends = groups.batch_ends(Cut::Optimal);
            assert_eq!(price(&groups, &ends), Some(best), "seed {seed}");
            assert!(groups.allows(&ends));
            ends.remove(ends.len() / 2);
            assert_eq!(groups.allows(&ends), price(&groups, &ends).is_some(), "{ends:?}");
            let greedy = price(&groups, &groups.batch_ends(Cut::Greedy)).unwrap();
            let prices = [groups.longest_first(), groups.shortest_first()]
                .map(|ends| price(&groups, &ends).unwrap());
            assert!(prices.iter().all(|&(n_batches, _)| n_batches == best.0), "seed {seed}");
            assert_eq!(Some(&greedy), prices.iter().min(), "seed {seed}");
        }
    }

    #[test]
    fn empty_groups_have_no_batches() {
        let limits = BatchLimits::new(BatchConfig::default().with_max_tokens(5)).unwrap();
        let groups = SortedGroups::new(&LengthHistogram::default(), &limits);
        for ends in [
            groups.batch_ends(Cut::Greedy),
            groups.batch_ends(Cut::Optimal),
            groups.shortest_first(),
        ] {
            assert!(ends.is_empty());
        }
    }
}
