//! Reading the samples of a batch, on any thread.

use std::sync::{
    Arc,
    atomic::{AtomicBool, AtomicU64, Ordering},
};

use core_types::{Epoch, Seed};
use dyn_batch::Batch;

use crate::{
    dataset::Dataset,
    error::{BoxError, Error, Result},
    loader::{
        plan::PlannedBatch,
        skipped::{OnError, SkippedSample},
    },
};

/// The samples of a batch, the input of [`LoaderBuilder::collate`](crate::LoaderBuilder::collate).
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct SampleBatch<I> {
    /// Epoch.
    pub epoch: Epoch,
    /// Number of the batch in the epoch, of this rank and world.
    pub number: u64,
    /// Indices of the samples, and the planned shape. In batches of a fixed size, each sample counts
    /// as one token.
    ///
    /// With skipped samples, there are fewer indices than rows.
    pub batch: Batch,
    /// Samples, in the order of the indices.
    pub items: Vec<I>,
    /// Whether each sample is padding of the sampler's tail, which metrics leave out.
    pub is_padding: Vec<bool>,
    /// Whether the batch is the last of its step: false for the micro-batches before it, if
    /// [`steps`](crate::LoaderBuilder::steps) accumulates gradients. An error may stand in place of the
    /// last: a loop that goes on after errors must drop the gradients of that step.
    #[doc(alias = "sync_gradients")]
    pub ends_step: bool,
    /// Whether the batch was planned with lengths.
    has_lengths: bool,
}

impl<I> SampleBatch<I> {
    /// Returns the batch as the functions of `dyn-batch` that make tensors need it: the indices are
    /// positions in [`items`](Self::items), because a sample may occur twice.
    ///
    /// Without planned lengths, rows are as long as the longest sample.
    ///
    /// # Errors
    ///
    /// [`Error::Batch`] if rows × length exceeds 64 bits.
    ///
    /// # Examples
    ///
    /// ```
    /// use core_types::Epoch;
    /// use data_loader::{DataLoader, SampleBatch};
    ///
    /// let texts = vec![vec![1_u32, 2, 3], vec![4]];
    /// let mut loader = DataLoader::builder(texts).batch_size(2).collate(
    ///     |samples: SampleBatch<Vec<u32>>| Ok(samples.with_lengths(|text| text.len() as u64)?),
    /// )?;
    /// loader.set_epoch(Epoch::ZERO)?;
    /// let batch = loader.next().expect("an epoch has a batch")?;
    /// assert_eq!((batch.indices, batch.padded_length, batch.real_tokens), (vec![0, 1], 3, 4));
    /// # Ok::<(), data_loader::Error>(())
    /// ```
    pub fn with_lengths(&self, length_of: impl Fn(&I) -> u64) -> Result<Batch> {
        let positions = 0..self.items.len() as u64;
        if self.has_lengths {
            let mut batch = self.batch.clone();
            batch.indices = positions.collect();
            return Ok(batch);
        }
        let mut batch = Batch::from_indices(positions, |position| length_of(self.item(position)))?;
        batch.rows = self.batch.rows;
        Ok(batch)
    }

    #[expect(clippy::cast_possible_truncation, reason = "positions of items in memory")]
    pub(crate) fn item(&self, position: u64) -> &I {
        &self.items[position as usize]
    }
}

/// A batch to make.
#[derive(Debug)]
pub(crate) struct BatchJob {
    pub(crate) epoch: Epoch,
    pub(crate) planned: PlannedBatch,
    /// Seed of the epoch's random changes.
    pub(crate) seed: Seed,
    pub(crate) progress: Arc<JobProgress>,
}

/// A batch, and the samples that it skips.
pub(crate) type MadeBatch<T> = (Result<T>, Vec<SkippedSample>);

/// Makes a batch from its samples.
pub(crate) type MakeBatch<T> = dyn Fn(&BatchJob) -> MadeBatch<T> + Send + Sync;

/// The activity of the thread that makes a batch, for other threads to see.
///
/// All accesses are relaxed: the values guard no other memory.
#[derive(Debug)]
pub(crate) struct JobProgress {
    /// Index of the sample that is read, or one of the following values.
    sample: AtomicU64,
    /// Whether the batch is cancelled. All batches of an epoch share it.
    is_cancelled: Arc<AtomicBool>,
}

