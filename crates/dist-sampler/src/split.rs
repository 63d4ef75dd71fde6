//! Splits of positions over the ranks of a world, besides those of [`core_types::split`].

use std::ops::Range;

use core_types::{Placement, split::balanced};

/// Returns the ⌊`len` / world⌋ items of `place`; the last rank also owns the remainder.
pub(crate) fn last_takes_rest(len: u64, place: Placement) -> Range<u64> {
    let size = len / place.world_size().as_u64();
    let start = place.rank().as_u64() * size;
    start..if place.is_last() { len } else { start + size }
}

/// Returns the rank that owns `item` under [`last_takes_rest`], or `None` if `item` is out of range.
pub(crate) fn last_takes_rest_owner(len: u64, world: u64, item: u64) -> Option<u64> {
    let last = world - 1;
    // With fewer items than ranks, all items are the remainder.
    let rank = item.checked_div(len / world).map_or(last, |rank| rank.min(last));
    (item < len).then_some(rank)
}

/// Returns the rank that owns `item` under [`balanced`], or `None` if `item` is out of range.
pub(crate) fn balanced_owner(len: u64, world: u64, item: u64) -> Option<u64> {
    let size = len / world;
    let extra = len % world;
    let n_in_larger_parts = extra * (size + 1);
    let rank = if item < n_in_larger_parts {
        item / (size + 1)
    } else {
        extra + (item - n_in_larger_parts).checked_div(size)?
    };
    (item < len).then_some(rank)
}

/// Returns the items of each rank if shares are proportional to `weights`, one per rank and not all
/// zero.
///
/// Every share differs from the exact proportion by less than one item, and the shares add up to
/// `len`.
pub(crate) fn proportional(len: u64, weights: &[u64]) -> impl Iterator<Item = Range<u64>> {
    let total: u128 = weights.iter().copied().map(u128::from).sum();
    let mut sum = 0;
    weights.iter().map(move |&weight| {
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

/// Every `step`-th item from `first` on. A range has step 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Strided {
    first: u64,
    /// Distance between items.
    pub(crate) step: u64,
    /// Number of items.
    pub(crate) len: u64,
}

impl Strided {
    /// Returns the items of `place` in a round-robin split: `rank`, `rank + world`, ….
    pub(crate) fn new(len: u64, place: Placement) -> Self {
        let part = balanced(len, place);
        let (first, step) = (place.rank().as_u64(), place.world_size().as_u64());
        Self { first, step, len: part.end - part.start }
    }

    /// Returns the `n`-th item, or `None` beyond the end.
    pub(crate) fn get(self, n: u64) -> Option<u64> {
        (n < self.len).then(|| self.first + n * self.step)
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

    proptest! {
        #[test]
        fn huge_weights_do_not_overflow(
            len in any::<u64>(),
            weights in prop::collection::vec(any::<u64>(), 1..40),
        ) {
            prop_assume!(weights.iter().any(|&weight| weight > 0));
            let parts: Vec<_> = proportional(len, &weights).collect();
            prop_assert!(parts.windows(2).all(|pair| pair[0].end == pair[1].start));
            prop_assert_eq!(parts.last().map(|part| part.end), Some(len));
        }
    }
}
