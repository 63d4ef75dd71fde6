//! The batches of a run: from lengths to steps, by sampler and batcher.

use std::{iter, sync::Arc};

use core_types::{Epoch, Placement, Seed, WorldSize};
use dist_sampler::{DistributedSampler, SamplerConfig};
use dyn_batch::{
    Batch, BatchConfig, BatchState, Buckets, DistributedBatchSampler, DistributedConfig,
    DynamicBatchSampler, DynamicBatchStrategy, PaddingReport, Steps,
};

use crate::error::{Error, Result, run::RunError};

/// The most padded tokens in a batch, over all devices.
const MAX_TOKENS: u64 = 4096;

/// The number of lengths that share a batch.
pub(crate) const BUCKET_WIDTH: u64 = 16;

/// The streams of random numbers of a run, one for each purpose.
pub(crate) const INIT_STREAM: u64 = 0;
pub(crate) const ORDER_STREAM: u64 = 1;
pub(crate) const VALIDATION_STREAM: u64 = 2;

/// The streams of random numbers of a run's order.
const SEQUENCE_STREAM: u64 = 0;
const BATCH_STREAM: u64 = 1;

/// Returns the default of the most padded tokens in a step of so many devices: enough for one longest
/// sequence each.
pub(crate) fn default_max_tokens(world_size: WorldSize, longest: usize) -> u64 {
    MAX_TOKENS.max(world_size.as_u64() * longest as u64)
}

/// The batches of a step.
#[derive(Clone, Debug)]
pub(crate) struct Batching {
    /// Choice of the sequences that share a batch.
    pub(crate) strategy: DynamicBatchStrategy,
    /// Most padded tokens of a batch.
    pub(crate) max_tokens: u64,
    /// Most sequences of a batch, if that is limited.
    pub(crate) max_batch_size: Option<u64>,
    /// Number of batches in a step: one, unless each is a packed row.
    pub(crate) batches: u64,
}

impl Batching {
    /// Puts sequences of similar length into batches, each of them a step.
    pub(crate) fn bucketed(max_tokens: u64) -> Self {
        let strategy = DynamicBatchStrategy::Bucket(Buckets::Width(BUCKET_WIDTH));
        Self { strategy, max_tokens, max_batch_size: None, batches: 1 }
    }
}

/// The batches of a run, epoch by epoch.
///
/// Every process plans the steps of all devices and leaves it to the mesh to split them. So they do
/// not depend on the number of devices, which may change when a run is resumed.
#[derive(Debug)]
pub(crate) struct BatchSchedule {
    order: DistributedSampler,
    batches: DistributedBatchSampler<Vec<u64>>,
}

/// One step of all devices.
#[derive(Debug)]
pub(crate) struct ScheduledStep {
    /// Epoch of the step.
    pub(crate) epoch: u64,
    /// One batch of padded rows, or several packed rows.
    pub(crate) batches: Vec<Batch>,
    /// Position after the step.
    pub(crate) state: BatchState,
}

impl BatchSchedule {
    /// Plans steps of sequences of these lengths, in random order, so that short ones do not all come
    /// at the end of an epoch.
    ///
    /// # Errors
    ///
    /// [`Error::Batch`] or [`Error::Sampler`] if there is no sequence, or if one is too long.
    pub(crate) fn new(lengths: Vec<u64>, seed: Seed, batching: &Batching) -> Result<Self> {
        let config = SamplerConfig::default().with_seed(seed.derive(SEQUENCE_STREAM));
        let order = DistributedSampler::new(lengths.len() as u64, Placement::SINGLE, config)?;
        let config = BatchConfig::default()
            .with_strategy(batching.strategy.clone())
            .with_max_tokens(batching.max_tokens);
        let config = match batching.max_batch_size {
            Some(most) => config.with_max_batch_size(most),
            None => config,
        };
        let shuffled = DistributedConfig::default().with_shuffle(seed.derive(BATCH_STREAM));
        let batches = DynamicBatchSampler::new(lengths, config)?;
        let place = Placement::new(0, batching.batches)?;
        Ok(Self { order, batches: DistributedBatchSampler::new(batches, place, shuffled)? })
    }

    /// Returns the batches of the steps of the first epoch, with their padding.
    ///
    /// # Errors
    ///
    /// [`RunError::PackedRows`] if the sequences fill fewer rows than a step has.
    pub(crate) fn first_epoch(&self) -> Result<(PaddingReport, Vec<Vec<Batch>>)> {
        let steps = self.epoch(Epoch::ZERO)?;
        Ok((steps.report(), (0..steps.len()).map_while(|nth| steps.step(nth)).collect()))
    }

