//! The steps of a rank in an epoch.

use std::{
    iter::{self, FusedIterator},
    ops::Range,
    sync::Arc,
};

use core_types::{Epoch, Placement, Seed, WorldSize};

use crate::{
    batch::{Batch, Sequence},
    distributed::{
        DistributedBatchSampler,
        config::{DistributedConfig, StepLayout},
        even::{batch_cost, batches_by_cost, fill_small_batch},
        grid_steps::{GridSteps, plan_grid},
        state::{BatchState, EarlierWorld, fingerprint},
    },
    error::{Error, Result},
    grid::{GridConfig, GridReport, Synchronization, balance::balance, report::CellSize},
    lengths::SequenceLengths,
    report::PaddingReport,
    sampler::{plan::BatchPlan, shuffle::shuffle},
};

/// One step of a rank: its micro-batches, and the totals of all ranks.
///
/// The weight of a mean loss is [`real_tokens`](Batch::real_tokens) of its micro-batch: the sum of mean
/// times weight over all micro-batches and ranks, divided by the step's
/// [`real_tokens`](Self::real_tokens), is the mean over all tokens, up to rounding, in any grid.
///
/// # Examples
///
/// ```
/// # use core_types::{Epoch, Placement};
/// # use dyn_batch::*;
/// let batches =
///     DynamicBatchSampler::new([9_u32, 2, 3, 8], BatchConfig::default().with_max_tokens(10))?;
/// let config = DistributedConfig {
///     layout: StepLayout::Grid(GridConfig { global_batch_size: Some(4), ..GridConfig::default() }),
///     ..DistributedConfig::default()
/// };
/// let sampler = DistributedBatchSampler::new(batches, Placement::SINGLE, config)?;
/// let step = sampler.epoch(Epoch::ZERO, 0..4)?.next().ok_or("no step")?;
/// let weights: Vec<u64> = step.micro_batches.iter().map(|batch| batch.real_tokens).collect();
/// assert_eq!((weights, step.real_tokens), (vec![9, 8, 5], 22));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct Step {
    /// Batches of this rank, at least one: one by default, and one per micro-step in a grid or with
    /// accumulation.
    pub micro_batches: Vec<Batch>,
    /// Real tokens in the batches of all ranks.
    pub real_tokens: u64,
    /// Number of ranks.
    pub world_size: u64,
}

impl Step {
    /// Returns the factor for this rank's mean loss over all its tokens before gradients are
    /// averaged over the ranks, so that every token of the step has the same weight; 0 for a step without tokens.
    ///
    /// With n of N tokens on this rank, the factor is n · W / N. The average of the weighted means
    /// over the W ranks is then the mean over all N tokens.
    ///
    /// # Examples
    ///
    /// Two ranks have 30 and 10 tokens; gradients are averaged as if one rank had all 40.
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
        let rank_tokens = self.micro_batches.iter().map(|batch| batch.real_tokens);
        let rank_tokens = rank_tokens.fold(0, u64::saturating_add);
        rank_tokens as f64 * self.world_size as f64 / self.real_tokens as f64
    }
}

impl<L: SequenceLengths> DistributedBatchSampler<L> {
    /// Returns the steps of an epoch. `order` is the order of the sequences of all ranks together,
    /// and must be the same on every rank.
    ///
    /// # Errors
    ///
    /// The errors of [`DynamicBatchSampler::iter_order`](crate::DynamicBatchSampler::iter_order),
    /// [`Error::TooManySequences`] if there are 2^32 sequences or more, or an index in `order` is
    /// 2^32 or more, and [`Error::CannotFillStep`] if there are too few sequences to split.
    pub fn epoch(&self, epoch: Epoch, order: impl IntoIterator<Item = u64>) -> Result<Steps<L>> {
        let unread = UnreadOrder { epoch, order: self.batches.read_order(order)?, last: None };
        Steps::new(self, self.placement, unread, &[])
    }

