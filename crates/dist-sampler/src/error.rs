//! Errors of creating or resuming a sampler.

use core_types::WorldSize;

/// The result of creating or resuming a sampler.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error about a data set, a state or weights.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The data set has no samples.
    #[error("data set of length 0 has no samples to distribute")]
    EmptyDataSet,
    /// The data set has more than 2^63 samples.
    #[error("data set of length {len} is too long, the limit is {max}")]
    DataSetTooLong {
        /// Requested length.
        len: u64,
        /// Limit on the length.
        max: u64,
    },
    /// The data set is too long for an order that must be cached, since cached indices have 32
    /// bits.
    #[error("data set of length {len} is too long for a cached order, the limit is {max}")]
    TooLongToShuffle {
        /// Requested length.
        len: u64,
        /// Limit on the length of a cached order.
        max: u64,
    },
    /// There is not enough memory for the order of an epoch or for the table of weights.
    #[error("a table of {len} samples needs {bytes} bytes of memory, which are not available")]
    OutOfMemory {
        /// Number of samples or weights.
        len: u64,
        /// Required memory: 4 bytes per sample, 8 per weight, or 16 per sample to sort by class.
        bytes: u64,
    },
    /// There are too many weights or shards, or too many worlds in the epoch of a state.
    #[error("{count} {what} are too many, the limit is {max}")]
    TooMany {
        /// The count.
        count: u64,
        /// Counted items.
        what: &'static str,
        /// Limit on the count.
        max: u64,
    },
    /// A weight is negative or not finite, all weights are 0, or their number, their sum or their cycle
    /// is out of range; or the weights of a mixture cannot change.
    #[error("{reason}")]
    InvalidWeights {
        /// What is wrong, with the value and the limit.
        reason: String,
    },
    /// The number of rank weights differs from the world size.
    #[error("{weights} rank weights were given for a world of {world_size}")]
    RankWeights {
        /// Number of weights.
        weights: usize,
        /// Number of ranks.
        world_size: WorldSize,
    },
    /// A state belongs to another data set, order or seed, or has another format version.
    #[error("sampler state has {what} {state}, the sampler has {sampler}")]
    StateMismatch {
        /// Property that differs.
        what: &'static str,
        /// Value in the state.
        state: String,
        /// Value in the sampler.
        sampler: String,
    },
    /// A state claims more reads than there are positions.
    #[error("sampler state has {consumed} reads per rank in an order of {len}")]
    StateConsumed {
        /// Reads per rank in the state.
        consumed: u64,
        /// Length of the order.
        len: u64,
    },
    /// A sharded order has no lanes.
    #[error("shards in 0 lanes cannot be read, at least 1 is needed")]
    NoLanes,
    /// SPDL's samplers reject fewer samples than ranks if they drop the incomplete last round.
    #[error("{samples} samples are fewer than one for each of {world_size} ranks")]
    FewerSamplesThanRanks {
        /// Number of samples or draws.
        samples: u64,
        /// Number of ranks.
        world_size: WorldSize,
    },
    /// Draws without replacement exceed the data set.
    #[error("{draws} draws without weights exceed the data set of length {len}")]
    DrawsExceedDataSet {
        /// Number of draws.
        draws: u64,
        /// Length of the data set.
        len: u64,
    },
}

impl Error {
    pub(crate) fn weights(reason: impl Into<String>) -> Self {
        Self::InvalidWeights { reason: reason.into() }
    }

    /// Makes the error of `n_weights` weights that are all 0.
    pub(crate) fn no_weight(n_weights: usize) -> Self {
        Self::weights(format!("none of the {n_weights} weights is above 0"))
    }

    /// Makes the error of weights for a sampler that is no mixture.
    pub(crate) fn not_mixture() -> Self {
        Self::weights("the sampler is not a mixture and has no weights at a position")
    }
}
