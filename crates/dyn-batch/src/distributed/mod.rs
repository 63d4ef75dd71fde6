//! The batches of one rank: as many on every rank, with almost equal cost in each step.

mod balance;
mod config;
mod even;
mod steps;

use core_types::{Epoch, Placement};

use self::even::{batches_by_cost, fill_small_batch};
pub use self::{
    balance::balance,
    config::{DistributedConfig, StepLayout, StepRemainder},
    steps::{BatchState, Step, Steps},
};
use crate::{
    error::{Error, Result},
    lengths::SequenceLengths,
    plan::BatchPlan,
    sampler::DynamicBatchSampler,
    shuffle::shuffle,
};

/// Batches for the ranks of a world, each rank the same number of them.
///
/// Every rank plans all batches of the epoch by itself, from the same lengths and the same order,
/// so nobody has to talk. The order comes from outside and must be the one of the whole world, not
/// a rank's share. Batches of similar cost then make a step, one for each rank, so that nobody
/// waits long for the slowest.
///
/// # Determinism
///
/// Steps depend on the lengths, the order, both configurations, the world size and the epoch alone.
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
/// let config = DistributedConfig::default().with_shuffle(Seed::new(1));
///
/// let mut n_sequences = 0;
/// for rank in 0..4 {
///     let sampler =
///         DistributedBatchSampler::new(batches.clone(), Placement::new(rank, 4)?, config)?;
///     let steps = sampler.epoch(Epoch::new(3), 0..100)?;
///     assert_eq!(steps.len(), 7, "on every rank");
///     n_sequences += steps.map(|step| step.batch.len()).sum::<usize>();
/// }
/// assert_eq!(n_sequences, 100);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct DistributedBatchSampler<L> {
    batches: DynamicBatchSampler<L>,
    placement: Placement,
    config: DistributedConfig,
}

impl<L: SequenceLengths> DistributedBatchSampler<L> {
    /// Returns a sampler of the batches of one rank.
    ///
    /// # Errors
    ///
    /// [`Error::CannotDeal`] for dealt steps of buckets or packed rows, and
    /// [`Error::MultipleOverLimit`] for those of more ranks than any number of sequences has.
    pub fn new(
        batches: DynamicBatchSampler<L>,
        placement: Placement,
        config: DistributedConfig,
    ) -> Result<Self> {
        let batches = match config.layout {
            StepLayout::Grouped => batches,
            StepLayout::Dealt => batches.of_all_ranks(placement.world_size())?,
        };
        Ok(Self { batches, placement, config })
    }

    /// The steps of an epoch, in which the sequences come in `order`: that of all ranks, the same
    /// on each.
    ///
    /// # Errors
    ///
    /// As [`DynamicBatchSampler::plan_in`], and [`Error::CannotFillStep`] if there are too few
    /// sequences to split.
    pub fn epoch(
        &self,
        epoch: Epoch,
        order: impl IntoIterator<Item = u64>,
    ) -> Result<Steps<'_, L>> {
        self.steps(epoch, self.batches.plan_in(order)?)
    }

    fn steps<'a>(&'a self, epoch: Epoch, mut plan: BatchPlan<'a, L>) -> Result<Steps<'a, L>> {
        let (world_size, remainder) = (self.placement.world_size(), self.config.remainder);
        let cut = plan.cut();
        let (mut batches, per_step) = match self.config.layout {
            StepLayout::Grouped => (
                batches_by_cost(&mut plan, world_size, remainder, self.config.cost)?,
                world_size.as_usize(),
            ),
            StepLayout::Dealt => {
                fill_small_batch(&mut plan, world_size, remainder)?;
                ((0..u32::try_from(plan.len()).unwrap_or(u32::MAX)).collect(), 1)
            }
        };
        let mut steps: Vec<&mut [u32]> = batches.chunks_mut(per_step).collect();
        for step in &mut steps {
            step.sort_unstable();
        }
        match self.config.shuffle.map(|seed| seed.derive(epoch.as_u64())) {
            Some(seed) => {
                shuffle(&mut steps, seed);
                (0..)
                    .zip(&mut steps)
                    .for_each(|(nth, step)| shuffle(step, seed.derive(u64::MAX).derive(nth)));
            }
            None => steps.sort_unstable(),
        }
        let steps = steps.concat();
        Ok(Steps::new(self, plan, epoch, cut, steps))
    }

    /// The steps of an epoch that are left after those that a state has seen, in the same order as
    /// then.
    ///
    /// # Errors
    ///
    /// As [`epoch`](Self::epoch), and [`Error::OtherBatches`] if the state is not one of these
    /// batches.
    pub fn resume(
        &self,
        state: &BatchState,
        order: impl IntoIterator<Item = u64>,
    ) -> Result<Steps<'_, L>> {
        let other = |expected: &BatchState| Error::OtherBatches {
            expected: expected.to_string(),
            found: state.to_string(),
        };
        // Where the sorted sequences were cut is in the state, since it takes longer to find than
        // to sort.
        let mut steps = self.steps(state.epoch, self.batches.plan_again(order, &state.cut)?)?;
        let start = steps.state();
        let seen = usize::try_from(state.step).ok().filter(|&step| step <= steps.len());
        let is_same = BatchState { step: 0, ..state.clone() } == start;
        steps.skip_to(seen.filter(|_| is_same).ok_or_else(|| other(&start))?);
        Ok(steps)
    }

    pub(crate) fn placement(&self) -> Placement {
        self.placement
    }

    pub(crate) fn config(&self) -> &DistributedConfig {
        &self.config
    }
}
