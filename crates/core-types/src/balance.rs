//! Balanced assignment of weights to owners.

use std::{cmp::Reverse, collections::BinaryHeap};

use crate::rank::WorldSize;

/// Returns the owner of each of `weights`: heaviest first, each to the owner with the smallest sum
/// so far.
///
/// Ties between owners go to the fewest items, then to the lowest number; ties between weights keep
/// the order of the slice. So items of weight 0 are spread as well.
///
/// This is Graham's longest-processing-time rule ("Bounds on Multiprocessing Timing Anomalies",
/// 1969). The largest sum is at most 4/3 − 1/(3 m) of the optimum for m owners.
///
/// # Determinism
///
/// Only integer sums are compared, and ties have an order, so the owners are the same everywhere.
///
/// # Complexity
///
/// O(m + n log (m n)) for n items.
///
/// # Examples
///
/// ```
/// use core_types::{WorldSize, balance};
///
/// assert_eq!(balance::longest_first(&[5, 1, 9, 3, 3, 1], WorldSize::new(2)?), [1, 0, 0, 1, 1, 0]);
/// # Ok::<(), core_types::Error>(())
/// ```
#[must_use]
pub fn longest_first(weights: &[u64], owners: WorldSize) -> Vec<usize> {
    let mut loads: BinaryHeap<_> =
        (0..owners.as_usize()).map(|owner| Reverse((0_u128, 0_usize, owner))).collect();
    let mut owner_of_item = vec![0; weights.len()];
    let mut heaviest_first: Vec<usize> = (0..weights.len()).collect();
    heaviest_first.sort_by_key(|&item| Reverse(weights[item]));
    for item in heaviest_first {
        #[expect(clippy::expect_used, reason = "entries are replaced, never removed")]
        let mut least = loads.peek_mut().expect("a world has at least one rank");
        let Reverse((sum, n_items, owner)) = *least;
        *least = Reverse((sum + u128::from(weights[item]), n_items + 1, owner));
        owner_of_item[item] = owner;
    }
    owner_of_item
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn world(size: u64) -> WorldSize {
        WorldSize::new(size).unwrap()
    }

    fn sums(weights: &[u64], owner_of_item: &[usize], owners: WorldSize) -> Vec<u128> {
        let mut sums = vec![0; owners.as_usize()];
        for (&weight, &owner) in weights.iter().zip(owner_of_item) {
            sums[owner] += u128::from(weight);
        }
        sums
    }

    #[test]
    fn weightless_items_are_spread() {
        assert_eq!(longest_first(&[0; 4], world(3)), [0, 1, 2, 0]);
    }

    #[test]
    fn huge_weights_do_not_overflow() {
        let weights = [u64::MAX; 5];
        let owner_of_item = longest_first(&weights, world(2));
        let most = u128::from(u64::MAX);
        assert_eq!(sums(&weights, &owner_of_item, world(2)), [3 * most, 2 * most]);
    }

    proptest! {
        #[test]
        fn sums_stay_near_an_even_share(
            weights in prop::collection::vec(0_u64..1000, 0..60),
            n_owners in 1_u64..9,
        ) {
            let owner_of_item = longest_first(&weights, world(n_owners));
            let total: u128 = weights.iter().copied().map(u128::from).sum();
            let heaviest = u128::from(weights.iter().copied().max().unwrap_or(0));
            let largest = sums(&weights, &owner_of_item, world(n_owners)).into_iter().max().unwrap();
            prop_assert!(largest <= total / u128::from(n_owners) + heaviest);
        }
    }
}
