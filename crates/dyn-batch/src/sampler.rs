//! Batches of a data set whose lengths are known.

use std::ops::Range;

use core_types::WorldSize;

use crate::{
    batch::Sequence,
    batches::Batches,
    config::{BatchConfig, DynamicBatchStrategy, Remainder},
    error::{Error, Result},
    lengths::{SequenceLengths, measure},
    limits::Limits,
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
/// let batches = sampler.iter_in([0, 2, 4, 1, 3]).map(indices).collect::<Result<Vec<_>, _>>()?;
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
    pub fn iter(&self) -> Batches<Measured<'_, L, Range<u64>>> {
        self.iter_in(0..self.lengths.count())
    }

    /// The batches of the sequences that `order` names, in that order; it may repeat some and leave
    /// others out.
    ///
    /// # Errors
    ///
    /// As [`iter`](Self::iter), and [`Error::IndexOutOfRange`] if there is no such sequence.
    pub fn iter_in<O>(&self, order: O) -> Batches<Measured<'_, L, O::IntoIter>>
    where
        O: IntoIterator<Item = u64>,
    {
        Batches::with_limits(
            Measured { lengths: &self.lengths, order: order.into_iter() },
            self.limits.clone(),
        )
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

impl<'a, L: SequenceLengths> IntoIterator for &'a DynamicBatchSampler<L> {
    type Item = <Self::IntoIter as Iterator>::Item;
    type IntoIter = Batches<Measured<'a, L, Range<u64>>>;

    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}

/// An order of indices, each with its length: what a [`DynamicBatchSampler`] feeds into
/// [`Batches`].
#[derive(Clone, Debug)]
#[must_use = "iterators are lazy and do nothing unless consumed"]
pub struct Measured<'a, L, O> {
    lengths: &'a L,
    order: O,
}

impl<L: SequenceLengths, O: Iterator<Item = u64>> Iterator for Measured<'_, L, O> {
    type Item = Result<Sequence>;

    fn next(&mut self) -> Option<Self::Item> {
        let index = self.order.next()?;
        Some(measure(self.lengths, index))
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        self.order.size_hint()
    }
}
