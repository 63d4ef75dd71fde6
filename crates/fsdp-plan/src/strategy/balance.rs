//! Balanced assignment of weights to bins, either of any items or of runs of neighbors.
//!
//! A bin is a rank or a pipeline stage, a weight is bytes or milliseconds. All arithmetic uses
//! integers, and ties are broken by position, so every rank computes the same assignment.
//!
//! # References
//!
//! - R. L. Graham, "Bounds on Multiprocessing Timing Anomalies", SIAM Journal on Applied
//!   Mathematics 17(2), 1969: the longest-processing-time rule and its bound of 4/3 − 1/(3 m).
//! - E. G. Coffman, M. R. Garey, D. S. Johnson, "An Application of Bin-Packing to Multiprocessor
//!   Scheduling", SIAM Journal on Computing 7(1), 1978: MULTIFIT.
//! - M. Yue, "On the Exact Upper Bound for the Multifit Processor Scheduling Algorithm", Annals of
//!   Operations Research 24, 1990: MULTIFIT stays within 13/11 of the optimum.

use std::{cmp::Reverse, collections::BinaryHeap, ops::Range};

use core_types::{WorldSize, balance::longest_first};

/// Limit on the capacities that [`multifit`] tries.
///
/// 24 tries are enough for 2^24 candidate capacities. Of larger ranges less than a ten-millionth
/// stays unsearched; with 64 tries, no largest sum of the timed sets changed in the first seven
/// digits.
const MAX_TRIES: usize = 24;

/// Returns the bin of each item such that the largest sum of a bin is small.
///
/// Runs [`longest_first`], and [`multifit`] if it can improve on that, because neither is always
/// better. No bin is empty while another has two items.
///
/// # Complexity
///
/// O(n log n) for n items, for each of at most [`MAX_TRIES`] tries, independent of bins beyond n.
pub(super) fn assign_any(weights: &[u64], bins: WorldSize) -> Vec<usize> {
    let order = largest_first(weights);
    let sorted: Vec<_> = order.iter().map(|&item| weights[item]).collect();
    let mut owners = vec![0; weights.len()];
    for (item, bin) in order.into_iter().zip(pack(&sorted, useful_bins(weights, bins))) {
        owners[item] = bin;
    }
    owners
}

/// Returns the bin of each item, where each bin is a run of neighbors and bin 0 has the first
/// items.
///
/// The largest sum is optimal, and the number of runs is the smaller of items and bins. Several
/// sets of cuts are optimal; each run takes as close to an even share of the remaining items as it
/// can, because runs as long as possible would starve the last ones.
///
/// # Complexity
///
/// O(n log n + n log w) for n items of a weight of at most w.
pub(super) fn assign_contiguous(weights: &[u64], bins: WorldSize) -> Vec<usize> {
    let n_bins = useful_bins(weights, bins).as_usize();
    let prefix = prefix_sums(weights);
    let capacity = least_capacity(weights, &prefix, n_bins);
    let starts = earliest_starts(&prefix, capacity, n_bins);
    let mut owners = Vec::with_capacity(weights.len());
    for bin in 0..n_bins {
        let n_after = n_bins - 1 - bin;
        let end = run_end(&prefix, owners.len(), capacity, n_after).max(starts[n_after]);
        owners.resize(end, bin);
    }
    owners
}

/// Returns a lower bound of the largest sum of any assignment.
///
/// It is the maximum of an even share, the largest weight, and, for each k, the k + 1 smallest of
/// the k × `n_bins` + 1 largest weights, because one bin has at least k + 1 of these.
///
/// # Complexity
///
/// O(n log n) for n items.
pub(super) fn lower_bound(weights: &[u64], bins: WorldSize) -> u128 {
    let mut sorted = weights.to_vec();
    sorted.sort_unstable_by_key(|&weight| Reverse(weight));
    lower_bound_sorted(&sorted, useful_bins(weights, bins).as_usize())
}

