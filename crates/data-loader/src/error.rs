//! Errors of data sets and loaders.

use std::{error::Error as StdError, io, path::PathBuf, time::Duration};

use core_types::WorldSize;

/// The error of a reader or a closure: any error, or a text, so `?` and `"text".into()` work.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// The result of opening a data set or loading a batch.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of a data set, a setting, a state or a batch.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A file or folder cannot be read or written.
    #[error("failed to access {}: {cause}", path.display())]
    Io {
        /// File or folder.
        path: PathBuf,
        /// Cause.
        cause: io::Error,
    },
    /// The length or the time of a file has changed since it was opened.
    #[error("{} has changed since it was opened: {}", path.display(), change_note(*.expected, *.found))]
    FileChanged {
        /// File.
        path: PathBuf,
        /// Bytes when it was opened.
        expected: u64,
        /// Bytes now.
        found: u64,
    },
    /// A line is invalid.
    #[error("line {line} of {} is invalid: {}", path.display(), chain(&**cause))]
    Line {
        /// File.
        path: PathBuf,
        /// Number of the line, from 1.
        line: u64,
        /// Cause.
        cause: BoxError,
    },
    /// The content of a text, a kept line index or a file of tokens cannot be used.
    #[error("cannot use {}: {fault}", path.display())]
    Content {
        /// File.
        path: PathBuf,
        /// Fault, with value and limit.
        fault: String,
    },
    /// A NumPy array cannot be read as requested.
    #[error("cannot use the array {}: {cause}", path.display())]
    Npy {
        /// File.
        path: PathBuf,
        /// Cause.
        cause: NpyFault,
    },
    /// A sample does not exist.
    #[error("sample {index} is out of range for a data set of {len}")]
    IndexOutOfRange {
        /// Requested sample.
        index: u64,
        /// Number of samples.
        len: u64,
    },
    /// A setting is invalid, or contradicts another one.
    #[error("{name} is {value}, it must be {expected}")]
    Setting {
        /// Setting.
        name: &'static str,
        /// Value.
        value: String,
        /// Valid values.
        expected: &'static str,
    },
    /// A list of lengths or an open shard has another number of samples than expected.
    #[error("{what} has {found} samples, it must have {expected}")]
    LengthMismatch {
        /// Lengths or shard.
        what: &'static str,
        /// Its number of samples.
        found: u64,
        /// Expected number.
        expected: u64,
    },
    /// An epoch has no batch.
    #[error("{samples} samples make no batch of {batch_size} on each of {world_size} ranks")]
    NoBatches {
        /// Samples in the epoch, over all ranks.
        samples: u64,
        /// Samples in a batch.
        batch_size: u64,
        /// Number of ranks.
        world_size: WorldSize,
    },
    /// Ranks would have different numbers of batches.
    #[error(
        "ranks would have {fewest} to {most} batches; use a tail that drops or pads, or `uneven`"
    )]
    UnevenBatches {
        /// Fewest batches of a rank.
        fewest: u64,
        /// Most batches of a rank.
        most: u64,
    },
    /// The epoch of a loader is not set, or has ended, so there are no batches.
    #[error(
        "the epoch is not set or has ended: call `set_epoch` before each loop over the batches"
    )]
    NoEpoch,
    /// A sample cannot be read.
    #[error("failed to read sample {index}: {}", chain(&**cause))]
    Sample {
        /// Index of the sample.
        index: u64,
        /// Cause.
        cause: BoxError,
    },
    /// More samples cannot be read than may be skipped.
    #[error(
        "{skipped} samples cannot be read, the limit is {at_most}; the last is sample {index}: {reason}"
    )]
    TooManySkipped {
        /// Number of samples that cannot be read.
        skipped: u64,
        /// Limit.
        at_most: u64,
        /// Last of the samples.
        index: u64,
        /// Its error.
        reason: String,
    },
    /// The function that makes batches has failed, or all samples of the batch have been skipped.
    #[error("failed to collate batch {batch} of epoch {epoch}: {}", chain(&**cause))]
    Collate {
        /// Epoch.
        epoch: u64,
        /// Number of the batch.
        batch: u64,
        /// Cause.
        cause: BoxError,
    },
    /// A batch was not ready in time.
    #[error("batch {batch} of epoch {epoch} is not ready after {limit:?}; a worker is at {at}")]
    Timeout {
        /// Epoch.
        epoch: u64,
        /// Number of the batch.
        batch: u64,
        /// Activity of the worker, such as the sample that it reads.
        at: String,
        /// Limit.
        limit: Duration,
    },
    /// The operating system cannot start the threads.
    #[error("failed to start {threads} threads: {cause}")]
    Threads {
        /// Number of threads.
        threads: usize,
        /// Cause.
        cause: io::Error,
    },
    /// A state belongs to another loader, or has another format version.
    #[error("loader state has {what} {state}, the loader has {loader}")]
    StateMismatch {
        /// Property that differs.
        what: &'static str,
        /// Value in the state.
        state: String,
        /// Value in the loader.
        loader: String,
    },
    /// A sampler cannot be created or resumed.
    #[error(transparent)]
    Sampler(#[from] dist_sampler::Error),
    /// Batches cannot be planned or resumed.
    #[error(transparent)]
    Batch(#[from] dyn_batch::Error),
}

/// The reason why a NumPy array cannot be read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NpyFault {
    /// The header cannot be read.
    #[error("failed to read its header: {0}")]
    Io(io::Error),
    /// The header is invalid, or describes an array in Fortran order or of an impossible size.
    #[error("{0}")]
    Invalid(String),
    /// The dtype is not the requested one.
    #[error("it has dtype {found}, it must be {expected}")]
    DtypeMismatch {
        /// Dtype of the array.
        found: String,
        /// Requested dtype.
        expected: String,
    },
}

/// Returns the difference between a file and its state when it was opened.
fn change_note(expected: u64, found: u64) -> String {
    if expected == found {
        return format!("it was written at another time, with {found} bytes as before");
    }
    format!("it had {expected} bytes and has {found}")
}

/// Returns the message of an error with those of its causes, because these errors have no `source`.
fn chain(error: &(dyn StdError + 'static)) -> String {
    let mut message = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        message = format!("{message}: {error}");
        cause = error.source();
    }
    message
}

impl Error {
    /// Returns a function that names the file of an I/O error.
    pub(crate) fn io(path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> Self {
        move |cause| Self::Io { path: path.into(), cause }
    }

    pub(crate) fn setting(
        name: &'static str,
        value: &(impl ToString + ?Sized),
        expected: &'static str,
    ) -> Self {
        Self::Setting { name, value: value.to_string(), expected }
    }
}
