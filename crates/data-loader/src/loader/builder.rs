//! The settings of a loader.

use std::{collections::VecDeque, fmt, sync::Arc, time::Duration};

use core_types::{Placement, Seed};
use dist_sampler::{DistributedSampler, Order, Partition, SamplerConfig, Tail};
use dyn_batch::{BatchConfig, DistributedConfig, SequenceLengths};

use crate::{
    dataset::Dataset,
    error::{BoxError, Error, Result},
    loader::{
        DataLoader,
        fetch::{SampleBatch, make_batch},
        plan::{BatchPlan, DynamicPlan, FixedPlan, SharedLengths},
        skipped::{OnError, SkippedSamples},
    },
    queue::pool::WorkerPool,
};

/// The settings of a [`DataLoader`], from [`DataLoader::builder`].
#[must_use = "nothing is loaded before `collate`"]
pub struct LoaderBuilder<D> {
    dataset: D,
    batch_size: Option<u64>,
    batches: Option<(BatchConfig, SharedLengths)>,
    step_config: Option<DistributedConfig>,
    seed: Option<Seed>,
    sampler: Option<DistributedSampler>,
    placement: Option<Placement>,
    drops_last: bool,
    is_uneven: bool,
    n_workers: usize,
    prefetch_factor: usize,
    timeout: Option<Duration>,
    on_error: OnError,
}

/// Random streams of the loader's seed: the order of samples, the order of planned batches, and
/// changes of samples.
const ORDER_STREAM: u64 = 0;
const BATCH_STREAM: u64 = 1;
const SAMPLE_STREAM: u64 = 2;

impl DataLoader<()> {
    /// Begins a loader: batches of one sample, in the order of the data set, made by the thread
    /// that takes them.
    pub fn builder<D: Dataset + 'static>(dataset: D) -> LoaderBuilder<D> {
        LoaderBuilder {
            dataset,
            batch_size: None,
            batches: None,
            step_config: None,
            seed: None,
            sampler: None,
            placement: None,
            drops_last: false,
            is_uneven: false,
            n_workers: 0,
            prefetch_factor: 2,
            timeout: None,
            on_error: OnError::Stop,
        }
    }
}