/// Returns the number of usable bins: at most the number of items, and at least one.
fn useful_bins(weights: &[u64], bins: WorldSize) -> WorldSize {
    let n_bins = bins.as_u64().min(weights.len() as u64).max(1);
    #[expect(clippy::expect_used, reason = "a world size is at least 1, and so is the result")]
    WorldSize::new(n_bins).expect("no more bins than there are ranks")
}

/// Returns the items from the heaviest to the lightest; equal items keep their order.
fn largest_first(weights: &[u64]) -> Vec<usize> {
    let mut order: Vec<_> = (0..weights.len()).collect();
    order.sort_by_key(|&item| Reverse(weights[item]));
    order
}

/// Returns the sums of the first 0, 1, … n weights. Sums of `u64`s that fit into memory never
/// overflow a `u128`.
fn prefix_sums(weights: &[u64]) -> Vec<u128> {
    let mut sums = Vec::with_capacity(weights.len() + 1);
    sums.push(0);
    sums.extend(weights.iter().scan(0, |sum, &weight| {
        *sum += u128::from(weight);
        Some(*sum)
    }));
    sums
}

/// Computes [`lower_bound`] for descending weights, in O(n).
fn lower_bound_sorted(sorted: &[u64], n_bins: usize) -> u128 {
    let prefix = prefix_sums(sorted);
    let mut bound = prefix[sorted.len()].div_ceil(n_bins as u128);
    // `k` = 0 is the largest weight alone.
    for k in 0..sorted.len().div_ceil(n_bins) {
        bound = bound.max(prefix[k * n_bins + 1] - prefix[k * n_bins - k]);
    }
    bound
}

/// Computes [`assign_any`] for descending weights and at most as many bins as items.
///
/// If [`longest_first`] meets the lower bound, as it does for equal weights, no capacity remains to
/// try.
fn pack(sorted: &[u64], bins: WorldSize) -> Vec<usize> {
    let n_bins = bins.as_usize();
    let baseline = longest_first(sorted, bins);
    let capacities = lower_bound_sorted(sorted, n_bins)..largest_sum(sorted, &baseline, n_bins);
    let Some(mut better) = multifit(sorted, n_bins, capacities) else { return baseline };
    fill_empty_bins(sorted, &mut better, n_bins);
    better
}

/// Returns the result of [`first_fit`] at a small capacity out of `capacities`, or `None` if all
/// tries fail.
///
/// This is MULTIFIT (Coffman, Garey and Johnson, 1978) with given bounds for the bisection. If it
/// ends before [`MAX_TRIES`], the result is within 13/11 of the optimum (Yue, 1990). It may miss
/// the smallest capacity, because first fit can fail at one capacity and succeed at a smaller one.
///
/// # Complexity
///
/// O(n log n) for n items, for each try.
fn multifit(sorted: &[u64], n_bins: usize, mut capacities: Range<u128>) -> Option<Vec<usize>> {
    let mut best = None;
    for _ in 0..MAX_TRIES {
        if capacities.is_empty() {
            break;
        }
        let capacity = u128::midpoint(capacities.start, capacities.end);
        if let Some(bins) = first_fit(sorted, n_bins, capacity) {
            // First fit gives the same result at every capacity down to its largest sum.
            capacities.end = largest_sum(sorted, &bins, n_bins);
            best = Some(bins);
        } else {
            capacities.start = capacity + 1;
        }
    }
    best
}

