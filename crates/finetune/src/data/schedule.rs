//! The batch schedule of a run, which samples sequences and groups them into the batches of steps.

use std::{collections::BTreeMap, iter, sync::Arc};

use core_types::{Epoch, Placement, Seed, WorldSize};
use dist_sampler::{DistributedSampler, MixtureEnd, MixturePart, SamplerConfig};
use dyn_batch::{
    Batch, BatchConfig, BatchState, Buckets, DistributedBatchSampler, DistributedConfig,
    DynamicBatchSampler, DynamicBatchStrategy, GridConfig, PaddingReport, Remainder, StepLayout,
    Steps,
};

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result, run::RunError};

/// Default maximum of padded tokens in a batch over all devices.
const DEFAULT_MAX_TOKENS: u64 = 4096;

/// The width of a bucket: the number of consecutive lengths that may share a batch.
pub(crate) const BUCKET_WIDTH: u64 = 16;

/// Random streams of a run's seed, one per purpose.
pub(crate) const INIT_STREAM: u64 = 0;
pub(crate) const ORDER_STREAM: u64 = 1;
pub(crate) const VALIDATION_STREAM: u64 = 2;

/// Random streams of the seed of [`ORDER_STREAM`].
const SEQUENCE_STREAM: u64 = 0;
const BATCH_STREAM: u64 = 1;

/// Returns the default maximum of padded tokens in a step: at least enough for one sequence of
/// length `longest` per device.
pub(crate) fn default_max_tokens(world_size: WorldSize, longest: usize) -> u64 {
    DEFAULT_MAX_TOKENS.max(world_size.as_u64() * longest as u64)
}

/// The weights of several texts, from an epoch on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MixtureWeights {
    /// First epoch with these weights.
    pub from_epoch: u64,
    /// Weight of each text.
    pub weights: Vec<u64>,
}

/// Settings of the batches of a step.
#[derive(Clone, Debug)]
pub(crate) struct Batching {
    /// Strategy that selects the sequences of a batch.
    pub(crate) strategy: DynamicBatchStrategy,
    /// Maximum padded tokens of a batch.
    pub(crate) max_tokens: u64,
    /// Maximum sequences of a batch, if limited.
    pub(crate) max_batch_size: Option<u64>,
    /// Number of batches in a micro-batch: 1 for padded rows. A packed row is a batch, and a
    /// micro-batch may have several.
    pub(crate) n_batches: u64,
    /// Number of micro-batches in a step, if gradients are accumulated.
    pub(crate) accumulate: Option<u64>,
}

impl Batching {
    /// Groups sequences of similar length into batches, one per step.
    pub(crate) fn bucketed(max_tokens: u64) -> Self {
        let strategy = DynamicBatchStrategy::Bucket(Buckets::Width(BUCKET_WIDTH));
        Self { strategy, max_tokens, max_batch_size: None, n_batches: 1, accumulate: None }
    }
}

/// The steps of a run, epoch by epoch.
///
/// Every process plans the steps of all devices, and the mesh splits them. The steps therefore do
/// not depend on the number of devices, which may change when a run is resumed.
#[derive(Debug)]
pub(crate) struct BatchSchedule {
    /// Orders of the sequences, by the first epoch of each. One begins at epoch 0.
    orders: BTreeMap<u64, DistributedSampler>,
    /// The "ranks" of this sampler are the batches of a micro-batch, which the mesh divides later.
    steps: DistributedBatchSampler<Vec<u64>>,
    batches_per_micro_batch: usize,
}

/// One step, with the batches of all devices.
#[derive(Debug)]
pub(crate) struct ScheduledStep {
    /// Epoch of the step.
    pub(crate) epoch: u64,
    /// One batch of padded rows, or several packed rows, for each micro-batch.
    pub(crate) batches: Vec<Batch>,
    batches_per_micro_batch: usize,
    /// Position after the step.
    pub(crate) state: BatchState,
}

