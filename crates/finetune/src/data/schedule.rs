//! The batch schedule of a run, which samples sequences and groups them into the batches of steps.

use std::{
    collections::BTreeMap,
    iter,
    ops::Bound::{Excluded, Included},
    sync::Arc,
};

use core_types::{Epoch, Placement, Seed, WorldSize};
use dist_sampler::{DistributedSampler, MixtureEnd, MixturePart, SamplerConfig};
use dyn_batch::{
    Batch, BatchConfig, BatchState, Buckets, DistributedBatchSampler, DistributedConfig,
    DynamicBatchSampler, DynamicBatchStrategy, GridConfig, PaddingReport, Remainder, StepLayout,
    Steps,
};

use serde::{Deserialize, Serialize};

use crate::error::{Result, run::RunError};

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

/// The weights of several texts, from a step of an epoch on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MixtureWeights {
    /// First epoch with these weights.
    pub from_epoch: u64,
    /// First step of that epoch with these weights, from 0.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub from_step: u64,
    /// Weight of each text.
    pub weights: Vec<u64>,
}

impl MixtureWeights {
    /// Returns the first epoch and its first step with these weights.
    pub(crate) fn start(&self) -> (u64, u64) {
        (self.from_epoch, self.from_step)
    }
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde requires this signature")]
fn is_zero(number: &u64) -> bool {
    *number == 0
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
    /// Whether a step is a grid of micro-batches of padded rows.
    pub(crate) is_grid: bool,
    /// Number of micro-batches in a step, if gradients are accumulated; the fewest that hold a global
    /// batch of a grid by default.
    pub(crate) accumulate: Option<u64>,
}

impl Batching {
    /// Groups sequences of similar length into batches, one per step.
    pub(crate) fn bucketed(max_tokens: u64) -> Self {
        let strategy = DynamicBatchStrategy::Bucket(Buckets::Width(BUCKET_WIDTH));
        Self {
            strategy,
            max_tokens,
            max_batch_size: None,
            n_batches: 1,
            is_grid: false,
            accumulate: None,
        }
    }
}

/// The steps of a run, epoch by epoch.
///
/// Every process plans the steps of all devices, and the mesh splits them. The steps therefore do
/// not depend on the number of devices, which may change when a run is resumed.
#[derive(Debug)]
pub(crate) struct BatchSchedule {
    /// Orders of the sequences, by the first epoch and step of each. One begins at the first step.
    orders: BTreeMap<(u64, u64), DistributedSampler>,
    /// Number of texts in a mixture.
    n_parts: usize,
    /// The steps of a world with a rank for each batch of a micro-batch, whatever the number of
    /// devices: the mesh divides the rows of a micro-batch.
    steps: DistributedBatchSampler<Vec<u64>>,
}

/// One step, with the batches of all devices.
#[derive(Debug)]
pub(crate) struct ScheduledStep {
    /// Epoch of the step.
    pub(crate) epoch: u64,
    /// Micro-batches: each one batch of padded rows, or several packed rows.
    pub(crate) micro_batches: Vec<Vec<Batch>>,
    /// Position after the step.
    pub(crate) state: BatchState,
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
        Self::with_orders(lengths, BTreeMap::from([((0, 0), order)]), 1, seed, batching)
    }

