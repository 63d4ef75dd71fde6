//! One batch of sequences, cut into parts of equal size and almost equal cost.

use core_types::{WorldSize, balance::snake_order};

/// Which sequences of a global batch each rank takes: as many on each, or one more on the first
/// ones, and so that the largest sum of costs is about as small as can be.
///
/// Part r holds the positions in `costs` that rank r takes, ascending. The parts are filled from
/// the most expensive sequence on, in turn and back again, and then the most expensive part swaps
/// sequences with others as long as that makes it cheaper.
///
/// # Determinism
///
/// Sums of integers and first choices among equals alone: the same parts everywhere.
#[must_use]
pub fn balance(costs: &[u64], world_size: WorldSize) -> Vec<Vec<usize>> {
    let mut parts = Parts::deal(costs, world_size);
    while parts.improve() {}
    parts.into_positions()
}

/// A sequence: its cost and where it stands.
type Item = (u64, usize);

#[derive(Debug)]
struct Parts {
    /// The sequences of each part, by cost.
    items: Vec<Vec<Item>>,
    sums: Vec<u128>,
}

impl Parts {
    /// From the most expensive one on: to the first part up to the last, then back, and so on.
    fn deal(costs: &[u64], world_size: WorldSize) -> Self {
        let mut items: Vec<Vec<Item>> = vec![Vec::new(); world_size.as_usize()];
        let parts = snake_order(costs, world_size);
        for ((position, &cost), part) in costs.iter().enumerate().zip(parts) {
            items[part].push((cost, position));
        }
        let mut sums = Vec::with_capacity(items.len());
        for items in &mut items {
            items.sort_unstable();
            sums.push(items.iter().map(|&(cost, _)| u128::from(cost)).sum());
        }
        Self { items, sums }
    }

    /// Makes the most expensive part cheaper by the swap that leaves the least to the costlier of
    /// its two parts; returns whether there was one.
    fn improve(&mut self) -> bool {
        let largest = self.most_expensive();
        let others = (0..self.sums.len()).filter(|&part| part != largest);
        match others.filter_map(|part| self.best_swap(largest, part)).min() {
            Some(swap) if swap.larger_sum < self.sums[largest] => {
                self.swap(largest, &swap);
                true
            }
            Some(_) | None => false,
        }
    }

    /// The part with the largest sum, the first one of equals.
    #[expect(clippy::expect_used, reason = "a world has at least one rank")]
    fn most_expensive(&self) -> usize {
        let from_last = (0..self.sums.len()).rev();
        from_last.max_by_key(|&part| self.sums[part]).expect("there is a part for each rank")
    }

    /// The swap of one sequence each after which the larger of the two sums is the smallest.
    fn best_swap(&self, largest: usize, part: usize) -> Option<Swap> {
        let gap = self.sums[largest] - self.sums[part];
        let (mine, theirs) = (&self.items[largest], &self.items[part]);
        let mut best = None;
        let mut other = 0;
        // What should move is half of the gap; both lists ascend, so the partner of a costlier
        // sequence is costlier.
        for (give, &(cost, _)) in mine.iter().enumerate() {
            let wanted = |take: usize| u128::from(theirs[take].0) + gap / 2 < u128::from(cost);
            while other < theirs.len() && wanted(other) {
                other += 1;
            }
            for take in [other.wrapping_sub(1), other] {
                let Some(&(taken, _)) = theirs.get(take) else { continue };
                if taken < cost {
                    let moved = u128::from(cost - taken);
                    let larger_sum = (self.sums[largest] - moved).max(self.sums[part] + moved);
                    best = best.into_iter().chain([Swap { larger_sum, part, give, take }]).min();
                }
            }
        }
        best
    }

    fn swap(&mut self, largest: usize, swap: &Swap) {
        let given = self.items[largest].remove(swap.give);
        let taken = self.items[swap.part].remove(swap.take);
        let moved = u128::from(given.0 - taken.0);
        self.sums[largest] -= moved;
        self.sums[swap.part] += moved;
        for (part, item) in [(largest, taken), (swap.part, given)] {
            let place = self.items[part].partition_point(|other| *other < item);
            self.items[part].insert(place, item);
        }
    }

    fn into_positions(self) -> Vec<Vec<usize>> {
        let positions = self.items.into_iter().map(|items| {
            let mut positions: Vec<usize> =
                items.into_iter().map(|(_, position)| position).collect();
            positions.sort_unstable();
            positions
        });
        positions.collect()
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Swap {
    /// What the costlier of the two parts costs then; first, since the smallest swap is the best.
    larger_sum: u128,
    part: usize,
    give: usize,
    take: usize,
}

#[cfg(test)]
mod tests {
    use core_types::{Placement, Seed, split};

    use super::*;

    /// Whether part sizes are what `split::balanced` gives, and each position is in one part.
    fn check_parts(parts: &[Vec<usize>], len: usize, world_size: WorldSize) {
        let size = |place: Placement| {
            let range = split::balanced(len as u64, place);
            range.end - range.start
        };
        let sizes: Vec<u64> = world_size.placements().map(size).collect();
        assert_eq!(parts.iter().map(|part| part.len() as u64).collect::<Vec<_>>(), sizes);
        let mut all = parts.concat();
        all.sort_unstable();
        assert!(all.into_iter().eq(0..len));
    }

    #[test]
    fn parts_are_of_equal_size_and_hold_everything_once() {
        for seed in 0..200_u64 {
            let draw = |i| Seed::new(seed).derive(i).as_u64();
            let world_size = WorldSize::new(1 + draw(0) % 9).unwrap();
            let costs: Vec<u64> = (0..seed % 60).map(|i| draw(i + 1) % (2 + seed)).collect();
            check_parts(&balance(&costs, world_size), costs.len(), world_size);
        }
    }

    #[test]
    fn parts_of_equal_sums_are_found() {
        let costs = [90, 5, 40, 45, 10, 70, 60, 80];
        let parts = balance(&costs, WorldSize::new(2).unwrap());
        assert_eq!(parts, [[0, 1, 3, 6], [2, 4, 5, 7]], "200 each");
    }

    #[test]
    fn the_largest_costs_do_not_overflow() {
        let world_size = WorldSize::new(2).unwrap();
        check_parts(&balance(&[u64::MAX; 5], world_size), 5, world_size);
    }
}
