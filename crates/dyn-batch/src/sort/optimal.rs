//! The cut into the fewest batches and, among these cuts, with the fewest padded tokens, by dynamic
//! programming.
//!
//! A prefix is the first groups in sorted order, identified by their number. A layer is the range
//! of prefixes that need the same number of batches. The last batch of a prefix starts where a
//! prefix of the previous layer ends. The best start never decreases from prefix to prefix: the
//! last groups grow longer, so each further group in the last batch costs more, which favors later
//! starts. Ties go to the first start.
//!
//! A stretch is a range of prefixes in a layer whose last groups have the same padded length.
//! Within a stretch, all prefixes rank the starts equally and differ only in the starts that they
//! can reach. So the costs of a stretch are computed once per start, and the best starts of a
//! layer's middle stretch bound the starts of the stretches before and after it (see
//! [`minima`](crate::lengths::minima)). A million sequences have a few thousand lengths, so most
//! layers have one or two stretches. An algorithm without stretches takes two to four times as
//! long.

#![expect(
    clippy::cast_possible_truncation,
    reason = "at most 2^32 sequences are sorted together, so all positions fit into 32 bits"
)]

use std::ops::{Add, Mul, Range};

/// Consecutive groups with the same padded length, which is the padded length of a group's longest
/// sequence.
#[derive(Clone, Copy, Debug)]
pub(super) struct LengthLevel {
    /// Number of groups in this level and all shorter levels.
    pub(super) end: usize,
    pub(super) padded_length: u64,
    /// Limit on the groups of a batch whose longest group has this level.
    pub(super) max_groups: usize,
}

/// Returns the ends of the batches of the optimal cut.
pub(super) fn optimal_ends(levels: &[LengthLevel]) -> Vec<usize> {
    let Some(&LengthLevel { end: n_groups, padded_length, .. }) = levels.last() else {
        return Vec::new();
    };
    // Costs of 64 bits halve the time, so use them if no cost overflows.
    let starts = match padded_length.checked_mul(n_groups as u64 + 1) {
        Some(_) => choose_starts::<u64>(levels, n_groups),
        None => choose_starts::<u128>(levels, n_groups),
    };
    let ends = std::iter::successors(Some(n_groups), |&end| Some(starts[end] as usize));
    let mut ends: Vec<usize> = ends.take_while(|&end| end > 0).collect();
    ends.reverse();
    ends
}

/// A number of padded tokens.
trait TokenCount: Copy + Ord + From<u64> + Add<Output = Self> + Mul<Output = Self> {}

impl TokenCount for u64 {}
impl TokenCount for u128 {}

/// Returns the start of the last batch of each prefix.
fn choose_starts<C: TokenCount>(levels: &[LengthLevel], n_groups: usize) -> Vec<u32> {
    let mut starts = vec![0; n_groups + 1];
    let mut previous = PrefixLayer { prefixes: 0..1, costs: vec![C::from(0)] };
    let mut stretches = Vec::new();
    let mut levels = levels.iter().copied().peekable();
    while previous.prefixes.end <= n_groups {
        let first = previous.prefixes.end;
        stretches.clear();
        let end = push_stretches(&mut stretches, &mut levels, first);
        let mut layer = PrefixLayer { prefixes: first..end, costs: vec![C::from(0); end - first] };
        let mut choice =
            StartChoice { previous: &previous, layer: &mut layer, starts: &mut starts[first..] };
        choice.choose(&stretches, previous.prefixes.clone());
        previous = layer;
    }
    starts
}

/// Adds the stretches of the layer that begins with the prefix of `first` groups, and returns the
/// end of the layer.
fn push_stretches(
    stretches: &mut Vec<PrefixStretch>,
    levels: &mut std::iter::Peekable<impl Iterator<Item = LengthLevel>>,
    first: usize,
) -> usize {
    let mut end = first;
    while let Some(&level) = levels.peek() {
        // The latest start is the prefix of `first - 1` groups, so the last prefix in reach has
        // `first - 1 + max_groups` groups.
        let stretch_end = first.saturating_add(level.max_groups).min(level.end + 1);
        if end < stretch_end {
            stretches.push(PrefixStretch { prefixes: end..stretch_end, level });
            end = stretch_end;
        }
        // The layer ends within this level.
        if end <= level.end {
            break;
        }
        levels.next();
    }
    end
}

/// The prefixes that need the same number of batches, and their padded tokens.
struct PrefixLayer<C> {
    prefixes: Range<usize>,
    costs: Vec<C>,
}

/// The prefixes of a layer whose last groups are in the same level.
struct PrefixStretch {
    prefixes: Range<usize>,
    level: LengthLevel,
}