/// Puts each item into the first bin in which it fits; returns `None` if an item fits nowhere.
///
/// Instead of searching a bin for each item, the loop fills one bin after another, with every
/// remaining item that still fits; the result is the same. There are two reasons, which together
/// halved the time. Items are found in the sorted weights, while a search for bins would need a
/// tree. And the free space of a finished bin is final, so the loop stops as soon as the bins waste
/// too much space.
///
/// # Complexity
///
/// O(n log n) for n items.
fn first_fit(sorted: &[u64], n_bins: usize, capacity: u128) -> Option<Vec<usize>> {
    let total: u128 = sorted.iter().copied().map(u128::from).sum();
    // This cannot overflow: the result of `longest_first` is less than an even share plus the
    // largest weight.
    let mut spare = (capacity * n_bins as u128).checked_sub(total)?;
    let mut remaining = RemainingItems::all(sorted.len());
    let mut bins = vec![0; sorted.len()];
    for bin in 0..n_bins {
        let mut from = 0;
        let mut free = capacity;
        loop {
            let n_too_heavy = sorted[from..].partition_point(|&weight| free < u128::from(weight));
            let Some(item) = remaining.first_from(from + n_too_heavy) else { break };
            remaining.remove(item);
            bins[item] = bin;
            free -= u128::from(sorted[item]);
            from = item + 1;
        }
        spare = spare.checked_sub(free)?;
    }
    Some(bins)
}

/// The remaining items of a list.
///
/// A remaining item points to itself; any other item points to a later one, and no item between the
/// two remains. Searches halve the paths they follow, as in a disjoint-set forest, so a search
/// takes O(log n) on average.
struct RemainingItems(Vec<usize>);

impl RemainingItems {
    /// Creates the set of all `n_items`, with a sentinel at the end.
    fn all(n_items: usize) -> Self {
        Self((0..=n_items).collect())
    }

    /// Removes a remaining item, in O(1).
    fn remove(&mut self, item: usize) {
        self.0[item] = item + 1;
    }

    /// Returns the first remaining item from `item` on.
    fn first_from(&mut self, mut item: usize) -> Option<usize> {
        while self.0[item] != item {
            self.0[item] = self.0[self.0[item]];
            item = self.0[item];
        }
        (item + 1 < self.0.len()).then_some(item)
    }
}

/// Returns the largest sum of a bin, in O(m + n).
pub(super) fn largest_sum(weights: &[u64], bins: &[usize], n_bins: usize) -> u128 {
    #[expect(clippy::expect_used, reason = "a world has at least one rank")]
    let largest = bin_sums(weights, bins, n_bins).into_iter().max().expect("at least one bin");
    largest
}

/// Returns the sum of each bin, in O(m + n).
fn bin_sums(weights: &[u64], bins: &[usize], n_bins: usize) -> Vec<u128> {
    let mut sums = vec![0; n_bins];
    for (&weight, &bin) in weights.iter().zip(bins) {
        sums[bin] += u128::from(weight);
    }
    sums
}

/// Moves an item into each bin that [`first_fit`] left empty: the lightest item of the fullest bin
/// with two or more.
///
/// First fit opens bins in order, so empty bins are the last ones. Of equally full bins the first
/// gives an item, and of equally light items the last moves. No bin becomes fuller than the fullest
/// was.
///
/// # Complexity
///
/// O(m + n log m) for n items.
fn fill_empty_bins(sorted: &[u64], bins: &mut [usize], n_bins: usize) {
    #[expect(clippy::expect_used, reason = "multifit tries no capacity without items")]
    let n_used = bins.iter().max().expect("at least one item") + 1;
    let mut items = vec![Vec::new(); n_used];
    for (item, &bin) in bins.iter().enumerate() {
        items[bin].push(item);
    }
    let sums = bin_sums(sorted, bins, n_used);
    let donors = (0..n_used).filter(|&bin| items[bin].len() > 1);
    let mut donors: BinaryHeap<_> = donors.map(|bin| (sums[bin], Reverse(bin))).collect();
    for empty in n_used..n_bins {
        #[expect(clippy::expect_used, reason = "there are at least as many items as bins")]
        let (sum, Reverse(donor)) =
            donors.pop().expect("while a bin is empty, another has two items");
        #[expect(clippy::expect_used, reason = "a bin with one item is not pushed again")]
        let item = items[donor].pop().expect("a donor has two items or more");
        bins[item] = empty;
        if items[donor].len() > 1 {
            donors.push((sum - u128::from(sorted[item]), Reverse(donor)));
        }
    }
}

