//! The steps of a rank in an epoch, one after the other.

use std::{iter::FusedIterator, ops::Range};

use core_types::{Epoch, Seed};

use crate::{
    batch::{Batch, Sequence},
    distributed::{
        DistributedBatchSampler,
        balance::balance,
        config::StepLayout,
        even::{batches_by_cost, fill_small_batch},
        state::{BatchState, fingerprint},
    },
    error::{Error, Result},
    lengths::SequenceLengths,
    report::PaddingReport,
    sampler::{plan::BatchPlan, shuffle::shuffle},
};

/// One step of a rank: its batch, and its share of the work of all ranks.
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
    /// The factor to multiply this rank's mean loss by before gradients are averaged over the
    /// ranks, so that every token of the step counts as much as any other; 0 for a step without
    /// tokens.
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

impl<L: SequenceLengths> DistributedBatchSampler<L> {
    /// The steps of an epoch, in which the sequences come in `order`: that of all ranks, the same
    /// on each.
    ///
    /// # Errors
    ///
    /// As [`DynamicBatchSampler::iter_order`](crate::DynamicBatchSampler::iter_order), [`Error::TooManySequences`] for an
    /// index, or for a number of them, from 2^32 on, and [`Error::CannotFillStep`] if there are too few sequences to
    /// split.
    pub fn epoch(
        &self,
        epoch: Epoch,
        order: impl IntoIterator<Item = u64>,
    ) -> Result<Steps<'_, L>> {
        Steps::new(self, epoch, self.batches().plan_order(order, &[])?)
    }

    /// The steps of an epoch that are left after those that a state has seen, in the same order as
    /// then.
    ///
    /// # Errors
    ///
    /// As [`epoch`](Self::epoch), and [`Error::OtherBatches`] if the state is not one of these
    /// batches.
    pub fn resume(
        &self,
        state: &BatchState,
        order: impl IntoIterator<Item = u64>,
    ) -> Result<Steps<'_, L>> {
        // Where the sorted sequences were cut is in the state, since it takes longer to find than
        // to sort.
        let plan = self.batches().plan_order(order, &state.cut)?;
        let mut steps = Steps::new(self, state.epoch, plan)?;
        match usize::try_from(state.step) {
            Ok(step) if step <= steps.len() && *state == steps.state_at(step) => {
                steps.remaining.start = step;
                Ok(steps)
            }
            Ok(_) | Err(_) => Err(Error::OtherBatches {
                expected: steps.state().to_string(),
                found: state.to_string(),
            }),
        }
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
    batches_per_step: usize,
    remaining: Range<usize>,
    /// The state of the first step.
    start: BatchState,
}

impl<'a, L: SequenceLengths> Steps<'a, L> {
    fn new(
        sampler: &'a DistributedBatchSampler<L>,
        epoch: Epoch,
        mut plan: BatchPlan<'a, L>,
    ) -> Result<Self> {
        let config = sampler.config();
        let world_size = sampler.placement().world_size();
        // Before batches are split or joined, so that it fits the plan that is made from it.
        let cut = plan.cut();
        let (batches, batches_per_step) = match config.layout {
            StepLayout::Grouped => {
                let batches =
                    batches_by_cost(&mut plan, world_size, config.remainder, config.cost)?;
                (batches, world_size.as_usize())
            }
            StepLayout::Dealt => {
                fill_small_batch(&mut plan, world_size, config.remainder)?;
                (plan.numbers().collect(), 1)
            }
        };
        let seed = config.shuffle.map(|seed| seed.derive(epoch.as_u64()));
        let batches = in_order_of_steps(batches, batches_per_step, seed);
        let n_steps = batches.len() / batches_per_step;
        let start = BatchState {
            format_version: 1,
            epoch,
            step: 0,
            n_steps: n_steps as u64,
            world_size: world_size.as_u64(),
            fingerprint: fingerprint(&plan, &batches, config),
            cut,
        };
        Ok(Self { sampler, plan, batches, batches_per_step, remaining: 0..n_steps, start })
    }

    /// How far this rank is.
    pub fn state(&self) -> BatchState {
        self.state_at(self.remaining.start)
    }

