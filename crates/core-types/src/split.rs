//! Splits of `len` items over the ranks of a world.
//!
//! All crates split with these functions, so the sampler and the planner never disagree. Every item
//! has exactly one owner, and each rank computes its part independently.
//!
//! | function | parts | used by |
//! |---|---|---|
//! | [`chunk`] | ⌈len / world⌉ each; the last ones may be short or empty | `torch.chunk`, FSDP2 |
//! | [`balanced`] | sizes differ by at most one, first ranks get more | NumPy's `array_split` |
//! | [`last_takes_rest`] | ⌊len / world⌋ each; the last takes the remainder too | the `DistributedSampler` spec |
//! | [`strided`] | round-robin: rank, rank + world, … | PyTorch's `DistributedSampler`, SPDL |
//! | [`proportional`] | shares follow given weights | ranks of unequal speed |

use std::ops::Range;

use crate::rank::{Placement, Rank, WorldSize};

/// Returns the ⌈`len` / world⌉ items of `place`; the last ranks may have fewer or none.
///
/// `torch.chunk` splits like this, and so FSDP2 splits the rows of a parameter.
///
/// # Examples
///
/// ```
/// # use core_types::{Placement, split};
/// // Seven rows on four ranks: 2, 2, 2, 1. Five rows: 2, 2, 1, 0.
/// assert_eq!(split::chunk(7, Placement::new(3, 4)?), 6..7);
/// assert_eq!(split::chunk(5, Placement::new(3, 4)?), 5..5);
/// # Ok::<(), core_types::Error>(())
/// ```
pub fn chunk(len: u64, place: Placement) -> Range<u64> {
    let size = len.div_ceil(place.world_size().as_u64());
    // An overflowing product is beyond `len`, and so is the saturated one.
    let rank = place.rank().as_u64();
    rank.saturating_mul(size).min(len)..(rank + 1).saturating_mul(size).min(len)
}

/// Returns the items of `place` if all parts differ by at most one.
///
/// The first `len % world` ranks own one item more than the others.
///
/// # Examples
///
/// ```
/// # use core_types::{Placement, split};
/// assert_eq!(split::balanced(10, Placement::new(0, 4)?), 0..3);
/// assert_eq!(split::balanced(10, Placement::new(3, 4)?), 8..10);
/// # Ok::<(), core_types::Error>(())
/// ```
pub fn balanced(len: u64, place: Placement) -> Range<u64> {
    let world = place.world_size().as_u64();
    let size = len / world;
    let extra = len % world;
    let rank = place.rank().as_u64();
    let start = rank * size + rank.min(extra);
    start..start + size + u64::from(rank < extra)
}

/// Returns the ⌊`len` / world⌋ items of `place`; the last rank also owns the remainder.
///
/// # Examples
///
/// ```
/// # use core_types::{Placement, split};
/// assert_eq!(split::last_takes_rest(10, Placement::new(0, 4)?), 0..2);
/// assert_eq!(split::last_takes_rest(10, Placement::new(3, 4)?), 6..10);
/// # Ok::<(), core_types::Error>(())
/// ```
pub fn last_takes_rest(len: u64, place: Placement) -> Range<u64> {
    let size = len / place.world_size().as_u64();
    let start = place.rank().as_u64() * size;
    start..if place.is_last() { len } else { start + size }
}

/// Returns the items of `place` in a round-robin split: `rank`, `rank + world`, ….
///
/// # Examples
///
/// ```
/// # use core_types::{Placement, split};
/// let mine = split::strided(11, Placement::new(1, 4)?);
/// assert_eq!(mine.iter().collect::<Vec<_>>(), [1, 5, 9]);
/// # Ok::<(), core_types::Error>(())
/// ```
pub fn strided(len: u64, place: Placement) -> Strided {
    let part = balanced(len, place);
    Strided {
        first: place.rank().as_u64(),
        step: place.world_size().as_u64(),
        len: part.end - part.start,
    }
}

