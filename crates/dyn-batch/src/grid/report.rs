//! Reports of grids: the time that ranks wait.

use std::fmt;

use crate::grid::config::Synchronization;

/// The costs of the steps of all ranks.
///
/// A step takes as long as its slowest ranks: [`time`](Self::time) is the sum of the largest cells of
/// all micro-steps, or of the largest rank's cells of all steps if ranks wait once per step.
///
/// No way to fill a grid delays a sequence: a step takes the next sequences of the order.
///
/// # Examples
///
/// ```
/// use core_types::{Epoch, Placement};
/// use dyn_batch::*;
///
/// let lengths: Vec<u32> = (0..64).map(|i| 8 + i * 37 % 120).collect();
/// let batches = DynamicBatchSampler::new(lengths, BatchConfig::default().with_max_tokens(1024))?;
/// let grid = GridConfig { global_batch_size: Some(32), ..GridConfig::default() };
/// let config = DistributedConfig {
///     layout: StepLayout::Grid(grid),
///     accumulation: Some(2),
///     cost: Cost::ATTENTION,
///     ..DistributedConfig::default()
/// };
/// let steps = DistributedBatchSampler::new(batches, Placement::new(0, 4)?, config)?
///     .epoch(Epoch::ZERO, 0..64)?;
/// let report = steps.grid_report().ok_or("no grid")?;
/// assert_eq!((report.steps, report.cells), (2, 16));
/// assert!(5 * u128::from(report.ranks) * report.time < 6 * report.cost, "{report}");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct GridReport {
    /// Number of steps.
    pub steps: u64,
    /// Number of cells in all steps.
    pub cells: u64,
    /// Tokens of all sequences, without padding.
    pub real_tokens: u128,
    /// Tokens of all cells, with padding.
    pub padded_tokens: u128,
    /// Cost of all cells.
    pub cost: u128,
    /// Cost of the largest cell.
    pub largest_cell: u64,
    /// Sum of the costs that ranks wait for.
    pub time: u128,
    /// Number of ranks.
    pub ranks: u64,
}

/// The size of a cell.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CellSize {
    pub(crate) real_tokens: u64,
    pub(crate) padded_tokens: u64,
    pub(crate) cost: u64,
}

impl GridReport {
    /// Counts the cells of a step, micro-step by micro-step.
    pub(crate) fn add(&mut self, cells: &[CellSize], synchronization: Synchronization) {
        self.steps += 1;
        self.cells += cells.len() as u64;
        self.real_tokens += sum(cells, |cell| cell.real_tokens);
        self.padded_tokens += sum(cells, |cell| cell.padded_tokens);
        self.cost += sum(cells, |cell| cell.cost);
        self.largest_cell = self.largest_cell.max(largest(cells));
        self.time += self.step_time(cells, synchronization);
    }

    /// Returns the cost that ranks wait for in a step.
    fn step_time(&self, cells: &[CellSize], synchronization: Synchronization) -> u128 {
        // The cells of a step are in memory, so their number is small.
        let n_ranks = usize::try_from(self.ranks).unwrap_or(usize::MAX);
        match synchronization {
            Synchronization::MicroStep => {
                cells.chunks(n_ranks).map(|cells| u128::from(largest(cells))).sum()
            }
            Synchronization::Step => {
                let of_rank = |rank| cells.iter().skip(rank).step_by(n_ranks);
                let costs = (0..n_ranks)
                    .map(|rank| of_rank(rank).map(|cell| u128::from(cell.cost)).sum::<u128>());
                costs.max().unwrap_or(0)
            }
        }
    }
}

impl fmt::Display for GridReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { steps, cells, ranks, real_tokens, padded_tokens, cost, time, .. } = *self;
        let waiting = 100.0 * (ratio(time.saturating_mul(ranks.into()), cost) - 1.0);
        let padding = 100.0 * (1.0 - ratio(real_tokens, padded_tokens));
        write!(
            f,
            "{steps} steps of {cells} micro-batches over {ranks} ranks: waiting {waiting:.2} %, \
             padding {padding:.2} %, no delay"
        )
    }
}

/// Returns `part` over `whole`; 1 if `whole` is 0.
fn ratio(part: u128, whole: u128) -> f64 {
    if whole == 0 { 1.0 } else { part as f64 / whole as f64 }
}

fn sum(cells: &[CellSize], value: impl Fn(&CellSize) -> u64) -> u128 {
    cells.iter().map(|cell| u128::from(value(cell))).sum()
}

fn largest(cells: &[CellSize]) -> u64 {
    cells.iter().map(|cell| cell.cost).max().unwrap_or(0)
}