impl ScheduledStep {
    /// Returns the batches of each micro-batch.
    pub(crate) fn micro_batches(&self) -> impl Iterator<Item = &[Batch]> {
        self.batches.chunks(self.batches_per_micro_batch)
    }
}

impl BatchSchedule {
    /// Plans steps of sequences of these lengths in random order. Batches are shuffled too:
    /// otherwise the short sequences would all come at the end of an epoch.
    ///
    /// # Errors
    ///
    /// [`Error::Batch`] or [`Error::Sampler`] if there is no sequence, or if a sequence is too long.
    pub(crate) fn new(lengths: Vec<u64>, seed: Seed, batching: &Batching) -> Result<Self> {
        let config = sequence_config(seed);
        let order = DistributedSampler::new(lengths.len() as u64, Placement::SINGLE, config)?;
        Self::with_orders(lengths, BTreeMap::from([(0, order)]), seed, batching)
    }

    /// Plans steps that mix several parts of the sequences, in proportion to weights that begin at
    /// epoch 0. An epoch has as many sequences as all parts have; a part that ends is read again.
    ///
    /// # Errors
    ///
    /// The errors of [`new`](Self::new), and [`Error::Sampler`] if the proportion of the weights is
    /// too fine.
    pub(crate) fn mixed(
        lengths: Vec<u64>,
        part_lens: &[u64],
        mixture: &[MixtureWeights],
        seed: Seed,
        batching: &Batching,
    ) -> Result<Self> {
        let end = MixtureEnd::Repeat { len: lengths.len() as u64 };
        let mut orders = BTreeMap::new();
        for MixtureWeights { from_epoch, weights } in mixture {
            let parts = iter::zip(part_lens, weights);
            let parts: Vec<MixturePart> =
                parts.map(|(&len, &weight)| MixturePart::new(len, weight)).collect();
            let config = sequence_config(seed);
            let order = DistributedSampler::mixture(&parts, end, Placement::SINGLE, config)?;
            orders.insert(*from_epoch, order);
        }
        Self::with_orders(lengths, orders, seed, batching)
    }

    fn with_orders(
        lengths: Vec<u64>,
        orders: BTreeMap<u64, DistributedSampler>,
        seed: Seed,
        batching: &Batching,
    ) -> Result<Self> {
        let mut batch_config = BatchConfig::default()
            .with_strategy(batching.strategy.clone())
            .with_max_tokens(batching.max_tokens);
        if let Some(max_batch_size) = batching.max_batch_size {
            batch_config = batch_config.with_max_batch_size(max_batch_size);
        }
        let mut step_config = DistributedConfig::default().with_shuffle(seed.derive(BATCH_STREAM));
        if let Some(accumulate) = batching.accumulate {
            step_config = step_config.with_accumulation(accumulate);
            if !matches!(batching.strategy, DynamicBatchStrategy::Pack(_)) {
                // The batch size is the number of sequences in a step.
                let mut grid = GridConfig::default();
                grid.global_batch_size = batching.max_batch_size;
                step_config = step_config.with_layout(StepLayout::Grid(grid));
                batch_config = batch_config.with_remainder(Remainder::Keep);
            }
        }
        let batches = DynamicBatchSampler::new(lengths, batch_config)?;
        let placement = Placement::new(0, batching.n_batches)?;
        let batches_per_micro_batch = placement.world_size().as_usize();
        let steps = DistributedBatchSampler::new(batches, placement, step_config)?;
        Ok(Self { orders, steps, batches_per_micro_batch })
    }

    /// Returns the padding of the first epoch, and the batches of each of its micro-batches.
    ///
    /// # Errors
    ///
    /// [`RunError::PackedRows`] if the sequences fill fewer rows than a step needs.
    pub(crate) fn first_epoch(&self) -> Result<(PaddingReport, Vec<Vec<Batch>>)> {
        let steps = self.epoch(Epoch::ZERO)?;
        let batches = (0..steps.len()).filter_map(|nth| steps.step(nth)).flat_map(|batches| {
            let micro_batches = batches.chunks(self.batches_per_micro_batch).map(<[Batch]>::to_vec);
            micro_batches.collect::<Vec<_>>()
        });
        Ok((steps.report(), batches.collect()))
    }

