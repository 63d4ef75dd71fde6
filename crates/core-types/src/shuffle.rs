//! The Fisher–Yates shuffle (Knuth, TAOCP vol. 2, algorithm P) with random numbers from the caller.

/// Shuffles `items`: swaps each in turn with itself or a later item.
///
/// `draw(n)` returns the distance to the other item, a number less than `n`. It is called once per
/// item, with `n` falling from the number of items to 1. If the draws are uniform and independent,
/// all orders are equally likely.
///
/// # Determinism
///
/// The same draws give the same order, in every version.
///
/// # Panics
///
/// Panics if `draw(n)` returns `n` or more.
///
/// # Examples
///
/// ```
/// let mut items = ['a', 'b', 'c', 'd'];
/// core_types::shuffle(&mut items, |n| n - 1); // always the last item
/// assert_eq!(items, ['d', 'a', 'b', 'c']);
/// ```
pub fn shuffle<T>(items: &mut [T], mut draw: impl FnMut(u64) -> u64) {
    let len = items.len();
    for index in 0..len {
        let n = (len - index) as u64;
        let distance = draw(n);
        assert!(distance < n, "{distance} was drawn below {n}");
        #[expect(clippy::cast_possible_truncation, reason = "less than the number of items")]
        items.swap(index, index + distance as usize);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::seed::Seed;

    #[test]
    fn shuffle_draws_once_per_item() {
        for len in [0, 1, 2, 100] {
            let draw = |n: u64| Seed::new(n).derive(1).as_u64() % n;
            let mut expected: Vec<usize> = (0..len).collect();
            for index in 0..len {
                expected.swap(index, index + usize::try_from(draw((len - index) as u64)).unwrap());
            }
            let mut items: Vec<usize> = (0..len).collect();
            let mut limits = Vec::new();
            shuffle(&mut items, |n| {
                limits.push(n);
                draw(n)
            });
            assert_eq!(items, expected, "{len}");
            assert!(limits.into_iter().eq((1..=len as u64).rev()));
        }
    }

    #[test]
    fn excessive_draws_panic() {
        let drawn = std::panic::catch_unwind(|| shuffle(&mut [1, 2, 3], |n| n.min(2)));
        let message = drawn.unwrap_err().downcast::<String>().unwrap();
        assert_eq!(*message, "2 was drawn below 2");
    }
}
