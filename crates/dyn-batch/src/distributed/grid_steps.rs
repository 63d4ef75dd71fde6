//! Steps of grids, planned along the order of an epoch.

use std::sync::Arc;

use core_types::WorldSize;

use crate::{
    config::Remainder,
    distributed::config::DistributedConfig,
    error::{Error, Result},
    grid::{GridConfig, GridPlanner},
    lengths::SequenceLengths,
    limits::BatchLimits,
    sampler::{DynamicBatchSampler, plan::BatchPlan},
};

/// The cells of all steps as batches, micro-step by micro-step.
pub(super) struct GridSteps<L> {
    pub(super) plan: BatchPlan<L>,
    /// Number of batches up to the end of each step.
    pub(super) ends: Vec<usize>,
}

/// Checks that full global batches have a group of sequences for each cell.
pub(super) fn check_grid(
    grid: &GridConfig,
    config: &DistributedConfig,
    limits: &BatchLimits,
    world_size: WorldSize,
) -> Result<()> {
    let multiple = limits.config().batch_size_multiple;
    let accumulation = config.accumulation.unwrap_or(1);
    let cells = world_size.as_u64().saturating_mul(accumulation);
    if let Some(sequences) = grid.global_batch_size {
        if sequences % multiple != 0 {
            return Err(Error::config(format!(
                "global_batch_size {sequences} is not a multiple of batch_size_multiple {multiple}"
            )));
        }
        if sequences / multiple < cells {
            return Err(cannot_fill(sequences, multiple, cells));
        }
    }
    // A grid has fewer cells than there are sequences.
    if u32::try_from(cells).is_err() {
        return Err(cannot_fill(u32::MAX.into(), multiple, cells));
    }
    Ok(())
}

fn cannot_fill(sequences: u64, multiple: u64, cells: u64) -> Error {
    let reason =
        format!("{sequences} sequences in groups of {multiple} cannot fill {cells} micro-batches");
    Error::GridMisfit { reason }
}

/// Plans the steps of an order, which ranks read together.
pub(super) fn plan_grid<L: SequenceLengths>(
    batches: DynamicBatchSampler<Arc<L>>,
    order: Vec<u32>,
    grid: &GridConfig,
    config: &DistributedConfig,
    world_size: WorldSize,
) -> Result<GridSteps<Arc<L>>> {
    let limits = batches.limits().clone();
    let planner = GridPlanner {
        limits: &limits,
        cost: config.cost,
        n_ranks: world_size.as_usize(),
        synchronization: grid.synchronization,
    };
    let (plan, order) = BatchPlan::admitted(batches, order)?;
    let accumulation = config.accumulation.map(to_usize);
    let steps = GridSteps { plan, ends: Vec::new() };
    let mut builder = GridBuilder { planner, accumulation, steps };
    match grid.global_batch_size {
        Some(size) => builder.add_global_batches(&order, to_usize(size))?,
        None => builder.add_longest_prefixes(&order)?,
    }
    Ok(builder.steps)
}

/// Clamps a number that is compared with numbers of sequences.
fn to_usize(count: u64) -> usize {
    usize::try_from(count).unwrap_or(usize::MAX)
}

struct GridBuilder<'a, L> {
    planner: GridPlanner<'a>,
    /// Number of micro-steps, if it is given.
    accumulation: Option<usize>,
    steps: GridSteps<L>,
}

