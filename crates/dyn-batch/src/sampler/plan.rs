//! Compact plans of all batches of an epoch.

#![expect(
    clippy::cast_possible_truncation,
    reason = "at most 2^32 sequences are arranged together, and no table has more entries"
)]

use std::{iter::repeat_n, ops::Range};

use crate::{
    batch::{Batch, Sequence},
    builder::{
        BatchBuilder,
        whole_set::{BatchArrangement, PlannedBatch, WholeSetStrategy},
    },
    error::{Error, Result},
    lengths::{SequenceLengths, histogram::LengthHistogram},
    limits::{Admission, BatchLimits},
    report::PaddingReport,
    sampler::DynamicBatchSampler,
};

/// The batches of an epoch, with constant-time access.
///
/// A plan takes 4 bytes per sequence and 24 per batch, and 12 more per sequence while it is made.
#[derive(Clone, Debug)]
pub(crate) struct BatchPlan<L> {
    sampler: DynamicBatchSampler<L>,
    /// Indices of the sequences, batch by batch.
    indices: Vec<u32>,
    /// Ranges of the batches in `indices`.
    batches: Vec<PlannedBatch>,
    /// First entry of `indices` that repeats an earlier one.
    repeats_start: usize,
    /// Skipped, truncated and dropped sequences; batches are counted on demand.
    drop_counts: PaddingReport,
}

impl<L: SequenceLengths> DynamicBatchSampler<L> {
    /// Reads the indices of an order, which may be the order of a plan.
    pub(crate) fn read_order(&self, order: impl IntoIterator<Item = u64>) -> Result<Vec<u32>> {
        let count = self.lengths().count();
        let order = order.into_iter();
        // Iterators may report any size, so the hint is bounded.
        let hint = (order.size_hint().0 as u64).min(count).min(LIMIT);
        let mut indices = Vec::with_capacity(hint as usize);
        for index in order {
            if index >= count {
                return Err(Error::IndexOutOfRange { index, count });
            }
            let Ok(index) = u32::try_from(index) else {
                return Err(Error::TooManySequences { count, limit: LIMIT });
            };
            indices.push(index);
        }
        Ok(indices)
    }

    /// Plans the batches of the sequences in `order`. `cuts` is empty, or the
    /// [`BatchPlan::sorted_cuts`] of an equal plan.
    pub(crate) fn plan_order(self, order: Vec<u32>, cuts: &[(u32, u32)]) -> Result<BatchPlan<L>> {
        match BatchBuilder::whole_set_strategy(self.limits()) {
            Some(strategy) => BatchPlan::from_whole_set(self, order, strategy, SortedCuts(cuts)),
            None => BatchPlan::from_stream(self, order),
        }
    }

    /// Returns the sequences of an order that are not skipped.
    pub(crate) fn admit_all(
        &self,
        order: Vec<u32>,
        report: &mut PaddingReport,
    ) -> Result<Vec<u32>> {
        let longest = self.longest(order.iter().copied())?;
        // If the longest sequence is admitted in full, all are.
        if let Ok(Admission::Whole(_)) = self.limits().admit(longest) {
            return Ok(order);
        }
        self.admit_each(order.into_iter(), report)
    }

    fn longest(&self, indices: impl Iterator<Item = u32>) -> Result<Sequence> {
        let mut longest = Sequence { index: 0, length: 0 };
        for index in indices {
            let sequence = self.measure(index.into())?;
            if longest.length < sequence.length {
                longest = sequence;
            }
        }
        Ok(longest)
    }

    fn admit_each(
        &self,
        indices: impl Iterator<Item = u32>,
        report: &mut PaddingReport,
    ) -> Result<Vec<u32>> {
        let mut admitted = Vec::new();
        for index in indices {
            let admission = self.limits().admit(self.measure(index.into())?)?;
            let admitted_sequence = report.count(admission);
            if admitted_sequence.is_some() {
                admitted.push(index);
            }
        }
        Ok(admitted)
    }

    /// Returns the admitted sequence `index`, truncated if needed.
    #[expect(
        clippy::expect_used,
        reason = "`SequenceLengths` must return the same length each time"
    )]
    fn admitted_sequence(&self, index: u32) -> Sequence {
        let sequence = self.measure(index.into());
        self.limits().truncate(sequence.expect("an admitted sequence has a length"))
    }
}

