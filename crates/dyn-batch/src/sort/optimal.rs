//! Of all cuts into the fewest batches the one with the fewest padded tokens, by dynamic
//! programming.
//!
//! The prefixes of the groups that need n batches follow those that need n − 1; here they are a
//! layer. The last batch of each of the former begins where one of the latter ends. The best such
//! place is a totally monotone choice: a longer group costs more for every other group in its
//! batch. Of equally good places the first is taken.
//!
//! Prefixes that end with groups of the same padded length are a stretch, and share their choices:
//! which of two places is better does not depend on the prefix, only how far back it reaches does.
//! So a stretch looks at each place once, and the stretch in the middle of a layer halves the places
//! for those on both sides of it (see [`minima`](crate::lengths::minima)). A million sequences have a few
//! thousand lengths, so most layers are one stretch or two. Looked at prefix by prefix they take two
//! to four times as long.

#![expect(
    clippy::cast_possible_truncation,
    reason = "at most 2^32 sequences are arranged together, and tables are as long"
)]

use std::ops::{Add, Mul, Range};

/// Groups of sequences with the same padded length, by the longest of each group.
#[derive(Clone, Copy, Debug)]
pub(super) struct Level {
    /// The number of groups up to the last of these.
    pub(super) end: usize,
    pub(super) padded_length: u64,
    /// The most groups in a batch whose longest group is one of these.
    pub(super) max_groups: usize,
}

/// Where the batches end.
pub(super) fn ends(levels: &[Level]) -> Vec<usize> {
    let Some(&Level { end: n_groups, padded_length, .. }) = levels.last() else {
        return Vec::new();
    };
    // Costs in 64 bits take half of the time.
    let starts = match padded_length.checked_mul(n_groups as u64 + 1) {
        Some(_) => starts::<u64>(levels, n_groups),
        None => starts::<u128>(levels, n_groups),
    };
    let ends = std::iter::successors(Some(n_groups), |&end| Some(starts[end] as usize));
    let mut ends: Vec<usize> = ends.take_while(|&end| end > 0).collect();
    ends.reverse();
    ends
}

/// A number of padded tokens.
trait Tokens: Copy + Ord + From<u64> + Add<Output = Self> + Mul<Output = Self> {}

impl Tokens for u64 {}
impl Tokens for u128 {}

/// For each prefix, where its last batch starts.
fn starts<C: Tokens>(levels: &[Level], n_groups: usize) -> Vec<u32> {
    let mut starts = vec![0; n_groups + 1];
    let mut before = Layer { prefixes: 0..1, costs: vec![C::from(0)] };
    let mut stretches = Vec::new();
    let mut levels = levels.iter().copied().peekable();
    while before.prefixes.end <= n_groups {
        let first = before.prefixes.end;
        stretches.clear();
        let end = push_stretches(&mut stretches, &mut levels, first);
        let mut layer = Layer { prefixes: first..end, costs: vec![C::from(0); end - first] };
        let mut choice =
            Choice { before: &before, layer: &mut layer, starts: &mut starts[first..] };
        choice.choose(&stretches, before.prefixes.clone());
        before = layer;
    }
    starts
}

/// Adds the stretches of the layer that begins with the prefix of `first` groups, and returns where
/// it ends.
fn push_stretches(
    stretches: &mut Vec<Stretch>,
    levels: &mut std::iter::Peekable<impl Iterator<Item = Level>>,
    first: usize,
) -> usize {
    let mut end = first;
    while let Some(&level) = levels.peek() {
        // A batch that begins before the layer reaches up to here, if its groups are as long.
        let reached = first.saturating_add(level.max_groups).min(level.end + 1);
        if end < reached {
            stretches.push(Stretch { prefixes: end..reached, level });
            end = reached;
        }
        if end <= level.end {
            break;
        }
        levels.next();
    }
    end
}

/// The prefixes that need equally many batches, and their padded tokens.
struct Layer<C> {
    prefixes: Range<usize>,
    costs: Vec<C>,
}

/// Prefixes of a layer whose last groups are of one level.
struct Stretch {
    prefixes: Range<usize>,
    level: Level,
}

