//! Division of a batch into parts of equal size and almost equal cost.

use std::cmp::Reverse;

use core_types::WorldSize;

/// Divides the sequences of a global batch over the ranks, equally many for each rank (or one more
/// for the first ranks), such that the largest sum of costs is small.
///
/// Part r has the positions in `costs` for rank r, ascending. The most expensive sequences are
/// assigned first, in snake order. Then the most expensive part swaps sequences with other parts
/// until no swap makes it cheaper.
///
/// # Determinism
///
/// The result depends only on integer sums, and ties go to the first position, so it is equal
/// everywhere.
#[must_use]
pub fn balance(costs: &[u64], world_size: WorldSize) -> Vec<Vec<usize>> {
    let mut parts = CostParts::deal(costs, world_size);
    while parts.improve() {}
    parts.into_positions()
}

/// The cost and the position of a sequence.
type CostItem = (u64, usize);

#[derive(Debug)]
struct CostParts {
    /// Sequences of each part, in ascending order of cost.
    items: Vec<Vec<CostItem>>,
    sums: Vec<u128>,
}

impl CostParts {
    /// Assigns the most expensive sequences first: to the first part up to the last, then back, and
    /// so on.
    fn deal(costs: &[u64], world_size: WorldSize) -> Self {
        let n_parts = world_size.as_usize();
        let mut items: Vec<Vec<CostItem>> = vec![Vec::new(); n_parts];
        let mut most_expensive_first: Vec<usize> = (0..costs.len()).collect();
        most_expensive_first.sort_by_key(|&position| Reverse(costs[position]));
        for (round, positions) in most_expensive_first.chunks(n_parts).enumerate() {
            // A last round with fewer sequences than parts gives them to the first parts.
            let is_backward = round % 2 == 1 && positions.len() == n_parts;
            for (part, &position) in positions.iter().enumerate() {
                let part = if is_backward { n_parts - 1 - part } else { part };
                items[part].push((costs[position], position));
            }
        }
        let mut sums = Vec::with_capacity(items.len());
        for items in &mut items {
            items.sort_unstable();
            sums.push(items.iter().map(|&(cost, _)| u128::from(cost)).sum());
        }
        Self { items, sums }
    }

    /// Makes the best swap of the most expensive part with any other part: the swap after which the
    /// larger sum of the two parts is smallest. Returns true if the part became cheaper; otherwise
    /// no swap is made.
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

    /// Returns the part with the largest sum, the first one of ties.
    #[expect(clippy::expect_used, reason = "a world has at least one rank")]
    fn most_expensive(&self) -> usize {
        let from_last = (0..self.sums.len()).rev();
        from_last.max_by_key(|&part| self.sums[part]).expect("there is a part for each rank")
    }

    /// Returns the swap of one sequence each that makes the larger of the two sums smallest.
    fn best_swap(&self, largest: usize, part: usize) -> Option<SequenceSwap> {
        let gap = self.sums[largest] - self.sums[part];
        let partners = &self.items[part];
        let mut best: Option<SequenceSwap> = None;
        let mut next = 0;
        // A swap should move half of the gap. Both lists ascend, so the partner of a costlier
        // sequence is costlier, and `next` never moves back.
        for (give, &(cost, _)) in self.items[largest].iter().enumerate() {
            while next < partners.len() && u128::from(partners[next].0) + gap / 2 < u128::from(cost)
            {
                next += 1;
            }
            // The two partners whose costs are closest to the cost less half of the gap.
            let nearest = next.saturating_sub(1)..partners.len().min(next + 1);
            for (take, &(partner_cost, _)) in nearest.clone().zip(&partners[nearest]) {
                if partner_cost < cost {
                    let difference = u128::from(cost - partner_cost);
                    let larger_sum =
                        (self.sums[largest] - difference).max(self.sums[part] + difference);
                    let swap = SequenceSwap { larger_sum, part, give, take };
                    best = Some(best.map_or(swap, |best| best.min(swap)));
                }
            }
        }
        best
    }

    /// Makes a swap.
    fn swap(&mut self, largest: usize, swap: &SequenceSwap) {
        let given = self.items[largest].remove(swap.give);
        let taken = self.items[swap.part].remove(swap.take);
        let difference = u128::from(given.0 - taken.0);
        self.sums[largest] -= difference;
        self.sums[swap.part] += difference;
        for (part, item) in [(largest, taken), (swap.part, given)] {
            let position = self.items[part].partition_point(|other| *other < item);
            self.items[part].insert(position, item);
        }
    }

    fn into_positions(self) -> Vec<Vec<usize>> {
        let mut parts = Vec::with_capacity(self.items.len());
        for items in self.items {
            let mut positions: Vec<_> = items.into_iter().map(|(_, position)| position).collect();
            positions.sort_unstable();
            parts.push(positions);
        }
        parts
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct SequenceSwap {
    /// Cost of the costlier part after the swap. It is the first field, so the best swap is the
    /// smallest.
    larger_sum: u128,
    part: usize,
    give: usize,
    take: usize,
}

#[cfg(test)]
mod tests {
    use core_types::{Seed, split};

    use super::*;

    /// Checks that the sizes match `split::balanced`, and that each position is in one part.
    fn check_parts(parts: &[Vec<usize>], len: usize, world_size: WorldSize) {
        for (part, place) in parts.iter().zip(world_size.placements()) {
            let range = split::balanced(len as u64, place);
            assert_eq!(part.len() as u64, range.end - range.start);
        }
        assert_eq!(parts.len(), world_size.as_usize());
        let mut all = parts.concat();
        all.sort_unstable();
        assert!(all.into_iter().eq(0..len));
    }

    #[test]
    fn parts_cover_every_position_once() {
        for seed in 0..200_u64 {
            let draw = |i| Seed::new(seed).derive(i).as_u64();
            let world_size = WorldSize::new(1 + draw(0) % 9).unwrap();
            let costs: Vec<u64> = (0..seed % 60).map(|i| draw(i + 1) % (2 + seed)).collect();
            check_parts(&balance(&costs, world_size), costs.len(), world_size);
        }
    }

    #[test]
    fn balance_finds_equal_sums() {
        let costs = [90, 5, 40, 45, 10, 70, 60, 80];
        let parts = balance(&costs, WorldSize::new(2).unwrap());
        assert_eq!(parts, [[0, 1, 3, 6], [2, 4, 5, 7]], "200 each");
    }

    #[test]
    fn huge_costs_do_not_overflow() {
        let world_size = WorldSize::new(2).unwrap();
        check_parts(&balance(&[u64::MAX; 5], world_size), 5, world_size);
    }
}
