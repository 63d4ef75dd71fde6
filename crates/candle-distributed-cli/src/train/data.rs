//! From a corpus to the tensors of a training step: sampler, batcher, collation.

use candle_core::{Device, Tensor};
use candle_distributed::{
    batch::{Batch, BatchConfig, Buckets, DynamicBatchSampler, DynamicBatchStrategy, PaddingReport},
    sampler::{DistributedSampler, SamplerConfig},
    types::{Epoch, Placement, Seed, WorldSize},
};

use crate::{
    error::{Error, Result},
    train::corpus::{Corpus, MAX_SEQUENCE_LENGTH},
};

/// The most padded tokens in a batch, over all devices; with very many devices, one longest sequence for each.
const MAX_TOKENS: u64 = 4096;

/// How many lengths share a batch.
const BUCKET_WIDTH: u64 = 16;

/// What the randomness of a run's order is for; each purpose has a stream of its own.
const SEQUENCE_STREAM: u64 = 0;
const BATCH_STREAM: u64 = 1;

/// The batches of a run, epoch by epoch.
#[derive(Debug)]
pub(crate) struct Schedule {
    order: DistributedSampler,
    batches: DynamicBatchSampler<Vec<u64>>,
    seed: Seed,
    /// What the first epoch is made of.
    first_epoch: PaddingReport,
}

impl Schedule {
    /// Batches of similar length that split evenly over `world_size` devices.
    ///
    /// One process drives all devices, so it reads the order of the whole data set and leaves the split to the mesh.
    pub(crate) fn new(corpus: &Corpus, world_size: WorldSize, seed: Seed) -> Result<Self> {
        let lengths = corpus.lengths();
        let order = shuffled(lengths.len() as u64, seed.derive(SEQUENCE_STREAM))?;
        let config = BatchConfig::default()
            .with_strategy(DynamicBatchStrategy::Bucket(Buckets::Width(BUCKET_WIDTH)))
            .with_max_tokens(MAX_TOKENS.max(world_size.as_u64() * MAX_SEQUENCE_LENGTH as u64))
            .with_batch_size_multiple(world_size.as_u64());
        let batches = DynamicBatchSampler::new(lengths, config)?;
        let mut schedule = Self { order, batches, seed, first_epoch: PaddingReport::default() };
        // Too little text is found out here, before anything is written.
        schedule.first_epoch = schedule.bucketed(0)?.1;
        Ok(schedule)
    }

    /// How the first epoch is batched, with the sequences it leaves out because no batch is full without them.
    pub(crate) fn first_epoch(&self) -> &PaddingReport {
        &self.first_epoch
    }

    /// Batch after batch, each with its epoch, without end but for an error.
    pub(crate) fn batches(mut self) -> impl Iterator<Item = Result<(u64, Batch)>> {
        (0..).flat_map(move |epoch| match self.epoch(epoch) {
            Ok(batches) => batches.into_iter().map(|batch| Ok((epoch, batch))).collect(),
            Err(error) => vec![Err(error)],
        })
    }

    /// The batches of one epoch in random order, so that short ones do not all come at its end.
    fn epoch(&mut self, epoch: u64) -> Result<Vec<Batch>> {
        let (batches, _) = self.bucketed(epoch)?;
        let order = shuffled(batches.len() as u64, self.seed.derive(BATCH_STREAM).derive(epoch))?;
        let mut placed: Vec<(u64, Batch)> = order.iter().zip(batches).collect();
        placed.sort_unstable_by_key(|(place, _)| *place);
        Ok(placed.into_iter().map(|(_, batch)| batch).collect())
    }

    /// The batches of one epoch as the batcher makes them; at least one.
    fn bucketed(&mut self, epoch: u64) -> Result<(Vec<Batch>, PaddingReport)> {
        self.order.set_epoch(Epoch::new(epoch));
        let mut made = self.batches.iter_in(&self.order);
        let batches = made.by_ref().collect::<Result<Vec<_>, _>>()?;
        if batches.is_empty() {
            let (len, world_size) = (self.order.data_set_len(), self.batches.config().batch_size_multiple);
            return Err(Error::Usage(format!("{len} sequences of text are too few for {world_size} devices")));
        }
        Ok((batches, *made.report()))
    }
}

/// Another order of `len` things each epoch.
fn shuffled(len: u64, seed: Seed) -> Result<DistributedSampler> {
    Ok(DistributedSampler::new(len, Placement::SINGLE, SamplerConfig::default().with_seed(seed))?)
}

/// The token ids of a batch and the weights of their predictions.
///
/// # Shapes
///
/// Ids [batch, `padded_length`] u32, padded with 0 on the right; weights [batch, `padded_length` − 1] f32: one over the
/// number of predictions in the batch where there is one, 0 where there is padding. So a sum over all replicas is the
/// mean over the whole batch, however its tokens are spread.
pub(crate) fn collate(batch: &Batch, corpus: &Corpus, device: &Device) -> candle_core::Result<(Tensor, Tensor)> {
    let sequences: Vec<&[u8]> = batch.indices.iter().map(|&index| corpus.sequence(index)).collect();
    let rows = sequences.len();
    let length = sequences.iter().map(|sequence| sequence.len()).max().unwrap_or(0);
    let predictions: usize = sequences.iter().map(|sequence| sequence.len() - 1).sum();
    let weight = 1.0 / predictions as f32;
    let ids: Vec<u32> = sequences.iter().flat_map(|sequence| padded(sequence, length, u32::from, 0)).collect();
    let weights: Vec<f32> =
        sequences.iter().flat_map(|sequence| padded(&sequence[1..], length - 1, |_| weight, 0.0)).collect();
    Ok((Tensor::from_vec(ids, (rows, length), device)?, Tensor::from_vec(weights, (rows, length - 1), device)?))
}

/// `of` each byte, then `padding` up to `length`.
fn padded<T: Clone>(bytes: &[u8], length: usize, of: impl Fn(u8) -> T, padding: T) -> impl Iterator<Item = T> {
    bytes.iter().map(move |&byte| of(byte)).chain(std::iter::repeat(padding)).take(length)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn padding_has_no_weight_and_weights_add_up_to_one() {
        let corpus = Corpus::new(["ab\n\ncdef"]);
        let config = BatchConfig::default().with_max_batch_size(2);
        let sampler = DynamicBatchSampler::new(corpus.lengths(), config).unwrap();
        let batch = sampler.iter_in([1, 0]).next().unwrap().unwrap();
        let (ids, weights) = collate(&batch, &corpus, &Device::Cpu).unwrap();
        assert_eq!(ids.to_vec2::<u32>().unwrap(), [[99, 100, 101, 102], [97, 98, 0, 0]]);
        assert_eq!(weights.to_vec2::<f32>().unwrap(), [[0.25, 0.25, 0.25], [0.25, 0.0, 0.0]]);
    }

    #[test]
    fn every_batch_splits_over_the_devices_and_too_little_text_is_refused() {
        let text = (10..60).map(|length| "x".repeat(length)).collect::<Vec<_>>().join("\n\n");
        let corpus = Corpus::new([text.as_str()]);
        let world_size = WorldSize::new(3).unwrap();
        let mut schedule = Schedule::new(&corpus, world_size, Seed::new(0)).unwrap();
        assert!(schedule.epoch(0).unwrap().iter().all(|batch| batch.len() % 3 == 0));

        let too_little = Schedule::new(&Corpus::new(["one", "two"]), world_size, Seed::new(0));
        assert!(matches!(too_little, Err(Error::Usage(_))));
    }
}