impl Stretch {
    /// The earliest start of the last batch of this prefix.
    fn first_start(&self, prefix: usize) -> usize {
        prefix.saturating_sub(self.level.max_groups)
    }
}

/// The choice of a start for each prefix of a layer, among the prefixes of the layer before.
struct Choice<'a, C> {
    before: &'a Layer<C>,
    layer: &'a mut Layer<C>,
    starts: &'a mut [u32],
}

impl<C: Tokens> Choice<'_, C> {
    /// Chooses for these stretches, whose best starts are among `places`.
    #[expect(clippy::expect_used, reason = "each layer's batches may begin before it")]
    fn choose(&mut self, stretches: &[Stretch], places: Range<usize>) {
        let middle = stretches.len() / 2;
        let Some(stretch) = stretches.get(middle) else { return };
        let (earliest, latest) = self.choose_in(stretch, places.clone()).expect("a start");
        self.choose(&stretches[..middle], places.start..earliest + 1);
        self.choose(&stretches[middle + 1..], latest..places.end);
    }

    /// Chooses for one stretch, and returns the starts of its first prefix and of its last one.
    fn choose_in(&mut self, stretch: &Stretch, places: Range<usize>) -> Option<(usize, usize)> {
        let (first, length) = (self.layer.prefixes.start, C::from(stretch.level.padded_length));
        let mut ends = None;
        let mut place = places.end;
        let mut best: Option<(C, usize)> = None;
        // From the back, where the fewest places are within reach.
        for prefix in stretch.prefixes.clone().rev() {
            let reach = stretch.first_start(prefix).max(places.start);
            while reach < place {
                place -= 1;
                // As if the batch ended with the layer before, to which all prefixes add as much.
                let cost = self.before.costs[place - self.before.prefixes.start]
                    + C::from((first - place) as u64) * length;
                if best.is_none_or(|(least, _)| cost <= least) {
                    best = Some((cost, place));
                }
            }
            let (cost, start) = best?;
            let added = C::from((prefix - first) as u64) * length;
            self.layer.costs[prefix - first] = cost + added;
            self.starts[prefix - first] = start as u32;
            ends = Some((start, ends.map_or(start, |(_, latest)| latest)));
        }
        ends
    }
}

#[cfg(test)]
mod tests {
    use core_types::Seed;

    use super::*;

    /// The rule itself: for each prefix the start with the fewest batches, then the fewest tokens,
    /// then the first one.
    fn prefix_by_prefix(levels: &[Level]) -> Vec<usize> {
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

    /// Levels of random sizes, lengths and limits.
    fn levels(seed: u64) -> Vec<Level> {
        let draw = |i: u64| Seed::new(seed).derive(i).as_u64();
        let (sizes, steps) = (1 + draw(0) % 40, 1 + draw(1) % 5);
        let budget = 20 + draw(2) % 400;
        let mut level = Level { end: 0, padded_length: draw(3) % 3, max_groups: 0 };
        let next = |i: u64| {
            level.end += 1 + (draw(2 * i) % sizes) as usize;
            level.padded_length += 1 + draw(2 * i + 1) % steps;
            level.max_groups = (budget / level.padded_length).max(1) as usize;
            level
        };
        (2..2 + draw(4) % 30).map(next).collect()
    }

    #[test]
    fn of_equally_good_cuts_it_is_the_one_that_starts_first() {
        for seed in 0..2000 {
            let levels = levels(seed);
            assert_eq!(ends(&levels), prefix_by_prefix(&levels), "seed {seed}: {levels:?}");
            let wide: Vec<usize> = match levels.last() {
                Some(last) => {
                    let starts = starts::<u128>(&levels, last.end);
                    prefix_by_prefix(&levels)
                        .into_iter()
                        .scan(0, |start, end| Some((std::mem::replace(start, end), end)))
                        .filter(|&(start, end)| starts[end] as usize != start)
                        .map(|(_, end)| end)
                        .collect()
                }
                None => Vec::new(),
            };
            assert_eq!(wide, [0_usize; 0], "the same in 128 bits, seed {seed}");
        }
    }
}
