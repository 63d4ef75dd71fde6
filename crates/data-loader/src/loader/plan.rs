//! The batches of an epoch, and a rank's position in them.

use std::{collections::VecDeque, sync::Arc};

use core_types::{Epoch, Placement, Seed};
use dist_sampler::DistributedSampler;
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
    pub(crate) ends_step: bool,
}

/// The batches of a rank from its position to the end of the epoch.
pub(crate) trait BatchPlan: Send {
    /// Moves to the start of an epoch, also of the current one.
    fn set_epoch(&mut self, epoch: Epoch) -> Result<()>;

    /// Moves to a position, and mixes by other weights from there on, if there are some. On an
    /// error, the plan is unchanged.
    fn resume(&mut self, position: &LoaderPosition) -> Result<()>;

    /// Returns the number of batches from the position on.
    fn n_batches(&self) -> u64;

    /// Returns the `n`-th batch from the position on. Batches must be read in order.
    fn next_batch(&mut self, n: u64) -> PlannedBatch;

    /// Returns the position behind the first `n` batches, or behind all batches of the rank with the
    /// most if there are fewer.
    fn position(&self, n: u64) -> LoaderPosition;
}

const FIXED: &str = "of a fixed size";
const DYNAMIC: &str = "planned by lengths";

fn kind_mismatch(state: &str, loader: &str) -> Error {
    Error::StateMismatch { what: "batches", state: state.into(), loader: loader.into() }
}

/// Batches of a fixed number of samples.
pub(crate) struct FixedPlan {
    sampler: DistributedSampler,
    batch_size: u64,
    drops_last: bool,
    is_uneven: bool,
    n_batches: u64,
    /// Number of samples in all batches of the rank with the most, from the position on.
    most_samples: u64,
    /// Whether the position is not the start of the epoch.
    is_resumed: bool,
    /// Seed that the user gave for the order.
    seed: Option<Seed>,
}

impl FixedPlan {
    pub(crate) fn new(
        sampler: DistributedSampler,
        batch_size: u64,
        drops_last: bool,
        is_uneven: bool,
    ) -> Result<Self> {
        let mut plan = Self {
            sampler,
            batch_size,
            drops_last,
            is_uneven,
            n_batches: 0,
            most_samples: 0,
            is_resumed: false,
            seed: None,
        };
        plan.start()?;
        Ok(plan)
    }

    /// Sets the seed that messages name: the sampler has another one, derived from it.
    pub(crate) fn with_seed(self, seed: Option<Seed>) -> Self {
        Self { seed, ..self }
    }

    /// Counts the batches at the start of an epoch, which must have some.
    fn start(&mut self) -> Result<()> {
        let lens = lens_of_ranks(&self.sampler)?;
        if lens.iter().all(|&len| self.n_batches_of(len) == 0) {
            return Err(Error::NoBatches {
                samples: self.sampler.data_set_len(),
                batch_size: self.batch_size,
                world_size: self.sampler.placement().world_size(),
            });
        }
        self.count(self.sampler.len(), &lens)
    }

    /// Counts the batches, given the number of samples that this rank and each rank have left.
    fn count(&mut self, own_len: u64, lens: &[u64]) -> Result<()> {
        let fewest = lens.iter().map(|&len| self.n_batches_of(len)).min().unwrap_or(0);
        let most = lens.iter().map(|&len| self.n_batches_of(len)).max().unwrap_or(0);
        if fewest != most && !self.is_uneven {
            return Err(Error::UnevenBatches { fewest, most });
        }
        self.n_batches = self.n_batches_of(own_len);
        let longest = lens.iter().copied().max().unwrap_or(0);
        self.most_samples = longest.min(most.saturating_mul(self.batch_size));
        Ok(())
    }

    /// Replaces the seeds of the sampler in an error by the one that the user knows.
    fn name_seed(&self, error: dist_sampler::Error) -> Error {
        match (error, self.seed) {
            (dist_sampler::Error::StateMismatch { what: "seed", .. }, Some(seed)) => {
                Error::StateMismatch {
                    what: "another",
                    state: "seed of `shuffle`".into(),
                    loader: format!("seed {}", seed.as_u64()),
                }
            }
            (error, _) => error.into(),
        }
    }

    fn n_batches_of(&self, n_samples: u64) -> u64 {
        let size = self.batch_size;
        if self.drops_last { n_samples / size } else { n_samples.div_ceil(size) }
    }
}

impl BatchPlan for FixedPlan {
    fn set_epoch(&mut self, epoch: Epoch) -> Result<()> {
        if self.is_resumed {
            // Samplers keep their position within an epoch, so it is left first.
            self.sampler.set_epoch(Epoch::new(epoch.as_u64() ^ 1));
            self.is_resumed = false;
        }
        // In place, because a copy of the sampler would copy a cached order.
        self.sampler.set_epoch(epoch);
        self.start()
    }

    fn resume(&mut self, position: &LoaderPosition) -> Result<()> {
        let LoaderPosition::Fixed { batch_size, sampler: state } = position else {
            return Err(kind_mismatch(DYNAMIC, FIXED));
        };
        if *batch_size != self.batch_size {
            return Err(Error::StateMismatch {
                what: "batch size",
                state: batch_size.to_string(),
                loader: self.batch_size.to_string(),
            });
        }
        let mut sampler = self.sampler.clone();
        sampler.resume(state).map_err(|error| self.name_seed(error))?;
        self.count(sampler.len(), &lens_of_ranks(&sampler)?)?;
        self.sampler = sampler;
        self.is_resumed = true;
        Ok(())
    }