    /// Plans steps that mix several parts of the sequences, in proportion to weights that begin at
    /// the first step. An epoch has as many sequences as all parts have; a part that ends is read again.
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
        for MixtureWeights { from_epoch, from_step, weights } in mixture {
            let parts = iter::zip(part_lens, weights);
            let parts: Vec<MixturePart> =
                parts.map(|(&len, &weight)| MixturePart::new(len, weight)).collect();
            let config = sequence_config(seed);
            let order = DistributedSampler::mixture(&parts, end, Placement::SINGLE, config)?;
            orders.insert((*from_epoch, *from_step), order);
        }
        Self::with_orders(lengths, orders, part_lens.len(), seed, batching)
    }

    fn with_orders(
        lengths: Vec<u64>,
        orders: BTreeMap<(u64, u64), DistributedSampler>,
        n_parts: usize,
        seed: Seed,
        batching: &Batching,
    ) -> Result<Self> {
        let mut batch_config = BatchConfig::default()
            .with_strategy(batching.strategy.clone())
            .with_max_tokens(batching.max_tokens);
        if let Some(max_batch_size) = batching.max_batch_size {
            batch_config = batch_config.with_max_batch_size(max_batch_size);
        }
        let mut step_config = DistributedConfig {
            shuffle: Some(seed.derive(BATCH_STREAM)),
            accumulation: batching.accumulate,
            ..DistributedConfig::default()
        };
        if batching.is_grid {
            // The batch size is the number of sequences in a step.
            let global_batch_size = batching.max_batch_size;
            let grid = GridConfig { global_batch_size, ..GridConfig::default() };
            step_config.layout = StepLayout::Grid(grid);
            batch_config = batch_config.with_remainder(Remainder::Keep);
        }
        let batches = DynamicBatchSampler::new(lengths, batch_config)?;
        let placement = Placement::new(0, batching.n_batches)?;
        let steps = DistributedBatchSampler::new(batches, placement, step_config)?;
        // Packed rows that are left at the end of an epoch are a step of their own.
        Ok(Self { orders, n_parts, steps: steps.with_short_last_step() })
    }

    /// Returns the padding of the first epoch, and the batches of each of its micro-batches, if the
    /// weights do not change in it.
    ///
    /// # Errors
    ///
    /// [`Error::Batch`] if there are 2^32 sequences or more.
    pub(crate) fn first_epoch(&self) -> Result<(PaddingReport, Vec<Vec<Batch>>)> {
        let steps = self.plan(Epoch::ZERO, self.order_at(Epoch::ZERO, 0).iter())?;
        let micro_batches = (0..steps.len()).filter_map(|nth| steps.all_ranks(nth)).flatten();
        Ok((steps.report(), micro_batches.collect()))
    }

    /// Returns the number of steps of its epoch that are done at `state`, also with earlier weights.
    /// Plans the epoch, so that a schedule without steps is an error too.
    ///
    /// # Errors
    ///
    /// [`Error::Batch`] if the state belongs to another schedule, since the text has changed.
    pub(crate) fn steps_done(&self, state: Option<&BatchState>) -> Result<u64> {
        let epoch = state.map_or(Epoch::ZERO, |state| state.epoch);
        Ok(self.epoch_steps(epoch, state)?.n_done)
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
        let epoch = state.map_or(Epoch::ZERO, |state| state.epoch);
        let first_epoch = self.epoch_steps(epoch, state)?.steps;
        // `skip(1)` instead of `epoch + 1`, which overflows after the last epoch.
        let later_epochs = (epoch.as_u64()..=u64::MAX).skip(1);
        let schedule = Arc::clone(self);
        let later_steps = later_epochs.flat_map(move |epoch| {
            match schedule.epoch_steps(Epoch::new(epoch), None) {
                Ok(epoch) => epoch.steps.into_iter().map(Ok).collect(),
                Err(error) => vec![Err(error)],
            }
        });
        let end = iter::once_with(|| Err(RunError::LastEpoch.into()));
        Ok(first_epoch.into_iter().map(Ok).chain(later_steps).chain(end))
    }

    /// Plans the steps of an epoch that follow `state`, or all of them.
    fn epoch_steps(&self, epoch: Epoch, state: Option<&BatchState>) -> Result<RemainingSteps> {
        let mut parts = self.parts(epoch)?.into_iter();
        let mut remaining = match state {
            None => RemainingSteps { n_done: 0, steps: Vec::new() },
            Some(state) => self.resume_part(&mut parts, state)?,
        };
        for part in parts {
            let planned = self.plan(epoch, part.sequences)?;
            remaining.steps.extend(collect_steps(planned, part.n_steps));
        }
        Ok(remaining)
    }

    /// Returns the parts of an epoch between changes of the weights; in most epochs one.
    ///
    /// Where the weights change, the remaining sequences are mixed and planned anew.
    fn parts(&self, epoch: Epoch) -> Result<Vec<EpochPart>> {
        let sequences = self.order_at(epoch, 0).iter().collect();
        let mut part = EpochPart { first_step: 0, n_steps: u64::MAX, sequences };
        let mut parts = Vec::new();
        let mut read = Vec::new();
        let epoch_number = epoch.as_u64();
        let changes = (Excluded((epoch_number, 0)), Included((epoch_number, u64::MAX)));
        for &(_, first_step) in self.orders.range(changes).map(|(start, _)| start) {
            part.n_steps = first_step - part.first_step;
            let planned = self.plan(epoch, part.sequences.iter().copied())?;
            for step in collect_steps(planned, part.n_steps) {
                let batches = step.micro_batches.into_iter().flatten();
                read.extend(batches.flat_map(|batch| batch.indices));
            }
            parts.push(part);
            let sequences = remix(&self.order_at(epoch, first_step), self.n_parts, &read)?;
            part = EpochPart { first_step, n_steps: u64::MAX, sequences };
        }
        parts.push(part);
        Ok(parts)
    }

    /// Returns the steps after `state` in its part, and advances `parts` to the next one.
    #[expect(clippy::expect_used, reason = "the message says why it cannot fail")]
    fn resume_part(
        &self,
        parts: &mut impl Iterator<Item = EpochPart>,
        state: &BatchState,
    ) -> Result<RemainingSteps> {
        let mut mismatch = None;
        for part in parts {
            match self.steps.resume(state, part.sequences) {
                Ok(steps) if steps.state().step <= part.n_steps => {
                    let n_done = part.first_step + steps.state().step;
                    let steps = collect_steps(steps, part.n_steps);
                    return Ok(RemainingSteps { n_done, steps });
                }
                Ok(_) => {}
                Err(error) => mismatch = Some(error),
            }
        }
        Err(mismatch.expect("the last part has no end, so another state is an error").into())
    }

    fn plan(
        &self,
        epoch: Epoch,
        sequences: impl IntoIterator<Item = u64>,
    ) -> Result<Steps<Vec<u64>>> {
        Ok(self.steps.epoch(epoch, sequences)?)
    }

    /// Returns the order of an epoch with the weights at one of its steps.
    #[expect(clippy::expect_used, reason = "the message says why it cannot fail")]
    fn order_at(&self, epoch: Epoch, step: u64) -> DistributedSampler {
        let mut begun = self.orders.range(..=(epoch.as_u64(), step));
        let (_, order) = begun.next_back().expect("one order begins at the first step");
        let mut sequences = order.clone();
        sequences.set_epoch(epoch);
        sequences
    }
}

