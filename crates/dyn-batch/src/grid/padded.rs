//! Padded cells: the least largest cell over all divisions of a step's sequences into cells.
//!
//! Sequences are sorted from the longest and joined to groups of `batch_size_multiple`. A group costs
//! as much as its longest sequence, padded, times its size. A cell of groups costs the number of its
//! groups times its first group's cost; below, *bound* is a limit on that cost.
//!
//! **Filling from the longest down is optimal.** Under a bound and the limits of a batch, a cell whose
//! longest sequence has length p holds at most r(p) sequences, a multiple of the group size, and r
//! never grows with p (padding to `length_multiple` keeps the order of lengths). Take any division
//! into cells, order the cells by their longest sequences, falling, and give cell i an interval of the
//! sorted sequences of the same size instead. All sequences of the cells i, i + 1, … are at most as
//! long as the longest of cell i, so at most as many sequences are longer as the cells before i have:
//! the interval's first sequence is at most as long, and the interval is within its limits. Among
//! divisions into intervals, cells that take as many as they may reach at least as far: by induction,
//! each starts at the same or a later sequence, which allows as many or more. So sequences fit into n
//! cells under a bound if and only if filling needs at most n, and bisection over the bound finds the
//! least largest cell of *all* divisions. If filling needs fewer than n cells, then cells give groups
//! to empty ones, and a part of a cell never costs more than the cell. (With a multiple m and a
//! surplus of s < m sequences that is kept, the shortest group has s sequences and counts as m: the
//! bound is then the least for which the surplus is a group of its own.)
//!
//! **Later micro-steps.** Ranks wait in every micro-step, so after the least bound of all cells is
//! known, the first micro-step takes its cells under this bound, and the same search continues with
//! the other sequences and cells. Bounds fall from micro-step to micro-step, the first is the least
//! possible, and each next is the least for the sequences that the ones before leave.

use crate::{config::Cost, grid::GridCell, limits::BatchLimits};

/// Groups of sequences, the longest first.
#[derive(Debug)]
pub(super) struct GroupList {
    group_len: usize,
    /// Cost of each group.
    costs: Vec<u64>,
    /// Limit on the groups of a cell that begins with this group, apart from the bound.
    max_groups: Vec<u64>,
    /// Sums of the costs from each group to the last.
    sums: Vec<u128>,
    /// Cost of a sequence as long as the first of each group.
    sequence_costs: Vec<u64>,
}

impl GroupList {
    /// Groups sequences, given their positions from the longest.
    pub(super) fn new(lengths: &[u64], sorted: &[u32], limits: &BatchLimits, cost: Cost) -> Self {
        let group_len = limits.group_len();
        let n_groups = sorted.len().div_ceil(group_len);
        let mut groups = Self {
            group_len,
            costs: Vec::with_capacity(n_groups),
            max_groups: Vec::with_capacity(n_groups),
            sums: vec![0; n_groups],
            sequence_costs: Vec::with_capacity(n_groups),
        };
        let mut known = None;
        for &first in sorted.iter().step_by(group_len) {
            let length = lengths[first as usize];
            let values = match known {
                Some((known_length, values)) if known_length == length => values,
                _ => groups.measure(limits.padded_length(length), limits, cost),
            };
            known = Some((length, values));
            groups.costs.push(values.0);
            groups.max_groups.push(values.1);
            groups.sequence_costs.push(values.2);
        }
        let mut sum = 0;
        for (entry, &cost) in groups.sums.iter_mut().zip(&groups.costs).rev() {
            sum += u128::from(cost);
            *entry = sum;
        }
        groups
    }

    /// Returns a group's cost, the limit on the groups of its cell, and a sequence's cost.
    fn measure(&self, padded_length: u64, limits: &BatchLimits, cost: Cost) -> (u64, u64, u64) {
        let sequence_cost = cost.for_length(padded_length);
        let group_cost = sequence_cost.saturating_mul(self.group_len as u64);
        (group_cost, limits.max_rows(padded_length) / self.group_len as u64, sequence_cost)
    }

    fn len(&self) -> usize {
        self.costs.len()
    }

    /// Returns the number of groups of a cell that begins at `start`, with at least one group.
    fn n_taken(&self, start: usize, bound: u64) -> usize {
        // The largest number is no bound, since costs saturate there.
        let by_bound = match bound.checked_div(self.costs[start]) {
            Some(n_groups) if bound < u64::MAX => n_groups,
            Some(_) | None => u64::MAX,
        };
        let n_groups = by_bound.min(self.max_groups[start]).max(1);
        usize::try_from(n_groups).unwrap_or(usize::MAX).min(self.len() - start)
    }

