//! The batches of one rank: as many on every rank, with almost equal cost in each step.

use std::{cmp::Reverse, collections::BinaryHeap, iter::FusedIterator, ops::Range};

use core_types::{Epoch, Placement, Seed, WorldSize};

use crate::{
    Batch, BatchPlan, Cost, DynamicBatchSampler, Error, PaddingReport, Result, SequenceLengths, balance::balance,
    shuffle::shuffle,
};

/// What happens when the number of batches is no multiple of the world size.
///
/// Every rank must take the same number of steps: one with a batch less leaves the others waiting in their collectives.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "snake_case"))]
#[non_exhaustive]
pub enum StepRemainder {
    /// The batches with the most padding are split in two: each sequence comes exactly once.
    #[default]
    Split,
    /// The last batches are left out; the report counts their sequences as dropped.
    Drop,
    /// The first batches come once more.
    Repeat,
}

/// What makes a step of all ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "snake_case"))]
#[non_exhaustive]
pub enum StepLayout {
    /// As many batches as there are ranks, of similar cost. The least padding.
    #[default]
    Grouped,
    /// One batch that is as large as those of all ranks together, dealt out by [`balance`]: as many sequences on each
    /// rank, and nearly the same cost. The least waiting, above all where attention skips the padding.
    ///
    /// Not for buckets and packed rows.
    Dealt,
}

/// The choices of a [`DistributedBatchSampler`].
///
/// # Examples
///
/// ```
/// use core_types::Seed;
/// use dyn_batch::{Cost, DistributedConfig, StepRemainder};
///
/// let config = DistributedConfig::default().with_shuffle(Seed::new(7)).with_cost(Cost::ATTENTION);
/// assert_eq!(config.remainder, StepRemainder::Split);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(default, deny_unknown_fields))]
#[non_exhaustive]
pub struct DistributedConfig {
    /// Steps come in a random order, another one each epoch, if there is a seed; none by default.
    pub shuffle: Option<Seed>,
    /// What makes a step; [`StepLayout::Grouped`] by default.
    pub layout: StepLayout,
    /// What happens to batches that cannot fill up a step; [`StepRemainder::Split`] by default.
    pub remainder: StepRemainder,
    /// What is to be equal in a step; the padded tokens by default.
    pub cost: Cost,
}

impl Default for DistributedConfig {
    fn default() -> Self {
        Self { shuffle: None, layout: StepLayout::default(), remainder: StepRemainder::default(), cost: Cost::TOKENS }
    }
}

impl DistributedConfig {
    /// Lets steps come in a random order, another one each epoch.
    #[must_use]
    pub fn with_shuffle(self, seed: Seed) -> Self {
        Self { shuffle: Some(seed), ..self }
    }

    /// Sets what makes a step; [`StepLayout::Grouped`] by default.
    #[must_use]
    pub fn with_layout(self, layout: StepLayout) -> Self {
        Self { layout, ..self }
    }

    /// Sets what happens to batches that cannot fill up a step; [`StepRemainder::Split`] by default.
    #[must_use]
    pub fn with_remainder(self, remainder: StepRemainder) -> Self {
        Self { remainder, ..self }
    }

    /// Sets what is to be equal in a step; the padded tokens by default.
    #[must_use]
    pub fn with_cost(self, cost: Cost) -> Self {
        Self { cost, ..self }
    }
}