/// Returns the smallest possible largest sum of `n_bins` runs, in O(n log w) for n items of weights
/// up to w.
fn least_capacity(weights: &[u64], prefix: &[u128], n_bins: usize) -> u128 {
    let Some(largest) = weights.iter().copied().max().map(u128::from) else { return 0 };
    let mut low = prefix[weights.len()].div_ceil(n_bins as u128).max(largest);
    // This capacity always suffices: a run that has no space for the next item then has more than
    // an even share.
    let mut high = low + largest;
    while low < high {
        let capacity = u128::midpoint(low, high);
        if earliest_starts(prefix, capacity, n_bins)[n_bins] == 0 {
            high = capacity;
        } else {
            low = capacity + 1;
        }
    }
    low
}

/// Returns, for each number of runs up to `n_bins`, the first item from which all items fit into
/// that many runs, in O(m + n).
fn earliest_starts(prefix: &[u128], capacity: u128, n_bins: usize) -> Vec<usize> {
    let mut start = prefix.len() - 1;
    let mut starts = vec![start];
    for _ in 0..n_bins {
        let least = prefix[start].saturating_sub(capacity);
        while start > 0 && least <= prefix[start - 1] {
            start -= 1;
        }
        starts.push(start);
    }
    starts
}

/// Returns the end of a run from `start` that takes about an even share, fits, and leaves an item
/// for each of `n_after` runs.
///
/// It takes O(log n).
fn run_end(prefix: &[u128], start: usize, capacity: u128, n_after: usize) -> usize {
    let n_items = prefix.len() - 1;
    let share = (prefix[n_items] - prefix[start]) / (n_after as u128 + 1);
    let fitting = prefix.partition_point(|&sum| sum <= prefix[start] + capacity) - 1;
    find_nearest(prefix, prefix[start] + share).max(start + 1).min(fitting).min(n_items - n_after)
}

