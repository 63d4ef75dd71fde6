//! What a rank does step by step.

use std::{fmt, iter::FusedIterator, ops::Range};

use core_types::{Epoch, Seed};

use crate::{
    batch::{Batch, Sequence},
    distributed::{DistributedBatchSampler, balance::balance, config::StepLayout},
    lengths::SequenceLengths,
    plan::BatchPlan,
    report::PaddingReport,
};

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
    /// By what this rank's mean loss is to be multiplied before gradients are averaged over the
    /// ranks, so that every token of the step counts as much as any other.
    ///
    /// The mean over n tokens here, times n · W / N, summed over the W ranks and divided by W, is
    /// the mean over all N.
    ///
    /// # Examples
    ///
    /// Two ranks, 30 and 10 tokens: gradients are averaged as if all 40 were on one.
    ///
    /// ```
    /// # use core_types::{Epoch, Placement};
    /// # use dyn_batch::*;
    /// let batches =
    ///     DynamicBatchSampler::new([30_u32, 10], BatchConfig::default().with_max_batch_size(1))?;
    /// let weight = |rank| -> Result<f64, Box<dyn std::error::Error>> {
    ///     let sampler = DistributedBatchSampler::new(
    ///         batches.clone(),
    ///         Placement::new(rank, 2)?,
    ///         DistributedConfig::default(),
    ///     )?;
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
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
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
    /// Where sorted sequences are cut: batches of so many sequences, so many times, from the
    /// shortest on. Nothing for other strategies.
    pub cut: Vec<(u32, u32)>,
}

impl fmt::Display for BatchState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { format_version, epoch, step, n_steps, world_size, fingerprint, .. } = self;
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
    /// The batches of the first step, rank by rank, then those of the second, and so on; one for
    /// each if it is dealt.
    batches: Vec<u32>,
    remaining: Range<usize>,
    /// The state of the first step.
    start: BatchState,
}

impl<'a, L: SequenceLengths> Steps<'a, L> {
    pub(crate) fn new(
        sampler: &'a DistributedBatchSampler<L>,
        plan: BatchPlan<'a, L>,
        epoch: Epoch,
        cut: Vec<(u32, u32)>,
        batches: Vec<u32>,
    ) -> Self {
        let world_size = sampler.placement().world_size().as_u64();
        let fingerprint = fingerprint(&plan, sampler.config().shuffle);
        let start = BatchState {
            format_version: 1,
            epoch,
            step: 0,
            n_steps: 0,
            world_size,
            fingerprint,
            cut,
        };
        let mut steps = Self { sampler, plan, batches, remaining: 0..0, start };
        steps.remaining.end = steps.batches.len() / steps.batches_per_step();
        steps.start.n_steps = steps.remaining.end as u64;
        steps
    }

    pub(crate) fn skip_to(&mut self, step: usize) {
        self.remaining.start = step;
    }

    /// How far this rank is.
    pub fn state(&self) -> BatchState {
        BatchState { step: self.remaining.start as u64, ..self.start.clone() }
    }

    /// What the batches of all ranks and steps cost, and how many sequences made it into none.
    pub fn report(&self) -> PaddingReport {
        let mut report = self.plan.fate();
        let steps = (0..self.batches.len()).map_while(|nth| self.step(nth));
        steps.flatten().for_each(|batch| report.add(&batch));
        report
    }

    /// The batches of all ranks in step `nth`, rank by rank; `None` if there are fewer steps.
    pub fn step(&self, nth: usize) -> Option<Vec<Batch>> {
        let batches = self.planned(nth)?;
        Some(match self.sampler.config().layout {
            StepLayout::Grouped => {
                batches.iter().map(|&batch| self.plan.batch(batch as usize)).collect()
            }
            StepLayout::Dealt => {
                self.deal(*batches.first()?).map(|part| self.gather(part)).collect()
            }
        })
    }

    /// The batches of step `nth` in the plan.
    fn planned(&self, nth: usize) -> Option<&[u32]> {
        self.batches.chunks_exact(self.batches_per_step()).nth(nth)
    }

    /// The sequences of a batch that each rank takes.
    fn deal(&self, batch: u32) -> impl Iterator<Item = Vec<Sequence>> {
        let sequences: Vec<Sequence> = self.plan.sequences(batch as usize).collect();
        let costs: Vec<u64> =
            sequences.iter().map(|each| self.sampler.config().cost.of(each.length)).collect();
        let parts = balance(&costs, self.sampler.placement().world_size()).into_iter();
        parts.map(move |part| part.into_iter().map(|place| sequences[place]).collect())
    }

    fn gather(&self, part: Vec<Sequence>) -> Batch {
        Batch::gather(part.into_iter(), self.plan.limits())
    }

    fn batches_per_step(&self) -> usize {
        match self.sampler.config().layout {
            StepLayout::Grouped => self.sampler.placement().world_size().as_usize(),
            StepLayout::Dealt => 1,
        }
    }

    fn read(&self, nth: usize) -> Option<Step> {
        let batches = self.planned(nth)?;
        let placement = self.sampler.placement();
        let rank = placement.rank().as_usize();
        let batch = match self.sampler.config().layout {
            StepLayout::Grouped => self.plan.batch(*batches.get(rank)? as usize),
            StepLayout::Dealt => self.gather(self.deal(*batches.first()?).nth(rank)?),
        };
        let tokens = batches.iter().map(|&batch| self.plan.planned(batch as usize).real_tokens);
        let real_tokens = tokens.fold(0, u64::saturating_add);
        Some(Step { batch, real_tokens, world_size: placement.world_size().as_u64() })
    }
}

/// The order of the steps, the sizes of all batches and what each begins with, as one number.
fn fingerprint<L: SequenceLengths>(plan: &BatchPlan<'_, L>, shuffle: Option<Seed>) -> u64 {
    let order = shuffle.map_or(Seed::new(0), |seed| seed.derive(1));
    let fold = |seed: Seed, nth: usize| {
        let indices = plan.indices(nth);
        seed.derive((indices.len() as u64) << 32 | u64::from(indices.first().copied().unwrap_or(0)))
    };
    (0..plan.len()).fold(order, fold).as_u64()
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