/// Returns the owner of `item` under [`balanced`], or `None` if `item` is out of range.
///
/// # Examples
///
/// ```
/// # use core_types::{WorldSize, split};
/// let owner = split::balanced_owner(10, WorldSize::new(4)?, 8);
/// assert_eq!(owner.map(|rank| rank.as_u64()), Some(3));
/// # Ok::<(), core_types::Error>(())
/// ```
#[doc(hidden)]
pub fn balanced_owner(len: u64, world_size: WorldSize, item: u64) -> Option<Rank> {
    let world = world_size.as_u64();
    let size = len / world;
    let extra = len % world;
    let n_in_larger_parts = extra * (size + 1);
    let rank = if item < n_in_larger_parts {
        item / (size + 1)
    } else {
        extra + (item - n_in_larger_parts).checked_div(size)?
    };
    (item < len).then(|| Rank::in_world(rank))
}

/// Returns the owner of `item` under [`last_takes_rest`], or `None` if `item` is out of range.
///
/// # Examples
///
/// ```
/// # use core_types::{WorldSize, split};
/// let owner = split::last_takes_rest_owner(10, WorldSize::new(4)?, 9);
/// assert_eq!(owner.map(|rank| rank.as_u64()), Some(3));
/// # Ok::<(), core_types::Error>(())
/// ```
#[doc(hidden)]
pub fn last_takes_rest_owner(len: u64, world_size: WorldSize, item: u64) -> Option<Rank> {
    let last = world_size.as_u64() - 1;
    let rank = match len / world_size.as_u64() {
        // With fewer items than ranks, all items are the remainder.
        0 => last,
        size => last.min(item / size),
    };
    (item < len).then(|| Rank::in_world(rank))
}

/// Returns the owner of `item` under [`strided`].
///
/// # Examples
///
/// ```
/// # use core_types::{WorldSize, split};
/// assert_eq!(split::strided_owner(WorldSize::new(4)?, 9).as_u64(), 1);
/// # Ok::<(), core_types::Error>(())
/// ```
#[doc(hidden)]
pub fn strided_owner(world_size: WorldSize, item: u64) -> Rank {
    Rank::in_world(item % world_size.as_u64())
}

/// Returns the items of `rank` if shares are proportional to `weights`, one per rank.
///
/// Every share differs from the exact proportion by less than one item, and the shares add up to
/// `len`. A rank without a weight owns nothing, and if all weights are 0 no rank owns anything.
///
/// # Complexity
///
/// O(world), because a rank adds the weights before its own.
///
/// # Examples
///
/// ```
/// # use core_types::{Rank, split};
/// // The first rank is twice as fast as the second.
/// assert_eq!(split::proportional(10, &[2, 1], Rank::ZERO), 0..6);
/// ```
pub fn proportional(len: u64, weights: &[u64], rank: Rank) -> Range<u64> {
    let sum = |weights: &[u64]| weights.iter().copied().map(u128::from).sum::<u128>();
    let total = sum(weights);
    if total == 0 {
        return 0..0;
    }
    let index = rank.as_usize().min(weights.len());
    let next = (rank.as_usize() + 1).min(weights.len());
    fraction(len, sum(&weights[..index]), total)..fraction(len, sum(&weights[..next]), total)
}

/// Returns the range of [`proportional`] for each rank, in rank order.
///
/// # Complexity
///
/// O(world) for all ranks together.
///
/// # Examples
///
/// ```
/// # use core_types::split;
/// let parts: Vec<_> = split::proportional_parts(10, &[2, 0, 1]).collect();
/// assert_eq!(parts, [0..6, 6..6, 6..10]);
/// ```
#[doc(hidden)]
pub fn proportional_parts(len: u64, weights: &[u64]) -> impl Iterator<Item = Range<u64>> + '_ {
    let total: u128 = weights.iter().copied().map(u128::from).sum();
    let mut sum = 0;
    weights.iter().map(move |&weight| {
        if total == 0 {
            return 0..0;
        }
        let start = fraction(len, sum, total);
        sum += u128::from(weight);
        start..fraction(len, sum, total)
    })
}