    /// Returns the steps of an epoch that follow `state`. `order` must be the order that the epoch
    /// began with.
    ///
    /// The state may be from another world size. The sequences in the steps that it counts are then
    /// left out of the order, and the rest is planned anew: no sequence is lost or read twice,
    /// except by [`StepRemainder`](crate::StepRemainder) at the end. [`Steps::report`] then covers
    /// this world's steps.
    ///
    /// # Errors
    ///
    /// The errors of [`epoch`](Self::epoch), [`Error::BatchMismatch`] if the state belongs to other
    /// batches, and [`Error::TooMany`] if more than 255 worlds have read this epoch in turn.
    ///
    /// # Examples
    ///
    /// A run of 3 ranks continues on 2.
    ///
    /// ```
    /// # use core_types::{Epoch, Placement};
    /// # use dyn_batch::*;
    /// let config = BatchConfig::default().with_max_batch_size(2);
    /// let batches = DynamicBatchSampler::new((1..=20).collect::<Vec<u32>>(), config)?;
    /// let sampler = |rank, world_size| -> Result<_, Box<dyn std::error::Error>> {
    ///     let placement = Placement::new(rank, world_size)?;
    ///     let config = DistributedConfig::default();
    ///     Ok(DistributedBatchSampler::new(batches.clone(), placement, config)?)
    /// };
    /// let mut steps = sampler(0, 3)?.epoch(Epoch::ZERO, 0..20)?;
    /// steps.next(); // 3 ranks read 6 sequences
    ///
    /// let rest = sampler(0, 2)?.resume(&steps.state(), 0..20)?;
    /// assert_eq!(rest.report().sequences, 14);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn resume(
        &self,
        state: &BatchState,
        order: impl IntoIterator<Item = u64>,
    ) -> Result<Steps<L>> {
        check_earlier_worlds(state.earlier_worlds.len())?;
        let order = self.batches.read_order(order)?;
        let mut unread = UnreadOrder { epoch: state.epoch, order, last: None };
        for &world in &state.earlier_worlds {
            unread = self.replay(world, state, unread.clone(), &[])?.remove_read(unread);
        }
        let world = EarlierWorld { world_size: state.world_size, step: state.step };
        let is_same_world = world.world_size == self.placement.world_size();
        let order_of_other_world = (!is_same_world).then(|| unread.clone());
        // The state has the cuts of sorted sequences, because finding them takes longer than
        // sorting.
        let steps = self.replay(world, state, unread, &state.cut)?;
        if *state != steps.state() {
            return Err(steps.mismatch(state));
        }
        let Some(unread) = order_of_other_world else { return Ok(steps) };
        check_earlier_worlds(state.earlier_worlds.len() + 1)?;
        Steps::new(self, self.placement, steps.remove_read(unread), &[])
    }

    /// Plans the steps of a world that `state` counts, and moves to the step that it reached.
    fn replay(
        &self,
        world: EarlierWorld,
        state: &BatchState,
        unread: UnreadOrder,
        cut: &[(u32, u32)],
    ) -> Result<Steps<L>> {
        let mut steps = Steps::new(self, self.placement_in(world.world_size), unread, cut)?;
        match usize::try_from(world.step) {
            Ok(step) if step <= steps.n_steps() => steps.remaining.start = step,
            Ok(_) | Err(_) => return Err(steps.mismatch(state)),
        }
        Ok(steps)
    }

    /// Returns the placement of this rank, or of the first rank in another world.
    #[expect(clippy::expect_used, reason = "a world has at least one rank")]
    fn placement_in(&self, world_size: WorldSize) -> Placement {
        if world_size == self.placement.world_size() {
            return self.placement;
        }
        world_size.placements().next().expect("a world has a first rank")
    }
}

fn check_earlier_worlds(count: usize) -> Result<()> {
    let limit = BatchState::MAX_EARLIER_WORLDS;
    if count <= limit {
        return Ok(());
    }
    let (count, limit) = (count as u64, limit as u64);
    Err(Error::TooMany { count, what: "earlier worlds in one epoch", limit })
}

/// The part of an epoch's order that earlier worlds have not read.
#[derive(Clone, Debug)]
struct UnreadOrder {
    epoch: Epoch,
    order: Vec<u32>,
    /// State of the last earlier world.
    last: Option<BatchState>,
}

