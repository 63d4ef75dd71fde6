//! Batches of a data set with known lengths.

pub(crate) mod batches;
pub(crate) mod plan;
pub(crate) mod shuffle;

use std::sync::Arc;

use core_types::WorldSize;

use crate::{
    batch::Sequence,
    config::{BatchConfig, DynamicBatchStrategy, Remainder},
    error::{Error, Result},
    lengths::{SequenceLengths, measure},
    limits::BatchLimits,
    sampler::batches::Batches,
};

/// A sampler of the batches of a data set, in the order of the data set or in another order.
///
/// The sampler looks up lengths one by one as batches are made, and never reads a sequence.
///
/// # Determinism
///
/// The batches depend only on lengths, order and configuration: ranks that agree on these agree on
/// every batch.
///
/// # Examples
///
/// ```
/// use dyn_batch::{BatchConfig, DynamicBatchSampler, DynamicBatchStrategy};
///
/// let lengths = [12_u32, 80, 15, 70, 9];
/// let config =
///     BatchConfig::default().with_strategy(DynamicBatchStrategy::Dynamic).with_max_tokens(100);
/// let sampler = DynamicBatchSampler::new(&lengths, config)?;
///
/// // In the order of the data set, or in the order of a sampler for this rank.
/// let indices = |batch: Result<dyn_batch::Batch, _>| batch.map(|batch| batch.indices);
/// let batches = sampler.iter().map(indices).collect::<Result<Vec<_>, _>>()?;
/// assert_eq!(batches, [vec![0], vec![1], vec![2], vec![3], vec![4]]);
/// let batches = sampler.iter_order([0, 2, 4, 1, 3]).map(indices).collect::<Result<Vec<_>, _>>()?;
/// assert_eq!(batches, [vec![0, 2, 4], vec![1], vec![3]]);
/// # Ok::<(), dyn_batch::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct DynamicBatchSampler<L> {
    lengths: L,
    limits: BatchLimits,
}

impl<L: SequenceLengths> DynamicBatchSampler<L> {
    /// Creates a sampler for sequences of these lengths.
    ///
    /// # Errors
    ///
    /// [`Error::Zero`], [`Error::NoLimit`], [`Error::NoTokenBudget`] or [`Error::InvalidConfig`] if
    /// settings contradict each other.
    ///
    /// # Examples
    ///
    /// ```
    /// use dyn_batch::{BatchConfig, DynamicBatchSampler};
    ///
    /// let config = BatchConfig::default().with_max_batch_size(4).with_batch_size_multiple(8);
    /// let error = DynamicBatchSampler::new([3_u32, 5], config).unwrap_err();
    /// assert_eq!(error.to_string(), "batch_size_multiple 8 is above max_batch_size 4");
    /// ```
    pub fn new(lengths: L, config: BatchConfig) -> Result<Self> {
        BatchLimits::new(config).map(|limits| Self { lengths, limits })
    }

    /// Returns the lengths.
    #[doc(hidden)]
    pub fn lengths(&self) -> &L {
        &self.lengths
    }

    /// Returns the configuration.
    #[doc(hidden)]
    pub fn config(&self) -> &BatchConfig {
        self.limits.config()
    }

    /// Returns the batches in the order of the data set.
    ///
    /// # Errors
    ///
    /// The last item is [`Error::SequenceTooLong`] or [`Error::SequenceOverBudget`] if a sequence
    /// fits no batch.
    #[expect(clippy::iter_without_into_iter, reason = "the iterator type cannot be named")]
    pub fn iter(&self) -> Batches<impl Iterator<Item = Result<Sequence>>> {
        self.iter_order(0..self.lengths.count())
    }

    /// Returns the batches of the sequences in `order`, which may repeat or omit sequences.
    ///
    /// # Errors
    ///
    /// The errors of [`iter`](Self::iter), and [`Error::IndexOutOfRange`] for an unknown sequence.
    pub fn iter_order(
        &self,
        order: impl IntoIterator<Item = u64>,
    ) -> Batches<impl Iterator<Item = Result<Sequence>>> {
        let sequences = order.into_iter().map(|index| self.measure(index));
        Batches::with_limits(sequences, self.limits.clone())
    }

    /// Multiplies the limits and the batch size multiple by the world size, for batches of all
    /// ranks together.
    pub(crate) fn for_all_ranks(self, world_size: WorldSize) -> Result<Self> {
        let config = self.config().clone();
        match config.strategy {
            DynamicBatchStrategy::Bucket(_) | DynamicBatchStrategy::Pack(_) => {
                let other = "dealt steps: use grouped steps";
                return Err(Error::conflict("buckets or packed rows", other));
            }
            DynamicBatchStrategy::PadToMax
            | DynamicBatchStrategy::Dynamic
            | DynamicBatchStrategy::Sorted { .. } => {}
        }
        let scale = |limit: u64| limit.saturating_mul(world_size.as_u64());
        let limits = BatchLimits::new(BatchConfig {
            max_batch_size: config.max_batch_size.map(scale),
            max_tokens: config.max_tokens.map(scale),
            max_cost: config.max_cost.map(scale),
            batch_size_multiple: scale(config.batch_size_multiple),
            // Without a multiple, the world size need not divide the last step.
            remainder: if config.batch_size_multiple == 1 {
                Remainder::Keep
            } else {
                config.remainder
            },
            ..config
        })?;
        Ok(Self { limits, ..self })
    }

    /// Moves the lengths behind a counted reference, so that clones share them.
    pub(crate) fn into_shared(self) -> DynamicBatchSampler<Arc<L>> {
        DynamicBatchSampler { lengths: Arc::new(self.lengths), limits: self.limits }
    }

    pub(crate) fn limits(&self) -> &BatchLimits {
        &self.limits
    }

    /// Returns a sequence with its length.
    pub(crate) fn measure(&self, index: u64) -> Result<Sequence> {
        measure(&self.lengths, index)
    }
}