    /// Each step with the state to [resume](DistributedBatchSampler::resume) by after it: for steps
    /// that are read before they are taken, whose own [`state`](Self::state) is ahead.
    ///
    /// # Examples
    ///
    /// ```
    /// # use core_types::{Epoch, Placement};
    /// # use dyn_batch::*;
    /// let batches = DynamicBatchSampler::new([3_u32, 4, 5], BatchConfig::default().with_max_batch_size(1))?;
    /// let sampler =
    ///     DistributedBatchSampler::new(batches, Placement::SINGLE, DistributedConfig::default())?;
    /// let steps = sampler.epoch(Epoch::ZERO, 0..3)?;
    /// let ahead: Vec<_> = steps.with_states().collect();
    /// let (_, after_first) = &ahead[0];
    /// assert_eq!(sampler.resume(after_first, 0..3)?.next().as_ref(), Some(&ahead[1].0));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn with_states(mut self) -> impl Iterator<Item = (Step, BatchState)> {
        std::iter::from_fn(move || {
            let step = self.next()?;
            Some((step, self.state()))
        })
    }

    fn state_at(&self, step: usize) -> BatchState {
        BatchState { step: step as u64, ..self.start.clone() }
    }

    /// What the batches of all ranks and steps cost, and how many sequences are in none.
    pub fn report(&self) -> PaddingReport {
        let mut report = self.plan.drop_counts();
        for nth in 0..self.n_steps() {
            report.extend(&self.batches_of_all(nth));
        }
        report
    }

    /// The batches of all ranks in step `nth`, rank by rank; `None` if there are fewer steps.
    pub fn step(&self, nth: usize) -> Option<Vec<Batch>> {
        (nth < self.n_steps()).then(|| self.batches_of_all(nth))
    }

    fn n_steps(&self) -> usize {
        self.batches.len() / self.batches_per_step
    }

    /// The batches of step `nth` in the plan: one for each rank, or one that is dealt.
    fn planned(&self, nth: usize) -> &[u32] {
        &self.batches[nth * self.batches_per_step..][..self.batches_per_step]
    }

    fn batches_of_all(&self, nth: usize) -> Vec<Batch> {
        match self.sampler.config().layout {
            StepLayout::Grouped => {
                self.planned(nth).iter().map(|&batch| self.plan.batch(batch as usize)).collect()
            }
            StepLayout::Dealt => self.deal(nth).map(|part| self.batch(part)).collect(),
        }
    }

    fn batch_of(&self, rank: usize, nth: usize) -> Option<Batch> {
        match self.sampler.config().layout {
            StepLayout::Grouped => {
                let batch = self.planned(nth).get(rank)?;
                Some(self.plan.batch(*batch as usize))
            }
            StepLayout::Dealt => self.deal(nth).nth(rank).map(|part| self.batch(part)),
        }
    }

    /// The sequences of the only batch of step `nth`, rank by rank.
    fn deal(&self, nth: usize) -> impl Iterator<Item = Vec<Sequence>> {
        let cost = self.sampler.config().cost;
        let batch = self.planned(nth)[0];
        let sequences: Vec<Sequence> = self.plan.sequences(batch as usize).collect();
        let costs: Vec<u64> = sequences.iter().map(|sequence| cost.of(sequence.length)).collect();
        let parts = balance(&costs, self.sampler.placement().world_size());
        let of_part =
            move |part: Vec<usize>| part.into_iter().map(|place| sequences[place]).collect();
        parts.into_iter().map(of_part)
    }

    fn batch(&self, sequences: Vec<Sequence>) -> Batch {
        self.plan.limits().batch(sequences.into_iter())
    }

    fn read(&self, nth: usize) -> Step {
        let placement = self.sampler.placement();
        let tokens =
            self.planned(nth).iter().map(|&batch| self.plan.planned(batch as usize).real_tokens);
        #[expect(clippy::expect_used, reason = "steps are made for the world of the placement")]
        let batch =
            self.batch_of(placement.rank().as_usize(), nth).expect("every rank has a batch");
        Step {
            batch,
            real_tokens: tokens.fold(0, u64::saturating_add),
            world_size: placement.world_size().as_u64(),
        }
    }
}

/// The batches of the first step, then those of the second, and so on: as they come in the plan, or
/// shuffled, both the steps and the batches of each, so that no rank always gets the larger one.
fn in_order_of_steps(mut batches: Vec<u32>, per_step: usize, seed: Option<Seed>) -> Vec<u32> {
    let mut steps: Vec<&mut [u32]> = batches.chunks_mut(per_step).collect();
    for step in &mut steps {
        step.sort_unstable();
    }
    match seed {
        Some(seed) => {
            shuffle(&mut steps, seed);
            // A seed for each step, which is not a draw of the shuffle of the steps.
            let of_steps = seed.derive(u64::MAX);
            for (nth, step) in (0..).zip(&mut steps) {
                shuffle(step, of_steps.derive(nth));
            }
        }
        None => steps.sort_unstable(),
    }
    steps.concat()
}

impl<L: SequenceLengths> Iterator for Steps<'_, L> {
    type Item = Step;

    fn next(&mut self) -> Option<Step> {
        self.remaining.next().map(|nth| self.read(nth))
    }

    fn nth(&mut self, n: usize) -> Option<Step> {
        self.remaining.nth(n).map(|nth| self.read(nth))
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        self.remaining.size_hint()
    }
}

impl<L: SequenceLengths> ExactSizeIterator for Steps<'_, L> {}

impl<L: SequenceLengths> FusedIterator for Steps<'_, L> {}