/// Batches for the ranks of a world, each rank the same number of them.
///
/// Every rank plans all batches of the epoch by itself, from the same lengths and the same order, so nobody has to talk.
/// The order comes from outside and must be the one of the whole world, not a rank's share. Batches of similar cost then
/// make a step, one for each rank, so that nobody waits long for the slowest.
///
/// # Determinism
///
/// Steps depend on the lengths, the order, both configurations, the world size and the epoch alone.
///
/// # Examples
///
/// ```
/// use core_types::{Epoch, Placement, Seed};
/// use dyn_batch::{
///     BatchConfig, Cut, DistributedBatchSampler, DistributedConfig, DynamicBatchSampler, DynamicBatchStrategy,
/// };
///
/// let lengths: Vec<u32> = (1..=100).collect();
/// let sorted = DynamicBatchStrategy::Sorted { window: None, cut: Cut::Optimal };
/// let batches = DynamicBatchSampler::new(lengths, BatchConfig::default().with_strategy(sorted).with_max_tokens(256))?;
/// let config = DistributedConfig::default().with_shuffle(Seed::new(1));
///
/// let mut n_sequences = 0;
/// for rank in 0..4 {
///     let sampler = DistributedBatchSampler::new(batches.clone(), Placement::new(rank, 4)?, config)?;
///     let steps = sampler.epoch(Epoch::new(3), 0..100)?;
///     assert_eq!(steps.len(), 6, "on every rank");
///     n_sequences += steps.map(|step| step.batch.len()).sum::<usize>();
/// }
/// assert_eq!(n_sequences, 100);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct DistributedBatchSampler<L> {
    batches: DynamicBatchSampler<L>,
    placement: Placement,
    config: DistributedConfig,
}

impl<L: SequenceLengths> DistributedBatchSampler<L> {
    /// Returns a sampler of the batches of one rank.
    ///
    /// # Errors
    ///
    /// [`Error::CannotDeal`] for dealt steps of buckets or packed rows, and [`Error::MultipleOverLimit`] for those of more
    /// ranks than any number of sequences has.
    pub fn new(batches: DynamicBatchSampler<L>, placement: Placement, config: DistributedConfig) -> Result<Self> {
        let batches = match config.layout {
            StepLayout::Grouped => batches,
            StepLayout::Dealt => batches.of_all_ranks(placement.world_size())?,
        };
        Ok(Self { batches, placement, config })
    }

    /// The steps of an epoch, in which the sequences come in `order`: that of all ranks, the same on each.
    ///
    /// # Errors
    ///
    /// As [`DynamicBatchSampler::plan_in`], and [`Error::CannotFillStep`] if there are too few sequences to split.
    pub fn epoch(&self, epoch: Epoch, order: impl IntoIterator<Item = u64>) -> Result<Steps<'_, L>> {
        let mut plan = self.batches.plan_in(order)?;
        let mut steps = match self.config.layout {
            StepLayout::Grouped => self.group(&mut plan)?,
            StepLayout::Dealt => self.whole_batches(&mut plan)?,
        };
        match self.config.shuffle.map(|seed| seed.derive(epoch.as_u64())) {
            Some(seed) => {
                shuffle(&mut steps, seed);
                (0..).zip(&mut steps).for_each(|(nth, step)| shuffle(step, seed.derive(u64::MAX).derive(nth)));
            }
            None => steps.sort_unstable(),
        }
        let remaining = 0..steps.len();
        Ok(Steps { sampler: self, plan, epoch, steps: steps.concat(), remaining })
    }

    /// Steps of batches of similar cost.
    fn group(&self, plan: &mut BatchPlan<'_, L>) -> Result<Vec<Vec<u32>>> {
        let world_size = self.placement.world_size();
        let mut batches = fill_last_step(plan, world_size, self.config.remainder)?;
        batches.sort_by_cached_key(|&nth| Reverse(batch_cost(plan, nth as usize, self.config.cost)));
        let mut steps: Vec<Vec<u32>> = batches.chunks(world_size.as_usize()).map(<[u32]>::to_vec).collect();
        steps.iter_mut().for_each(|step| step.sort_unstable());
        Ok(steps)
    }

    /// A step for each batch that has a sequence for each rank. The one that has not is joined to the smallest other.
    #[allow(clippy::cast_possible_truncation, reason = "a plan has fewer than 2^32 batches")]
    fn whole_batches(&self, plan: &mut BatchPlan<'_, L>) -> Result<Vec<Vec<u32>>> {
        let world_size = self.placement.world_size();
        let is_small = |plan: &BatchPlan<'_, L>, nth: usize| plan.sequences(nth).len() < world_size.as_usize();
        if let Some(small) = (0..plan.len()).find(|&nth| is_small(plan, nth)) {
            match self.config.remainder {
                StepRemainder::Drop => plan.remove(small),
                StepRemainder::Repeat => plan.repeat(small, world_size.as_usize()),
                StepRemainder::Split => {
                    let error = Error::CannotFillStep { n_batches: plan.len() as u64, world_size };
                    let smallest = (0..plan.len()).filter(|&nth| nth != small).min_by_key(|&nth| plan.batch(nth).rows);
                    let joined = plan.join(small, smallest.ok_or_else(|| error.clone())?);
                    let Batch { rows, padded_length, .. } = plan.batch(joined);
                    if rows > plan.limits().max_rows(padded_length) {
                        let half = rows as usize / 2;
                        plan.split(joined, half);
                        if half < world_size.as_usize() {
                            return Err(error);
                        }
                    }
                }
            }
        }
        Ok((0..plan.len() as u32).map(|nth| vec![nth]).collect())
    }

    /// The steps of an epoch that are left after those that a state has seen, in the same order as then.
    ///
    /// # Errors
    ///
    /// As [`epoch`](Self::epoch), and [`Error::OtherBatches`] if the state is not one of these batches.
    pub fn resume(&self, state: &BatchState, order: impl IntoIterator<Item = u64>) -> Result<Steps<'_, L>> {
        let mut steps = self.epoch(state.epoch, order)?;
        let start = steps.state();
        let seen = usize::try_from(state.step).ok().filter(|&step| step <= steps.len());
        match seen.filter(|_| BatchState { step: 0, ..*state } == start) {
            Some(seen) => steps.remaining.start = seen,
            None => return Err(Error::OtherBatches { expected: start.to_string(), found: state.to_string() }),
        }
        Ok(steps)
    }
}

