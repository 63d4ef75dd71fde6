//! Reports of grids: the time that ranks wait.

use std::fmt;

use core_types::WorldSize;

use crate::grid::config::Synchronization;

/// The costs of the steps of all ranks, beside the plain order.
///
/// A step takes as long as its slowest ranks: [`time`](Self::time) is the sum of the largest cells of
/// all micro-steps, or of the largest rank's cells of all steps if ranks wait once per step. The *plain
/// order* has the same sequences in equally many cells of equal counts, in the order of the epoch.
/// Its limits are not checked.
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
/// let grid = GridConfig::default().with_global_batch_size(32);
/// let config = DistributedConfig::default()
///     .with_layout(StepLayout::Grid(grid))
///     .with_accumulation(2)
///     .with_cost(Cost::ATTENTION);
/// let steps = DistributedBatchSampler::new(batches, Placement::new(0, 4)?, config)?
///     .epoch(Epoch::ZERO, 0..64)?;
/// let report = steps.grid_report().ok_or("no grid")?;
/// assert_eq!((report.steps, report.cells), (2, 16));
/// assert!(report.waste() < 0.2 && 3 * report.time < 2 * report.plain_time, "{report}");
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
    /// Tokens of the cells of the plain order, with padding.
    pub plain_padded_tokens: u128,
    /// Cost of the largest cell of the plain order.
    pub plain_largest_cell: u64,
    /// Sum of the costs that ranks wait for in the plain order.
    pub plain_time: u128,
    /// Cost of all cells of the plain order.
    pub plain_cost: u128,
}

/// The size of a cell.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CellSize {
    pub(crate) n_sequences: usize,
    pub(crate) real_tokens: u64,
    pub(crate) padded_tokens: u64,
    pub(crate) cost: u64,
}

impl GridReport {
    /// Creates a report without steps.
    pub(crate) fn new(world_size: WorldSize) -> Self {
        Self { ranks: world_size.as_u64(), ..Self::default() }
    }

    /// Counts the cells of a step, micro-step by micro-step, and those of the plain order.
    pub(crate) fn add(
        &mut self,
        cells: &[CellSize],
        plain: &[CellSize],
        synchronization: Synchronization,
    ) {
        self.steps += 1;
        self.cells += cells.len() as u64;
        self.real_tokens += sum(cells, |cell| cell.real_tokens);
        self.padded_tokens += sum(cells, |cell| cell.padded_tokens);
        self.cost += sum(cells, |cell| cell.cost);
        self.largest_cell = self.largest_cell.max(largest(cells));
        self.time += self.step_time(cells, synchronization);
        self.plain_padded_tokens += sum(plain, |cell| cell.padded_tokens);
        self.plain_cost += sum(plain, |cell| cell.cost);
        self.plain_largest_cell = self.plain_largest_cell.max(largest(plain));
        self.plain_time += self.step_time(plain, synchronization);
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

    /// Returns the share of time by which ranks wait: the sum of (largest cell − mean) over the sum of
    /// means; 0 without cost.
    pub fn waste(&self) -> f64 {
        waste(self.time, self.cost, self.ranks)
    }

    /// Returns the [`waste`](Self::waste) of the plain order.
    fn plain_waste(&self) -> f64 {
        waste(self.plain_time, self.plain_cost, self.ranks)
    }

    /// Returns the time of the plain order over the time of these steps; 1 without cost.
    fn speedup(&self) -> f64 {
        if self.time == 0 { 1.0 } else { self.plain_time as f64 / self.time as f64 }
    }

    /// Returns the share of padding in all cells; 0 without tokens.
    fn padding(&self) -> f64 {
        padding(self.real_tokens, self.padded_tokens)
    }

    /// Returns the share of padding in the plain order.
    fn plain_padding(&self) -> f64 {
        padding(self.real_tokens, self.plain_padded_tokens)
    }
}

fn waste(time: u128, cost: u128, ranks: u64) -> f64 {
    if cost == 0 { 0.0 } else { time as f64 * ranks as f64 / cost as f64 - 1.0 }
}

fn padding(real: u128, padded: u128) -> f64 {
    if padded == 0 { 0.0 } else { 1.0 - real as f64 / padded as f64 }
}

impl fmt::Display for GridReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { steps, cells, ranks, .. } = self;
        let percent = |share: f64| 100.0 * share;
        write!(
            f,
            "{steps} steps of {cells} micro-batches over {ranks} ranks: waiting {:.2} % (plain order {:.2} %), ",
            percent(self.waste()),
            percent(self.plain_waste())
        )?;
        write!(
            f,
            "padding {:.2} % ({:.2} %), no delay, {:.3} times as fast as the plain order",
            percent(self.padding()),
            percent(self.plain_padding()),
            self.speedup()
        )
    }
}

fn sum(cells: &[CellSize], value: impl Fn(&CellSize) -> u64) -> u128 {
    cells.iter().map(|cell| u128::from(value(cell))).sum()
}

fn largest(cells: &[CellSize]) -> u64 {
    cells.iter().map(|cell| cell.cost).max().unwrap_or(0)
}