/// The steps of one rank in an epoch, from [`DistributedBatchSampler::epoch`].
///
/// Steps share the lengths with their sampler and do not borrow it, so a loader can have both.
#[derive(Clone, Debug)]
#[must_use = "iterators are lazy and do nothing unless consumed"]
pub struct Steps<L> {
    placement: Placement,
    config: DistributedConfig,
    plan: BatchPlan<Arc<L>>,
    /// Indices of the batches, step by step: one batch per rank, or one batch in a dealt step; with
    /// accumulation, micro-step by micro-step.
    batch_indices: Vec<u32>,
    sizes: StepSizes,
    remaining: Range<usize>,
    /// State at the first step.
    start: BatchState,
}

/// The number of batches in each step.
#[derive(Clone, Debug)]
enum StepSizes {
    Equal(usize),
    /// Ends of the steps in the list of batches.
    Ends(Vec<usize>),
}

impl StepSizes {
    /// Returns the range of a step in the list of batches.
    fn range(&self, step: usize) -> Range<usize> {
        match self {
            Self::Equal(size) => step * size..(step + 1) * size,
            Self::Ends(ends) => self.end_before(step)..ends[step],
        }
    }

    /// Returns the number of batches in the steps before this one.
    fn end_before(&self, step: usize) -> usize {
        match self {
            Self::Equal(size) => step * size,
            Self::Ends(ends) => step.checked_sub(1).map_or(0, |last| ends[last]),
        }
    }

    /// Returns the number of whole steps in the first batches of the list.
    fn whole_steps(&self, n_batches: usize) -> usize {
        match self {
            Self::Equal(size) => n_batches / size,
            Self::Ends(ends) => ends.partition_point(|&end| end <= n_batches),
        }
    }
}

/// The batches of an epoch, step by step.
struct PlannedSteps<L> {
    plan: BatchPlan<L>,
    /// Cuts of sorted sequences, before batches were split or joined.
    cut: Vec<(u32, u32)>,
    batch_indices: Vec<u32>,
    sizes: StepSizes,
}

impl<L: SequenceLengths> DistributedBatchSampler<L> {
    fn plan_grouped(
        &self,
        order: Vec<u32>,
        cut: &[(u32, u32)],
        world_size: WorldSize,
        seed: Option<Seed>,
    ) -> Result<PlannedSteps<Arc<L>>> {
        let config = self.config;
        let mut plan = self.batches_of_steps(world_size)?.plan_order(order, cut)?;
        let cut = plan.sorted_cuts();
        let accumulation = config.accumulation.unwrap_or(1);
        let n_batches = plan.len() as u64;
        let per_step = WorldSize::new(world_size.as_u64().saturating_mul(accumulation))
            .map_err(|_| Error::CannotFillStep { n_batches, world_size })?;
        let may_be_short = self.may_end_short;
        let mut by_cost =
            batches_by_cost(&mut plan, per_step, config.remainder, may_be_short, config.cost)?;
        let per_step = per_step.as_usize();
        let n_steps = by_cost.len() / per_step;
        let short_step = by_cost.split_off(n_steps * per_step);
        let mut batch_indices = order_steps(by_cost, world_size.as_usize(), seed);
        let mut sizes = StepSizes::Equal(per_step);
        if !short_step.is_empty() {
            batch_indices.extend(short_step);
            let ends = (1..=n_steps).map(|nth| nth * per_step);
            sizes = StepSizes::Ends(ends.chain([batch_indices.len()]).collect());
        }
        Ok(PlannedSteps { plan, cut, batch_indices, sizes })
    }

    fn plan_dealt(
        &self,
        order: Vec<u32>,
        cut: &[(u32, u32)],
        world_size: WorldSize,
        seed: Option<Seed>,
    ) -> Result<PlannedSteps<Arc<L>>> {
        let mut plan = self.batches_of_steps(world_size)?.plan_order(order, cut)?;
        let cut = plan.sorted_cuts();
        fill_small_batch(&mut plan, world_size, self.config.remainder)?;
        let batch_indices = order_steps(plan.batch_indices().collect(), 1, seed);
        Ok(PlannedSteps { plan, cut, batch_indices, sizes: StepSizes::Equal(1) })
    }