impl<L: SequenceLengths> BatchPlan<L> {
    /// Plans the batches of a strategy that reads sequences one by one.
    fn from_stream(sampler: DynamicBatchSampler<L>, order: Vec<u32>) -> Result<Self> {
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
        drop(stream);
        Ok(Self { sampler, indices, batches, repeats_start: usize::MAX, drop_counts })
    }

    /// Returns a plan without batches, and the sequences of an order that are not skipped.
    pub(crate) fn admitted(
        sampler: DynamicBatchSampler<L>,
        order: Vec<u32>,
    ) -> Result<(Self, Vec<u32>)> {
        let mut drop_counts = PaddingReport::default();
        let admitted = sampler.admit_all(order, &mut drop_counts)?;
        let plan = Self {
            sampler,
            indices: Vec::with_capacity(admitted.len()),
            batches: Vec::new(),
            repeats_start: usize::MAX,
            drop_counts,
        };
        Ok((plan, admitted))
    }

    /// Plans the batches of a strategy that arranges all sequences at once.
    fn from_whole_set(
        sampler: DynamicBatchSampler<L>,
        order: Vec<u32>,
        strategy: WholeSetStrategy,
        cuts: SortedCuts<'_>,
    ) -> Result<Self> {
        let mut drop_counts = PaddingReport::default();
        let admitted = sampler.admit_all(order, &mut drop_counts)?;
        let sequences =
            || admitted.iter().map(|&index| (index, sampler.admitted_sequence(index).length));
        let histogram = LengthHistogram::new(sequences().map(|(_, length)| length));
        let group_len = sampler.limits().group_len();
        let known_group_ends = cuts.group_ends(group_len, histogram.count());
        let arrangement =
            strategy.arrange(&histogram, sequences(), sampler.limits(), known_group_ends)?;
        drop_counts.dropped = arrangement.dropped;
        let BatchArrangement { ids: indices, batches, .. } = arrangement;
        Ok(Self { sampler, indices, batches, repeats_start: usize::MAX, drop_counts })
    }

    /// Returns the cuts of sorted sequences as a run-length list of batch size and count, the
    /// shortest sequences first; empty for other strategies.
    pub(crate) fn sorted_cuts(&self) -> Vec<(u32, u32)> {
        let mut cuts: Vec<(u32, u32)> = Vec::new();
        let strategy = BatchBuilder::whole_set_strategy(self.limits());
        if !matches!(strategy, Some(WholeSetStrategy::Sorted(_))) {
            return cuts;
        }
        for batch in &self.batches {
            let size = batch.range.end - batch.range.start;
            match cuts.last_mut() {
                Some((last, count)) if *last == size => *count += 1,
                Some(_) | None => cuts.push((size, 1)),
            }
        }
        cuts
    }

    /// Returns the number of batches.
    pub(crate) fn len(&self) -> usize {
        self.batches.len()
    }

    /// Returns the padded tokens of a batch.
    pub(crate) fn padded_tokens(&self, batch: &PlannedBatch) -> u64 {
        self.limits().rows(batch.len()) * batch.padded_length
    }

    pub(crate) fn limits(&self) -> &BatchLimits {
        self.sampler.limits()
    }

    /// Returns a batch; panics if `index` is out of range.
    pub(crate) fn batch(&self, index: usize) -> Batch {
        self.limits().batch(self.sequences(index))
    }