/// The batches of all steps: as many as there are, or a few more or fewer, so that the world size divides their number.
#[allow(clippy::cast_possible_truncation, reason = "a plan has fewer than 2^32 batches")]
fn fill_last_step<L: SequenceLengths>(
    plan: &mut BatchPlan<'_, L>,
    world_size: WorldSize,
    remainder: StepRemainder,
) -> Result<Vec<u32>> {
    let (n_batches, n_ranks) = (plan.len(), world_size.as_usize());
    let surplus = n_batches % n_ranks;
    let missing = (n_ranks - surplus) % n_ranks;
    if remainder == StepRemainder::Split {
        split_most_padded(plan, missing).ok_or(Error::CannotFillStep { n_batches: n_batches as u64, world_size })?;
    }
    let all = 0..plan.len() as u32;
    Ok(match remainder {
        StepRemainder::Split => all.collect(),
        StepRemainder::Drop => {
            (0..surplus).for_each(|_| plan.remove(plan.len() - 1));
            (0..plan.len() as u32).collect()
        }
        StepRemainder::Repeat => {
            let missing = if n_batches == 0 { 0 } else { missing };
            all.clone().chain(all.cycle().take(missing)).collect()
        }
    })
}

/// Splits `n` batches, each time the one with the most padding; `None` if none can be split any more.
fn split_most_padded<L: SequenceLengths>(plan: &mut BatchPlan<'_, L>, n: usize) -> Option<()> {
    if n == 0 {
        return Some(());
    }
    let group_len = plan.limits().group_len();
    let entry = |plan: &BatchPlan<'_, L>, nth: usize| {
        let batch = plan.get(nth)?;
        // At equal padding the one with the most tokens, then the first one.
        (batch.len() > group_len).then(|| (batch.padding_tokens(), batch.real_tokens, Reverse(nth)))
    };
    let mut padded: BinaryHeap<_> = (0..plan.len()).filter_map(|nth| entry(plan, nth)).collect();
    for _ in 0..n {
        let (_, _, Reverse(nth)) = padded.pop()?;
        plan.split(nth, best_split(plan, nth, group_len));
        padded.extend([nth, plan.len() - 1].into_iter().filter_map(|nth| entry(plan, nth)));
    }
    Some(())
}

