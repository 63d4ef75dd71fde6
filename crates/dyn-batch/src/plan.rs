//! All batches of an epoch at once, in few bytes.

#![expect(
    clippy::cast_possible_truncation,
    reason = "at most 2^32 sequences are arranged together, and tables are as long"
)]

use std::{iter::repeat_n, ops::Range};

use core_types::Seed;

use crate::{
    assembly::{
        Assembly,
        whole_set::{Arrangement, Planned, Whole},
    },
    batch::{Batch, Sequence},
    batches::Batches,
    error::{Error, Result},
    lengths::SequenceLengths,
    limits::{Admission, Limits},
    report::PaddingReport,
    sampler::DynamicBatchSampler,
    shuffle::shuffle,
    sort::histogram::Histogram,
};

/// The batches of an epoch, each of them at hand in constant time; made by
/// [`DynamicBatchSampler::plan`].
///
/// A plan holds 4 bytes for each sequence and 24 for each batch. While it is made, it takes 8 more
/// for each sequence, and 4 for those of an order that is not the data set's own.
///
/// # Determinism
///
/// The same batches in the same order as those of [`DynamicBatchSampler::iter`], until it is
/// [shuffled](Self::shuffled).
///
/// # Examples
///
/// ```
/// use dyn_batch::{BatchConfig, Cut, DynamicBatchSampler, DynamicBatchStrategy};
///
/// let sorted = DynamicBatchStrategy::Sorted { window: None, cut: Cut::Optimal };
/// let config = BatchConfig::default().with_strategy(sorted).with_max_tokens(16);
/// let sampler = DynamicBatchSampler::new([5_u32, 9, 2, 6, 4, 8], config)?;
///
/// let plan = sampler.plan()?;
/// assert_eq!((plan.len(), plan.report().efficiency()), (3, 34.0 / 40.0));
/// assert_eq!(plan.get(1).map(|batch| batch.indices), Some(vec![3, 5]));
/// # Ok::<(), dyn_batch::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct BatchPlan<'a, L> {
    sampler: &'a DynamicBatchSampler<L>,
    /// The sequences of all batches.
    indices: Vec<u32>,
    /// Where in there each batch is.
    batches: Vec<Planned>,
    /// What was skipped, truncated and dropped; the batches are counted when somebody asks.
    without_batches: PaddingReport,
}

impl<L: SequenceLengths> DynamicBatchSampler<L> {
    /// All batches of the data set at once, each at hand in constant time.
    ///
    /// # Errors
    ///
    /// As [`iter`](Self::iter), and [`Error::TooManySequences`] from 2^32 sequences on.
    pub fn plan(&self) -> Result<BatchPlan<'_, L>> {
        let count = self.lengths().count();
        if count > LIMIT {
            return Err(Error::TooManySequences { count, limit: LIMIT });
        }
        BatchPlan::new(self, None, &[])
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
        let count = self.lengths().count();
        let order = order.into_iter();
        // What an iterator says of itself may be anything, so it is believed within bounds.
        let hint = (order.size_hint().0 as u64).min(count).min(LIMIT);
        let mut indices = Vec::with_capacity(hint as usize);
        for index in order {
            if index >= count {
                return Err(Error::IndexOutOfRange { index, count });
            }
            let too_many = |_| Error::TooManySequences { count, limit: LIMIT };
            indices.push(u32::try_from(index).map_err(too_many)?);
        }
        BatchPlan::new(self, Some(indices), cut)
    }

    /// The sequences of an order that are not skipped; `None` stands for all in their own order.
    fn admit_all(
        &self,
        order: Option<Vec<u32>>,
        report: &mut PaddingReport,
    ) -> Result<Option<Vec<u32>>> {
        let longest = match &order {
            Some(order) => self.longest(order.iter().copied())?,
            None => self.longest(self.all_indices())?,
        };
        // If the longest is admitted as it is, then all are.
        if let Ok(Admission::Whole(_)) = self.limits().admit(longest) {
            return Ok(order);
        }
        let admitted = match order {
            Some(order) => self.admit_each(order.into_iter(), report)?,
            None => self.admit_each(self.all_indices(), report)?,
        };
        Ok(Some(admitted))
    }

    fn longest(&self, mut indices: impl Iterator<Item = u32>) -> Result<Sequence> {
        let first = Sequence { index: 0, length: 0 };
        indices.try_fold(first, |longest, index| {
            let sequence = self.measure(index.into())?;
            Ok(if sequence.length > longest.length { sequence } else { longest })
        })
    }

    fn admit_each(
        &self,
        indices: impl Iterator<Item = u32>,
        report: &mut PaddingReport,
    ) -> Result<Vec<u32>> {
        let mut admitted = Vec::new();
        for index in indices {
            let admission = self.limits().admit(self.measure(index.into())?)?;
            if report.count(admission).is_some() {
                admitted.push(index);
            }
        }
        Ok(admitted)
    }

    #[expect(clippy::expect_used, reason = "`plan` refuses larger data sets")]
    fn all_indices(&self) -> Range<u32> {
        0..u32::try_from(self.lengths().count()).expect("there are fewer than 2^32 sequences")
    }

    /// An admitted sequence as it counts.
    #[expect(clippy::expect_used, reason = "lengths must give the same answer each time")]
    fn admitted(&self, index: u32) -> Sequence {
        let sequence = self.measure(index.into());
        self.limits().counted(sequence.expect("a sequence that was admitted has a length"))
    }
}

