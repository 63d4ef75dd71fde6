//! Fisher and Yates' shuffle (Knuth, TAOCP vol. 2, algorithm P); random numbers are the caller's.

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
    for place in 0..items.len() {
        let distance = below((items.len() - place) as u64);
        #[expect(clippy::cast_possible_truncation, reason = "below the number of items")]
        items.swap(place, place + distance as usize);
    }
}
