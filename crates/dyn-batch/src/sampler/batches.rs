//! The batcher, which turns a stream of sequences into batches in one pass.

use std::{collections::VecDeque, iter::FusedIterator};

use core_types::Seed;

use crate::{
    batch::{Batch, Sequence},
    builder::BatchBuilder,
    config::BatchConfig,
    error::{Error, Result},
    limits::BatchLimits,
    report::PaddingReport,
    sampler::shuffle::shuffle,
};

/// An iterator of batches over an iterator of sequences.
///
/// The iterator reads no more sequences than the next batch needs, so streams may be endless. It
/// holds only the open batches: one batch, one per bucket or open row, or a window. Two strategies
/// read all sequences before the first batch: [`Sorted`](crate::DynamicBatchStrategy::Sorted)
/// without a window, and [`Pack`](crate::DynamicBatchStrategy::Pack) except in order.
///
/// The stream may return its own errors. The first error, of the stream or of a batch, ends the
/// iteration and discards the sequences of open batches.
///
/// # Determinism
///
/// The batches depend only on the sequences, their order and the configuration.
///
/// # Examples
///
/// ```
/// use dyn_batch::{BatchConfig, Batches, DynamicBatchStrategy, Error, Sequence};
///
/// let endless = (0..).map(|index| Ok::<_, Error>(Sequence { index, length: index % 100 }));
/// let config =
///     BatchConfig::default().with_strategy(DynamicBatchStrategy::Dynamic).with_max_tokens(400);
/// let mut batches = Batches::new(endless, config)?;
///
/// let sizes = batches
///     .by_ref()
///     .take(4)
///     .map(|batch| Ok(batch?.len()))
///     .collect::<Result<Vec<_>, Error>>()?;
/// assert_eq!(sizes, [20, 12, 9, 8]);
/// assert_eq!(batches.report().sequences, 49);
/// # Ok::<(), Error>(())
/// ```
#[derive(Clone, Debug)]
#[must_use = "iterators are lazy and do nothing unless consumed"]
pub struct Batches<I> {
    /// `None` after the end or the first error.
    sequences: Option<I>,
    limits: BatchLimits,
    builder: BatchBuilder,
    /// Completed batches.
    ready: VecDeque<Batch>,
    /// Seed for batches that complete together.
    shuffle: Option<Seed>,
    report: PaddingReport,
}

impl<I: Iterator> Batches<I> {
    /// Creates an iterator of the batches of a stream.
    ///
    /// # Errors
    ///
    /// [`Error::Zero`], [`Error::NoLimit`], [`Error::NoTokenBudget`] or [`Error::InvalidConfig`] if
    /// settings contradict each other.
    pub fn new(sequences: impl IntoIterator<IntoIter = I>, config: BatchConfig) -> Result<Self> {
        BatchLimits::new(config).map(|limits| Self::with_limits(sequences.into_iter(), limits))
    }

    pub(crate) fn with_limits(sequences: I, limits: BatchLimits) -> Self {
        Self {
            sequences: Some(sequences),
            builder: BatchBuilder::new(&limits),
            limits,
            ready: VecDeque::new(),
            shuffle: None,
            report: PaddingReport::default(),
        }
    }

    /// Shuffles batches that complete together, reproducibly for a seed: the batches of a window,
    /// of a whole sorted or packed set, or of the buckets at the end.
    ///
    /// # Examples
    ///
    /// ```
    /// use core_types::Seed;
    /// use dyn_batch::{BatchConfig, Cut, DynamicBatchSampler, DynamicBatchStrategy};
    ///
    /// let sorted = DynamicBatchStrategy::Sorted { window: None, cut: Cut::Greedy };
    /// let config = BatchConfig::default().with_strategy(sorted).with_max_batch_size(2);
    /// let sampler = DynamicBatchSampler::new([5_u32, 9, 2, 6, 4, 8], config)?;
    /// let batches = sampler.iter().shuffled(Seed::new(1)).map(|batch| Ok(batch?.indices));
    /// assert_eq!(
    ///     batches.collect::<Result<Vec<_>, dyn_batch::Error>>()?,
    ///     [vec![2, 4], vec![5, 1], vec![0, 3]]
    /// );
    /// # Ok::<(), dyn_batch::Error>(())
    /// ```
    pub fn shuffled(self, seed: Seed) -> Self {
        Self { shuffle: Some(seed), ..self }
    }

    /// Reports the batches so far, and the sequences in no batch.
    pub fn report(&self) -> &PaddingReport {
        &self.report
    }

    fn add(&mut self, sequence: Sequence) -> Result<()> {
        let admission = self.limits.admit(sequence)?;
        if let Some(sequence) = self.report.count(admission) {
            self.builder.push(sequence, &self.limits, &mut self.ready);
        }
        Ok(())
    }

    fn finish(&mut self) -> Result<()> {
        self.sequences = None;
        self.report.dropped += self.builder.finish(&self.limits, &mut self.ready)?;
        Ok(())
    }

    fn shuffle_ready(&mut self) {
        if self.ready.len() < 2 {
            return;
        }
        if let Some(seed) = &mut self.shuffle {
            shuffle(self.ready.make_contiguous(), *seed);
            // A shuffle never derives this number, so no two shuffles share a draw.
            *seed = seed.derive(u64::MAX);
        }
    }

    /// Discards all pending sequences and batches.
    fn abandon(&mut self) {
        self.sequences = None;
        self.builder = BatchBuilder::new(&self.limits);
        self.ready.clear();
    }
}

impl<I, E> Batches<I>
where
    I: Iterator<Item = Result<Sequence, E>>,
    E: From<Error>,
{
    /// Adds the next sequence, or makes the last batches if there is no next sequence. Returns
    /// `None` after the last batches.
    fn advance(&mut self) -> Option<Result<(), E>> {
        Some(match self.sequences.as_mut()?.next() {
            Some(sequence) => sequence.and_then(|sequence| Ok(self.add(sequence)?)),
            None => self.finish().map_err(E::from),
        })
    }
}

impl<I, E> Iterator for Batches<I>
where
    I: Iterator<Item = Result<Sequence, E>>,
    E: From<Error>,
{
    type Item = Result<Batch, E>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            if let Some(batch) = self.ready.pop_front() {
                self.report.add(&batch);
                return Some(Ok(batch));
            }
            if let Err(error) = self.advance()? {
                self.abandon();
                return Some(Err(error));
            }
            self.shuffle_ready();
        }
    }
}

impl<I, E> FusedIterator for Batches<I>
where
    I: Iterator<Item = Result<Sequence, E>>,
    E: From<Error>,
{
}