impl<D: Dataset + 'static> LoaderBuilder<D> {
    /// Sets the number of samples in a batch of a rank; 1 by default.
    pub fn batch_size(self, batch_size: u64) -> Self {
        Self { batch_size: Some(batch_size), ..self }
    }

    /// Plans batches by the lengths of the samples, instead of a fixed size: see `dyn-batch`.
    ///
    /// `lengths` are the lengths of all samples. A [`TextDataset`](crate::TextDataset) knows them in
    /// bytes; [`measure`](crate::measure) reads them once.
    #[doc(alias = "batch_sampler")]
    pub fn batches(
        self,
        config: BatchConfig,
        lengths: impl SequenceLengths + Send + Sync + 'static,
    ) -> Self {
        Self { batches: Some((config, Arc::new(lengths))), ..self }
    }

    /// Sets how planned batches form the steps of all ranks.
    ///
    /// With a grid or accumulation, the loader returns each micro-batch of a step, and
    /// [`SampleBatch::ends_step`] marks the last one. A state taken within a step is the state
    /// before that step, because the gradients of its first micro-batches are not saved.
    ///
    /// By default, ranks get batches of similar cost, and [`shuffle`](Self::shuffle) shuffles the
    /// steps.
    pub fn steps(self, config: DistributedConfig) -> Self {
        Self { step_config: Some(config), ..self }
    }

    /// Reads the samples in a random order, another one in each epoch.
    pub fn shuffle(self, seed: Seed) -> Self {
        Self { seed: Some(seed), ..self }
    }

    /// Reads the samples in the order of a sampler: weighted, stratified, sharded or mixed. Its
    /// placement applies, unless [`placement`](Self::placement) sets another.
    pub fn sampler(self, sampler: DistributedSampler) -> Self {
        Self { sampler: Some(sampler), ..self }
    }

    /// Sets the rank and the number of ranks; a single rank by default.
    ///
    /// Ranks read the samples round-robin. Without a sampler, samples that do not fill a round are
    /// dropped, so all ranks have equally many batches.
    pub fn placement(self, placement: Placement) -> Self {
        Self { placement: Some(placement), ..self }
    }

    /// Sets the number of threads that read samples and collate batches ahead of time. With 0, the
    /// default, the thread that takes a batch makes it.
    ///
    /// Threads are worth their cost if a sample takes more than some 10 µs.
    pub fn num_workers(self, n_workers: usize) -> Self {
        Self { n_workers, ..self }
    }

    /// Sets the number of batches per worker that are ready or in progress; 2 by default.
    pub fn prefetch_factor(self, n_batches: usize) -> Self {
        Self { prefetch_factor: n_batches, ..self }
    }

    /// Sets whether the last samples of an epoch are dropped if they do not fill a batch; `false`
    /// by default.
    pub fn drop_last(self, drops_last: bool) -> Self {
        Self { drops_last, ..self }
    }

    /// Sets the treatment of samples that cannot be read; [`OnError::Stop`] by default.
    pub fn on_error(self, on_error: OnError) -> Self {
        Self { on_error, ..self }
    }

    /// Sets the maximum time to wait for a batch; no limit by default.
    ///
    /// A late batch is [`Error::Timeout`], and the next batch follows as usual. Dropping the loader
    /// also waits at most this long for its threads, and detaches a thread that hangs.
    pub fn timeout(self, limit: Duration) -> Self {
        Self { timeout: Some(limit), ..self }
    }

    /// Allows ranks to have different numbers of batches, for an evaluation without collectives.
    ///
    /// Without a sampler, each sample is then read exactly once. Two ranks have equal states when
    /// they have taken equally many batches, and when both have ended the epoch.
    pub fn uneven(self) -> Self {
        Self { is_uneven: true, ..self }
    }

    /// Starts the workers; `f` makes a batch from its samples.
    ///
    /// Workers should make tensors on the CPU, and the thread that takes them should copy them to
    /// another device: streams of CUDA devices are not ordered across threads.
    ///
    /// # Errors
    ///
    /// - [`Error::Setting`] for settings that are 0 or contradict each other.
    /// - [`Error::LengthMismatch`] if the lengths or the mixture are for another number of samples.
    /// - [`Error::NoBatches`] and [`Error::UnevenBatches`] for batches of a fixed size; planned
    ///   batches are checked at the start of an epoch.
    /// - [`Error::Sampler`], [`Error::Batch`] and [`Error::Threads`].
    #[doc(alias = "collate_fn")]
    pub fn collate<T, F>(self, f: F) -> Result<DataLoader<T>>
    where
        T: Send + 'static,
        F: Fn(SampleBatch<D::Item>) -> Result<T, BoxError> + Send + Sync + 'static,
    {
        self.check()?;
        let sampler = self.make_sampler()?;
        let sample_seed = self.seed.unwrap_or(sampler.config().seed).derive(SAMPLE_STREAM);
        let fingerprint = self.dataset.fingerprint();
        let depth = self.n_workers.saturating_mul(self.prefetch_factor);
        let timeout = self.timeout.unwrap_or(Duration::MAX);
        let Self { dataset, on_error, batches, step_config, seed, .. } = self;
        let plan: Box<dyn BatchPlan> = match batches {
            None => {
                let batch_size = self.batch_size.unwrap_or(1);
                let plan = FixedPlan::new(sampler, batch_size, self.drops_last, self.is_uneven)?;
                Box::new(plan.with_seed(seed))
            }
            Some((config, lengths)) => {
                let step_config = step_config.unwrap_or(DistributedConfig {
                    shuffle: seed.map(|seed| seed.derive(BATCH_STREAM)),
                    ..DistributedConfig::default()
                });
                Box::new(DynamicPlan::new(sampler, lengths, config, step_config)?)
            }
        };
        Ok(DataLoader {
            plan,
            epoch: None,
            has_ended: true,
            n_taken: 0,
            n_started: 0,
            pending: VecDeque::new(),
            is_cancelled: Arc::default(),
            make: Arc::new(move |job| make_batch(&dataset, on_error, &f, job)),
            pool: WorkerPool::start(self.n_workers, timeout)?,
            depth,
            timeout,
            on_error,
            skipped: SkippedSamples::default(),
            seed: sample_seed,
            fingerprint,
        })
    }

    /// Checks the settings that can be judged without the data set and the sampler.
    fn check(&self) -> Result<()> {
        let is_planned = self.batches.is_some();
        let one = "at least 1";
        let no_lengths = "unset if batches are planned by lengths";
        let has_timeout_without_workers = self.timeout.is_some() && self.n_workers == 0;
        let has_steps_without_batches = !is_planned && self.step_config.is_some();
        let has_two_orders = self.sampler.is_some() && self.seed.is_some();
        for (is_invalid, name, value, expected) in [
            (self.batch_size == Some(0), "the batch size", "0", one),
            (self.n_workers > 0 && self.prefetch_factor == 0, "the prefetch factor", "0", one),
            (is_planned && self.batch_size.is_some(), "the batch size", "set", no_lengths),
            (is_planned && self.drops_last, "`drop_last`", "set", no_lengths),
            (has_steps_without_batches, "`steps`", "set", "unset without `batches`"),
            (has_two_orders, "`shuffle`", "set", "unset if there is a sampler"),
            (has_timeout_without_workers, "`timeout`", "set", "unset without workers"),
        ] {
            if is_invalid {
                return Err(Error::setting(name, value, expected));
            }
        }
        Ok(())
    }

    fn make_sampler(&self) -> Result<DistributedSampler> {
        let n_samples = self.dataset.len();
        let lengths = self.batches.as_ref().map(|(_, lengths)| lengths.count());
        // Only mixtures have parts, and one of the parts contains sample 0.
        let mixture = self.sampler.as_ref().filter(|sampler| sampler.part_of(0).is_some());
        let mixture = mixture.map(DistributedSampler::data_set_len);
        for (what, found) in [("the list of lengths", lengths), ("the mixture", mixture)] {
            if let Some(found) = found.filter(|&found| found != n_samples) {
                return Err(Error::LengthMismatch { what, found, expected: n_samples });
            }
        }
        match (&self.sampler, self.placement) {
            (Some(sampler), None) => Ok(sampler.clone()),
            (Some(sampler), Some(placement)) => Ok(sampler.clone().with_placement(placement)?),
            (None, placement) => {
                let placement = placement.unwrap_or(Placement::SINGLE);
                Ok(DistributedSampler::new(n_samples, placement, self.sampler_config())?)
            }
        }
    }

    fn sampler_config(&self) -> SamplerConfig {
        let tail = if self.is_uneven { Tail::Spread } else { Tail::Drop };
        let config = SamplerConfig::default().with_partition(Partition::Strided).with_tail(tail);
        match self.seed {
            None => config.with_order(Order::Sequential),
            Some(seed) => config.with_seed(seed.derive(ORDER_STREAM)),
        }
    }
}

impl<D> fmt::Debug for LoaderBuilder<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LoaderBuilder").field("n_workers", &self.n_workers).finish_non_exhaustive()
    }
}
