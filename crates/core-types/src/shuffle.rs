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
    let len = items.len();
    for place in 0..len {
        let n = (len - place) as u64;
        let distance = below(n);
        assert!(distance < n, "{distance} was drawn below {n}");
        #[expect(clippy::cast_possible_truncation, reason = "below a number of items")]
        items.swap(place, place + distance as usize);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::index::Seed;

    #[test]
    fn each_item_is_drawn_for_once_and_swaps_follow_one_another() {
        for len in [0, 1, 2, 100] {
            let draw = |n: u64| Seed::new(n).derive(1).as_u64() % n;
            let mut expected: Vec<usize> = (0..len).collect();
            for place in 0..len {
                expected.swap(place, place + usize::try_from(draw((len - place) as u64)).unwrap());
            }
            let mut items: Vec<usize> = (0..len).collect();
            let mut asked = Vec::new();
            shuffle(&mut items, |n| {
                asked.push(n);
                draw(n)
            });
            assert_eq!(items, expected, "{len}");
            assert!(asked.into_iter().eq((1..=len as u64).rev()));
        }
    }

    #[test]
    fn a_number_that_is_not_below_its_bound_is_refused() {
        let drawn = std::panic::catch_unwind(|| shuffle(&mut [1, 2, 3], |n| n.min(2)));
        let message = drawn.unwrap_err().downcast::<String>().unwrap();
        assert_eq!(*message, "2 was drawn below 2");
    }
}