    /// Checks that `state` is a position in this schedule.
    ///
    /// # Errors
    ///
    /// [`Error::Batch`] if the state belongs to another schedule, since the text has changed.
    pub(crate) fn check_position(&self, state: Option<&BatchState>) -> Result<()> {
        self.rest_of_epoch(state).map(drop)
    }

    /// Returns all steps after `state`, or all steps of the run. If an epoch cannot be planned, the
    /// iterator yields one error instead of its steps. The last item is [`RunError::LastEpoch`].
    ///
    /// # Errors
    ///
    /// [`Error::Batch`] if the state belongs to another schedule, since the text has changed.
    pub(crate) fn steps(
        self: &Arc<Self>,
        state: Option<&BatchState>,
    ) -> Result<impl Iterator<Item = Result<ScheduledStep>> + use<>> {
        let first_epoch = self.rest_of_epoch(state)?;
        // `skip(1)` instead of `epoch + 1`, which overflows after the last epoch.
        let later_epochs = (first_epoch.state().epoch.as_u64()..=u64::MAX).skip(1);
        let schedule = Arc::clone(self);
        let later_steps =
            later_epochs.flat_map(move |epoch| match schedule.epoch(Epoch::new(epoch)) {
                Ok(steps) => schedule.collect_steps(steps),
                Err(error) => vec![Err(error)],
            });
        let end = iter::once_with(|| Err(RunError::LastEpoch.into()));
        Ok(self.collect_steps(first_epoch).into_iter().chain(later_steps).chain(end))
    }

    /// Returns the remaining steps of the epoch of `state`, or all steps of the first epoch.
    fn rest_of_epoch(&self, state: Option<&BatchState>) -> Result<Steps<Vec<u64>>> {
        match state {
            None => self.epoch(Epoch::ZERO),
            Some(state) => Ok(self.steps.resume(state, &self.sequences_in(state.epoch))?),
        }
    }

    fn epoch(&self, epoch: Epoch) -> Result<Steps<Vec<u64>>> {
        self.steps.epoch(epoch, &self.sequences_in(epoch)).map_err(|error| match error {
            // Each batch is a packed row, so the "ranks" of the sampler are the rows of a step.
            dyn_batch::Error::CannotFillStep { n_batches: n_rows, world_size: rows_per_step } => {
                RunError::PackedRows { n_rows, expected: rows_per_step }.into()
            }
            error => Error::from(error),
        })
    }

    #[expect(clippy::expect_used, reason = "the message says why it cannot fail")]
    fn sequences_in(&self, epoch: Epoch) -> DistributedSampler {
        let mut begun = self.orders.range(..=epoch.as_u64());
        let (_, order) = begun.next_back().expect("one order begins at epoch 0");
        let mut sequences = order.clone();
        sequences.set_epoch(epoch);
        sequences
    }

    /// Returns the remaining steps of an epoch.
    #[expect(clippy::expect_used, reason = "the message says why it cannot fail")]
    fn collect_steps(&self, mut steps: Steps<Vec<u64>>) -> Vec<Result<ScheduledStep>> {
        let batches_per_micro_batch = self.batches_per_micro_batch;
        let first = usize::try_from(steps.state().step);
        let mut index = first.expect("steps in memory have indices of type usize");
        let mut scheduled = Vec::with_capacity(steps.len());
        // `next` returns only the batches of one "rank", but moves the state.
        while steps.next().is_some() {
            let batches = steps.step(index).expect("`next` has just returned this step");
            let state = steps.state();
            let epoch = state.epoch.as_u64();
            scheduled.push(Ok(ScheduledStep { epoch, batches, batches_per_micro_batch, state }));
            index += 1;
        }
        scheduled
    }
}

