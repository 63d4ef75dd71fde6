//! The batches of an epoch, and a rank's position in them.

use std::sync::Arc;

use core_types::{Epoch, Placement};
use dist_sampler::{DistributedSampler, SamplerState};
use dyn_batch::{
    Batch, BatchConfig, BatchState, DistributedBatchSampler, DistributedConfig,
    DynamicBatchSampler, SequenceLengths, Steps,
};

use crate::{
    error::{Error, Result},
    loader::state::LoaderPosition,
};

/// Lengths that a plan shares with its batches.
pub(crate) type SharedLengths = Arc<dyn SequenceLengths + Send + Sync>;

/// The samples of a batch.
#[derive(Clone, Debug)]
pub(crate) struct PlannedBatch {
    /// Number of the batch in the epoch, of this rank and world.
    pub(crate) number: u64,
    pub(crate) batch: Batch,
    pub(crate) is_padding: Vec<bool>,
    /// Planned lengths of the samples, if they were planned.
    pub(crate) lengths: Option<Vec<u64>>,
}

/// The batches of a rank from its position to the end of the epoch.
pub(crate) enum BatchPlan {
    Fixed(FixedPlan),
    Dynamic(Box<DynamicPlan>),
}

impl BatchPlan {
    /// Moves to the start of an epoch.
    pub(crate) fn set_epoch(&mut self, epoch: Epoch) -> Result<()> {
        match self {
            Self::Fixed(plan) => plan.set_epoch(epoch),
            Self::Dynamic(plan) => plan.set_epoch(epoch),
        }
    }

    /// Moves to a position of an epoch. On an error, the plan is unchanged.
    pub(crate) fn resume(&mut self, position: &LoaderPosition) -> Result<()> {
        match (self, position) {
            (Self::Fixed(plan), LoaderPosition::Fixed { batch_size, sampler }) => {
                plan.resume(*batch_size, sampler)
            }
            (Self::Dynamic(plan), LoaderPosition::Dynamic(state)) => plan.resume(state),
            (plan, position) => Err(Error::StateMismatch {
                what: "batches",
                state: position.kind().into(),
                loader: plan.kind().into(),
            }),
        }
    }

    fn kind(&self) -> &'static str {
        match self {
            Self::Fixed(_) => "of a fixed size",
            Self::Dynamic(_) => "planned by lengths",
        }
    }

    /// Returns the number of batches from the position on.
    pub(crate) fn n_batches(&self) -> u64 {
        match self {
            Self::Fixed(plan) => plan.n_batches,
            Self::Dynamic(plan) => plan.n_batches(),
        }
    }

    /// Returns the `n`-th batch from the position on. Batches must be read in order.
    pub(crate) fn next_batch(&mut self, n: u64) -> PlannedBatch {
        match self {
            Self::Fixed(plan) => plan.batch(n),
            Self::Dynamic(plan) => plan.next_batch(),
        }
    }

    /// Returns the position behind the first `n` batches.
    pub(crate) fn position(&self, n: u64) -> LoaderPosition {
        match self {
            Self::Fixed(plan) => plan.position(n),
            Self::Dynamic(plan) => plan.position(n),
        }
    }
}

/// Batches of a fixed number of samples.
pub(crate) struct FixedPlan {
    sampler: DistributedSampler,
    batch_size: u64,
    drops_last: bool,
    is_uneven: bool,
    n_batches: u64,
    /// Most samples of a rank from the position on.
    most_samples: u64,
}

impl FixedPlan {
    pub(crate) fn new(
        sampler: DistributedSampler,
        batch_size: u64,
        drops_last: bool,
        is_uneven: bool,
    ) -> Result<Self> {
        let mut plan =
            Self { sampler, batch_size, drops_last, is_uneven, n_batches: 0, most_samples: 0 };
        plan.start_at(plan.sampler.clone())?;
        Ok(plan)
    }

    /// Moves to the position of a sampler at the start of an epoch, which must have batches.
    fn start_at(&mut self, sampler: DistributedSampler) -> Result<()> {
        let lens = lens_of_ranks(&sampler)?;
        if lens.iter().all(|&len| self.n_batches_of(len) == 0) {
            return Err(Error::NoBatches {
                samples: sampler.data_set_len(),
                batch_size: self.batch_size,
                world_size: sampler.placement().world_size(),
            });
        }
        self.move_to(sampler, &lens)
    }

    /// Moves to the position of a sampler, with the number of samples that each rank has left.
    fn move_to(&mut self, sampler: DistributedSampler, lens: &[u64]) -> Result<()> {
        let fewest = lens.iter().map(|&len| self.n_batches_of(len)).min().unwrap_or(0);
        let most = lens.iter().map(|&len| self.n_batches_of(len)).max().unwrap_or(0);
        if fewest != most && !self.is_uneven {
            return Err(Error::UnevenBatches { fewest, most });
        }
        self.n_batches = self.n_batches_of(sampler.len());
        self.most_samples = lens.iter().copied().max().unwrap_or(0);
        self.sampler = sampler;
        Ok(())
    }

    fn n_batches_of(&self, n_samples: u64) -> u64 {
        if self.drops_last {
            n_samples / self.batch_size
        } else {
            n_samples.div_ceil(self.batch_size)
        }
    }

