//! Batches of a data set, made ahead of time, with one state for all ranks.

pub(crate) mod builder;
pub(crate) mod fetch;
pub(crate) mod plan;
pub(crate) mod skipped;
pub(crate) mod state;

use std::{
    collections::VecDeque,
    fmt,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use core_types::{Epoch, Seed};

use crate::{
    error::{Error, Result},
    loader::{
        fetch::{BatchJob, JobProgress, MadeBatch, MakeBatch},
        plan::BatchPlan,
        skipped::{OnError, SkippedSamples},
        state::{LoaderPosition, LoaderState},
    },
    queue::pool::{PendingResult, WorkerPool},
};

/// An iterator over the batches of an epoch, which workers make ahead of time.
///
/// Call [`set_epoch`](Self::set_epoch) before each loop over the batches: without it, the only item of
/// the loop is [`Error::NoEpoch`]. A sample that cannot be read or a batch that cannot be made is an error in
/// place of its batch, and the next batch follows. A panic of a reader is raised in the thread that
/// takes the batch. Dropping the loader ends its threads, each after the sample that it reads.
///
/// # Determinism
///
/// Batches depend on data set, settings and epoch, not on the number of workers. The order of
/// samples does not depend on the number of ranks.
///
/// # Examples
///
/// A run that is interrupted and resumed:
///
/// ```
/// use core_types::{Epoch, Seed};
/// use data_loader::{DataLoader, LoaderState, SampleBatch};
///
/// let make = |num_workers| {
///     DataLoader::builder((0..100).collect::<Vec<u32>>())
///         .batch_size(8)
///         .shuffle(Seed::new(42))
///         .num_workers(num_workers)
///         .collate(|samples: SampleBatch<u32>| Ok(samples.items))
/// };
/// let mut loader = make(2)?;
/// loader.set_epoch(Epoch::ZERO)?;
/// let first: Vec<_> = loader.by_ref().take(3).collect::<Result<_, _>>()?;
/// let state = serde_json::to_string(&loader.state_dict())?; // save it with the checkpoint
///
/// let mut resumed = make(1)?;
/// resumed.load_state_dict(&serde_json::from_str::<LoaderState>(&state)?)?;
/// assert_eq!((first.len(), resumed.len()), (3, 10));
/// assert_eq!(resumed.next().transpose()?, loader.next().transpose()?);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[must_use = "iterators are lazy and do nothing unless consumed"]
pub struct DataLoader<T> {
    plan: Box<dyn BatchPlan>,
    epoch: Option<Epoch>,
    /// Whether `next` has returned `None`, or there was no epoch yet: another call is an error.
    has_ended: bool,
    /// Number of batches that were returned since the position of the plan.
    n_taken: u64,
    /// Number of batches that were started since the position of the plan.
    n_started: u64,
    /// Batches that are ready or in progress, in order.
    pending: VecDeque<PendingBatch<T>>,
    /// Whether the pending batches are cancelled.
    is_cancelled: Arc<AtomicBool>,
    make: Arc<MakeBatch<T>>,
    /// Worker threads; `None` if `next` makes the batches.
    pool: Option<WorkerPool>,
    /// Maximum number of batches that are ready or in progress.
    depth: usize,
    timeout: Duration,
    on_error: OnError,
    skipped: SkippedSamples,
    /// Seed of the random changes of samples.
    seed: Seed,
    fingerprint: Option<u64>,
}

/// A batch that a worker makes.
struct PendingBatch<T> {
    number: u64,
    progress: Arc<JobProgress>,
    result: PendingResult<MadeBatch<T>>,
}

impl<T: Send + 'static> DataLoader<T> {
    /// Returns the next batch of the plan, as a job.
    fn next_job(&mut self, epoch: Epoch) -> BatchJob {
        let planned = self.plan.next_batch(self.n_started);
        self.n_started += 1;
        let seed = self.seed.derive(epoch.as_u64());
        let progress = Arc::new(JobProgress::new(Arc::clone(&self.is_cancelled)));
        BatchJob { epoch, planned, seed, progress }
    }

    /// Starts batches until enough are pending or all of the epoch are.
    fn start_batches(&mut self, epoch: Epoch) {
        while self.pending.len() < self.depth && self.n_started < self.plan.n_batches() {
            let job = self.next_job(epoch);
            let Some(pool) = &self.pool else { break };
            let (number, progress) = (job.planned.number, Arc::clone(&job.progress));
            let make = Arc::clone(&self.make);
            let result = pool.submit(move || make(&job));
            self.pending.push_back(PendingBatch { number, progress, result });
        }
    }

    /// Makes or waits for the next batch.
    fn make_next(&mut self, epoch: Epoch) -> Result<MadeBatch<T>> {
        // Before the work, so that a panic or an error is the end of its batch only.
        self.n_taken += 1;
        if self.pool.is_none() {
            let job = self.next_job(epoch);
            return Ok((self.make)(&job));
        }
        self.start_batches(epoch);
        #[expect(clippy::expect_used, reason = "the epoch has a batch, so one was started")]
        let next = self.pending.pop_front().expect("a batch is pending");
        // Refills the queue, so that the workers stay busy while the batch is used.
        self.start_batches(epoch);
        next.result.wait(self.timeout).ok_or_else(|| Error::Timeout {
            epoch: epoch.as_u64(),
            batch: next.number,
            at: next.progress.describe(),
            limit: self.timeout,
        })
    }

    /// Counts the skipped samples of a batch that is taken.
    fn count_skipped(&mut self, (mut result, skipped): MadeBatch<T>) -> Result<T> {
        for sample in skipped {
            let OnError::Skip { at_most } = self.on_error else { break };
            if self.skipped.count >= at_most {
                result = Err(Error::TooManySkipped {
                    skipped: self.skipped.count.saturating_add(1),
                    at_most,
                    index: sample.index,
                    reason: sample.error.to_string(),
                });
            }
            self.skipped.push(sample);
        }
        result
    }
}