/// Computes ⌊`len` × `part` / `total`⌋ for `part` ≤ `total`; `total` must not be 0.
#[expect(clippy::expect_used, reason = "a fraction of the length is at most the length")]
fn fraction(len: u64, part: u128, total: u128) -> u64 {
    // A sum of 2^20 weights has up to 84 bits, so a product with 64 bits would overflow 128: divide in two steps.
    let high = u128::from(len >> 32) * part;
    let low = u128::from(len & 0xffff_ffff) * part;
    let rest = ((high % total) << 32) + low;
    u64::try_from(((high / total) << 32) + rest / total).expect("at most `len`")
}

/// Every `step`-th item from `first` on, as split by [`strided`]. A range has step 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Strided {
    first: u64,
    step: u64,
    len: u64,
}

impl Strided {
    /// Returns the number of items.
    pub fn len(self) -> u64 {
        self.len
    }

    /// Returns true if there are no items.
    pub fn is_empty(self) -> bool {
        self.len == 0
    }

    /// Returns the distance between items.
    pub fn step(self) -> u64 {
        self.step
    }

    /// Returns the `n`-th item, or `None` beyond the end.
    pub fn get(self, n: u64) -> Option<u64> {
        (n < self.len).then(|| self.first + n * self.step)
    }

    /// Returns the items in ascending order.
    pub fn iter(self) -> impl DoubleEndedIterator<Item = u64> {
        (0..self.len).map(move |n| self.first + n * self.step)
    }
}