    fn set_epoch(&mut self, epoch: Epoch) -> Result<()> {
        let mut sampler = self.sampler.clone();
        sampler.set_epoch(epoch);
        self.start_at(sampler)
    }

    fn resume(&mut self, batch_size: u64, state: &SamplerState) -> Result<()> {
        if batch_size != self.batch_size {
            return Err(Error::StateMismatch {
                what: "batch size",
                state: batch_size.to_string(),
                loader: self.batch_size.to_string(),
            });
        }
        let mut sampler = self.sampler.clone();
        sampler.resume(state)?;
        let lens = lens_of_ranks(&sampler)?;
        self.move_to(sampler, &lens)
    }

    #[expect(clippy::expect_used, reason = "the message says why it cannot fail")]
    fn batch(&self, n: u64) -> PlannedBatch {
        // All batches of an epoch have fewer samples together than 64 bits count.
        let start = n * self.batch_size;
        let end = self.sampler.len().min(start.saturating_add(self.batch_size));
        let entries = (start..end).filter_map(|n| self.sampler.entry(n));
        let (indices, is_padding): (Vec<u64>, Vec<bool>) = entries.unzip();
        let number = self.sampler.state(0).consumed() / self.batch_size + n;
        let batch = Batch::from_indices(indices, |_| 1).expect("a row has one token");
        PlannedBatch { number, batch, is_padding, lengths: None }
    }

    fn position(&self, n: u64) -> LoaderPosition {
        // Ranks with fewer samples have read all of theirs.
        let n_read = n.saturating_mul(self.batch_size).min(self.most_samples);
        LoaderPosition::Fixed { batch_size: self.batch_size, sampler: self.sampler.state(n_read) }
    }
}

/// Returns the number of samples that each rank has left.
fn lens_of_ranks(sampler: &DistributedSampler) -> Result<Vec<u64>> {
    let mut other = sampler.clone();
    let mut lens = Vec::new();
    for placement in sampler.placement().world_size().placements() {
        other = other.with_placement(placement)?;
        lens.push(other.len());
    }
    Ok(lens)
}

/// Batches that a batcher plans for all ranks together.
pub(crate) struct DynamicPlan {
    /// Order of all ranks together.
    order: DistributedSampler,
    placement: Placement,
    lengths: SharedLengths,
    max_length: u64,
    batches: DistributedBatchSampler<SharedLengths>,
    /// Steps of the current epoch; `None` before the first epoch.
    steps: Option<PlannedSteps>,
}

/// The steps of an epoch from a position on.
struct PlannedSteps {
    start: BatchState,
    n_steps: u64,
    /// Steps that are not planned as batches yet.
    unread: Steps<SharedLengths>,
}

impl PlannedSteps {
    fn new(steps: Steps<SharedLengths>) -> Self {
        Self { start: steps.state(), n_steps: steps.len() as u64, unread: steps }
    }
}

impl DynamicPlan {
    pub(crate) fn new(
        sampler: DistributedSampler,
        lengths: SharedLengths,
        config: BatchConfig,
        step_config: DistributedConfig,
    ) -> Result<Self> {
        let placement = sampler.placement();
        let max_length = config.max_sequence_length.unwrap_or(u64::MAX);
        let batches = DynamicBatchSampler::new(Arc::clone(&lengths), config)?;
        let batches = DistributedBatchSampler::new(batches, placement, step_config)?;
        let order = sampler.with_placement(Placement::SINGLE)?;
        Ok(Self { order, placement, lengths, max_length, batches, steps: None })
    }

    fn set_epoch(&mut self, epoch: Epoch) -> Result<()> {
        let mut order = self.order.clone();
        order.set_epoch(epoch);
        let steps = self.batches.epoch(epoch, &order)?;
        if steps.len() == 0 {
            let (samples, world_size) = (order.data_set_len(), self.placement.world_size());
            return Err(Error::NoBatches { samples, batch_size: 1, world_size });
        }
        self.order = order;
        self.steps = Some(PlannedSteps::new(steps));
        Ok(())
    }

    fn resume(&mut self, state: &BatchState) -> Result<()> {
        let mut order = self.order.clone();
        order.set_epoch(state.epoch);
        self.steps = Some(PlannedSteps::new(self.batches.resume(state, &order)?));
        self.order = order;
        Ok(())
    }

    fn n_batches(&self) -> u64 {
        self.steps.as_ref().map_or(0, |steps| steps.n_steps)
    }

    #[expect(clippy::expect_used, reason = "a loader reads as many batches as there are")]
    fn next_batch(&mut self) -> PlannedBatch {
        let steps = self.steps.as_mut().expect("batches are read after an epoch was set");
        let number = steps.unread.state().step;
        let batch = steps.unread.next().expect("there are as many steps as counted").batch;
        let length_of = |&index: &u64| self.lengths.length(index).unwrap_or(0).min(self.max_length);
        let lengths = batch.indices.iter().map(length_of).collect();
        let is_padding = vec![false; batch.len()];
        PlannedBatch { number, batch, is_padding, lengths: Some(lengths) }
    }

    fn position(&self, n: u64) -> LoaderPosition {
        let Some(steps) = &self.steps else { return LoaderPosition::Start };
        let mut state = steps.start.clone();
        state.step += n;
        LoaderPosition::Dynamic(state)
    }
}