    /// Returns the sequences of a batch; panics if `index` is out of range.
    pub(crate) fn sequences(
        &self,
        index: usize,
    ) -> impl ExactSizeIterator<Item = Sequence> + DoubleEndedIterator + '_ {
        self.measure_all(self.indices(index))
    }

    fn measure_all<'b>(
        &'b self,
        indices: &'b [u32],
    ) -> impl ExactSizeIterator<Item = Sequence> + DoubleEndedIterator + 'b {
        indices.iter().map(|&index| self.sampler.admitted_sequence(index))
    }

    /// Returns the lengths of admitted sequences.
    pub(crate) fn lengths<'b>(&'b self, indices: &'b [u32]) -> impl Iterator<Item = u64> + 'b {
        self.measure_all(indices).map(|sequence| sequence.length)
    }

    /// Counts dropped sequences.
    pub(crate) fn count_dropped(&mut self, count: usize) {
        self.drop_counts.dropped += count as u64;
    }

    /// Returns the report without batches: only skipped, truncated and dropped sequences.
    pub(crate) fn drop_counts(&self) -> PaddingReport {
        self.drop_counts
    }

    /// Returns the indices of all batches.
    #[expect(clippy::expect_used, reason = "the message says why it cannot fail")]
    pub(crate) fn batch_indices(&self) -> Range<u32> {
        let n_batches = u32::try_from(self.len());
        0..n_batches.expect("a plan has fewer than 2^32 sequences, and no batch is empty")
    }

    /// Returns the indices of the sequences of a batch; panics if `index` is out of range.
    pub(crate) fn indices(&self, index: usize) -> &[u32] {
        let Range { start, end } = self.batches[index].range;
        &self.indices[start as usize..end as usize]
    }

    /// Returns the indices of a batch without those that repeat others; panics if `index` is out of
    /// range.
    pub(crate) fn unrepeated_indices(&self, index: usize) -> &[u32] {
        let Range { start, end } = self.batches[index].range;
        &self.indices[start as usize..self.repeats_start.min(end as usize)]
    }

    /// Returns a planned batch; panics if `index` is out of range.
    pub(crate) fn planned_batch(&self, index: usize) -> &PlannedBatch {
        &self.batches[index]
    }

    /// Drops a batch.
    pub(crate) fn remove(&mut self, index: usize) {
        self.drop_counts.dropped += self.batches.remove(index).len() as u64;
    }

    /// Splits a batch after its first `size` sequences; the rest moves to the end of the plan.
    pub(crate) fn split(&mut self, index: usize, size: usize) {
        let Range { start, end } = self.batches[index].range;
        let middle = start + size as u32;
        self.batches[index] = self.plan(start..middle);
        self.batches.push(self.plan(middle..end));
    }

    /// Removes two batches and returns their sequences.
    pub(crate) fn remove_pair(&mut self, one: usize, other: usize) -> Vec<u32> {
        let both = [self.indices(one), self.indices(other)].concat();
        self.batches.remove(one.max(other));
        self.batches.remove(one.min(other));
        both
    }

    /// Returns true if these sequences can share a batch.
    pub(crate) fn allows(&self, indices: &[u32]) -> bool {
        let Some(longest) = self.measure_all(indices).map(|sequence| sequence.length).max() else {
            return false;
        };
        let max_rows = self.limits().max_rows(self.limits().padded_length(longest));
        indices.len() as u64 <= max_rows
    }

    /// Repeats the sequences of a batch up to `len` sequences, and moves the batch to the end of
    /// the plan. Afterwards no batch can be added.
    pub(crate) fn repeat(&mut self, index: usize, len: usize) {
        self.repeats_start = self.indices.len() + self.indices(index).len();
        let repeated: Vec<u32> = self.indices(index).iter().copied().cycle().take(len).collect();
        self.batches.remove(index);
        self.push(&repeated);
    }

    /// Adds a batch of these sequences, which must fit into one batch.
    pub(crate) fn push(&mut self, indices: &[u32]) {
        let start = self.indices.len() as u32;
        self.indices.extend(indices);
        self.batches.push(self.plan(start..self.indices.len() as u32));
    }

    /// Plans a batch of a range of the sequences.
    fn plan(&self, range: Range<u32>) -> PlannedBatch {
        let indices = &self.indices[range.start as usize..range.end as usize];
        let batch = self.limits().batch(self.measure_all(indices));
        let Batch { padded_length, real_tokens, .. } = batch;
        PlannedBatch { range, padded_length, real_tokens }
    }
}

/// Limit on the sequences in a plan.
pub(crate) const LIMIT: u64 = u32::MAX as u64;

/// Cuts of sorted sequences, from a state: see [`BatchPlan::sorted_cuts`].
#[derive(Clone, Copy)]
struct SortedCuts<'a>(&'a [(u32, u32)]);

impl SortedCuts<'_> {
    /// Returns the ends of the batches, counted in groups, or `None` if the cuts are from another plan.
    ///
    /// Leading batches smaller than a group are left out: the arrangement adds the surplus again.
    fn group_ends(self, group_len: usize, n_sequences: u64) -> Option<Vec<usize>> {
        // More batches than sequences might exceed the memory.
        let counts = self.0.iter().map(|&(_, count)| u64::from(count));
        let n_batches = counts.fold(0, u64::saturating_add);
        if n_batches == 0 || n_batches > n_sequences {
            return None;
        }
        let runs = self.0.iter();
        let sizes = runs.flat_map(|&(size, count)| repeat_n(size as usize, count as usize));
        let mut ends = Vec::new();
        let mut end = 0_usize;
        for size in sizes.skip_while(|&size| size < group_len) {
            end = end.saturating_add(size / group_len);
            ends.push(end);
        }
        Some(ends)
    }
}