impl From<Range<u64>> for Strided {
    fn from(range: Range<u64>) -> Self {
        Self { first: range.start, step: 1, len: range.end.saturating_sub(range.start) }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    type Cut = fn(u64, Placement) -> Range<u64>;
    const CONTIGUOUS: [Cut; 3] = [chunk, balanced, last_takes_rest];

    fn small_grid() -> impl Iterator<Item = (u64, WorldSize)> {
        (0..=100).flat_map(|len| (1..=17).map(move |world| (len, WorldSize::new(world).unwrap())))
    }

    #[test]
    fn contiguous_parts_cover_all_items() {
        for cut in CONTIGUOUS {
            for (len, world) in small_grid() {
                let mut end = 0;
                for place in world.placements() {
                    let part = cut(len, place);
                    assert_eq!(part.start, end, "{len} over {world}");
                    assert!(part.start <= part.end);
                    end = part.end;
                }
                assert_eq!(end, len);
            }
        }
    }

    #[test]
    fn strided_parts_cover_every_item_once() {
        for (len, world) in small_grid() {
            let mut items: Vec<u64> =
                world.placements().flat_map(|p| strided(len, p).iter()).collect();
            items.sort_unstable();
            assert_eq!(items, (0..len).collect::<Vec<_>>(), "{len} over {world}");
        }
    }

    #[test]
    fn sizes_follow_each_rule() {
        for (len, world) in small_grid() {
            let w = world.as_u64();
            for (r, place) in (0..).zip(world.placements()) {
                let size = |range: Range<u64>| range.end - range.start;
                let ceil = len.div_ceil(w);
                assert_eq!(size(chunk(len, place)), ceil.min(len.saturating_sub(r * ceil)));
                assert_eq!(size(balanced(len, place)), len / w + u64::from(r < len % w));
                let rest = if r + 1 == w { len % w } else { 0 };
                assert_eq!(size(last_takes_rest(len, place)), len / w + rest);
                let dealt = strided(len, place);
                assert_eq!(dealt.len(), (r..len).step_by(world.as_usize()).count() as u64);
                assert_eq!(dealt.is_empty(), dealt.iter().next().is_none());
                assert_eq!(dealt.get(dealt.len()), None);
                assert!(dealt.iter().eq((0..dealt.len()).map(|n| dealt.get(n).unwrap())));
            }
        }
    }

    #[test]
    fn owners_match_the_parts() {
        for (len, world) in small_grid() {
            for place in world.placements() {
                let rank = Some(place.rank());
                assert!(
                    balanced(len, place).all(|item| balanced_owner(len, world, item) == rank),
                    "{len} over {world}"
                );
                assert!(
                    last_takes_rest(len, place)
                        .all(|item| last_takes_rest_owner(len, world, item) == rank)
                );
                assert!(
                    strided(len, place).iter().all(|item| Some(strided_owner(world, item)) == rank)
                );
            }
            assert_eq!(
                (balanced_owner(len, world, len), last_takes_rest_owner(len, world, len)),
                (None, None)
            );
        }
    }

    #[test]
    fn proportional_parts_are_exact() {
        for weights in [&[1, 1, 1][..], &[2, 1], &[0, 3, 0, 1], &[7], &[1000, 1, 999, 500]] {
            let total: u64 = weights.iter().sum();
            for len in 0..=100 {
                let mut end = 0;
                let world = WorldSize::new(weights.len() as u64).unwrap();
                for (place, weight) in world.placements().zip(weights) {
                    let part = proportional(len, weights, place.rank());
                    assert_eq!(part.start, end);
                    assert!(
                        (part.end - part.start) * total < len * weight + total
                            && len * weight < (part.end - part.start + 1) * total
                    );
                    end = part.end;
                }
                assert_eq!(end, len);
                let one_by_one =
                    world.placements().map(|place| proportional(len, weights, place.rank()));
                assert!(proportional_parts(len, weights).eq(one_by_one), "{len}, {weights:?}");
            }
        }
        assert_eq!(proportional(10, &[0, 0], Rank::ZERO), 0..0);
        assert!(proportional_parts(10, &[0, 0]).eq([0..0, 0..0]));
    }

    #[test]
    fn ranges_have_step_one() {
        assert!(Strided::from(3..7).iter().eq(3..7));
        assert!(Strided::from(7..7).is_empty());
    }

    proptest! {
        #[test]
        fn huge_sizes_do_not_overflow(
            len in any::<u64>(),
            world in 1..=WorldSize::MAX.as_u64(),
            rank in any::<u64>(),
        ) {
            let place = Placement::new(rank % world, world).unwrap();
            for cut in CONTIGUOUS {
                let part = cut(len, place);
                prop_assert!(part.start <= part.end && part.end <= len);
            }
            let last = balanced_owner(len, place.world_size(), len.saturating_sub(1));
            prop_assert_eq!(last.is_some(), len > 0);
            let dealt = strided(len, place);
            prop_assert!(dealt.iter().next_back().is_none_or(|last| last < len));
        }

        #[test]
        fn huge_weights_do_not_overflow(
            len in any::<u64>(),
            weights in prop::collection::vec(any::<u64>(), 1..40),
        ) {
            let world = WorldSize::new(weights.len() as u64).unwrap();
            let parts: Vec<_> = world
                .placements()
                .map(|place| proportional(len, &weights, place.rank()))
                .collect();
            prop_assert!(parts.windows(2).all(|pair| pair[0].end == pair[1].start));
            let end = if weights.iter().any(|&weight| weight > 0) { len } else { 0 };
            prop_assert_eq!(parts.last().map(|part| part.end), Some(end));
        }

        #[test]
        fn neighboring_parts_are_contiguous(
            len in any::<u64>(),
            world in 2..=WorldSize::MAX.as_u64(),
            rank in any::<u64>(),
        ) {
            let rank = rank % (world - 1);
            let place = Placement::new(rank, world).unwrap();
            let next = Placement::new(rank + 1, world).unwrap();
            for cut in CONTIGUOUS {
                prop_assert_eq!(cut(len, place).end, cut(len, next).start);
            }
        }
    }
}