/// How many of the first sequences make a batch of their own so that both have the least padding.
fn best_split<L: SequenceLengths>(plan: &BatchPlan<'_, L>, nth: usize, group_len: usize) -> usize {
    let lengths: Vec<u64> = plan.sequences(nth).map(|sequence| sequence.length).collect();
    let longest = |lengths: &mut dyn Iterator<Item = &u64>| -> Vec<u64> {
        lengths
            .scan(0, |longest, &length| {
                *longest = length.max(*longest);
                Some(*longest)
            })
            .collect()
    };
    let of_first = longest(&mut lengths.iter());
    let of_last = longest(&mut lengths.iter().rev());
    let tokens = |size: usize| {
        let other = lengths.len() - size;
        u128::from(of_first[size - 1]) * size as u128 + u128::from(of_last[other - 1]) * other as u128
    };
    (group_len..lengths.len()).step_by(group_len).min_by_key(|&size| tokens(size)).unwrap_or(group_len)
}

/// What a batch costs: that of its rows, or of the sequences in them if they are packed.
fn batch_cost<L: SequenceLengths>(plan: &BatchPlan<'_, L>, nth: usize, cost: Cost) -> u64 {
    let lengths = plan.sequences(nth).map(|sequence| sequence.length);
    if plan.limits().is_packing() {
        return lengths.fold(0, |sum: u64, length| sum.saturating_add(cost.of(length)));
    }
    let rows = lengths.len() as u64;
    let padded_length = plan.limits().padded_length(lengths.max().unwrap_or(0));
    cost.of(padded_length).saturating_mul(rows)
}

/// What a rank does in one step.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct Step {
    /// The batch of this rank.
    pub batch: Batch,
    /// The real tokens in the batches of all ranks.
    pub real_tokens: u64,
    /// How many ranks take the step.
    pub world_size: u64,
}

impl Step {
    /// By what this rank's mean loss is to be multiplied before gradients are averaged over the ranks, so that every
    /// token of the step counts as much as any other.
    ///
    /// The mean over n tokens here, times n · W / N, summed over the W ranks and divided by W, is the mean over all N.
    ///
    /// # Examples
    ///
    /// Two ranks, 30 and 10 tokens: gradients are averaged as if all 40 were on one.
    ///
    /// ```
    /// # use core_types::{Epoch, Placement};
    /// # use dyn_batch::*;
    /// let batches = DynamicBatchSampler::new([30_u32, 10], BatchConfig::default().with_max_batch_size(1))?;
    /// let weight = |rank| -> Result<f64, Box<dyn std::error::Error>> {
    ///     let sampler = DistributedBatchSampler::new(batches.clone(), Placement::new(rank, 2)?, DistributedConfig::default())?;
    ///     let step = sampler.epoch(Epoch::ZERO, 0..2)?.next().ok_or("no step")?;
    ///     Ok(step.loss_weight())
    /// };
    /// assert_eq!((weight(0)?, weight(1)?), (1.5, 0.5));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn loss_weight(&self) -> f64 {
        if self.real_tokens == 0 {
            return 0.0;
        }
        self.batch.real_tokens as f64 * self.world_size as f64 / self.real_tokens as f64
    }
}

/// How far a rank is in its batches; serializable with feature `serde`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(deny_unknown_fields))]
#[non_exhaustive]
pub struct BatchState {
    /// The version of this form.
    pub format_version: u32,
    /// The epoch.
    pub epoch: Epoch,
    /// How many of its steps have been taken.
    pub step: u64,
    /// How many steps it has.
    pub n_steps: u64,
    /// How many ranks take part.
    pub world_size: u64,
    /// A number that other batches hardly have.
    pub fingerprint: u64,
}

impl std::fmt::Display for BatchState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { format_version, epoch, step, n_steps, world_size, fingerprint } = self;
        write!(f, "step {step} of {n_steps} in epoch {} over {world_size} ranks", epoch.as_u64())?;
        write!(f, " (format {format_version}, batches {fingerprint:016x})")
    }
}

