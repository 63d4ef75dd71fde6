//! All batches of an epoch at once, in few bytes.

#![expect(
    clippy::cast_possible_truncation,
    reason = "at most 2^32 sequences are arranged together, and tables are as long"
)]

use std::{iter::repeat_n, ops::Range};

use crate::{
    batch::{Batch, Sequence},
    builder::{
        BatchBuilder,
        sorted_set::{Arrangement, PlannedBatch, WholeSetStrategy},
    },
    error::{Error, Result},
    lengths::{SequenceLengths, histogram::Histogram},
    limits::{Admission, Limits},
    report::PaddingReport,
    sampler::DynamicBatchSampler,
};

/// The batches of an epoch, each found in constant time.
///
/// A plan holds 4 bytes for each sequence and 24 for each batch. While it is made, it takes 12 more for each sequence.
#[derive(Clone, Debug)]
pub(crate) struct BatchPlan<'a, L> {
    sampler: &'a DynamicBatchSampler<L>,
    /// The sequences of all batches.
    indices: Vec<u32>,
    /// Where in there each batch is.
    batches: Vec<PlannedBatch>,
    /// What was skipped, truncated and dropped; the batches are counted on demand.
    drop_counts: PaddingReport,
}

impl<L: SequenceLengths> DynamicBatchSampler<L> {
    /// Plans the batches of the sequences that `order` names, in that order; `cut`, unless empty, is what
    /// [`BatchPlan::cut`] returned for the same ones.
    pub(crate) fn plan_order(
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
        match BatchBuilder::whole(self.limits()) {
            Some(whole) => BatchPlan::of_whole_set(self, indices, whole, cut),
            None => BatchPlan::of_stream(self, indices),
        }
    }

    /// Returns the sequences of an order that are not skipped.
    fn admit_all(&self, order: Vec<u32>, report: &mut PaddingReport) -> Result<Vec<u32>> {
        let longest = self.longest(order.iter().copied())?;
        // If the longest is admitted as it is, then all are.
        if let Ok(Admission::Whole(_)) = self.limits().admit(longest) {
            return Ok(order);
        }
        self.admit_each(order.into_iter(), report)
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

    /// An admitted sequence as it counts.
    #[expect(clippy::expect_used, reason = "lengths must give the same answer each time")]
    fn admitted(&self, index: u32) -> Sequence {
        let sequence = self.measure(index.into());
        self.limits().counted(sequence.expect("a sequence that was admitted has a length"))
    }
}

impl<'a, L: SequenceLengths> BatchPlan<'a, L> {
    fn of_stream(sampler: &'a DynamicBatchSampler<L>, order: Vec<u32>) -> Result<Self> {
        let mut stream = sampler.iter_order(order.into_iter().map(u64::from));
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
            batches.push(PlannedBatch { range: start..count as u32, padded_length, real_tokens });
        }
        let drop_counts = stream.report().drop_counts();
        Ok(Self { sampler, indices, batches, drop_counts })
    }

    fn of_whole_set(
        sampler: &'a DynamicBatchSampler<L>,
        order: Vec<u32>,
        whole: WholeSetStrategy,
        cut: &[(u32, u32)],
    ) -> Result<Self> {
        let mut drop_counts = PaddingReport::default();
        let admitted = sampler.admit_all(order, &mut drop_counts)?;
        let sequences = || admitted.iter().map(|&index| (index, sampler.admitted(index).length));
        let arrangement = arrange(whole, sampler.limits(), cut, sequences)?;
        drop_counts.dropped = arrangement.dropped;
        let Arrangement { ids: indices, batches, .. } = arrangement;
        Ok(Self { sampler, indices, batches, drop_counts })
    }

    /// Where sorted sequences are cut, as a list of batch sizes and how often each comes in a row,
    /// from the shortest sequences on; nothing for other strategies.
    pub(crate) fn cut(&self) -> Vec<(u32, u32)> {
        let mut cut: Vec<(u32, u32)> = Vec::new();
        if !matches!(BatchBuilder::whole(self.limits()), Some(WholeSetStrategy::Sorted(_))) {
            return cut;
        }
        for batch in &self.batches {
            let size = batch.range.end - batch.range.start;
            match cut.last_mut() {
                Some((last, times)) if *last == size => *times += 1,
                Some(_) | None => cut.push((size, 1)),
            }
        }
        cut
    }

    /// The number of batches.
    pub(crate) fn len(&self) -> usize {
        self.batches.len()
    }

    /// The tokens of one of the batches, padding included.
    pub(crate) fn padded_tokens(&self, batch: &PlannedBatch) -> u64 {
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
    pub(crate) fn drop_counts(&self) -> PaddingReport {
        self.drop_counts
    }

    /// The number of every batch.
    #[expect(clippy::expect_used, reason = "a plan has fewer than 2^32 sequences")]
    pub(crate) fn numbers(&self) -> Range<u32> {
        0..u32::try_from(self.len()).expect("no batch is empty")
    }

    /// The indices of batch `nth`, which must be there.
    pub(crate) fn indices(&self, nth: usize) -> &[u32] {
        let Range { start, end } = self.batches[nth].range;
        &self.indices[start as usize..end as usize]
    }

    /// What is known of batch `nth`, which must be there.
    pub(crate) fn planned(&self, nth: usize) -> &PlannedBatch {
        &self.batches[nth]
    }

    /// Leaves out a batch.
    pub(crate) fn remove(&mut self, nth: usize) {
        self.drop_counts.dropped += self.batches.remove(nth).len() as u64;
    }

    /// Makes two batches of one: its first `size` sequences, and the others at the end of the plan.
    pub(crate) fn split(&mut self, nth: usize, size: usize) {
        let Range { start, end } = self.batches[nth].range;
        let middle = start + size as u32;
        self.batches[nth] = self.plan(start..middle);
        self.batches.push(self.plan(middle..end));
    }

    /// Takes two batches out of the plan; returns the sequences of the one, then of the other.
    pub(crate) fn remove_pair(&mut self, one: usize, other: usize) -> Vec<u32> {
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
    fn plan(&self, range: Range<u32>) -> PlannedBatch {
        let indices = &self.indices[range.start as usize..range.end as usize];
        let batch = self.limits().batch(self.measured(indices));
        let Batch { padded_length, real_tokens, .. } = batch;
        PlannedBatch { range, padded_length, real_tokens }
    }
}

/// The most sequences in a plan.
pub(crate) const LIMIT: u64 = u32::MAX as u64;

fn arrange<I>(
    whole: WholeSetStrategy,
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