impl PrefixStretch {
    /// Returns the earliest start of the last batch of this prefix.
    fn first_start(&self, prefix: usize) -> usize {
        prefix.saturating_sub(self.level.max_groups)
    }
}

/// The choice of a start in the previous layer for each prefix of a layer.
struct StartChoice<'a, C> {
    previous: &'a PrefixLayer<C>,
    layer: &'a mut PrefixLayer<C>,
    starts: &'a mut [u32],
}

impl<C: TokenCount> StartChoice<'_, C> {
    /// Chooses the starts of these stretches among `candidates`.
    #[expect(clippy::expect_used, reason = "batches can start in the previous layer")]
    fn choose(&mut self, stretches: &[PrefixStretch], candidates: Range<usize>) {
        let middle = stretches.len() / 2;
        let Some(stretch) = stretches.get(middle) else { return };
        let (first_best, last_best) =
            self.choose_in(stretch, candidates.clone()).expect("a start for each prefix");
        self.choose(&stretches[..middle], candidates.start..first_best + 1);
        self.choose(&stretches[middle + 1..], last_best..candidates.end);
    }

    /// Chooses the starts of one stretch, and returns the starts of its first and its last prefix.
    fn choose_in(
        &mut self,
        stretch: &PrefixStretch,
        candidates: Range<usize>,
    ) -> Option<(usize, usize)> {
        let first = self.layer.prefixes.start;
        let length = C::from(stretch.level.padded_length);
        let mut start = candidates.end;
        let mut best: Option<(C, usize)> = None;
        let mut last_best = None;
        // Go backward: the last prefix reaches the fewest starts, and each other prefix reaches all
        // starts of the prefixes after it.
        for prefix in stretch.prefixes.clone().rev() {
            let first_reachable = stretch.first_start(prefix).max(candidates.start);
            while first_reachable < start {
                start -= 1;
                // Cost without the groups of this layer, which cost the same for all starts.
                let cost = self.previous.costs[start - self.previous.prefixes.start]
                    + C::from((first - start) as u64) * length;
                if best.is_none_or(|(least, _)| cost <= least) {
                    best = Some((cost, start));
                }
            }
            let (cost, best_start) = best?;
            let cost_in_layer = C::from((prefix - first) as u64) * length;
            self.layer.costs[prefix - first] = cost + cost_in_layer;
            self.starts[prefix - first] = best_start as u32;
            last_best.get_or_insert(best_start);
        }
        Some((best?.1, last_best?))
    }
}

#[cfg(test)]
mod tests {
    use core_types::Seed;

    use super::*;

    /// Applies the definition: for each prefix the start with the fewest batches, then the fewest
    /// tokens, then the first.
    fn prefix_by_prefix(levels: &[LengthLevel]) -> Vec<usize> {
        let n_groups = levels.last().map_or(0, |level| level.end);
        let mut best = vec![(0_usize, 0_u64, 0_usize)];
        for end in 1..=n_groups {
            let level = levels.iter().find(|level| end <= level.end).unwrap();
            let starts = end.saturating_sub(level.max_groups)..end;
            let choices = starts.map(|start| {
                let (n_batches, tokens, _) = best[start];
                (n_batches + 1, tokens + (end - start) as u64 * level.padded_length, start)
            });
            best.push(choices.min().unwrap());
        }
        let mut ends = Vec::new();
        let mut end = n_groups;
        while end > 0 {
            ends.push(end);
            end = best[end].2;
        }
        ends.reverse();
        ends
    }

    /// Draws levels of random sizes, lengths and limits.
    fn levels(seed: u64) -> Vec<LengthLevel> {
        let draw = |i: u64| Seed::new(seed).derive(i).as_u64();
        let sizes = 1 + draw(0) % 40;
        let steps = 1 + draw(1) % 5;
        let budget = 20 + draw(2) % 400;
        let mut level = LengthLevel { end: 0, padded_length: draw(3) % 3, max_groups: 0 };
        let mut levels = Vec::new();
        for i in 2..2 + draw(4) % 30 {
            level.end += 1 + (draw(2 * i) % sizes) as usize;
            level.padded_length += 1 + draw(2 * i + 1) % steps;
            level.max_groups = (budget / level.padded_length).max(1) as usize;
            levels.push(level);
        }
        levels
    }

    #[test]
    fn cuts_match_the_definition() {
        for seed in 0..2000 {
            let levels = levels(seed);
            assert_eq!(optimal_ends(&levels), prefix_by_prefix(&levels), "seed {seed}: {levels:?}");
            let Some(last) = levels.last() else { continue };
            let wide_starts = choose_starts::<u128>(&levels, last.end);
            let mut start = 0;
            for end in prefix_by_prefix(&levels) {
                assert_eq!(wide_starts[end] as usize, start, "128-bit costs, seed {seed}");
                start = end;
            }
        }
    }
}
