//! From a corpus to the tensors of a training step: sampler, batcher, collation.

use candle_core::{Device, Tensor};
use candle_distributed::{
    batch::{
        Batch, BatchConfig, BatchState, Buckets, DistributedBatchSampler, DistributedConfig,
        DynamicBatchSampler, DynamicBatchStrategy, PaddingReport, Steps,
    },
    sampler::{DistributedSampler, SamplerConfig},
    types::{Epoch, Placement, Seed, WorldSize},
};

use crate::{
    error::Result,
    train::{corpus::Corpus, model::Config, settings::Settings},
};

/// The most padded tokens in a batch, over all devices.
const MAX_TOKENS: u64 = 4096;

/// The number of lengths that share a batch.
pub(crate) const BUCKET_WIDTH: u64 = 16;

/// The streams of random numbers of a run, one for each purpose.
pub(crate) const INIT_STREAM: u64 = 0;
const ORDER_STREAM: u64 = 1;

/// The streams of random numbers of a run's order.
const SEQUENCE_STREAM: u64 = 0;
const BATCH_STREAM: u64 = 1;

/// The most padded tokens in a batch of a run that starts on this many devices: enough for one
/// longest sequence each.
pub(crate) fn max_tokens(world_size: WorldSize, config: Config) -> u64 {
    MAX_TOKENS.max(world_size.as_u64() * config.longest_sequence() as u64)
}

/// The batches of a run, epoch by epoch.
///
/// Every process plans the batches of all devices and leaves it to the mesh to split them. So they
/// do not depend on the number of devices, which may change when a run is resumed.
#[derive(Debug)]
pub(crate) struct Schedule {
    order: DistributedSampler,
    batches: DistributedBatchSampler<Vec<u64>>,
}

/// One batch of all devices.
#[derive(Debug)]
pub(crate) struct Scheduled {
    pub(crate) epoch: u64,
    pub(crate) batch: Batch,
    /// Where to resume after it.
    pub(crate) state: BatchState,
}

impl Schedule {
    /// Batches of similar length, in random order, so that short ones do not all come at the end of
    /// an epoch.
    pub(crate) fn new(corpus: &Corpus, seed: Seed, max_tokens: u64) -> Result<Self> {
        let lengths = corpus.lengths();
        let config = SamplerConfig::default().with_seed(seed.derive(SEQUENCE_STREAM));
        let order = DistributedSampler::new(lengths.len() as u64, Placement::SINGLE, config)?;
        let config = BatchConfig::default()
            .with_strategy(DynamicBatchStrategy::Bucket(Buckets::Width(BUCKET_WIDTH)))
            .with_max_tokens(max_tokens);
        let shuffled = DistributedConfig::default().with_shuffle(seed.derive(BATCH_STREAM));
        let batches = DynamicBatchSampler::new(lengths, config)?;
        Ok(Self {
            order,
            batches: DistributedBatchSampler::new(batches, Placement::SINGLE, shuffled)?,
        })
    }

    /// The schedule of a run.
    pub(crate) fn of(settings: &Settings, corpus: &Corpus) -> Result<Self> {
        Self::new(corpus, Seed::new(settings.seed).derive(ORDER_STREAM), settings.max_tokens)
    }

    /// The batches of the first epoch, and how much of them is padding.
    pub(crate) fn first_epoch(&self) -> Result<(PaddingReport, Vec<Batch>)> {
        let steps = self.epoch(Epoch::ZERO)?;
        Ok((steps.report(), steps.map(|step| step.batch).collect()))
    }

    /// Endless batches, from `state` or from the first epoch on. An error is the last item.
    ///
    /// # Errors
    ///
    /// If the state is not one of these batches: the text has changed.
    pub(crate) fn batches(
        &self,
        state: Option<&BatchState>,
    ) -> Result<impl Iterator<Item = Result<Scheduled>>> {
        let first = match state {
            None => self.epoch(Epoch::ZERO)?,
            Some(state) => self.batches.resume(state, &self.order_in(state.epoch))?,
        };
        let next = first.state().epoch.as_u64() + 1..;
        let later = next.flat_map(|epoch| match self.epoch(Epoch::new(epoch)) {
            Ok(steps) => scheduled(steps),
            Err(error) => vec![Err(error)],
        });
        Ok(scheduled(first).into_iter().chain(later))
    }