/// Returns the position of the sum nearest to `target`, which must not exceed the last; the later
/// of two ties, in O(log n).
fn find_nearest(prefix: &[u128], target: u128) -> usize {
    let upper = prefix.partition_point(|&sum| sum < target);
    let lower = upper.saturating_sub(1);
    if target - prefix[lower] < prefix[upper] - target { lower } else { upper }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn world(n_bins: usize) -> WorldSize {
        WorldSize::new(n_bins as u64).unwrap()
    }

    /// Computes the optimum by exhaustive search.
    fn optimum(weights: &[u64], sums: &mut [u128]) -> u128 {
        let Some((&weight, rest)) = weights.split_first() else {
            return sums.iter().copied().max().unwrap();
        };
        let mut best = u128::MAX;
        for bin in 0..sums.len() {
            sums[bin] += u128::from(weight);
            best = best.min(optimum(rest, sums));
            sums[bin] -= u128::from(weight);
        }
        best
    }

    /// Computes the optimum of runs by exhaustive search.
    fn optimum_of_runs(weights: &[u64], n_bins: usize) -> u128 {
        let sum = |run: &[u64]| run.iter().copied().map(u128::from).sum::<u128>();
        if n_bins == 1 {
            return sum(weights);
        }
        let mut best = u128::MAX;
        for end in 0..=weights.len() {
            let (first, rest) = weights.split_at(end);
            best = best.min(sum(first).max(optimum_of_runs(rest, n_bins - 1)));
        }
        best
    }

    fn check_balanced(weights: &[u64], n_bins: usize) {
        let owners = assign_any(weights, world(n_bins));
        check_occupied(&owners, n_bins, weights);
        assert_eq!(owners, assign_any(weights, world(n_bins)));

        let items = weights.len() as u128;
        let bins = n_bins as u128;
        let optimum = optimum(weights, &mut vec![0; n_bins]);
        let lpt =
            largest_sum(&sorted(weights), &longest_first(&sorted(weights), world(n_bins)), n_bins);
        let best = largest_sum(weights, &owners, n_bins);
        let lower = lower_bound(weights, world(n_bins));
        assert!(lower <= optimum && optimum <= best && best <= lpt, "{weights:?} on {n_bins}");
        assert!(
            3 * bins * lpt <= (4 * bins - 1) * optimum,
            "Graham's bound: {weights:?} on {n_bins}"
        );
        assert!(11 * best <= 13 * optimum, "Yue's bound: {weights:?} on {n_bins}");
        assert!(items > bins || best == lower, "{weights:?} on {n_bins}");
    }

    fn check_contiguous(weights: &[u64], n_bins: usize) {
        let owners = assign_contiguous(weights, world(n_bins));
        check_occupied(&owners, n_bins, weights);
        assert!(
            owners.is_sorted() && owners.first().is_none_or(|&bin| bin == 0),
            "{weights:?} on {n_bins}"
        );
        assert_eq!(
            largest_sum(weights, &owners, n_bins),
            optimum_of_runs(weights, n_bins),
            "{weights:?} on {n_bins}"
        );
    }

    /// Checks that as many bins as possible have items.
    fn check_occupied(owners: &[usize], n_bins: usize, weights: &[u64]) {
        assert_eq!(owners.len(), weights.len());
        assert!(owners.iter().all(|&bin| bin < n_bins));
        let n_occupied = (0..n_bins).filter(|bin| owners.contains(bin)).count();
        assert_eq!(n_occupied, n_bins.min(weights.len()), "{weights:?} on {n_bins}: {owners:?}");
    }

    fn sorted(weights: &[u64]) -> Vec<u64> {
        largest_first(weights).into_iter().map(|item| weights[item]).collect()
    }

    /// Computes [`first_fit`] item by item.
    fn slow_first_fit(sorted: &[u64], n_bins: usize, capacity: u128) -> Option<Vec<usize>> {
        let mut free = vec![capacity; n_bins];
        let mut bins = Vec::new();
        for &weight in sorted {
            let bin = free.iter().position(|&free| u128::from(weight) <= free)?;
            free[bin] -= u128::from(weight);
            bins.push(bin);
        }
        Some(bins)
    }

    #[test]
    fn small_cases_keep_the_bounds() {
        for n_items in 0..=5 {
            for code in 0..5_u64.pow(n_items) {
                let weights: Vec<_> = (0..n_items).map(|item| code / 5_u64.pow(item) % 5).collect();
                for n_bins in 1..=4 {
                    check_balanced(&weights, n_bins);
                    check_contiguous(&weights, n_bins);
                }
            }
        }
    }

    proptest! {
        #[test]
        fn larger_cases_keep_the_bounds(weights in proptest::collection::vec(0_u64..50, 6..=8), n_bins in 1_usize..=4) {
            check_balanced(&weights, n_bins);
            check_contiguous(&weights, n_bins);
        }

        #[test]
        fn huge_weights_keep_the_bounds(
            weights in proptest::collection::vec(u64::MAX - 9.., 0..=7), n_bins in 1_usize..=3,
        ) {
            check_balanced(&weights, n_bins);
            check_contiguous(&weights, n_bins);
        }

        #[test]
        fn first_fit_matches_its_definition(
            weights in proptest::collection::vec(0_u64..30, 0..60), n_bins in 1_usize..20, capacity in 30_u128..200,
        ) {
            let weights = sorted(&weights);
            prop_assert_eq!(first_fit(&weights, n_bins, capacity), slow_first_fit(&weights, n_bins, capacity));
        }

        #[test]
        fn no_bin_stays_empty(
            weights in proptest::collection::vec(0_u64..6, 0..80), n_bins in 1_usize..40,
        ) {
            check_occupied(&assign_any(&weights, world(n_bins)), n_bins, &weights);
            check_occupied(&assign_contiguous(&weights, world(n_bins)), n_bins, &weights);
        }
    }

    #[test]
    fn multifit_wins_if_better() {
        let weights = [3, 3, 2, 2, 2];
        assert_eq!(longest_first(&weights, world(2)), [0, 1, 0, 1, 0]);
        assert_eq!(assign_any(&weights, world(2)), [0, 0, 1, 1, 1]);
    }

    #[test]
    fn longest_first_wins_ties() {
        let weights = [3, 3, 2, 2, 2, 2];
        assert_eq!(assign_any(&weights, world(2)), longest_first(&weights, world(2)));
        // First fit would need a third bin at the same capacity.
        assert_eq!(first_fit(&weights, 2, 7), None);
    }

    #[test]
    fn empty_bins_get_an_item() {
        // At capacity 6, first fit needs four bins for the threes and three for the twos. The other rule ends at 7.
        let weights: Vec<_> = [[3; 8].as_slice(), &[2; 9]].concat();
        assert_eq!(largest_sum(&weights, &longest_first(&weights, world(8)), 8), 7);
        assert_eq!(first_fit(&weights, 8, 6).unwrap().iter().max(), Some(&6));
        assert_eq!(
            assign_any(&weights, world(8)),
            [0, 7, 1, 1, 2, 2, 3, 3, 4, 4, 4, 5, 5, 5, 6, 6, 6]
        );
    }

    #[test]
    fn fullest_bin_gives_an_item_first() {
        let mut bins = [0, 1, 1, 2, 2, 2, 2];
        fill_empty_bins(&[9, 4, 3, 2, 2, 1, 0], &mut bins, 6);
        // Bin 0 has one item; bin 1 gives its 3, then bin 2 gives its 0 and its 1.
        assert_eq!(bins, [0, 1, 3, 2, 2, 5, 4]);
    }

    #[test]
    fn equal_weights_are_spread_evenly() {
        assert_eq!(assign_any(&[7; 5], world(3)), [0, 1, 2, 0, 1]);
        assert_eq!(assign_any(&[0; 5], world(3)), [0, 1, 2, 0, 1]);
        for (n_items, n_bins) in [(126, 8), (12, 5), (7, 5), (61, 16), (9, 9)] {
            let counts = bin_sums(
                &vec![1; n_items],
                &assign_contiguous(&vec![1; n_items], world(n_bins)),
                n_bins,
            );
            assert!(
                counts.iter().all(|&count| count.abs_diff(n_items as u128 / n_bins as u128) <= 1),
                "{counts:?}"
            );
        }
    }

    #[test]
    fn light_runs_are_even() {
        // The largest sum is always 9; the longest runs within that capacity would have 1, 4 and 1 items.
        assert_eq!(assign_contiguous(&[9, 2, 2, 2, 2, 2], world(3)), [0, 1, 1, 1, 2, 2]);
    }

    #[test]
    fn crowded_bins_raise_the_lower_bound() {
        // Even shares are 8 and 10. But one bin gets two of the three fives, or three of the five fours.
        assert_eq!(lower_bound(&[5, 5, 5, 0, 0], world(2)), 10);
        assert_eq!(lower_bound(&[4, 4, 4, 4, 4], world(2)), 12);
        assert_eq!(lower_bound(&[9, 1], world(2)), 9);
        assert_eq!(lower_bound(&[1, 1, 1, 2], world(3)), 2);
        assert_eq!(lower_bound(&[], world(3)), 0);
    }

    #[test]
    fn extremes_do_not_overflow() {
        let weights = [u64::MAX; 3];
        assert_eq!(assign_any(&weights, world(2)), [0, 1, 0]);
        assert_eq!(assign_contiguous(&weights, world(1)), [0, 0, 0]);
        assert_eq!(lower_bound(&weights, world(2)), 2 * u128::from(u64::MAX));
        assert_eq!(assign_any(&weights, WorldSize::MAX), [0, 1, 2]);
        assert_eq!(assign_contiguous(&weights, WorldSize::MAX), [0, 1, 2]);
        assert_eq!(lower_bound(&weights, WorldSize::MAX), u128::from(u64::MAX));
        assert!(
            assign_any(&[], world(4)).is_empty() && assign_contiguous(&[], world(4)).is_empty()
        );
    }
}
