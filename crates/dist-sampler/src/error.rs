//! Why a sampler cannot be made.

/// The result of making a sampler.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// A data set that no sampler, or not the one asked for, can read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// There is nothing to sample.
    #[error("data set of length 0 has no samples to distribute")]
    EmptyDataSet,
    /// The data set is longer than [`DistributedSampler::MAX_LEN`](crate::DistributedSampler::MAX_LEN).
    #[error("data set of length {len} is too long, the limit is {max}")]
    DataSetTooLong {
        /// The length that was asked for.
        len: u64,
        /// The longest data set a sampler takes.
        max: u64,
    },
    /// The order of the epoch would have to be held in memory, and its indices do not fit 32 bits.
    #[error("data set of length {len} is too long for an exact shuffle, the limit is {max}")]
    TooLongToShuffle {
        /// The length that was asked for.
        len: u64,
        /// The longest data set that is shuffled exactly.
        max: u64,
    },
    /// The memory for the order of the epoch is not to be had.
    #[error("an exact shuffle of {len} samples needs {bytes} bytes of memory, which are not available")]
    OutOfMemory {
        /// The length that was asked for.
        len: u64,
        /// The memory it takes, 4 bytes a sample.
        bytes: u64,
    },
}
