//! From a corpus to the tensors of a training step: sampler, batcher, collation.

use std::{collections::BTreeMap, iter};

use candle_core::{DType, Device, Tensor};
use candle_distributed::{
    batch::{
        Batch, BatchConfig, BatchState, Buckets, Collator, DistributedBatchSampler,
        DistributedConfig, DynamicBatchSampler, DynamicBatchStrategy, PaddingReport, Steps,
    },
    sampler::{DistributedSampler, SamplerConfig},
    types::{Epoch, Placement, Seed, WorldSize},
};

use crate::{
    error::{Error, Result},
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
        let later = (first.state().epoch.as_u64()..=u64::MAX).skip(1);
        let later = later.flat_map(|epoch| match self.epoch(Epoch::new(epoch)) {
            Ok(steps) => scheduled(steps),
            Err(error) => vec![Err(error)],
        });
        let end = iter::once_with(|| Err(Error::usage("no epoch comes after the last of 2^64")));
        Ok(scheduled(first).into_iter().chain(later).chain(end))
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
    let tokens = |index: u64| corpus.sequence(index).iter().map(|&byte| byte.into()).collect();
    let sequences: BTreeMap<u64, Vec<u32>> =
        batch.indices.iter().map(|&index| (index, tokens(index))).collect();
    let padded = Collator::default().pad(batch, |index| &sequences[&index], device)?;
    // What predicts a token is the one before it.
    let weights = padded.mask.narrow(1, 1, padded.mask.dim(1)? - 1)?.to_dtype(DType::F32)?;
    Ok((padded.ids, weights))
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
        // A checkpoint may say anything, and there is nothing after the last epoch.
        let last = schedule.epoch(Epoch::new(u64::MAX)).unwrap().state();
        let mut rest = schedule.batches(Some(&last)).unwrap();
        let end = rest.find_map(Result::err).unwrap().to_string();
        assert!(end.contains("no epoch comes after"), "{end}");
        assert!(rest.next().is_none());
        let other = Schedule::new(&Corpus::new(["abc\n\nde"], 129), Seed::new(0), 128).unwrap();
        assert!(other.batches(Some(&all[3].state)).is_err());
    }
}