    /// Returns true if the groups from `start` on fit into `n_cells` cells. The bound must be at least
    /// the cost of the first group.
    fn fits(&self, mut start: usize, n_cells: usize, bound: u64) -> bool {
        for _ in 0..n_cells {
            if start == self.len() {
                return true;
            }
            start += self.n_taken(start, bound);
        }
        start == self.len()
    }

    /// Returns the least number of cells that hold all groups.
    pub(super) fn n_needed(&self) -> usize {
        let mut n_cells = 0;
        let mut start = 0;
        while start < self.len() {
            start += self.n_taken(start, u64::MAX);
            n_cells += 1;
        }
        n_cells
    }

    /// Returns the least bound under which the groups from `start` on fit into `n_cells` cells, which
    /// must be possible.
    fn least_bound(&self, start: usize, n_cells: usize) -> u64 {
        // No bound below the mean cost of cells, or below the longest group's cost, is possible.
        let mean = self.sums[start].div_ceil(n_cells as u128);
        let mut least = u64::try_from(mean).unwrap_or(u64::MAX).max(self.costs[start]);
        if self.fits(start, n_cells, least) {
            return least;
        }
        // The least bound is mostly a few percent above the mean.
        let mut step = (least >> 6).max(1);
        let mut fitting = least.saturating_add(step);
        while !self.fits(start, n_cells, fitting) {
            least = fitting;
            step = step.saturating_mul(2);
            fitting = least.saturating_add(step);
        }
        while fitting - least > 1 {
            let bound = least.midpoint(fitting);
            if self.fits(start, n_cells, bound) {
                fitting = bound;
            } else {
                least = bound;
            }
        }
        fitting
    }

    /// Returns the ends of `n_cells` cells in micro-steps of `n_ranks` cells, counted in groups, or
    /// `None` if the limits do not allow so few. There must be a group for each cell.
    pub(super) fn least_ends(&self, n_cells: usize, n_ranks: usize) -> Option<Vec<usize>> {
        if !self.fits(0, n_cells, u64::MAX) {
            return None;
        }
        let mut ends = Vec::with_capacity(n_cells);
        let mut start = 0;
        let mut bound = u64::MAX;
        while ends.len() < n_cells {
            let n_left = n_cells - ends.len();
            if ends.len() % n_ranks == 0 {
                bound = self.least_bound(start, n_left);
            }
            let n_spare = self.len() - start - (n_left - 1);
            start += self.n_taken(start, bound).min(n_spare);
            ends.push(start);
        }
        Some(ends)
    }

    /// Returns the cells that end after these groups.
    pub(super) fn cells(&self, sorted: &[u32], ends: &[usize]) -> Vec<GridCell> {
        let mut cells = Vec::with_capacity(ends.len());
        let mut start = 0;
        for &end in ends {
            let last = sorted.len().min(end * self.group_len);
            let positions = sorted[start * self.group_len..last].to_vec();
            let cost = self.sequence_costs[start].saturating_mul(positions.len() as u64);
            cells.push(GridCell { positions, cost });
            start = end;
        }
        cells
    }
}

#[cfg(test)]
#[expect(clippy::cast_possible_truncation, reason = "all numbers are small")]
mod tests {
    use core_types::Seed;

    use super::*;
    use crate::{
        config::BatchConfig,
        grid::{GridPlanner, Synchronization, longest_first},
    };