impl<T> DataLoader<T> {
    /// Moves to the start of an epoch, also of an epoch whose last batch was returned: an evaluation may
    /// read the same epoch each time.
    ///
    /// While the current epoch has batches left, it does nothing, so a loop that sets its first epoch
    /// does not undo [`load_state_dict`](Self::load_state_dict). After the state of a finished epoch,
    /// the loop of that epoch has no batch.
    ///
    /// # Errors
    ///
    /// [`Error::NoBatches`], [`Error::UnevenBatches`] and [`Error::Batch`] if the batches of the
    /// epoch cannot be planned.
    pub fn set_epoch(&mut self, epoch: Epoch) -> Result<()> {
        let has_returned_all = self.n_taken > 0 && self.n_taken == self.plan.n_batches();
        if self.epoch == Some(epoch) && !self.has_ended && !has_returned_all {
            return Ok(());
        }
        self.plan.set_epoch(epoch)?;
        self.start_at(Some(epoch));
        Ok(())
    }

    /// Forgets the batches that were started, and continues at the position of the plan.
    fn start_at(&mut self, epoch: Option<Epoch>) {
        self.cancel();
        self.is_cancelled = Arc::default();
        self.epoch = epoch;
        self.has_ended = epoch.is_none();
        self.n_taken = 0;
        self.n_started = 0;
    }

    /// Cancels the pending batches: workers stop after the sample that they read.
    fn cancel(&mut self) {
        self.is_cancelled.store(true, Ordering::Relaxed);
        if let Some(pool) = &self.pool {
            pool.clear();
        }
        self.pending.clear();
    }

    /// Returns the position behind the last batch that `next` has returned, however many batches
    /// the workers have made.
    ///
    /// Ranks that have taken equally many batches have equal states. An [`uneven`] rank with fewer
    /// batches has the state of the whole epoch once `next` has returned `None`.
    ///
    /// [`uneven`]: crate::LoaderBuilder::uneven
    pub fn state_dict(&self) -> LoaderState {
        let position = match self.epoch {
            None => LoaderPosition::Start,
            // Other ranks may have more batches.
            Some(_) if self.has_ended => self.plan.position(u64::MAX),
            Some(_) => self.plan.position(self.n_taken),
        };
        LoaderState {
            format_version: LoaderState::VERSION,
            position,
            fingerprint: self.fingerprint,
            skipped: self.skipped.count,
        }
    }

    /// Moves to the position of another loader, of any rank of any world with any number of
    /// workers.
    ///
    /// If the number of ranks has changed, the unread samples are assigned anew. Over all ranks, no
    /// sample is lost or read again, except for the tail of this world.
    ///
    /// # Errors
    ///
    /// [`Error::StateMismatch`], [`Error::Sampler`] or [`Error::Batch`] if
    /// the state belongs to another data set, order, seed or batch size. The loader is then
    /// unchanged.
    pub fn load_state_dict(&mut self, state: &LoaderState) -> Result<()> {
        if state.format_version != LoaderState::VERSION {
            return Err(Error::StateMismatch {
                what: "format version",
                state: state.format_version.to_string(),
                loader: LoaderState::VERSION.to_string(),
            });
        }
        let fingerprints = state.fingerprint.zip(self.fingerprint);
        if let Some((found, expected)) = fingerprints.filter(|(found, expected)| found != expected)
        {
            return Err(Error::StateMismatch {
                what: "a data set with fingerprint",
                state: format!("{found:016x}"),
                loader: format!("{expected:016x}"),
            });
        }
        if state.position != LoaderPosition::Start {
            self.plan.resume(&state.position)?;
        }
        self.start_at(state.epoch());
        self.skipped.count = state.skipped;
        Ok(())
    }

    /// Returns the current epoch, or `None` before the first one.
    pub fn epoch(&self) -> Option<Epoch> {
        self.epoch
    }

    /// Returns the samples that were skipped, up to the last batch that `next` has returned.
    pub fn skipped(&self) -> &SkippedSamples {
        &self.skipped
    }

    fn n_remaining(&self) -> u64 {
        let n_batches = self.epoch.map_or(0, |_| self.plan.n_batches());
        match n_batches.saturating_sub(self.n_taken) {
            // The error of a loop without an epoch.
            0 => u64::from(self.has_ended),
            n_batches => n_batches,
        }
    }
}

impl<T: Send + 'static> Iterator for DataLoader<T> {
    type Item = Result<T>;

    /// Returns the next batch of the epoch, or `None` at its end.
    fn next(&mut self) -> Option<Result<T>> {
        match self.epoch {
            Some(epoch) if self.n_taken < self.plan.n_batches() => {
                Some(self.make_next(epoch).and_then(|made| self.count_skipped(made)))
            }
            _ => {
                // Every other call, so that each loop without an epoch ends after one error.
                self.has_ended = !self.has_ended;
                (!self.has_ended).then_some(Err(Error::NoEpoch))
            }
        }
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        let n_remaining = usize::try_from(self.n_remaining());
        (n_remaining.unwrap_or(usize::MAX), n_remaining.ok())
    }
}

impl<T: Send + 'static> ExactSizeIterator for DataLoader<T> {}

impl<T> Drop for DataLoader<T> {
    fn drop(&mut self) {
        self.cancel();
    }
}

impl<T> fmt::Debug for DataLoader<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DataLoader").field("epoch", &self.epoch).finish_non_exhaustive()
    }
}
