//! The settings of a loader.

use std::{fmt, sync::Arc, time::Duration};

use core_types::{Placement, Seed};
use dist_sampler::{DistributedSampler, Order, Partition, SamplerConfig, Tail};
use dyn_batch::{BatchConfig, DistributedConfig, SequenceLengths};

use crate::{
    dataset::Dataset,
    error::{BoxError, Error, Result},
    loader::{
        DataLoader,
        fetch::{MakeBatch, SampleBatch, make_batch},
        plan::{BatchPlan, DynamicPlan, FixedPlan, SharedLengths},
        skipped::OnError,
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
    workers: WorkerSettings,
    on_error: OnError,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct WorkerSettings {
    n_workers: usize,
    prefetch_factor: usize,
    pub(crate) timeout: Option<Duration>,
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
            workers: WorkerSettings { n_workers: 0, prefetch_factor: 2, timeout: None },
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
    /// placement is that of the loader.
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
    pub fn num_workers(mut self, n_workers: usize) -> Self {
        self.workers.n_workers = n_workers;
        self
    }

    /// Sets the number of batches per worker that are ready or in progress; 2 by default.
    pub fn prefetch_factor(mut self, n_batches: usize) -> Self {
        self.workers.prefetch_factor = n_batches;
        self
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

    /// Sets the time that the taker of a batch waits for it; no limit by default.
    ///
    /// A batch that is late is [`Error::Timeout`], and the next one follows as usual. Dropping the
    /// loader also waits no longer for its threads. A thread that hangs then goes on alone.
    pub fn timeout(mut self, limit: Duration) -> Self {
        self.workers.timeout = Some(limit);
        self
    }

    /// Allows ranks to have different numbers of batches, for an evaluation without collectives.
    ///
    /// Without a sampler, each sample is then read exactly once.
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
    /// - [`Error::LengthMismatch`] if lengths or sampler are for another number of samples.
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
        let seed = self.seed.unwrap_or(sampler.config().seed).derive(SAMPLE_STREAM);
        let fingerprint = self.dataset.fingerprint();
        let Self { dataset, on_error, workers, batches, step_config, seed: shuffle, .. } = self;
        let plan = match batches {
            None => {
                let batch_size = self.batch_size.unwrap_or(1);
                let plan = FixedPlan::new(sampler, batch_size, self.drops_last, self.is_uneven)?;
                BatchPlan::Fixed(plan)
            }
            Some((config, lengths)) => {
                let shuffle = shuffle.map(|seed| seed.derive(BATCH_STREAM));
                let default = DistributedConfig::default();
                let default = shuffle.map_or(default, |seed| default.with_shuffle(seed));
                let step_config = step_config.unwrap_or(default);
                let plan = DynamicPlan::new(sampler, lengths, config, step_config)?;
                BatchPlan::Dynamic(Box::new(plan))
            }
        };
        let make: Arc<MakeBatch<T>> = Arc::new(move |job| make_batch(&dataset, on_error, &f, job));
        let pool = workers.start()?;
        Ok(DataLoader::new(plan, make, pool, workers, on_error, seed, fingerprint))
    }

    /// Checks settings that need nothing else.
    fn check(&self) -> Result<()> {
        let WorkerSettings { n_workers, prefetch_factor, timeout } = self.workers;
        let checks = [
            (self.batch_size != Some(0), "the batch size", "at least 1"),
            (n_workers == 0 || prefetch_factor > 0, "the prefetch factor", "at least 1"),
        ];
        for (is_valid, name, expected) in checks {
            if !is_valid {
                return Err(Error::setting(name, &0, expected));
            }
        }
        let conflicts = [
            (self.batches.is_some() && self.batch_size.is_some(), "the batch size"),
            (self.batches.is_some() && self.drops_last, "`drop_last`"),
        ];
        for (is_conflict, name) in conflicts {
            if is_conflict {
                return Err(Error::setting(name, "set", "unset if batches are planned by lengths"));
            }
        }
        if self.batches.is_none() && self.step_config.is_some() {
            return Err(Error::setting("`steps`", "set", "unset without planned batches"));
        }
        if self.sampler.is_some() && self.seed.is_some() {
            return Err(Error::setting("`shuffle`", "set", "unset if there is a sampler"));
        }
        if timeout.is_some() && n_workers == 0 {
            return Err(Error::setting("`timeout`", "set", "unset without workers"));
        }
        Ok(())
    }

    fn make_sampler(&self) -> Result<DistributedSampler> {
        let n_samples = self.dataset.len();
        if let Some((_, lengths)) = &self.batches {
            check_len("the list of lengths", lengths.count(), n_samples)?;
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

fn check_len(what: &'static str, found: u64, expected: u64) -> Result<()> {
    if found == expected { Ok(()) } else { Err(Error::LengthMismatch { what, found, expected }) }
}

impl WorkerSettings {
    fn start(self) -> Result<Option<WorkerPool>> {
        match self.n_workers {
            0 => Ok(None),
            n_workers => WorkerPool::start(n_workers, self.timeout).map(Some),
        }
    }

    /// Returns the maximum number of batches that are ready or in progress.
    pub(crate) fn depth(self) -> usize {
        self.n_workers.saturating_mul(self.prefetch_factor)
    }
}

impl<D> fmt::Debug for LoaderBuilder<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LoaderBuilder")
            .field("batch_size", &self.batch_size)
            .field("sampler", &self.sampler)
            .field("placement", &self.placement)
            .field("workers", &self.workers)
            .finish_non_exhaustive()
    }
}