impl<'a, L: SequenceLengths> BatchPlan<'a, L> {
    /// Plans the batches of the sequences in this order, or of all if there is none; `cut` is what
    /// [`cut`](Self::cut) said of the same ones, or nothing.
    pub(crate) fn new(
        sampler: &'a DynamicBatchSampler<L>,
        order: Option<Vec<u32>>,
        cut: &[(u32, u32)],
    ) -> Result<Self> {
        match Assembly::whole(sampler.limits()) {
            Some(whole) => Self::of_whole_set(sampler, order, whole, cut),
            None => Self::of_stream(sampler, order),
        }
    }

    fn of_stream(sampler: &'a DynamicBatchSampler<L>, order: Option<Vec<u32>>) -> Result<Self> {
        match order {
            Some(order) => {
                Self::collect(sampler, sampler.iter_in(order.into_iter().map(u64::from)))
            }
            None => Self::collect(sampler, sampler.iter()),
        }
    }

    fn collect<I>(sampler: &'a DynamicBatchSampler<L>, mut stream: Batches<I>) -> Result<Self>
    where
        I: Iterator<Item = Result<Sequence>>,
    {
        let mut indices = Vec::new();
        let mut batches = Vec::new();
        for batch in stream.by_ref() {
            let batch = batch?;
            let start = indices.len() as u32;
            indices.extend(batch.indices.iter().map(|&index| index as u32));
            let count = indices.len() as u64;
            if count > LIMIT {
                return Err(Error::TooManySequences { count, limit: LIMIT });
            }
            let Batch { padded_length, real_tokens, .. } = batch;
            batches.push(Planned { places: start..count as u32, padded_length, real_tokens });
        }
        let without_batches = stream.report().without_batches();
        Ok(Self { sampler, indices, batches, without_batches })
    }

    fn of_whole_set(
        sampler: &'a DynamicBatchSampler<L>,
        order: Option<Vec<u32>>,
        whole: Whole,
        cut: &[(u32, u32)],
    ) -> Result<Self> {
        let mut without_batches = PaddingReport::default();
        let sequence = |index: u32| (index, sampler.admitted(index).length);
        let limits = sampler.limits();
        let arrangement = match sampler.admit_all(order, &mut without_batches)? {
            Some(order) => {
                let sequences = || order.iter().map(|&index| sequence(index));
                arrange(whole, limits, cut, sequences)?
            }
            None => arrange(whole, limits, cut, || sampler.all_indices().map(sequence))?,
        };
        without_batches.dropped = arrangement.dropped;
        let Arrangement { ids: indices, batches, .. } = arrangement;
        Ok(Self { sampler, indices, batches, without_batches })
    }

    /// Where sorted sequences are cut, as a list of batch sizes and how often each comes in a row,
    /// from the shortest sequences on; nothing for other strategies.
    pub(crate) fn cut(&self) -> Vec<(u32, u32)> {
        let mut cut: Vec<(u32, u32)> = Vec::new();
        if !matches!(Assembly::whole(self.limits()), Some(Whole::Sorted(_))) {
            return cut;
        }
        for batch in &self.batches {
            let size = batch.places.end - batch.places.start;
            match cut.last_mut() {
                Some((last, times)) if *last == size => *times += 1,
                Some(_) | None => cut.push((size, 1)),
            }
        }
        cut
    }

    /// The number of batches.
    pub fn len(&self) -> usize {
        self.batches.len()
    }

    /// Whether there is no batch.
    pub fn is_empty(&self) -> bool {
        self.batches.is_empty()
    }

    /// Batch number `nth`, from 0; `None` if there are fewer.
    pub fn get(&self, nth: usize) -> Option<Batch> {
        (nth < self.len()).then(|| self.batch(nth))
    }

    /// All batches in order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = Batch> + '_ {
        (0..self.len()).map(|nth| self.batch(nth))
    }

    /// The batches in a random order, the same for the same seed.
    #[must_use]
    pub fn shuffled(mut self, seed: Seed) -> Self {
        shuffle(&mut self.batches, seed);
        self
    }

    /// What the batches cost, and how many sequences made it into none.
    pub fn report(&self) -> PaddingReport {
        let mut report = self.without_batches;
        for batch in &self.batches {
            report.add_totals(batch.len() as u64, self.padded_tokens(batch), batch.real_tokens);
        }
        report
    }

    /// The tokens of one of the batches, padding included.
    pub(crate) fn padded_tokens(&self, batch: &Planned) -> u64 {
        self.limits().rows(batch.len()) * batch.padded_length
    }

    pub(crate) fn limits(&self) -> &Limits {
        self.sampler.limits()
    }