impl<L: SequenceLengths> GridBuilder<'_, L> {
    /// Makes a step of every `size` sequences.
    fn add_global_batches(&mut self, order: &[u32], size: usize) -> Result<()> {
        for indices in order.chunks(size) {
            if indices.len() == size {
                self.add_full(indices)?;
            } else {
                self.add_remainder(indices, size)?;
            }
        }
        Ok(())
    }

    /// Makes steps of as many of the next sequences as fit a grid.
    fn add_longest_prefixes(&mut self, mut order: &[u32]) -> Result<()> {
        let n_cells = self.accumulation.unwrap_or(1) * self.planner.n_ranks;
        let group_len = self.planner.limits.group_len();
        let mut n_last = n_cells;
        while !order.is_empty() {
            let size = self.longest_prefix(order, n_cells, n_last);
            let (indices, rest) = order.split_at(size);
            let is_full =
                !rest.is_empty() || self.planner.n_needed(&self.lengths(indices)) == n_cells;
            if is_full && size % group_len == 0 && size / group_len >= n_cells {
                self.add_full(indices)?;
            } else {
                self.add_remainder(indices, size)?;
            }
            (order, n_last) = (rest, size);
        }
        Ok(())
    }

    /// Returns the largest number of next sequences that fit into `n_cells` cells, a multiple of the
    /// group size or all of them; at least one sequence. `guess` may be any number.
    fn longest_prefix(&self, order: &[u32], n_cells: usize, guess: usize) -> usize {
        let group_len = self.planner.limits.group_len();
        let lengths =
            |n_groups: usize| self.lengths(&order[..order.len().min(n_groups * group_len)]);
        let fits = |n_groups| self.planner.n_needed(&lengths(n_groups)) <= n_cells;
        let all = order.len().div_ceil(group_len);
        // A cell holds every group.
        let mut fitting = n_cells.min(all);
        let mut too_many = all + 1;
        // Grids of one epoch have similar sizes, so the search begins a little below the last.
        let mut step = (guess / group_len / 16).max(1);
        let mut probe = (guess / group_len).saturating_sub(2 * step);
        let mut has_failed = false;
        while fitting + 1 < too_many {
            probe = probe.clamp(fitting + 1, too_many - 1);
            if fits(probe) {
                fitting = probe;
                step = step.saturating_mul(2);
            } else {
                too_many = probe;
                has_failed = true;
            }
            probe =
                if has_failed { fitting.midpoint(too_many) } else { fitting.saturating_add(step) };
        }
        order.len().min(fitting * group_len)
    }

    fn lengths(&self, indices: &[u32]) -> Vec<u64> {
        self.steps.plan.lengths(indices).collect()
    }

    /// Adds a step of the given number of micro-steps, or of the fewest.
    fn add_full(&mut self, indices: &[u32]) -> Result<()> {
        let lengths = self.lengths(indices);
        let n_ranks = self.planner.n_ranks;
        let most = self.planner.max_cells(lengths.len()) / n_ranks;
        let accumulation = match self.accumulation {
            Some(accumulation) => accumulation,
            None => self.planner.n_needed(&lengths).div_ceil(n_ranks).clamp(1, most),
        };
        self.add(indices, &lengths, accumulation)
    }

    /// Adds a step of the last sequences, with fewer micro-steps, or drops them.
    fn add_remainder(&mut self, indices: &[u32], full_len: usize) -> Result<()> {
        let n_ranks = self.planner.n_ranks;
        let allowed = self.accumulation.unwrap_or(usize::MAX);
        let most = allowed.min(self.planner.max_cells(indices.len()) / n_ranks);
        let is_kept = self.planner.limits.config().remainder == Remainder::Keep;
        if !is_kept || most == 0 {
            self.steps.plan.count_dropped(indices.len());
            return Ok(());
        }
        let n_fitting = self.longest_prefix(indices, most * n_ranks, indices.len());
        let (indices, rest) = indices.split_at(n_fitting);
        self.steps.plan.count_dropped(rest.len());
        let lengths = self.lengths(indices);
        // As many micro-steps as the share of a full step, so that cells have the usual size.
        let share = self.accumulation.map_or(1, |given| (given * indices.len()).div_ceil(full_len));
        let fewest = self.planner.n_needed(&lengths).div_ceil(n_ranks);
        let accumulation = share.max(fewest).min(most);
        self.add(indices, &lengths, accumulation)
    }

    /// Adds a step, or returns an error if the sequences do not fit.
    fn add(&mut self, indices: &[u32], lengths: &[u64], accumulation: usize) -> Result<()> {
        let Some(cells) = self.planner.plan(lengths, accumulation) else {
            let reason = format!(
                "{} sequences need {} micro-batches, above the {} of a step",
                indices.len(),
                self.planner.n_needed(lengths),
                accumulation * self.planner.n_ranks
            );
            return Err(Error::GridMisfit { reason });
        };
        for cell in cells {
            let cell_indices: Vec<u32> =
                cell.positions.iter().map(|&position| indices[position as usize]).collect();
            self.steps.plan.push(&cell_indices);
        }
        self.steps.ends.push(self.steps.plan.len());
        Ok(())
    }
}