const NOT_BEGUN: u64 = u64::MAX;
const COLLATING: u64 = u64::MAX - 1;

impl JobProgress {
    pub(crate) fn new(is_cancelled: Arc<AtomicBool>) -> Self {
        Self { sample: AtomicU64::new(NOT_BEGUN), is_cancelled }
    }

    fn set(&self, sample: u64) {
        self.sample.store(sample, Ordering::Relaxed);
    }

    /// Returns the activity in words.
    pub(crate) fn describe(&self) -> String {
        match self.sample.load(Ordering::Relaxed) {
            NOT_BEGUN => "another batch".into(),
            COLLATING => "the function that collates".into(),
            sample => format!("sample {sample}"),
        }
    }
}

/// Reads the samples of a batch and collates them.
pub(crate) fn make_batch<D: Dataset, T>(
    dataset: &D,
    on_error: OnError,
    collate: impl Fn(SampleBatch<D::Item>) -> Result<T, BoxError>,
    job: &BatchJob,
) -> MadeBatch<T> {
    let mut skipped = Vec::new();
    let epoch = job.epoch.as_u64();
    let batch = job.planned.number;
    let result = read_samples(dataset, on_error, job, &mut skipped).and_then(|samples| {
        if samples.items.is_empty() {
            let cause = "none of its samples can be read".into();
            return Err(Error::Collate { epoch, batch, cause });
        }
        job.progress.set(COLLATING);
        collate(samples).map_err(|cause| Error::Collate { epoch, batch, cause })
    });
    (result, skipped)
}

fn read_samples<D: Dataset>(
    dataset: &D,
    on_error: OnError,
    job: &BatchJob,
    skipped: &mut Vec<SkippedSample>,
) -> Result<SampleBatch<D::Item>> {
    let indices = &job.planned.batch.indices;
    dataset.prefetch(indices);
    let samples = read_each(dataset, on_error, job, skipped, |_| Ok(()))?;
    if dataset.check(indices).is_ok() {
        return Ok(samples);
    }
    // Read again, so that errors name the right samples.
    skipped.clear();
    read_each(dataset, on_error, job, skipped, |index| dataset.check(&[index]))
}

/// Reads the samples of a batch, and checks each with `check`.
fn read_each<D: Dataset>(
    dataset: &D,
    on_error: OnError,
    job: &BatchJob,
    skipped: &mut Vec<SkippedSample>,
    check: impl Fn(u64) -> Result<(), BoxError>,
) -> Result<SampleBatch<D::Item>> {
    let PlannedBatch { number, batch, is_padding, lengths, ends_step } = &job.planned;
    let mut samples = SampleBatch {
        epoch: job.epoch,
        number: *number,
        batch: batch.clone(),
        items: Vec::with_capacity(batch.len()),
        is_padding: Vec::with_capacity(batch.len()),
        ends_step: *ends_step,
        has_lengths: lengths.is_some(),
    };
    samples.batch.indices.clear();
    for (position, (&index, &is_padding)) in batch.indices.iter().zip(is_padding).enumerate() {
        if job.progress.is_cancelled.load(Ordering::Relaxed) {
            // The incomplete batch is never returned.
            break;
        }
        job.progress.set(index);
        let sample = dataset.read_seeded(index, job.seed.derive(index));
        // A sample that cannot be read because its file has changed says so.
        let check = if sample.is_err() { dataset.check(&[index]) } else { check(index) };
        match check.and(sample) {
            Ok(item) => {
                samples.batch.indices.push(index);
                samples.items.push(item);
                samples.is_padding.push(is_padding);
            }
            Err(cause) if on_error == OnError::Stop => {
                return Err(Error::Sample { index, cause });
            }
            Err(error) => {
                let length = lengths.as_ref().map_or(1, |lengths| lengths[position]);
                samples.batch.real_tokens = samples.batch.real_tokens.saturating_sub(length);
                skipped.push(SkippedSample { epoch: job.epoch, index, error });
            }
        }
    }
    Ok(samples)
}