fn sequence_config(seed: Seed) -> SamplerConfig {
    SamplerConfig::default().with_seed(seed.derive(SEQUENCE_STREAM))
}

#[cfg(test)]
mod tests {
    use dyn_batch::Packing;

    use super::*;

    #[test]
    fn schedules_resume_at_any_step() {
        let schedule = |lengths, batching| {
            Arc::new(BatchSchedule::new(lengths, Seed::new(0), batching).unwrap())
        };
        let bucketed = Batching::bucketed(128);
        resumes(&schedule((10..60).collect(), &bucketed), &schedule(vec![3, 2], &bucketed));
        let strategy = DynamicBatchStrategy::Pack(Packing::BestFit);
        let packed =
            Batching { strategy, max_batch_size: None, n_batches: 2, ..Batching::bucketed(64) };
        resumes(&schedule((10..60).collect(), &packed), &schedule(vec![3, 2], &packed));
        for accumulated in [
            Batching { strategy: DynamicBatchStrategy::PadToMax, ..bucketed },
            Batching { n_batches: 1, ..packed },
        ] {
            let accumulated = Batching { accumulate: Some(2), ..accumulated };
            resumes(
                &schedule((10..60).collect(), &accumulated),
                &schedule(vec![3, 2], &accumulated),
            );
        }
    }

    #[test]
    fn mixed_epochs_follow_their_weights() {
        let weights = |from_epoch, weights: [u64; 2]| {
            let weights = weights.to_vec();
            MixtureWeights { from_epoch, weights }
        };
        let mixture = [weights(0, [7, 3]), weights(2, [1, 1])];
        // The second part is smaller than its share.
        let mixed = |batching: &Batching| {
            let lengths = (10..60).collect();
            BatchSchedule::mixed(lengths, &[40, 10], &mixture, Seed::new(0), batching).unwrap()
        };
        for batching in [Batching::bucketed(128), Batching::bucketed(1 << 20)] {
            let schedule = mixed(&batching);
            for (epoch, expected) in [(0, [35, 15]), (1, [35, 15]), (2, [25, 25]), (9, [25, 25])] {
                let steps = schedule.collect_steps(schedule.epoch(Epoch::new(epoch)).unwrap());
                let batches = steps.into_iter().flat_map(|step| step.unwrap().batches);
                let indices = batches.flat_map(|batch| batch.indices);
                let (first, second): (Vec<u64>, Vec<u64>) = indices.partition(|&index| index < 40);
                assert_eq!([first.len(), second.len()], expected, "epoch {epoch}");
            }
        }
        let bucketed = Batching::bucketed(128);
        let plain = BatchSchedule::new((10..60).collect(), Seed::new(0), &bucketed).unwrap();
        resumes(&Arc::new(mixed(&bucketed)), &Arc::new(plain));
    }

    fn resumes(schedule: &Arc<BatchSchedule>, other: &Arc<BatchSchedule>) {
        let all: Vec<ScheduledStep> =
            schedule.steps(None).unwrap().take(60).map(Result::unwrap).collect();
        assert!(all[59].epoch > 0);
        for at in [0, 7, 58] {
            let rest = schedule.steps(Some(&all[at].state)).unwrap();
            for (next, expected) in rest.map(Result::unwrap).zip(&all[at + 1..]) {
                assert_eq!((next.epoch, &next.batches), (expected.epoch, &expected.batches));
            }
        }
        // A damaged checkpoint may name the last epoch, which has no successor.
        let last = schedule.epoch(Epoch::new(u64::MAX)).unwrap().state();
        let mut rest = schedule.steps(Some(&last)).unwrap();
        let end = rest.find_map(Result::err).unwrap().to_string();
        assert!(end.contains("no epoch comes after"), "{end}");
        assert!(rest.next().is_none());
        assert!(other.steps(Some(&all[3].state)).is_err());
    }
}
