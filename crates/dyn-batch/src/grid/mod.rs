//! The grid of a step: micro-batches `[accumulation][rank]`, so that no rank waits long.
//!
//! A *cell* is the micro-batch of one rank in one micro-step. Padded cells are cut from the sorted
//! sequences ([`padded`]), packed cells are rows of balanced cost ([`packed`]). Then [`deal`] orders
//! the cells by micro-step and rank.

pub(crate) mod balance;
mod config;
mod deal;
mod packed;
mod padded;
pub(crate) mod report;

use std::cmp::Reverse;

pub use self::{
    config::{GridConfig, Synchronization},
    report::GridReport,
};
use crate::{config::Cost, limits::BatchLimits};

/// Positions of the sequences of a cell, the longest first, and its cost.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct GridCell {
    pub(crate) positions: Vec<u32>,
    pub(crate) cost: u64,
}

/// A planner of grids: the limits of a cell, and what to balance.
#[derive(Clone, Debug)]
pub(crate) struct GridPlanner<'a> {
    pub(crate) limits: &'a BatchLimits,
    /// Cost to balance.
    pub(crate) cost: Cost,
    pub(crate) n_ranks: usize,
    pub(crate) synchronization: Synchronization,
}

impl GridPlanner<'_> {
    /// Returns the least number of cells that hold these lengths; for packed rows, the number that
    /// best fit needs.
    pub(crate) fn n_needed(&self, lengths: &[u64]) -> usize {
        let sorted = longest_first(lengths);
        if self.limits.is_packing() {
            packed::best_fit(&self.row_items(lengths, &sorted), self.limits).len()
        } else {
            padded::GroupList::new(lengths, &sorted, self.limits, self.cost).n_needed()
        }
    }

    /// Returns the maximum number of cells that these sequences fill, with a group of sequences each.
    pub(crate) fn max_cells(&self, n_sequences: usize) -> usize {
        n_sequences.div_ceil(self.limits.group_len())
    }

    /// Arranges sequences in `accumulation` micro-steps of a cell per rank, micro-step by micro-step.
    /// Returns `None` if they do not fit.
    ///
    /// There must be a group of sequences for each cell.
    pub(crate) fn plan(&self, lengths: &[u64], accumulation: usize) -> Option<Vec<GridCell>> {
        let sorted = longest_first(lengths);
        let n_cells = accumulation * self.n_ranks;
        let cells = if self.limits.is_packing() {
            let items = self.row_items(lengths, &sorted);
            packed::balance_rows(&items, self.limits, n_cells, self.n_ranks)?
        } else {
            let groups = padded::GroupList::new(lengths, &sorted, self.limits, self.cost);
            let ends = groups.least_ends(n_cells, self.n_ranks)?;
            groups.cells(&sorted, &ends)
        };
        Some(deal::deal(cells, self.n_ranks, self.synchronization))
    }

    fn row_items(&self, lengths: &[u64], sorted: &[u32]) -> Vec<packed::Item> {
        let items = sorted.iter().map(|&position| {
            let length = lengths[position as usize];
            let space = self.limits.row_item(length);
            packed::Item { position, space, cost: self.cost.for_length(length) }
        });
        items.collect()
    }
}

/// Returns the positions of the lengths from the longest; equal lengths keep their order.
fn longest_first(lengths: &[u64]) -> Vec<u32> {
    let mut sorted: Vec<u32> = (0..).zip(lengths).map(|(position, _)| position).collect();
    sorted.sort_by_key(|&position| Reverse(lengths[position as usize]));
    sorted
}
