//! Why a sampler cannot be made, or cannot be resumed.

use core_types::WorldSize;

/// The result of making a sampler.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// A data set, a state or weights that the sampler asked for cannot take.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// There is nothing to sample.
    #[error("data set of length 0 has no samples to distribute")]
    EmptyDataSet,
    /// The data set is longer than
    /// 2^63 samples.
    #[error("data set of length {len} is too long, the limit is {max}")]
    DataSetTooLong {
        /// The length that was asked for.
        len: u64,
        /// The longest data set a sampler takes.
        max: u64,
    },
    /// The order of the epoch would have to be held in memory, and its indices do not fit 32 bits.
    #[error("data set of length {len} is too long for an order held in memory, the limit is {max}")]
    TooLongToShuffle {
        /// The length that was asked for.
        len: u64,
        /// The longest data set that is shuffled exactly.
        max: u64,
    },
    /// There is not enough memory for the order of an epoch, for making it, or for the table of
    /// weights.
    #[error("a table of {len} samples needs {bytes} bytes of memory, which are not available")]
    OutOfMemory {
        /// The number of samples, or of weights.
        len: u64,
        /// The memory it takes: 4 bytes per sample, 8 per weight, or 16 per sample that is sorted by
        /// class.
        bytes: u64,
    },
    /// There are more weights than a table has slots for.
    #[error("{weights} weights are too many, the limit is {max}")]
    TooManyWeights {
        /// The number of weights.
        weights: u64,
        /// The most that are taken.
        max: u64,
    },
    /// A weight is negative, infinite or not a number.
    #[error("weight {weight} at index {index} is negative or not finite")]
    InvalidWeight {
        /// The sample whose weight it is.
        index: usize,
        /// The weight, as text: as a number it might not equal itself.
        weight: String,
    },
    /// No sample can be drawn, since all weights are 0.
    #[error("all {weights} weights are 0")]
    NoWeight {
        /// The number of weights.
        weights: usize,
    },
    /// The sum of the weights exceeds the largest `f64`.
    #[error("the sum of the weights overflows at index {index}, weight {weight}")]
    WeightSumOverflow {
        /// The first sample at which the sum is too large.
        index: usize,
        /// Its weight, as text.
        weight: String,
    },
    /// A proportional partition has more or fewer weights than ranks.
    #[error("{weights} rank weights were given for a world of {world_size}")]
    RankWeights {
        /// The number of weights.
        weights: usize,
        /// The number of ranks.
        world_size: WorldSize,
    },
    /// A proportional partition gives nothing to any rank.
    #[error("all {world_size} rank weights are 0")]
    NoRankWeight {
        /// The number of ranks.
        world_size: WorldSize,
    },
    /// A saved state was written by a version of this crate that has another format.
    #[error("sampler state has version {version}, this crate reads version {supported}")]
    StateVersion {
        /// The state's version.
        version: u32,
        /// The version that is understood.
        supported: u32,
    },
    /// A saved state belongs to another data set, order or seed.
    #[error("sampler state has {what} {state}, the sampler has {sampler}")]
    StateMismatch {
        /// What differs.
        what: &'static str,
        /// Its value in the state.
        state: String,
        /// Its value in the sampler.
        sampler: String,
    },
    /// A saved state says that more was read than there was.
    #[error("sampler state says that each rank has read {consumed} of an order of {len}")]
    StateConsumed {
        /// How much every rank has read, according to the state.
        consumed: u64,
        /// How much there was to read.
        len: u64,
    },
    /// A saved state names more worlds than an epoch is read by.
    #[error("sampler state names {stages} worlds that read one epoch, the limit is {max}")]
    StateStages {
        /// The worlds of the state.
        stages: usize,
        /// The most that are taken.
        max: usize,
    },
    /// A mixture has more or fewer weights than samplers.
    #[error("{weights} weights were given for a mixture of {samplers} samplers")]
    MixtureWeights {
        /// The number of weights.
        weights: usize,
        /// The number of samplers.
        samplers: usize,
    },
    /// No sampler of a mixture has a weight above 0.
    #[error("no sampler of the mixture has a weight above 0")]
    NoMixtureWeight,
    /// The interleaving of a mixture repeats only after too many turns.
    #[error(
        "the weights of the mixture repeat after {turns} turns, the limit is {max}; round them"
    )]
    MixtureCycle {
        /// The sum of the weights over their greatest common divisor.
        turns: u64,
        /// The longest cycle.
        max: u64,
    },
}