    fn plan_grids(
        &self,
        order: Vec<u32>,
        grid: &GridConfig,
        world_size: WorldSize,
        seed: Option<Seed>,
    ) -> Result<PlannedSteps<Arc<L>>> {
        let batches = self.batches_of_steps(world_size)?;
        let GridSteps { plan, ends } = plan_grid(batches, order, grid, &self.config, world_size)?;
        let (batch_indices, ends) = order_grids(&plan, &ends, world_size.as_usize(), seed);
        Ok(PlannedSteps { plan, cut: Vec::new(), batch_indices, sizes: StepSizes::Ends(ends) })
    }
}

impl<L: SequenceLengths> Steps<L> {
    fn new(
        sampler: &DistributedBatchSampler<L>,
        placement: Placement,
        unread: UnreadOrder,
        cut: &[(u32, u32)],
    ) -> Result<Self> {
        let UnreadOrder { epoch, order, last } = unread;
        let config = sampler.config;
        let world_size = placement.world_size();
        let seed = config.shuffle.map(|seed| seed.derive(epoch.as_u64()));
        let planned = match config.layout {
            StepLayout::Grouped => sampler.plan_grouped(order, cut, world_size, seed)?,
            StepLayout::Dealt => sampler.plan_dealt(order, cut, world_size, seed)?,
            StepLayout::Grid(grid) => sampler.plan_grids(order, &grid, world_size, seed)?,
        };
        let PlannedSteps { plan, cut, batch_indices, sizes } = planned;
        let n_steps = match &sizes {
            StepSizes::Equal(size) => batch_indices.len() / size,
            StepSizes::Ends(ends) => ends.len(),
        };
        let start = BatchState {
            format_version: 1,
            epoch,
            step: 0,
            n_steps: n_steps as u64,
            world_size,
            fingerprint: fingerprint(
                &plan,
                &batch_indices,
                &config,
                last.as_ref().map(|last| last.fingerprint),
            ),
            cut,
            earlier_worlds: last.map_or_else(Vec::new, BatchState::into_worlds),
        };
        let remaining = 0..n_steps;
        Ok(Self { placement, config, plan, batch_indices, sizes, remaining, start })
    }

    /// Returns the state after the steps read so far.
    pub fn state(&self) -> BatchState {
        BatchState { step: self.remaining.start as u64, ..self.start.clone() }
    }

