//! Fisher and Yates' shuffle (Knuth, TAOCP vol. 2, algorithm P); random numbers are the caller's.

use std::hint::black_box;

/// How many swaps are drawn before they are made; see [`swap_ahead`].
const AHEAD: usize = 512;

/// Shuffles `items`: each in turn, from the first on, changes places with one of those from it on.
///
/// `below(n)` draws the distance to that one, a number below `n`; it is asked once for each item,
/// with `n` falling from the number of items to 1. If the draws are uniform and independent, all
/// orders are equally likely.
///
/// # Determinism
///
/// The same draws give the same order, in every version.
///
/// # Panics
///
/// If `below(n)` is not below `n`.
///
/// # Examples
///
/// ```
/// let mut items = ['a', 'b', 'c', 'd'];
/// core_types::shuffle(&mut items, |n| n - 1); // always the last one
/// assert_eq!(items, ['d', 'a', 'b', 'c']);
/// ```
pub fn shuffle<T>(items: &mut [T], mut below: impl FnMut(u64) -> u64) {
    let len = items.len();
    for place in 0..len {
        items.swap(place, index(partner(place, len, &mut below)));
    }
}

/// [`shuffle`] for tables that are larger than the cache: the same order, in less time.
///
/// Draws are made ahead of the swaps, in the same order, and [`swap_ahead`] says what that is
/// worth.
///
/// # Determinism
///
/// As [`shuffle`].
///
/// # Panics
///
/// As [`shuffle`].
pub fn shuffle_ahead<T: Copy>(items: &mut [T], mut below: impl FnMut(u64) -> u64) {
    let len = items.len();
    let mut partners = [0_u64; AHEAD];
    for start in (0..len).step_by(AHEAD) {
        let partners = &mut partners[..AHEAD.min(len - start)];
        for (place, drawn) in (start..).zip(&mut *partners) {
            *drawn = partner(place, len, &mut below);
        }
        swap_ahead(items, start, partners);
    }
}

/// Where the item at `place` of `len` goes.
fn partner(place: usize, len: usize, below: &mut impl FnMut(u64) -> u64) -> u64 {
    let n = (len - place) as u64;
    let distance = below(n);
    assert!(distance < n, "{distance} was drawn below {n}");
    place as u64 + distance
}

/// Swaps the items from `start` on with those at `partners`, one after the other.
///
/// All partners are read once before the first swap, which brings them into the cache. These loads
/// do not depend on each other, so the processor has many of them under way at once; the stores
/// between the loads of the swaps would hinder it. Shuffling 10^8 items of 4 bytes takes 1.7 s this
/// way and 2.1 s without; while all items fit into the cache, 10^7 of them, it costs up to a tenth
/// more.
///
/// Any 300 to 1,200 partners at a time are as fast. 16 take half as long again, and 10,000 a third:
/// they no longer stay where they were brought.
///
/// # Panics
///
/// If an item or a partner lies beyond the end.
///
/// # Examples
///
/// ```
/// let mut items = ['a', 'b', 'c', 'd'];
/// core_types::swap_ahead(&mut items, 1, &[3_u32, 0]);
/// assert_eq!(items, ['c', 'd', 'a', 'b']);
/// ```
pub fn swap_ahead<T: Copy, P: Copy + Into<u64>>(items: &mut [T], start: usize, partners: &[P]) {
    for &partner in partners {
        black_box(items[index(partner)]);
    }
    for (place, &partner) in (start..).zip(partners) {
        items.swap(place, index(partner));
    }
}

#[expect(clippy::expect_used, reason = "as with any other index, the caller names what is there")]
fn index(partner: impl Into<u64>) -> usize {
    usize::try_from(partner.into()).expect("no item lies beyond `usize`")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::index::Seed;

    type Shuffle = fn(&mut [usize], &mut dyn FnMut(u64) -> u64);

    #[test]
    fn each_item_is_drawn_for_once_and_swaps_follow_one_another() {
        for len in [0, 1, 2, AHEAD - 1, AHEAD, AHEAD + 1, 3 * AHEAD + 7] {
            let draw = |n: u64| Seed::new(n).derive(1).as_u64() % n;
            let mut expected: Vec<usize> = (0..len).collect();
            for place in 0..len {
                expected.swap(place, place + usize::try_from(draw((len - place) as u64)).unwrap());
            }
            for run in [(|items, below| shuffle(items, below)) as Shuffle, |items, below| {
                shuffle_ahead(items, below);
            }] {
                let mut items: Vec<usize> = (0..len).collect();
                let mut asked = Vec::new();
                run(&mut items, &mut |n| {
                    asked.push(n);
                    draw(n)
                });
                assert_eq!(items, expected, "{len}");
                assert!(asked.into_iter().eq((1..=len as u64).rev()));
            }
        }
    }

    #[test]
    fn a_number_that_is_not_below_its_bound_is_refused() {
        let drawn = std::panic::catch_unwind(|| shuffle(&mut [1, 2, 3], |n| n.min(2)));
        let message = drawn.unwrap_err().downcast::<String>().unwrap();
        assert_eq!(*message, "2 was drawn below 2");
    }
}
