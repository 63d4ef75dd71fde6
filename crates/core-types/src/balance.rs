//! Which owner takes which weight, so that no owner gets much more than another.

use std::{cmp::Reverse, collections::BinaryHeap};

use crate::rank::WorldSize;

/// Returns the owner of each of `weights`: the heaviest first, each to the owner with the least so
/// far.
///
/// Among owners with equal sums the one with the fewest items comes first, then the one with the
/// lowest number; among equal weights, the one that stands first in the slice. So items of weight 0
/// are spread as well.
///
/// This is Graham's longest-processing-time rule ("Bounds on Multiprocessing Timing Anomalies",
/// 1969). The largest sum is never more than 4/3 − 1/(3 m) of the smallest possible for m owners.
///
/// # Determinism
///
/// It compares sums of integers only, and ties have an order: the owners are the same everywhere.
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
    let mut owner_of = vec![0; weights.len()];
    for item in heaviest_first(weights) {
        #[expect(clippy::expect_used, reason = "nothing is taken out of the heap")]
        let mut least = loads.peek_mut().expect("a world has at least one rank");
        let Reverse((sum, n_items, owner)) = *least;
        *least = Reverse((sum + u128::from(weights[item]), n_items + 1, owner));
        owner_of[item] = owner;
    }
    owner_of
}

/// Returns the owner of each of `weights`, where every owner takes equally many: the heaviest first,
/// in turn from the first owner to the last and back again.
///
/// The items of a last, shorter round go to the first owners. Among equal weights the one that
/// stands first in the slice comes first.
///
/// # Determinism
///
/// It compares integers only, and ties have an order: the owners are the same everywhere.
///
/// # Complexity
///
/// O(n log n) for n items.
///
/// # Examples
///
/// ```
/// use core_types::{WorldSize, balance};
///
/// assert_eq!(balance::snake_order(&[9, 8, 7, 6, 5], WorldSize::new(2)?), [0, 1, 1, 0, 0]);
/// # Ok::<(), core_types::Error>(())
/// ```
#[must_use]
pub fn snake_order(weights: &[u64], owners: WorldSize) -> Vec<usize> {
    let n_owners = owners.as_usize();
    let mut owner_of = vec![0; weights.len()];
    for (nth, item) in heaviest_first(weights).into_iter().enumerate() {
        let (round, turn) = (nth / n_owners, nth % n_owners);
        let is_way_back = round % 2 == 1 && (round + 1) * n_owners <= weights.len();
        owner_of[item] = if is_way_back { n_owners - 1 - turn } else { turn };
    }
    owner_of
}

/// Returns the positions of `weights`, the heaviest first; equal ones in the order in which they stand.
fn heaviest_first(weights: &[u64]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..weights.len()).collect();
    order.sort_by_key(|&item| Reverse(weights[item]));
    order
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn world(size: u64) -> WorldSize {
        WorldSize::new(size).unwrap()
    }

    fn sums(weights: &[u64], owner_of: &[usize], owners: WorldSize) -> Vec<u128> {
        let mut sums = vec![0; owners.as_usize()];
        for (&weight, &owner) in weights.iter().zip(owner_of) {
            sums[owner] += u128::from(weight);
        }
        sums
    }

    #[test]
    fn items_without_weight_spread_as_well() {
        assert_eq!(longest_first(&[0; 4], world(3)), [0, 1, 2, 0]);
    }

    #[test]
    fn a_last_short_round_goes_to_the_first_owners() {
        assert_eq!(snake_order(&[6, 5, 4, 3], world(3)), [0, 1, 2, 0]);
        assert_eq!(snake_order(&[6, 5, 4, 3, 2, 1], world(3)), [0, 1, 2, 2, 1, 0]);
    }

    #[test]
    fn the_largest_weights_do_not_overflow() {
        let weights = [u64::MAX; 5];
        let owner_of = longest_first(&weights, world(2));
        let most = u128::from(u64::MAX);
        assert_eq!(sums(&weights, &owner_of, world(2)), [3 * most, 2 * most]);
    }

    proptest! {
        #[test]
        fn no_sum_exceeds_an_even_share_by_more_than_the_heaviest(
            weights in prop::collection::vec(0_u64..1000, 0..60),
            n_owners in 1_u64..9,
        ) {
            let owner_of = longest_first(&weights, world(n_owners));
            let total: u128 = weights.iter().copied().map(u128::from).sum();
            let heaviest = u128::from(weights.iter().copied().max().unwrap_or(0));
            let largest = sums(&weights, &owner_of, world(n_owners)).into_iter().max().unwrap();
            prop_assert!(largest <= total / u128::from(n_owners) + heaviest);
        }

        #[test]
        fn every_owner_takes_equally_many(
            weights in prop::collection::vec(0_u64..1000, 0..60),
            n_owners in 1_u64..9,
        ) {
            let owner_of = snake_order(&weights, world(n_owners));
            let mut counts = vec![0; world(n_owners).as_usize()];
            for owner in owner_of {
                counts[owner] += 1;
            }
            let least = weights.len() / counts.len();
            prop_assert!(counts.iter().all(|&count| count == least || count == least + 1));
            prop_assert!(counts.is_sorted_by(|left, right| left >= right));
        }
    }
}