/// Returns the steps from the position of `steps` up to step `end`.
#[expect(clippy::expect_used, reason = "the message says why it cannot fail")]
fn collect_steps(mut steps: Steps<Vec<u64>>, end: u64) -> Vec<ScheduledStep> {
    let mut scheduled = Vec::with_capacity(steps.len());
    let mut index = to_usize(steps.state().step);
    // `next` returns only the batches of one "rank", but moves the state.
    while steps.state().step < end && steps.next().is_some() {
        let micro_batches = steps.all_ranks(index).expect("`next` has just returned this step");
        let state = steps.state();
        scheduled.push(ScheduledStep { epoch: state.epoch.as_u64(), micro_batches, state });
        index += 1;
    }
    scheduled
}

/// The steps of an epoch that are mixed by the same weights.
struct EpochPart {
    first_step: u64,
    /// Number of its steps until the weights change.
    n_steps: u64,
    sequences: Vec<u64>,
}

/// The steps of an epoch that are left.
struct RemainingSteps {
    /// Number of steps before them.
    n_done: u64,
    steps: Vec<ScheduledStep>,
}

/// Returns the sequences of an epoch that follow those in `read`, mixed by the weights of `order`.
///
/// Batches read an order out of sequence, so no position in it divides the sequences that are read
/// from the others. Every part continues with its first sequences that are not read.
#[expect(clippy::expect_used, reason = "the message says why it cannot fail")]
fn remix(order: &DistributedSampler, n_parts: usize, read: &[u64]) -> Result<Vec<u64>> {
    let mut n_read: BTreeMap<u64, u64> = BTreeMap::new();
    for &index in read {
        *n_read.entry(index).or_default() += 1;
    }
    let mut parts = Vec::with_capacity(n_parts);
    for part in 0..n_parts {
        let weights: Vec<u64> = (0..n_parts).map(|other| u64::from(other == part)).collect();
        parts.push(order.clone().with_weights_from(0, &weights)?);
    }
    let mut parts: Vec<_> = parts.iter().map(DistributedSampler::iter).collect();
    let n_left = order.len().saturating_sub(read.len() as u64);
    let mut rest = Vec::new();
    for turn in order.iter().take(to_usize(n_left)) {
        let part = order.part_of(turn).expect("a mixture has the part of each of its samples");
        let next = parts[part].find(|index| match n_read.get_mut(index) {
            Some(times) if *times > 0 => {
                *times -= 1;
                false
            }
            _ => true,
        });
        rest.push(next.expect("the order of a part alone has as many turns as the epoch"));
    }
    Ok(rest)
}