    fn n_batches(&self) -> u64 {
        self.n_batches
    }

    #[expect(clippy::expect_used, reason = "the message says why it cannot fail")]
    fn next_batch(&mut self, n: u64) -> PlannedBatch {
        // All batches of an epoch have fewer samples together than 64 bits count.
        let start = n * self.batch_size;
        let end = self.sampler.len().min(start.saturating_add(self.batch_size));
        let entries = (start..end).filter_map(|n| self.sampler.entry(n));
        let (indices, is_padding): (Vec<u64>, Vec<bool>) = entries.unzip();
        let number = self.sampler.state(0).consumed() / self.batch_size + n;
        let batch = Batch::from_indices(indices, |_| 1).expect("a row has one token");
        PlannedBatch { number, batch, is_padding, lengths: None, ends_step: true }
    }

    fn position(&self, n: u64) -> LoaderPosition {
        // Ranks with fewer samples have read all of theirs.
        let n_read = n.saturating_mul(self.batch_size).min(self.most_samples);
        LoaderPosition::Fixed { batch_size: self.batch_size, sampler: self.sampler.state(n_read) }
    }
}

/// Returns the number of samples that each rank has left.
fn lens_of_ranks(sampler: &DistributedSampler) -> Result<Vec<u64>> {
    if sampler.placement() == Placement::SINGLE {
        return Ok(vec![sampler.len()]);
    }
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
    /// The current epoch; `None` before the first one.
    epoch: Option<DynamicEpoch>,
}

/// The steps of an epoch from a position on.
struct DynamicEpoch {
    start: BatchState,
    /// Number of micro-batches of this rank before the position.
    n_before: u64,
    /// Steps that are not read yet.
    steps: Steps<SharedLengths>,
    /// Micro-batches of the last step that are not read yet.
    step: VecDeque<Batch>,
}

impl DynamicEpoch {
    fn new(steps: Steps<SharedLengths>) -> Self {
        let start = steps.state();
        let n_before = steps.n_micro_batches(start.step);
        Self { start, n_before, steps, step: VecDeque::new() }
    }

    fn n_batches(&self) -> u64 {
        self.steps.n_micro_batches(self.start.n_steps) - self.n_before
    }

    /// Returns the next micro-batch, and whether it is the last of its step.
    #[expect(clippy::expect_used, reason = "a loader reads as many batches as there are")]
    fn next_batch(&mut self) -> (Batch, bool) {
        if self.step.is_empty() {
            let step = self.steps.next().expect("there are as many steps as counted");
            self.step.extend(step.micro_batches);
        }
        let batch = self.step.pop_front().expect("a step has a batch of each rank");
        (batch, self.step.is_empty())
    }

    /// Returns the state behind the whole steps of the first `n` micro-batches: without the gradients of
    /// a part of a step, its first micro-batches must be read again.
    fn state(&self, n: u64) -> BatchState {
        let mut state = self.start.clone();
        state.step = self.steps.n_whole_steps(self.n_before.saturating_add(n));
        state
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
        Ok(Self { order, placement, lengths, max_length, batches, epoch: None })
    }

    #[expect(clippy::expect_used, reason = "the message says why it cannot fail")]
    fn cut_length(&self, index: u64) -> u64 {
        let length = self.lengths.length(index).expect("the batch was planned with this length");
        length.min(self.max_length)
    }
}

impl BatchPlan for DynamicPlan {
    fn set_epoch(&mut self, epoch: Epoch) -> Result<()> {
        let mut order = self.order.clone();
        order.set_epoch(epoch);
        let steps = self.batches.epoch(epoch, &order)?;
        if steps.len() == 0 {
            let (samples, world_size) = (order.data_set_len(), self.placement.world_size());
            return Err(Error::NoBatches { samples, batch_size: 1, world_size });
        }
        self.order = order;
        self.epoch = Some(DynamicEpoch::new(steps));
        Ok(())
    }

    fn resume(&mut self, position: &LoaderPosition) -> Result<()> {
        let LoaderPosition::Dynamic(state) = position else {
            return Err(kind_mismatch(FIXED, DYNAMIC));
        };
        let mut order = self.order.clone();
        order.set_epoch(state.epoch);
        let steps = self.batches.resume(state, &order)?;
        self.order = order;
        self.epoch = Some(DynamicEpoch::new(steps));
        Ok(())
    }

    fn n_batches(&self) -> u64 {
        self.epoch.as_ref().map_or(0, DynamicEpoch::n_batches)
    }

    #[expect(clippy::expect_used, reason = "the message says why it cannot fail")]
    fn next_batch(&mut self, n: u64) -> PlannedBatch {
        let epoch = self.epoch.as_mut().expect("batches are read after an epoch was set");
        let number = epoch.n_before + n;
        let (batch, ends_step) = epoch.next_batch();
        let lengths = batch.indices.iter().map(|&index| self.cut_length(index)).collect();
        let is_padding = vec![false; batch.len()];
        PlannedBatch { number, batch, is_padding, lengths: Some(lengths), ends_step }
    }

    fn position(&self, n: u64) -> LoaderPosition {
        let epoch = self.epoch.as_ref();
        epoch.map_or(LoaderPosition::Start, |epoch| LoaderPosition::Dynamic(epoch.state(n)))
    }
}