    /// Batch `nth`, which must be there.
    pub(crate) fn batch(&self, nth: usize) -> Batch {
        self.limits().batch(self.sequences(nth))
    }

    /// The sequences of batch `nth`, which must be there.
    pub(crate) fn sequences(
        &self,
        nth: usize,
    ) -> impl ExactSizeIterator<Item = Sequence> + DoubleEndedIterator + '_ {
        self.measured(self.indices(nth))
    }

    fn measured<'b>(
        &'b self,
        indices: &'b [u32],
    ) -> impl ExactSizeIterator<Item = Sequence> + DoubleEndedIterator + 'b {
        indices.iter().map(|&index| self.sampler.admitted(index))
    }

    /// The report before any batch: what was skipped, truncated and dropped.
    pub(crate) fn without_batches(&self) -> PaddingReport {
        self.without_batches
    }

    /// The number of every batch.
    #[expect(clippy::expect_used, reason = "a plan has fewer than 2^32 sequences")]
    pub(crate) fn numbers(&self) -> Range<u32> {
        0..u32::try_from(self.len()).expect("no batch is empty")
    }

    /// The indices of batch `nth`, which must be there.
    pub(crate) fn indices(&self, nth: usize) -> &[u32] {
        let Range { start, end } = self.batches[nth].places;
        &self.indices[start as usize..end as usize]
    }

    /// What is known of batch `nth`, which must be there.
    pub(crate) fn planned(&self, nth: usize) -> &Planned {
        &self.batches[nth]
    }

    /// Leaves out a batch.
    pub(crate) fn remove(&mut self, nth: usize) {
        self.without_batches.dropped += self.batches.remove(nth).len() as u64;
    }

    /// Makes two batches of one: its first `size` sequences, and the others at the end of the plan.
    pub(crate) fn split(&mut self, nth: usize, size: usize) {
        let Range { start, end } = self.batches[nth].places;
        let middle = start + size as u32;
        self.batches[nth] = self.plan(start..middle);
        self.batches.push(self.plan(middle..end));
    }

    /// Takes two batches out of the plan; returns the sequences of the one, then of the other.
    pub(crate) fn take_both(&mut self, one: usize, other: usize) -> Vec<u32> {
        let both = [self.indices(one), self.indices(other)].concat();
        self.batches.remove(one.max(other));
        self.batches.remove(one.min(other));
        both
    }

    /// Whether these sequences may share a batch.
    pub(crate) fn allows(&self, indices: &[u32]) -> bool {
        let longest = self.measured(indices).map(|sequence| sequence.length).max();
        let max_rows = |length| self.limits().max_rows(self.limits().padded_length(length));
        longest.is_some_and(|length| indices.len() as u64 <= max_rows(length))
    }

    /// Repeats the sequences of a batch until it has `len`; it moves to the end of the plan.
    pub(crate) fn repeat(&mut self, nth: usize, len: usize) {
        let repeated: Vec<u32> = self.indices(nth).iter().copied().cycle().take(len).collect();
        self.batches.remove(nth);
        self.push(&repeated);
    }

    /// Adds a batch of these sequences, which must fit one.
    pub(crate) fn push(&mut self, indices: &[u32]) {
        let start = self.indices.len() as u32;
        self.indices.extend(indices);
        self.batches.push(self.plan(start..self.indices.len() as u32));
    }

    /// The batch of the sequences at these places.
    fn plan(&self, places: Range<u32>) -> Planned {
        let indices = &self.indices[places.start as usize..places.end as usize];
        let batch = self.limits().batch(self.measured(indices));
        let Batch { padded_length, real_tokens, .. } = batch;
        Planned { places, padded_length, real_tokens }
    }
}

/// The most sequences in a plan.
pub(crate) const LIMIT: u64 = u32::MAX as u64;

fn arrange<I>(
    whole: Whole,
    limits: &Limits,
    cut: &[(u32, u32)],
    sequences: impl Fn() -> I,
) -> Result<Arrangement>
where
    I: Iterator<Item = (u32, u64)>,
{
    let histogram = Histogram::new(sequences().map(|(_, length)| length));
    let known = known_ends(cut, limits, histogram.count());
    whole.arrange(&histogram, sequences(), limits, known)
}

/// Where batches of groups end, by what [`BatchPlan::cut`] said of them. What is less than a group
/// comes first and is found again without it.
fn known_ends(cut: &[(u32, u32)], limits: &Limits, n_sequences: u64) -> Option<Vec<usize>> {
    // A cut into more batches than there are sequences belongs to other ones, and its list might
    // not fit the memory.
    let n_batches = cut.iter().fold(0_u64, |sum, &(_, times)| sum.saturating_add(times.into()));
    if n_batches == 0 || n_batches > n_sequences {
        return None;
    }
    let group_len = limits.group_len();
    let sizes = cut.iter().flat_map(|&(size, times)| repeat_n(size as usize, times as usize));
    let mut ends = Vec::new();
    let mut end = 0_usize;
    for size in sizes.skip_while(|&size| size < group_len) {
        end = end.saturating_add(size / group_len);
        ends.push(end);
    }
    Some(ends)
}
