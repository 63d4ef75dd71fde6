//! Batches of a data set whose lengths are known.

use std::ops::Range;

use core_types::WorldSize;

use crate::{
    batch::Sequence,
    batches::Batches,
    config::{BatchConfig, DynamicBatchStrategy, Remainder},
    error::{Error, Result},
    lengths::SequenceLengths,
    limits::Limits,
    plan::{self, BatchPlan},
    report::PaddingReport,
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

    /// All batches of the data set at once, each at hand in constant time.
    ///
    /// # Errors
    ///
    /// As [`iter`](Self::iter), and [`Error::TooManySequences`] from 2^32 sequences on.
    pub fn plan(&self) -> Result<BatchPlan<'_, L>> {
        match self.lengths.count() {
            count if count > plan::LIMIT => {
                Err(Error::TooManySequences { count, limit: plan::LIMIT })
            }
            _ => BatchPlan::new(self, None, &[]),
        }
    }

    /// All batches of the sequences that `order` names, in that order, at once.
    ///
    /// # Errors
    ///
    /// As [`iter_in`](Self::iter_in), and [`Error::TooManySequences`] for an index, or for a number
    /// of them, from 2^32 on.
    pub fn plan_in(&self, order: impl IntoIterator<Item = u64>) -> Result<BatchPlan<'_, L>> {
        self.plan_again(order, &[])
    }

    /// As [`plan_in`](Self::plan_in), where it is known how sorted sequences are cut.
    pub(crate) fn plan_again(
        &self,
        order: impl IntoIterator<Item = u64>,
        cut: &[(u32, u32)],
    ) -> Result<BatchPlan<'_, L>> {
        let (order, count) = (order.into_iter(), self.lengths.count());
        let mut indices =
            Vec::with_capacity(order.size_hint().0.min(usize::try_from(count).unwrap_or(0)));
        for index in order {
            indices.push(match u32::try_from(index) {
                _ if index >= count => return Err(Error::IndexOutOfRange { index, count }),
                Ok(index) => index,
                Err(_) => return Err(Error::TooManySequences { count, limit: plan::LIMIT }),
            });
        }
        BatchPlan::new(self, Some(indices), cut)
    }

    /// Batches for all ranks together: limits and multiple are so many times as large.
    pub(crate) fn of_all_ranks(self, world_size: WorldSize) -> Result<Self> {
        let config = self.config().clone();
        if matches!(
            config.strategy,
            DynamicBatchStrategy::Bucket(_) | DynamicBatchStrategy::Pack(_)
        ) {
            return Err(Error::CannotDeal);
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

    /// An admitted sequence as it counts.
    pub(crate) fn sequence(&self, index: u32) -> Sequence {
        self.limits.counted(self.measure(index))
    }

    fn measure(&self, index: u32) -> Sequence {
        Sequence { index: index.into(), length: self.lengths.length(index.into()).unwrap_or(0) }
    }

    /// The sequences of an order that are not skipped, `None` for all of them.
    pub(crate) fn admit_all(
        &self,
        order: Option<Vec<u32>>,
        report: &mut PaddingReport,
    ) -> Result<Option<Vec<u32>>> {
        // If the longest is admitted as it is, then all are.
        let longest = match &order {
            Some(order) => {
                order.iter().filter_map(|&index| self.lengths.length(index.into())).max()
            }
            None => (0..self.lengths.count()).filter_map(|index| self.lengths.length(index)).max(),
        };
        let is_short =
            |&length: &u64| self.config().max_sequence_length.is_none_or(|max| length <= max);
        if let Some(length) = longest.filter(is_short) {
            if self.limits.admit(Sequence { index: 0, length }, report).is_ok() {
                return Ok(order);
            }
        }
        let admit = |index: u32| {
            self.limits
                .admit(self.measure(index), report)
                .map(|admitted| admitted.map(|_| index))
                .transpose()
        };
        match order {
            Some(order) => order.into_iter().filter_map(admit).collect::<Result<_>>().map(Some),
            None => plan::indices(&self.lengths).filter_map(admit).collect::<Result<_>>().map(Some),
        }
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
        let length = self.lengths.length(index);
        let count = self.lengths.count();
        Some(
            length
                .map(|length| Sequence { index, length })
                .ok_or(Error::IndexOutOfRange { index, count }),
        )
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        self.order.size_hint()
    }
}