    fn epoch(&self, epoch: Epoch) -> Result<Steps<'_, Vec<u64>>> {
        Ok(self.batches.epoch(epoch, &self.order_in(epoch))?)
    }

    fn order_in(&self, epoch: Epoch) -> DistributedSampler {
        let mut order = self.order.clone();
        order.set_epoch(epoch);
        order
    }
}

/// The rest of an epoch.
fn scheduled(mut steps: Steps<'_, Vec<u64>>) -> Vec<Result<Scheduled>> {
    let mut scheduled = Vec::with_capacity(steps.len());
    while let Some(step) = steps.next() {
        let state = steps.state();
        scheduled.push(Ok(Scheduled { epoch: state.epoch.as_u64(), batch: step.batch, state }));
    }
    scheduled
}

/// The token ids of a batch and the weights of their predictions.
///
/// # Shapes
///
/// Ids [batch, `padded_length`] u32, padded with 0 on the right; weights
/// [batch, `padded_length` − 1] f32: 1 where there is a prediction, 0 where there is padding.
pub(crate) fn collate(
    batch: &Batch,
    corpus: &Corpus,
    device: &Device,
) -> candle_core::Result<(Tensor, Tensor)> {
    let sequences: Vec<&[u8]> = batch.indices.iter().map(|&index| corpus.sequence(index)).collect();
    let rows = sequences.len();
    let length = sequences.iter().map(|sequence| sequence.len()).fold(0, usize::max);
    let ids: Vec<u32> =
        sequences.iter().flat_map(|sequence| padded(sequence, length, u32::from, 0)).collect();
    let weights: Vec<f32> = sequences
        .iter()
        .flat_map(|sequence| padded(&sequence[1..], length - 1, |_| 1.0, 0.0))
        .collect();
    Ok((
        Tensor::from_vec(ids, (rows, length), device)?,
        Tensor::from_vec(weights, (rows, length - 1), device)?,
    ))
}

/// `of` each byte, then `padding` up to `length`.
fn padded<T: Clone>(
    bytes: &[u8],
    length: usize,
    of: impl Fn(u8) -> T,
    padding: T,
) -> impl Iterator<Item = T> {
    bytes.iter().map(move |&byte| of(byte)).chain(std::iter::repeat(padding)).take(length)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn padding_has_no_weight() {
        let corpus = Corpus::new(["ab\n\ncdef"], 129);
        let config = BatchConfig::default().with_max_batch_size(2);
        let sampler = DynamicBatchSampler::new(corpus.lengths(), config).unwrap();
        let batch = sampler.iter_in([1, 0]).next().unwrap().unwrap();
        let (ids, weights) = collate(&batch, &corpus, &Device::Cpu).unwrap();
        assert_eq!(ids.to_vec2::<u32>().unwrap(), [[99, 100, 101, 102], [97, 98, 0, 0]]);
        assert_eq!(weights.to_vec2::<f32>().unwrap(), [[1.0, 1.0, 1.0], [1.0, 0.0, 0.0]]);
    }

    #[test]
    fn a_schedule_resumes_where_it_was() {
        let text = (10..60).map(|length| "x".repeat(length)).collect::<Vec<_>>().join("\n\n");
        let schedule =
            Schedule::new(&Corpus::new([text.as_str()], 129), Seed::new(0), 128).unwrap();
        let all: Vec<Scheduled> =
            schedule.batches(None).unwrap().take(60).map(Result::unwrap).collect();
        assert!(all[59].epoch > 0);
        for at in [0, 7, 58] {
            let rest = schedule.batches(Some(&all[at].state)).unwrap();
            for (next, expected) in rest.map(Result::unwrap).zip(&all[at + 1..]) {
                assert_eq!((next.epoch, next.batch), (expected.epoch, expected.batch.clone()));
            }
        }
        let other = Schedule::new(&Corpus::new(["abc\n\nde"], 129), Seed::new(0), 128).unwrap();
        assert!(other.batches(Some(&all[3].state)).is_err());
    }
}
