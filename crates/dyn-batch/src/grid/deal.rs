//! Order of cells in micro-steps and ranks.
//!
//! If ranks wait in every micro-step, a step takes the sum of the largest cells of its micro-steps.
//! The largest of n·W cells is the largest of its micro-step; of the other micro-steps, the i-th
//! largest one's is at least the (i·W + 1)-th largest cell, since the i micro-steps before have only
//! i·W cells. Cells in falling order of cost, W to a micro-step, have exactly these, so the order
//! minimizes the sum.

use std::cmp::Reverse;

use core_types::WorldSize;

use crate::grid::{GridCell, balance::balance, config::Synchronization};

/// Orders cells micro-step by micro-step, in each rank by rank. The number of ranks must divide the
/// number of cells.
pub(super) fn deal(
    mut cells: Vec<GridCell>,
    n_ranks: usize,
    synchronization: Synchronization,
) -> Vec<GridCell> {
    cells.sort_by_key(|cell| Reverse(cell.cost));
    match synchronization {
        Synchronization::MicroStep => deal_in_turns(cells, n_ranks),
        Synchronization::Step => deal_by_rank(cells, n_ranks),
    }
}

/// Deals cells by falling cost, and reverses every other micro-step, so that no rank always gets the
/// largest cell.
fn deal_in_turns(mut cells: Vec<GridCell>, n_ranks: usize) -> Vec<GridCell> {
    for micro_step in cells.chunks_mut(n_ranks).skip(1).step_by(2) {
        micro_step.reverse();
    }
    cells
}

/// Deals equally many cells to each rank, with almost equal sums of costs.
#[expect(clippy::expect_used, reason = "the message says why it cannot fail")]
fn deal_by_rank(cells: Vec<GridCell>, n_ranks: usize) -> Vec<GridCell> {
    let costs: Vec<u64> = cells.iter().map(|cell| cell.cost).collect();
    let world_size = WorldSize::new(n_ranks as u64).expect("a grid has at least one rank");
    let mut cells: Vec<Option<GridCell>> = cells.into_iter().map(Some).collect();
    let parts = balance(&costs, world_size);
    let n_micro_steps = cells.len() / n_ranks;
    (0..n_micro_steps)
        .flat_map(|micro_step| parts.iter().map(move |part| part[micro_step]))
        .map(|place| cells[place].take().expect("each cell is in one part"))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dealt(costs: &[u64], n_ranks: usize, synchronization: Synchronization) -> Vec<u64> {
        let cells = costs.iter().map(|&cost| GridCell { positions: vec![0], cost }).collect();
        deal(cells, n_ranks, synchronization).into_iter().map(|cell| cell.cost).collect()
    }

    #[test]
    fn micro_steps_have_neighboring_costs() {
        let costs = [3, 9, 1, 8, 2, 7];
        assert_eq!(dealt(&costs, 2, Synchronization::MicroStep), [9, 8, 3, 7, 2, 1]);
    }

    #[test]
    fn ranks_have_equal_sums() {
        let costs = [6, 9, 7, 8];
        let found = dealt(&costs, 2, Synchronization::Step);
        let sums = [0, 1].map(|rank| found.iter().skip(rank).step_by(2).sum::<u64>());
        assert_eq!(sums, [15, 15], "{found:?}");
    }
}
