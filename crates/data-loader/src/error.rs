//! Errors of data sets and loaders.

use std::{io, path::PathBuf, time::Duration};

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
    #[error("failed to access {}", path.display())]
    Io {
        /// File or folder.
        path: PathBuf,
        /// Cause.
        source: io::Error,
    },
    /// The length or the time of a file has changed since it was opened.
    #[error("{} changed while it was read: it had {expected} bytes and has {found}", path.display())]
    FileChanged {
        /// File.
        path: PathBuf,
        /// Bytes when it was opened.
        expected: u64,
        /// Bytes now.
        found: u64,
    },
    /// A line is invalid.
    #[error("line {line} of {} is invalid", path.display())]
    Line {
        /// File.
        path: PathBuf,
        /// Number of the line, from 1.
        line: u64,
        /// Cause.
        source: BoxError,
    },
    /// Neighboring samples of a text are too long for a line index.
    #[error("64 samples from sample {sample} of {} on have more than 4 GiB", path.display())]
    SamplesTooLong {
        /// File.
        path: PathBuf,
        /// First of the samples.
        sample: u64,
    },
    /// A kept line index is damaged.
    #[error("block {block} of the line index {} is corrupt; remove the file", path.display())]
    CorruptIndex {
        /// Index file.
        path: PathBuf,
        /// Number of the block, from 0.
        block: u64,
    },
    /// A NumPy array cannot be read as requested.
    #[error("invalid array {}", path.display())]
    Npy {
        /// File.
        path: PathBuf,
        /// Cause.
        source: NpyFault,
    },
    /// A file of tokens cannot be read as requested.
    #[error("invalid tokens in {}: {fault}", path.display())]
    Tokens {
        /// File.
        path: PathBuf,
        /// Cause.
        fault: String,
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
    #[error("failed to read sample {index}")]
    Sample {
        /// Index of the sample.
        index: u64,
        /// Cause.
        source: BoxError,
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
    /// All samples of a batch have been skipped.
    #[error("none of the samples of batch {batch} in epoch {epoch} can be read")]
    EmptyBatch {
        /// Epoch.
        epoch: u64,
        /// Number of the batch.
        batch: u64,
    },
    /// The function that makes batches has failed.
    #[error("failed to collate batch {batch} of epoch {epoch}")]
    Collate {
        /// Epoch.
        epoch: u64,
        /// Number of the batch.
        batch: u64,
        /// Cause.
        source: BoxError,
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
    #[error("failed to start {threads} threads")]
    Threads {
        /// Number of threads.
        threads: usize,
        /// Cause.
        source: io::Error,
    },
    /// A state has an unsupported format.
    #[error("loader state has version {version}, this crate reads version {supported}")]
    StateVersion {
        /// Version of the state.
        version: u32,
        /// Supported version.
        supported: u32,
    },
    /// A state belongs to another loader.
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
    #[error("failed to read its header")]
    Io(#[from] io::Error),
    /// The file has no header of version 1, 2 or 3 with at most 10,000 bytes.
    #[error("it has no NumPy header of version 1, 2 or 3 with at most 10000 bytes")]
    NoHeader,
    /// The header is not a dictionary with dtype, order and shape.
    #[error("its header is invalid: {header}")]
    InvalidHeader {
        /// Text of the header.
        header: String,
    },
    /// The dtype is not the requested one.
    #[error("it has dtype {found}, it must be {expected}")]
    DtypeMismatch {
        /// Dtype of the array.
        found: String,
        /// Requested dtype.
        expected: String,
    },
    /// The array is in Fortran order.
    #[error("it is in Fortran order, it must be in C order")]
    FortranOrder,
    /// The shape has no rows, or more bytes than 64 bits count.
    #[error("it has shape {shape:?}, which has no rows or too many bytes")]
    InvalidShape {
        /// Shape of the array.
        shape: Vec<u64>,
    },
    /// The file is shorter or longer than its array.
    #[error("it has {found} bytes, its shape needs {expected}")]
    LengthMismatch {
        /// Bytes of the file.
        found: u64,
        /// Bytes of header and array.
        expected: u64,
    },
}

impl Error {
    /// Returns a function that names the file of an I/O error.
    pub(crate) fn io(path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Io { path: path.into(), source }
    }

    pub(crate) fn setting(
        name: &'static str,
        value: &(impl ToString + ?Sized),
        expected: &'static str,
    ) -> Self {
        Self::Setting { name, value: value.to_string(), expected }
    }
}