/// The steps of one rank in an epoch; made by [`DistributedBatchSampler::epoch`].
#[derive(Clone, Debug)]
#[must_use = "iterators are lazy and do nothing unless consumed"]
pub struct Steps<'a, L> {
    sampler: &'a DistributedBatchSampler<L>,
    plan: BatchPlan<'a, L>,
    epoch: Epoch,
    /// The batches of the first step, rank by rank, then those of the second, and so on; one for each if it is dealt.
    steps: Vec<u32>,
    remaining: Range<usize>,
}

impl<L: SequenceLengths> Steps<'_, L> {
    /// How far this rank is.
    pub fn state(&self) -> BatchState {
        BatchState {
            format_version: 1,
            epoch: self.epoch,
            step: self.remaining.start as u64,
            n_steps: (self.steps.len() / self.batches_per_step()) as u64,
            world_size: self.sampler.placement.world_size().as_u64(),
            fingerprint: self.fingerprint(),
        }
    }

    /// What the batches of all ranks and steps cost, and how many sequences made it into none.
    pub fn report(&self) -> PaddingReport {
        let mut report = self.plan.fate();
        let steps = (0..self.steps.len()).map_while(|nth| self.step(nth));
        steps.flatten().for_each(|batch| report.add(&batch));
        report
    }

    /// The batches of all ranks in step `nth`, rank by rank; `None` if there are fewer steps.
    pub fn step(&self, nth: usize) -> Option<Vec<Batch>> {
        let batches = self.steps.chunks_exact(self.batches_per_step()).nth(nth)?;
        Some(match self.sampler.config.layout {
            StepLayout::Grouped => batches.iter().map(|&batch| self.plan.batch(batch as usize)).collect(),
            StepLayout::Dealt => {
                let sequences: Vec<_> = self.plan.sequences(*batches.first()? as usize).collect();
                let costs: Vec<u64> = sequences.iter().map(|each| self.sampler.config.cost.of(each.length)).collect();
                let parts = balance(&costs, self.sampler.placement.world_size()).into_iter();
                let gather = |part: Vec<usize>| {
                    Batch::gather(part.into_iter().map(|place| sequences[place]), self.plan.limits())
                };
                parts.map(gather).collect()
            }
        })
    }

    fn batches_per_step(&self) -> usize {
        match self.sampler.config.layout {
            StepLayout::Grouped => self.sampler.placement.world_size().as_usize(),
            StepLayout::Dealt => 1,
        }
    }

    fn fingerprint(&self) -> u64 {
        let fold = |seed: Seed, &batch: &u32| {
            let mut sequences = self.plan.sequences(batch as usize);
            let len = sequences.len() as u64;
            seed.derive(len).derive(sequences.next().map_or(0, |first| first.index))
        };
        self.steps.iter().fold(Seed::new(0), fold).as_u64()
    }

    fn read(&self, nth: usize) -> Option<Step> {
        let mut batches = self.step(nth)?;
        let world_size = batches.len() as u64;
        let real_tokens = batches.iter().map(|batch| batch.real_tokens).fold(0, u64::saturating_add);
        let rank = self.sampler.placement.rank().as_usize();
        (rank < batches.len()).then(|| Step { batch: batches.swap_remove(rank), real_tokens, world_size })
    }
}

impl<L: SequenceLengths> Iterator for Steps<'_, L> {
    type Item = Step;

    fn next(&mut self) -> Option<Step> {
        let nth = self.remaining.next()?;
        self.read(nth)
    }

    fn nth(&mut self, n: usize) -> Option<Step> {
        let nth = self.remaining.nth(n)?;
        self.read(nth)
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        self.remaining.size_hint()
    }
}

impl<L: SequenceLengths> ExactSizeIterator for Steps<'_, L> {}

impl<L: SequenceLengths> FusedIterator for Steps<'_, L> {}