    /// Checks that `state` is a position in these batches.
    ///
    /// # Errors
    ///
    /// [`Error::Batch`] if it is not: the text has changed.
    pub(crate) fn check_position(&self, state: Option<&BatchState>) -> Result<()> {
        self.steps_after(state).map(drop)
    }

    /// Returns endless batches, from `state` or from the first epoch on. An error is the last item.
    ///
    /// # Errors
    ///
    /// [`Error::Batch`] if the state is not one of these batches: the text has changed.
    pub(crate) fn batches(
        self: &Arc<Self>,
        state: Option<&BatchState>,
    ) -> Result<impl Iterator<Item = Result<ScheduledStep>> + use<>> {
        let first = self.steps_after(state)?;
        let later = (first.state().epoch.as_u64()..=u64::MAX).skip(1);
        let schedule = Arc::clone(self);
        let later = later.flat_map(move |epoch| match schedule.epoch(Epoch::new(epoch)) {
            Ok(steps) => scheduled(steps),
            Err(error) => vec![Err(error)],
        });
        let end = iter::once_with(|| Err(RunError::LastEpoch.into()));
        Ok(scheduled(first).into_iter().chain(later).chain(end))
    }

    /// Returns the rest of an epoch after `state`, or the first epoch.
    fn steps_after(&self, state: Option<&BatchState>) -> Result<Steps<'_, Vec<u64>>> {
        match state {
            None => self.epoch(Epoch::ZERO),
            Some(state) => Ok(self.batches.resume(state, &self.order_in(state.epoch))?),
        }
    }

    fn epoch(&self, epoch: Epoch) -> Result<Steps<'_, Vec<u64>>> {
        self.batches.epoch(epoch, &self.order_in(epoch)).map_err(|error| match error {
            // The batches of a step are packed rows, and no ranks.
            dyn_batch::Error::CannotFillStep { n_batches, world_size: rows } => {
                RunError::PackedRows { n_rows: n_batches, expected: rows }.into()
            }
            error => Error::from(error),
        })
    }

    fn order_in(&self, epoch: Epoch) -> DistributedSampler {
        let mut order = self.order.clone();
        order.set_epoch(epoch);
        order
    }
}

/// Returns the rest of an epoch.
#[expect(clippy::expect_used, reason = "says why it cannot fail")]
fn scheduled(mut steps: Steps<'_, Vec<u64>>) -> Vec<Result<ScheduledStep>> {
    let first = steps.state().step;
    let mut scheduled = Vec::with_capacity(steps.len());
    for nth in first.. {
        if steps.next().is_none() {
            break;
        }
        let nth = usize::try_from(nth).expect("steps in memory are counted by a usize");
        let batches = steps.step(nth).expect("it is one of the steps");
        let state = steps.state();
        scheduled.push(Ok(ScheduledStep { epoch: state.epoch.as_u64(), batches, state }));
    }
    scheduled
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
        let packed = Batching { strategy, max_tokens: 64, max_batch_size: None, batches: 2 };
        resumes(&schedule((10..60).collect(), &packed), &schedule(vec![3, 2], &packed));
    }

    fn resumes(schedule: &Arc<BatchSchedule>, other: &Arc<BatchSchedule>) {
        let all: Vec<ScheduledStep> =
            schedule.batches(None).unwrap().take(60).map(Result::unwrap).collect();
        assert!(all[59].epoch > 0);
        for at in [0, 7, 58] {
            let rest = schedule.batches(Some(&all[at].state)).unwrap();
            for (next, expected) in rest.map(Result::unwrap).zip(&all[at + 1..]) {
                assert_eq!((next.epoch, &next.batches), (expected.epoch, &expected.batches));
            }
        }
        // A checkpoint may say anything, and there is nothing after the last epoch.
        let last = schedule.epoch(Epoch::new(u64::MAX)).unwrap().state();
        let mut rest = schedule.batches(Some(&last)).unwrap();
        let end = rest.find_map(Result::err).unwrap().to_string();
        assert!(end.contains("no epoch comes after"), "{end}");
        assert!(rest.next().is_none());
        assert!(other.batches(Some(&all[3].state)).is_err());
    }
}