    /// Returns the least largest cost over all divisions of groups into `n_cells` cells that are not
    /// empty, by trying each cell for each sequence.
    struct BruteForce<'a> {
        lengths: &'a [u64],
        limits: &'a BatchLimits,
        cost: Cost,
        cells: Vec<Vec<u64>>,
        least: Option<u64>,
    }

    impl BruteForce<'_> {
        fn search(&mut self, next: usize) {
            if next == self.lengths.len() {
                let costs: Option<Vec<u64>> =
                    self.cells.iter().map(|cell| self.cell_cost(cell)).collect();
                let largest = costs.and_then(|costs| costs.into_iter().max());
                self.least = match (self.least, largest) {
                    (Some(least), Some(largest)) => Some(least.min(largest)),
                    (least, largest) => least.or(largest),
                };
                return;
            }
            for cell in 0..self.cells.len() {
                let is_new = self.cells[cell].is_empty();
                self.cells[cell].push(self.lengths[next]);
                self.search(next + 1);
                self.cells[cell].pop();
                // Empty cells are equal.
                if is_new {
                    break;
                }
            }
        }

        fn cell_cost(&self, cell: &[u64]) -> Option<u64> {
            let padded = self.limits.padded_length(cell.iter().copied().max()?);
            let is_allowed = cell.len() as u64 <= self.limits.max_rows(padded)
                && cell.len() % self.limits.group_len() == 0;
            is_allowed.then(|| self.cost.for_length(padded) * cell.len() as u64)
        }
    }

    /// Compares the planner with brute force on random lengths.
    fn check(seed: u64) {
        let draw = |i| Seed::new(seed).derive(i).as_u64();
        let multiple = 1 + draw(0) % 10 / 8;
        let n_cells = 1 + draw(1) as usize % 4;
        let n_groups = n_cells as u64 + draw(2) % (9 / multiple - n_cells as u64 + 1);
        let mut config = BatchConfig::default()
            .with_batch_size_multiple(multiple)
            .with_length_multiple(1 + draw(3) % 3)
            .with_max_tokens(multiple * (24 + draw(4) % 60));
        if seed % 3 == 0 {
            config = config.with_max_cost(multiple * (600 + draw(5) % 900), Cost::ATTENTION);
        }
        let limits = BatchLimits::new(config).unwrap();
        let lengths: Vec<u64> =
            (0..n_groups * multiple).map(|i| 1 + draw(9 + i) % (4 + seed % 19)).collect();
        let cost = [
            Cost::TOKENS,
            Cost::ATTENTION,
            Cost { per_sequence: 3, per_token: 2, per_token_squared: 1 },
        ];
        let cost = cost[seed as usize % 3];
        let cells = vec![Vec::new(); n_cells];
        let mut brute = BruteForce { lengths: &lengths, limits: &limits, cost, cells, least: None };
        brute.search(0);
        let n_ranks = if n_cells == 4 { 2 } else { n_cells };
        let planner = GridPlanner {
            limits: &limits,
            cost,
            n_ranks,
            synchronization: Synchronization::MicroStep,
        };
        let found = planner.plan(&lengths, n_cells / n_ranks);
        let largest = found.as_ref().map(|cells| cells.iter().map(|cell| cell.cost).max().unwrap());
        assert_eq!(largest, brute.least, "seed {seed}: {lengths:?} in {n_cells} cells");
        for cell in found.iter().flatten() {
            let lengths: Vec<u64> = cell.positions.iter().map(|&p| lengths[p as usize]).collect();
            assert_eq!(brute.cell_cost(&lengths), Some(cell.cost), "seed {seed}");
        }
        assert_eq!(planner.n_needed(&lengths) <= n_cells, brute.least.is_some());
    }

    #[test]
    fn largest_cell_equals_brute_force() {
        for seed in 0..10_000 {
            check(seed);
        }
    }

    #[test]
    fn kept_surplus_is_the_shortest_group() {
        let config = BatchConfig::default().with_batch_size_multiple(4).with_max_tokens(400);
        let limits = BatchLimits::new(config).unwrap();
        let lengths = [5, 9, 7, 3, 8, 2];
        let sorted = longest_first(&lengths);
        let groups = GroupList::new(&lengths, &sorted, &limits, Cost::TOKENS);
        let cells = groups.cells(&sorted, &groups.least_ends(2, 2).unwrap());
        assert_eq!(cells[0], GridCell { positions: vec![1, 4, 2, 0], cost: 36 });
        assert_eq!(cells[1], GridCell { positions: vec![3, 5], cost: 6 });
    }

    #[test]
    fn bounds_fall_after_a_long_sequence() {
        // One sequence bounds the first micro-step; the others share the second evenly.
        let limits = BatchLimits::new(BatchConfig::default().with_max_tokens(1000)).unwrap();
        let lengths = [100, 10, 10, 10, 10, 10, 10, 10, 10, 10, 10, 10, 10, 10, 10, 10, 10];
        let sorted = longest_first(&lengths);
        let groups = GroupList::new(&lengths, &sorted, &limits, Cost::TOKENS);
        let cells = groups.cells(&sorted, &groups.least_ends(4, 2).unwrap());
        assert_eq!(cells.iter().map(|cell| cell.cost).collect::<Vec<_>>(), [100, 100, 30, 30]);
    }
}