    /// Returns each step with the state after it, for steps that are read ahead of training. The
    /// [`state`](Self::state) of the iterator is then ahead of the training.
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
    /// let prefetched: Vec<_> = steps.with_states().collect();
    /// let (_, first_state) = &prefetched[0];
    /// assert_eq!(sampler.resume(first_state, 0..3)?.next().as_ref(), Some(&prefetched[1].0));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn with_states(mut self) -> impl Iterator<Item = (Step, BatchState)> {
        std::iter::from_fn(move || {
            let step = self.next()?;
            Some((step, self.state()))
        })
    }

    fn mismatch(&self, found: &BatchState) -> Error {
        Error::BatchMismatch { expected: self.start.to_string(), found: found.to_string() }
    }

    /// Removes the sequences of the steps read so far from the order that these steps read.
    fn remove_read(&self, mut unread: UnreadOrder) -> UnreadOrder {
        let n_batches = self.sizes.end_before(self.remaining.start);
        let mut batches = self.batch_indices[..n_batches].to_vec();
        // A batch that is repeated to fill a step is read from the order once.
        batches.sort_unstable();
        batches.dedup();
        // An order may have a sequence several times.
        let n_indices = unread.order.iter().max().map_or(0, |&last| last as usize + 1);
        let mut n_read = vec![0_u32; n_indices];
        for batch in batches {
            for &index in self.plan.unrepeated_indices(batch as usize) {
                n_read[index as usize] += 1;
            }
        }
        unread.order.retain(|&index| {
            let n_read = &mut n_read[index as usize];
            let is_unread = *n_read == 0;
            *n_read = n_read.saturating_sub(1);
            is_unread
        });
        UnreadOrder { last: Some(self.state()), ..unread }
    }

    /// Reports the batches of all ranks and steps, and the sequences in no batch.
    pub fn report(&self) -> PaddingReport {
        let mut report = self.plan.drop_counts();
        for step in 0..self.n_steps() {
            report.extend(&self.step_batches(step));
        }
        report
    }

    /// Reports the costs of all ranks and steps, if steps have micro-batches: in a grid, or in grouped
    /// steps with accumulation.
    pub fn grid_report(&self) -> Option<GridReport> {
        let synchronization = match self.config.layout {
            StepLayout::Grid(grid) => grid.synchronization,
            StepLayout::Grouped if self.config.accumulation.is_some() => Synchronization::MicroStep,
            StepLayout::Grouped | StepLayout::Dealt => return None,
        };
        let ranks = self.placement.world_size().as_u64();
        let mut report = GridReport { ranks, ..GridReport::default() };
        for step in 0..self.n_steps() {
            report.add(&self.grid_cells(step), synchronization);
        }
        Some(report)
    }

    /// Returns the batches of all ranks in a step, for each micro-step rank by rank, or `None` if there
    /// are fewer steps. The last micro-step may lack ranks if the last step may be short.
    #[doc(hidden)]
    pub fn all_ranks(&self, step: usize) -> Option<Vec<Vec<Batch>>> {
        let n_ranks = self.placement.world_size().as_usize();
        let batches = (step < self.n_steps()).then(|| self.step_batches(step))?;
        Some(batches.chunks(n_ranks).map(<[Batch]>::to_vec).collect())
    }

    /// Returns the number of micro-batches of a rank in the first `n_steps` steps of this world.
    #[doc(hidden)]
    pub fn n_micro_batches(&self, n_steps: u64) -> u64 {
        let n_steps = usize::try_from(n_steps).unwrap_or(usize::MAX).min(self.n_steps());
        (self.sizes.end_before(n_steps) / self.batches_per_micro_step()) as u64
    }

    /// Returns the number of steps whose micro-batches are all among the first `n` of a rank.
    #[doc(hidden)]
    pub fn n_whole_steps(&self, n: u64) -> u64 {
        let n_batches = usize::try_from(n).unwrap_or(usize::MAX);
        let n_batches = n_batches.saturating_mul(self.batches_per_micro_step());
        self.sizes.whole_steps(n_batches).min(self.n_steps()) as u64
    }

    /// Returns the number of entries in the list of batches for a micro-batch of each rank.
    fn batches_per_micro_step(&self) -> usize {
        match self.config.layout {
            StepLayout::Grouped | StepLayout::Grid(_) => self.placement.world_size().as_usize(),
            StepLayout::Dealt => 1,
        }
    }

    fn n_steps(&self) -> usize {
        self.remaining.end
    }

    /// Returns the indices of the batches of a step: one per rank and micro-step, or one that is
    /// dealt to all ranks.
    fn batch_indices_of_step(&self, step: usize) -> &[u32] {
        &self.batch_indices[self.sizes.range(step)]
    }

    fn step_batches(&self, step: usize) -> Vec<Batch> {
        match self.config.layout {
            StepLayout::Grouped | StepLayout::Grid(_) => self
                .batch_indices_of_step(step)
                .iter()
                .map(|&index| self.plan.batch(index as usize))
                .collect(),
            StepLayout::Dealt => self.deal(step).map(|part| self.batch(part)).collect(),
        }
    }

    /// Returns the batches of a rank, one per micro-step.
    fn rank_batches(&self, rank: usize, step: usize) -> Vec<Batch> {
        match self.config.layout {
            StepLayout::Grouped | StepLayout::Grid(_) => {
                let indices = self.batch_indices_of_step(step).iter().skip(rank);
                let indices = indices.step_by(self.placement.world_size().as_usize());
                indices.map(|&index| self.plan.batch(index as usize)).collect()
            }
            StepLayout::Dealt => {
                self.deal(step).nth(rank).map(|part| self.batch(part)).into_iter().collect()
            }
        }
    }

    fn grid_cells(&self, step: usize) -> Vec<CellSize> {
        let cells = self.batch_indices_of_step(step).iter().map(|&index| {
            let batch = self.plan.planned_batch(index as usize);
            CellSize {
                real_tokens: batch.real_tokens,
                padded_tokens: self.plan.padded_tokens(batch),
                cost: batch_cost(&self.plan, index as usize, self.config.cost),
            }
        });
        cells.collect()
    }

    /// Divides the sequences of a dealt step over the ranks, and returns the sequences of each
    /// rank.
    fn deal(&self, step: usize) -> impl Iterator<Item = Vec<Sequence>> {
        let cost = self.config.cost;
        let index = self.batch_indices_of_step(step)[0];
        let sequences: Vec<Sequence> = self.plan.sequences(index as usize).collect();
        let lengths = sequences.iter().map(|sequence| sequence.length);
        let costs: Vec<u64> = lengths.map(|length| cost.for_length(length)).collect();
        let parts = balance(&costs, self.placement.world_size());
        parts
            .into_iter()
            .map(move |part| part.into_iter().map(|position| sequences[position]).collect())
    }

    fn batch(&self, sequences: Vec<Sequence>) -> Batch {
        self.plan.limits().batch(sequences.into_iter())
    }

    fn read_step(&self, step: usize) -> Step {
        let placement = self.placement;
        let indices = self.batch_indices_of_step(step).iter();
        let tokens = indices.map(|&index| self.plan.planned_batch(index as usize).real_tokens);
        Step {
            micro_batches: self.rank_batches(placement.rank().as_usize(), step),
            real_tokens: tokens.fold(0, u64::saturating_add),
            world_size: placement.world_size().as_u64(),
        }
    }
}