/// Returns a number of sequences or steps in memory, or the largest one.
fn to_usize(number: u64) -> usize {
    usize::try_from(number).unwrap_or(usize::MAX)
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
        let schedule = |lengths, batching: &Batching| {
            Arc::new(BatchSchedule::new(lengths, Seed::new(0), batching).unwrap())
        };
        let bucketed = Batching::bucketed(128);
        resumes(&schedule((10..60).collect(), &bucketed), &schedule(vec![3, 2], &bucketed));
        let strategy = DynamicBatchStrategy::Pack(Packing::BestFit);
        let packed =
            Batching { strategy, max_batch_size: None, n_batches: 2, ..Batching::bucketed(64) };
        resumes(&schedule((10..60).collect(), &packed), &schedule(vec![3, 2], &packed));
        for accumulated in [
            Batching {
                strategy: DynamicBatchStrategy::PadToMax,
                is_grid: true,
                ..bucketed.clone()
            },
            Batching { n_batches: 1, ..packed.clone() },
        ] {
            let accumulated = Batching { accumulate: Some(2), ..accumulated };
            resumes(
                &schedule((10..60).collect(), &accumulated),
                &schedule(vec![3, 2], &accumulated),
            );
        }
    }

    /// The position of a run of packed rows after three steps of epoch 1, as checkpoints have it. Its
    /// fingerprint includes every batch of the epoch.
    const POSITION: &str = concat!(
        r#"{"format_version":1,"epoch":1,"step":3,"n_steps":7,"world_size":2,"#,
        r#""fingerprint":14578585528962042213,"cut":[],"earlier_worlds":[]}"#
    );

    #[test]
    fn positions_of_version_1_resume() {
        let strategy = DynamicBatchStrategy::Pack(Packing::BestFit);
        let packed =
            Batching { strategy, n_batches: 2, accumulate: Some(2), ..Batching::bucketed(64) };
        let schedule = BatchSchedule::new((10..60).collect(), Seed::new(0), &packed).unwrap();
        let schedule = Arc::new(schedule);
        let steps = schedule.steps(None).unwrap().map(Result::unwrap);
        let second: Vec<ScheduledStep> = steps.skip_while(|step| step.epoch < 1).take(4).collect();
        assert_eq!(serde_json::to_string(&second[2].state).unwrap(), POSITION);
        let state = serde_json::from_str(POSITION).unwrap();
        let next = schedule.steps(Some(&state)).unwrap().next().unwrap().unwrap();
        assert_eq!(next.micro_batches, second[3].micro_batches);
    }

    #[test]
    fn mixed_epochs_follow_their_weights() {
        let mixture = [weights(0, 0, [7, 3]), weights(2, 0, [1, 1])];
        // The second part is smaller than its share.
        let mixed = |batching: &Batching| {
            let lengths = (10..60).collect();
            BatchSchedule::mixed(lengths, &[40, 10], &mixture, Seed::new(0), batching).unwrap()
        };
        for batching in [Batching::bucketed(128), Batching::bucketed(1 << 20)] {
            let schedule = mixed(&batching);
            for (epoch, expected) in [(0, [35, 15]), (1, [35, 15]), (2, [25, 25]), (9, [25, 25])] {
                let steps = schedule.epoch_steps(Epoch::new(epoch), None).unwrap().steps;
                let batches = steps.into_iter().flat_map(|step| step.micro_batches.concat());
                let indices = batches.flat_map(|batch| batch.indices);
                let (first, second): (Vec<u64>, Vec<u64>) = indices.partition(|&index| index < 40);
                assert_eq!([first.len(), second.len()], expected, "epoch {epoch}");
            }
        }
        let bucketed = Batching::bucketed(128);
        let plain = BatchSchedule::new((10..60).collect(), Seed::new(0), &bucketed).unwrap();
        resumes(&Arc::new(mixed(&bucketed)), &Arc::new(plain));
    }

    #[test]
    fn last_step_has_the_packed_rows_that_are_left() {
        let strategy = DynamicBatchStrategy::Pack(Packing::BestFit);
        // Two sequences never fit one row, so that no row can be split.
        for (n_sequences, n_batches, accumulate, last_step) in [
            (7, 4, None, &[3][..]),
            (3, 32, None, &[3]),
            (11, 2, Some(2), &[2, 1]),
            (13, 2, Some(2), &[1]),
        ] {
            let strategy = strategy.clone();
            let batching = Batching { strategy, n_batches, accumulate, ..Batching::bucketed(16) };
            let lengths = vec![16; n_sequences];
            let schedule = BatchSchedule::new(lengths.clone(), Seed::new(0), &batching).unwrap();
            let steps = schedule.epoch_steps(Epoch::ZERO, None).unwrap().steps;
            let n_rows: Vec<usize> =
                steps.last().unwrap().micro_batches.iter().map(Vec::len).collect();
            assert_eq!(n_rows, last_step, "{n_sequences} rows");
            let mut indices = indices_of(&steps);
            indices.sort_unstable();
            assert_eq!(indices, (0..n_sequences as u64).collect::<Vec<u64>>());
            let other = BatchSchedule::new(vec![3, 2], Seed::new(0), &batching).unwrap();
            resumes(&Arc::new(schedule), &Arc::new(other));
        }
    }

    fn weights(from_epoch: u64, from_step: u64, weights: [u64; 2]) -> MixtureWeights {
        MixtureWeights { from_epoch, from_step, weights: weights.to_vec() }
    }

    fn indices_of(steps: &[ScheduledStep]) -> Vec<u64> {
        let batches = steps.iter().flat_map(|step| step.micro_batches.iter().flatten());
        batches.flat_map(|batch| batch.indices.iter().copied()).collect()
    }

    #[test]
    fn weights_change_at_any_step() {
        let lengths: Vec<u64> = (0..200).map(|n| 10 + n * 7 % 50).collect();
        let schedule = |mixture: &[MixtureWeights]| {
            let batching = Batching::bucketed(256);
            BatchSchedule::mixed(lengths.clone(), &[150, 50], mixture, Seed::new(0), &batching)
        };
        let first = schedule(&[weights(0, 0, [7, 3])]).unwrap();
        let all = first.epoch_steps(Epoch::ZERO, None).unwrap().steps;
        for from_step in [1, 9, all.len() as u64] {
            let done = usize::try_from(from_step).unwrap();
            let phases =
                [weights(0, 0, [7, 3]), weights(0, from_step, [1, 1]), weights(1, 3, [0, 1])];
            let changed = schedule(&phases).unwrap();
            assert_eq!(changed.steps_done(Some(&all[done - 1].state)).unwrap(), from_step);
            let steps = changed.epoch_steps(Epoch::ZERO, None).unwrap().steps;
            let mut indices = indices_of(&steps);
            assert_eq!(indices.len(), lengths.len(), "an epoch keeps its length");
            assert_eq!(&indices_of(&all[..done]), &indices_of(&steps[..done]));
            let rest = indices_of(&steps[done..]);
            let n_second = rest.iter().filter(|&&index| index >= 150).count();
            assert_eq!(n_second, rest.len() / 2, "{from_step}");
            indices.retain(|&index| index < 150);
            let n_first = indices.len();
            indices.sort_unstable();
            indices.dedup();
            assert_eq!(indices.len(), n_first, "no sequence of the larger part is read again");
            let other = schedule(&[weights(0, 0, [1, 9])]).unwrap();
            resumes(&Arc::new(changed), &Arc::new(other));
        }
    }

    fn resumes(schedule: &Arc<BatchSchedule>, other: &Arc<BatchSchedule>) {
        let all: Vec<ScheduledStep> =
            schedule.steps(None).unwrap().take(60).map(Result::unwrap).collect();
        assert!(all[59].epoch > 0);
        for at in [0, 7, 58] {
            let rest = schedule.steps(Some(&all[at].state)).unwrap();
            for (next, expected) in rest.map(Result::unwrap).zip(&all[at + 1..]) {
                assert_eq!(next.epoch, expected.epoch);
                assert_eq!(next.micro_batches, expected.micro_batches);
            }
        }
        // A damaged checkpoint may name the last epoch, which has no successor.
        let last_epoch = Epoch::new(u64::MAX);
        let last = schedule.plan(last_epoch, schedule.order_at(last_epoch, 0).iter());
        let last = last.unwrap().state();
        let mut rest = schedule.steps(Some(&last)).unwrap();
        let end = rest.find_map(Result::err).unwrap().to_string();
        assert!(end.contains("no epoch comes after"), "{end}");
        assert!(rest.next().is_none());
        assert!(other.steps(Some(&all[3].state)).is_err());
    }
}
