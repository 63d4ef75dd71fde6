//! All batches of an epoch at once, in few bytes.

#![allow(
    clippy::cast_possible_truncation,
    reason = "at most 2^32 sequences are arranged together, and tables are as long"
)]

use std::ops::Range;

use core_types::Seed;

use crate::{
    assembly::whole_set::{Arrangement, Planned, Whole, of_whole_set},
    batch::{Batch, Sequence},
    batches::Batches,
    error::{Error, Result},
    lengths::SequenceLengths,
    limits::Limits,
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
    fate: PaddingReport,
}

impl<'a, L: SequenceLengths> BatchPlan<'a, L> {
    /// Plans the batches of the sequences in this order, or of all if there is none; `cut` is what
    /// [`cut`](Self::cut) said of the same ones, or nothing.
    pub(crate) fn new(
        sampler: &'a DynamicBatchSampler<L>,
        order: Option<Vec<u32>>,
        cut: &[(u32, u32)],
    ) -> Result<Self> {
        match of_whole_set(&sampler.config().strategy) {
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
        let (mut indices, mut batches) = (Vec::new(), Vec::new());
        for batch in stream.by_ref() {
            let (batch, start) = (batch?, indices.len());
            indices.extend(batch.indices.iter().map(|&index| index as u32));
            let end = u32::try_from(indices.len());
            let end = end.map_err(|_| Error::TooManySequences {
                count: indices.len() as u64,
                limit: LIMIT,
            })?;
            let Batch { padded_length, real_tokens, .. } = batch;
            batches.push(Planned { places: start as u32..end, padded_length, real_tokens });
        }
        let fate = stream.report().fate();
        Ok(Self { sampler, indices, batches, fate })
    }

    fn of_whole_set(
        sampler: &'a DynamicBatchSampler<L>,
        order: Option<Vec<u32>>,
        whole: Whole,
        cut: &[(u32, u32)],
    ) -> Result<Self> {
        let mut fate = PaddingReport::default();
        let order = sampler.admit_all(order, &mut fate)?;
        let (lengths, limits) = (sampler.lengths(), sampler.limits());
        let with_length = |index: u32| (index, sampler.sequence(index).length);
        let count = order.as_ref().map_or(lengths.count(), |order| order.len() as u64);
        let known = known_ends(cut, limits, count);
        let Arrangement { names, batches, dropped } = match &order {
            Some(order) => {
                arrange(whole, limits, known, || order.iter().map(|&index| with_length(index)))?
            }
            None => arrange(whole, limits, known, || indices(lengths).map(with_length))?,
        };
        fate.dropped = dropped;
        Ok(Self { sampler, indices: names, batches, fate })
    }

    /// Where sorted sequences are cut: so many batches of so many sequences, from the shortest on;
    /// nothing for other strategies.
    pub(crate) fn cut(&self) -> Vec<(u32, u32)> {
        let mut cut: Vec<(u32, u32)> = Vec::new();
        if let Some(Whole::Sorted(_)) = of_whole_set(&self.sampler.config().strategy) {
            for size in self.batches.iter().map(|batch| batch.places.end - batch.places.start) {
                match cut.last_mut().filter(|last| last.0 == size) {
                    Some(last) => last.1 += 1,
                    None => cut.push((size, 1)),
                }
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
        let mut report = self.fate;
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
        Batch::gather(self.sequences(nth), self.limits())
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
        indices.iter().map(|&index| self.sampler.sequence(index))
    }

    /// What became of the sequences that are in no batch.
    pub(crate) fn fate(&self) -> PaddingReport {
        self.fate
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
        self.fate.dropped += self.batches.remove(nth).len() as u64;
    }

    /// Makes two batches of one: its first `size` sequences, and the others at the end of the plan.
    pub(crate) fn split(&mut self, nth: usize, size: usize) {
        let Range { start, end } = self.batches[nth].places;
        let middle = start + size as u32;
        self.batches[nth] = self.plan(start..middle);
        self.batches.push(self.plan(middle..end));
    }

    /// Makes one batch of two, at the end of the plan; returns its number.
    pub(crate) fn join(&mut self, one: usize, other: usize) -> usize {
        let both = [self.indices(one), self.indices(other)].concat();
        self.batches.remove(one.max(other));
        self.batches.remove(one.min(other));
        self.push(&both);
        self.len() - 1
    }

    /// Repeats the sequences of a batch until it has `len`; it moves to the end of the plan.
    pub(crate) fn repeat(&mut self, nth: usize, len: usize) {
        let repeated: Vec<u32> = self.indices(nth).iter().copied().cycle().take(len).collect();
        self.batches.remove(nth);
        self.push(&repeated);
    }

    fn push(&mut self, indices: &[u32]) {
        let start = self.indices.len() as u32;
        self.indices.extend(indices);
        self.batches.push(self.plan(start..self.indices.len() as u32));
    }

    /// The batch of the sequences at these places.
    fn plan(&self, places: Range<u32>) -> Planned {
        let indices = &self.indices[places.start as usize..places.end as usize];
        let Batch { padded_length, real_tokens, .. } =
            Batch::gather(self.measured(indices), self.limits());
        Planned { places, padded_length, real_tokens }
    }
}

/// The most sequences in a plan.
pub(crate) const LIMIT: u64 = u32::MAX as u64;

/// Every index of a data set that has fewer than 2^32.
pub(crate) fn indices(lengths: &impl SequenceLengths) -> impl Iterator<Item = u32> {
    0..u32::try_from(lengths.count()).unwrap_or(u32::MAX)
}

fn arrange<I>(
    whole: Whole,
    limits: &Limits,
    known: Option<Vec<usize>>,
    sequences: impl Fn() -> I,
) -> Result<Arrangement>
where
    I: Iterator<Item = (u32, u64)>,
{
    whole.arrange(
        &Histogram::new(sequences().map(|(_, length)| length)),
        sequences(),
        limits,
        known,
    )
}

/// Where batches of groups end, by what [`BatchPlan::cut`] said of them. What is less than a group
/// comes first and is found again without it.
fn known_ends(cut: &[(u32, u32)], limits: &Limits, n_sequences: u64) -> Option<Vec<usize>> {
    // What says more batches than there are sequences is none of ours.
    let n_batches = cut.iter().fold(0_u64, |sum, &(_, times)| sum.saturating_add(times.into()));
    if n_batches == 0 || n_batches > n_sequences {
        return None;
    }
    let sizes =
        cut.iter().flat_map(|&(size, times)| std::iter::repeat_n(size as usize, times as usize));
    let whole = sizes.skip_while(|size| *size < limits.group_len());
    let ends = whole.scan(0_usize, |end, size| {
        *end = end.saturating_add(size / limits.group_len());
        Some(*end)
    });
    Some(ends.collect())
}
