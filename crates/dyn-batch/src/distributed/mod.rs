//! Batches of one rank: equally many on every rank, with almost equal cost in each step.

mod config;
mod even;
mod grid_steps;
mod state;
mod steps;

use std::sync::Arc;

use core_types::{Placement, WorldSize};

use self::grid_steps::check_grid;
pub use self::{
    config::{DistributedConfig, StepLayout, StepRemainder},
    state::BatchState,
    steps::{Step, Steps},
};
use crate::{
    config::DynamicBatchStrategy,
    error::{Error, Result},
    lengths::SequenceLengths,
    sampler::DynamicBatchSampler,
};

/// A sampler of batches for one rank, with the same number of batches on every rank.
///
/// Every rank plans all batches of the epoch from the same lengths and the same order, so no
/// communication is needed. The caller passes the order of the whole world, not a rank's share.
/// Batches of similar cost form a step, one for each rank, so that no rank waits long.
///
/// # Determinism
///
/// Steps depend only on the lengths, the order, both configurations, the world size and the epoch.
///
/// # Examples
///
/// ```
/// use core_types::{Epoch, Placement, Seed};
/// use dyn_batch::{
///     BatchConfig, Cut, DistributedBatchSampler, DistributedConfig, DynamicBatchSampler,
///     DynamicBatchStrategy,
/// };
///
/// let lengths: Vec<u32> = (1..=100).collect();
/// let sorted = DynamicBatchStrategy::Sorted { window: None, cut: Cut::Optimal };
/// let batches = DynamicBatchSampler::new(
///     lengths,
///     BatchConfig::default().with_strategy(sorted).with_max_tokens(256),
/// )?;
/// let config = DistributedConfig {
///     shuffle: Some(Seed::new(1)),
///     ..DistributedConfig::default()
/// };
///
/// let mut n_sequences = 0;
/// for rank in 0..4 {
///     let sampler =
///         DistributedBatchSampler::new(batches.clone(), Placement::new(rank, 4)?, config)?;
///     let steps = sampler.epoch(Epoch::new(3), 0..100)?;
///     assert_eq!(steps.len(), 7, "on every rank");
///     n_sequences += steps.map(|step| step.micro_batches[0].len()).sum::<usize>();
/// }
/// assert_eq!(n_sequences, 100);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct DistributedBatchSampler<L> {
    /// Batches with the limits of one rank.
    batches: DynamicBatchSampler<Arc<L>>,
    placement: Placement,
    config: DistributedConfig,
    /// Whether the last step may have fewer batches.
    may_end_short: bool,
}

impl<L: SequenceLengths> DistributedBatchSampler<L> {
    /// Creates a sampler for one rank.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidConfig`] for dealt steps of buckets or packed rows or with several
    /// micro-batches, for a grid of buckets or windows, and if the multiple for all ranks exceeds 64
    /// bits, or does not divide the size of a global batch; [`Error::Zero`] for a setting of 0, and
    /// [`Error::GridMisfit`] for a grid that cannot be filled.
    pub fn new(
        batches: DynamicBatchSampler<L>,
        placement: Placement,
        config: DistributedConfig,
    ) -> Result<Self> {
        let batches = batches.into_shared();
        let sampler = Self { batches, placement, config, may_end_short: false };
        // Contradictory limits are an error here, not in the first epoch.
        sampler.check(placement.world_size())?;
        Ok(sampler)
    }

    /// Lets the last step of an epoch have the batches that are left, if there are too few sequences to
    /// split. Its last ranks then have none, so this is for readers of [`Steps::all_ranks`] only.
    #[doc(hidden)]
    #[must_use]
    pub fn with_short_last_step(self) -> Self {
        Self { may_end_short: true, ..self }
    }

    fn check(&self, world_size: WorldSize) -> Result<()> {
        let accumulation = self.config.accumulation;
        if accumulation == Some(0) {
            return Err(Error::Zero { setting: "accumulation" });
        }
        match &self.config.layout {
            StepLayout::Grouped => Ok(()),
            StepLayout::Dealt if accumulation.is_some_and(|n| n > 1) => {
                let other = "dealt steps: use grouped steps or a grid";
                Err(Error::conflict("accumulation", other))
            }
            StepLayout::Dealt => self.batches_of_steps(world_size).map(drop),
            StepLayout::Grid(grid) => {
                check_strategy(&self.batches.config().strategy)?;
                if grid.global_batch_size == Some(0) {
                    return Err(Error::Zero { setting: "global_batch_size" });
                }
                check_grid(grid, &self.config, self.batches.limits(), world_size)
            }
        }
    }

    /// Returns the sampler of the batches that steps of a world consist of.
    fn batches_of_steps(&self, world_size: WorldSize) -> Result<DynamicBatchSampler<Arc<L>>> {
        match self.config.layout {
            StepLayout::Grouped | StepLayout::Grid(_) => Ok(self.batches.clone()),
            StepLayout::Dealt => self.batches.clone().for_all_ranks(world_size),
        }
    }
}

/// The reason why buckets and windows have no effect.
const GRID: &str = "a grid: its cells are cut from the sorted sequences of a step";

/// Rejects strategies whose settings have no effect on a grid.
fn check_strategy(strategy: &DynamicBatchStrategy) -> Result<()> {
    match strategy {
        DynamicBatchStrategy::Bucket(_) => Err(Error::conflict("buckets", GRID)),
        DynamicBatchStrategy::Sorted { window: Some(_), .. } => {
            Err(Error::conflict("a window", GRID))
        }
        DynamicBatchStrategy::PadToMax
        | DynamicBatchStrategy::Dynamic
        | DynamicBatchStrategy::Sorted { window: None, .. }
        | DynamicBatchStrategy::Pack(_) => Ok(()),
    }
}