/// Orders the batches step by step: by their numbers, or shuffled. A shuffle changes both the order
/// of steps and the order within each step, so that no rank always gets the larger batches.
fn order_steps(mut batch_indices: Vec<u32>, per_step: usize, seed: Option<Seed>) -> Vec<u32> {
    let mut steps: Vec<&mut [u32]> = batch_indices.chunks_mut(per_step).collect();
    for step in &mut steps {
        step.sort_unstable();
    }
    match seed {
        Some(seed) => {
            shuffle(&mut steps, seed);
            // `shuffle(&mut steps, seed)` derives only labels below the number of steps from
            // `seed`, so `u64::MAX` gives the shuffles within steps a seed of their own.
            let step_seed = seed.derive(u64::MAX);
            for (index, step) in (0..).zip(&mut steps) {
                shuffle(step, step_seed.derive(index));
            }
        }
        None => steps.sort_unstable(),
    }
    steps.concat()
}

/// Orders the cells of grids step by step: as planned, or with steps and ranks shuffled. A shuffle
/// gives the ranks of a step new numbers, so that no rank always gets the larger batches. Returns
/// the batches, and the ends of the steps.
fn order_grids<L: SequenceLengths>(
    plan: &BatchPlan<L>,
    ends: &[usize],
    n_ranks: usize,
    seed: Option<Seed>,
) -> (Vec<u32>, Vec<usize>) {
    let all: Vec<u32> = plan.batch_indices().collect();
    let Some(seed) = seed else { return (all, ends.to_vec()) };
    let starts = iter::once(0).chain(ends.iter().copied());
    let mut steps: Vec<&[u32]> = starts.zip(ends).map(|(start, &end)| &all[start..end]).collect();
    shuffle(&mut steps, seed);
    let rank_seed = seed.derive(u64::MAX);
    let mut ordered = Vec::with_capacity(all.len());
    let mut new_ends = Vec::with_capacity(ends.len());
    for (index, step) in (0..).zip(steps) {
        let mut ranks: Vec<usize> = (0..n_ranks).collect();
        shuffle(&mut ranks, rank_seed.derive(index));
        for micro_step in step.chunks(n_ranks) {
            ordered.extend(ranks.iter().map(|&rank| micro_step[rank]));
        }
        new_ends.push(ordered.len());
    }
    (ordered, new_ends)
}

impl<L: SequenceLengths> Iterator for Steps<L> {
    type Item = Step;

    fn next(&mut self) -> Option<Step> {
        self.remaining.next().map(|step| self.read_step(step))
    }

    fn nth(&mut self, n: usize) -> Option<Step> {
        self.remaining.nth(n).map(|step| self.read_step(step))
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        self.remaining.size_hint()
    }
}

impl<L: SequenceLengths> ExactSizeIterator for Steps<L> {}

impl<L: SequenceLengths> FusedIterator for Steps<L> {}
