//! Batches of a data set whose lengths are known.

pub(crate) mod batches;
pub(crate) mod plan;
pub(crate) mod shuffle;

use core_types::WorldSize;

use crate::{
    batch::Sequence,
    config::{BatchConfig, DynamicBatchStrategy, Remainder},
    error::{Error, Result},
    lengths::{SequenceLengths, measure},
    limits::Limits,
    sampler::batches::Batches,
};

/// Batches of a data set, in its own order or in any other.
///
/// The lengths are looked up one by one as the batches are made; the sequences themselves are never
/// read.
///
/// # Determinism
///
/// The batches depend on lengths, order and configuration alone: ranks that agree on these agree on
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
/// // As the data set has them, or in the order that a sampler gives to this rank.
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
    limits: Limits,
}

impl<L: SequenceLengths> DynamicBatchSampler<L> {
    /// Returns a sampler of batches over sequences of these lengths.
    ///
    /// # Errors
    ///
    /// [`Error::Zero`], [`Error::NoLimit`], [`Error::NoTokenBudget`],
    /// [`Error::TokenBudgetOverflow`] or [`Error::MultipleOverLimit`] if the configuration
    /// contradicts itself.
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
        Limits::new(config).map(|limits| Self { lengths, limits })
    }

    /// The lengths it was made over.
    pub fn lengths(&self) -> &L {
        &self.lengths
    }

    /// The configuration it was made with.
    pub fn config(&self) -> &BatchConfig {
        self.limits.config()
    }

    /// The batches in the order of the data set.
    ///
    /// # Errors
    ///
    /// The last item is [`Error::SequenceTooLong`] or [`Error::SequenceOverBudget`] if a sequence
    /// fits no batch.
    #[expect(clippy::iter_without_into_iter, reason = "the type of its sequences has no name")]
    pub fn iter(&self) -> Batches<impl Iterator<Item = Result<Sequence>>> {
        self.iter_order(0..self.lengths.count())
    }

    /// Returns the batches of the sequences that `order` names, in that order; it may repeat some and leave others
    /// out.
    ///
    /// # Errors
    ///
    /// As [`iter`](Self::iter), and [`Error::IndexOutOfRange`] if there is no such sequence.
    pub fn iter_order(
        &self,
        order: impl IntoIterator<Item = u64>,
    ) -> Batches<impl Iterator<Item = Result<Sequence>>> {
        let sequences = order.into_iter().map(|index| self.measure(index));
        Batches::with_limits(sequences, self.limits.clone())
    }

    /// Batches for all ranks together: limits and multiple are multiplied by their number.
    pub(crate) fn of_all_ranks(self, world_size: WorldSize) -> Result<Self> {
        let config = self.config().clone();
        match config.strategy {
            DynamicBatchStrategy::Bucket(_) | DynamicBatchStrategy::Pack(_) => {
                return Err(Error::CannotDeal);
            }
            DynamicBatchStrategy::PadToMax
            | DynamicBatchStrategy::Dynamic
            | DynamicBatchStrategy::Sorted { .. } => {}
        }
        let times = |limit: u64| limit.saturating_mul(world_size.as_u64());
        let limits = Limits::new(BatchConfig {
            max_batch_size: config.max_batch_size.map(times),
            max_tokens: config.max_tokens.map(times),
            max_cost: config.max_cost.map(times),
            batch_size_multiple: times(config.batch_size_multiple),
            // Alone the world size need not divide the last step.
            remainder: if config.batch_size_multiple == 1 {
                Remainder::Keep
            } else {
                config.remainder
            },
            ..config
        })?;
        Ok(Self { limits, ..self })
    }

    pub(crate) fn limits(&self) -> &Limits {
        &self.limits
    }

    /// A sequence with its whole length.
    pub(crate) fn measure(&self, index: u64) -> Result<Sequence> {
        measure(&self.lengths, index)
    }
}
