//! The errors of this crate.

/// The result of creating a sampler or a batch.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of a configuration, a sequence, a step or a tensor; each variant has the value and the
/// limit.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    // Contradictory configurations.
    /// A limit, a bucket width or a multiple is zero.
    #[error("{setting} is 0, it must be at least 1")]
    Zero {
        /// Name of the setting.
        setting: &'static str,
    },
    /// No setting limits the size of a batch.
    #[error("batches have no limit, set max_batch_size, max_tokens or max_cost")]
    NoLimit,
    /// The dynamic strategy has no token budget, and lacks one of the two limits that imply a
    /// budget.
    #[error(
        "the dynamic strategy has no token budget, set max_tokens, or max_batch_size and max_sequence_length"
    )]
    NoTokenBudget,
    /// Settings contradict each other.
    #[error("{reason}")]
    InvalidConfig {
        /// What is wrong, with the value and the limit.
        reason: String,
    },
    /// A count is too large for a table in memory, or for the time of resuming.
    #[error("{count} {what} are above the limit of {limit}")]
    TooMany {
        /// The count.
        count: u64,
        /// Counted items.
        what: &'static str,
        /// Limit on the count.
        limit: u64,
    },

    // Sequences that fit no batch.
    /// A sequence is too long, and the policy is [`Overlong::Error`](crate::Overlong::Error).
    #[error(
        "sequence {index} of length {length} is above max_sequence_length {max_sequence_length}"
    )]
    SequenceTooLong {
        /// Index of the sequence.
        index: u64,
        /// Length of the sequence.
        length: u64,
        /// Limit on the length.
        max_sequence_length: u64,
    },
    /// The smallest batch with this sequence exceeds the token budget.
    #[error(
        "a batch of {multiple} with sequence {index} of length {length}{} is above max_tokens {max_tokens}",
        padding_note(*.length, *.padded_length)
    )]
    SequenceOverBudget {
        /// Index of the sequence.
        index: u64,
        /// Length of the sequence, after truncation.
        length: u64,
        /// Length of the sequence with padding, `u64::MAX` if 64 bits cannot hold it.
        padded_length: u64,
        /// Size of the smallest batch.
        multiple: u64,
        /// Token budget, `u64::MAX` if unset.
        max_tokens: u64,
    },
    /// A sequence is above the last bucket boundary, or above the cost of a batch.
    #[error("{reason}")]
    SequenceMisfit {
        /// Index of the sequence.
        index: u64,
        /// What is wrong, with the value and the limit.
        reason: String,
    },

    // Invalid data sets and orders.
    /// The order contains an index beyond the data set.
    #[error("index {index} is out of range for {count} sequences")]
    IndexOutOfRange {
        /// Requested index.
        index: u64,
        /// Number of sequences in the data set.
        count: u64,
    },
    /// There are too many sequences for a strategy that arranges the whole set; windows have no
    /// limit.
    #[error("{count} sequences are above the limit of {limit} for a whole set, use a window")]
    TooManySequences {
        /// Number of sequences.
        count: u64,
        /// Limit on the number of sequences.
        limit: u64,
    },

    // Steps of several ranks.
    /// The sequences of a step do not fill its grid, or do not fit into it.
    #[error("{reason}")]
    GridMisfit {
        /// Numbers of sequences and micro-batches.
        reason: String,
    },
    /// There are too few sequences for a batch per rank in every step.
    #[error("{n_batches} batches cannot be split into equally many for each of {world_size} ranks")]
    CannotFillStep {
        /// Number of batches.
        n_batches: u64,
        /// Number of ranks.
        world_size: core_types::WorldSize,
    },
    /// The state was saved with other lengths, another order or another configuration.
    #[error("the state belongs to other batches: found {found}, expected {expected}")]
    BatchMismatch {
        /// Expected state: the state at the start of the sampler's batches.
        expected: String,
        /// Saved state.
        found: String,
    },

    // Tensors.
    /// A tensor exceeds the address space, or sequences do not have the lengths that their batch counts.
    #[error("{reason}")]
    InvalidTensor {
        /// What is wrong, with the value and the limit.
        reason: String,
    },
}

/// Returns the note of a message on a length that padding increases, or an empty string.
impl Error {
    /// Makes the error of settings that contradict each other.
    pub(crate) fn config(reason: impl Into<String>) -> Self {
        Self::InvalidConfig { reason: reason.into() }
    }

    /// Makes the error of two settings that exclude each other.
    pub(crate) fn conflict(setting: &str, other: &str) -> Self {
        Self::config(format!("{setting} cannot be used with {other}"))
    }

    /// Makes the error of a tensor that is too large.
    pub(crate) fn tensor_too_large(rows: u64, padded_length: u64, n_features: u64) -> Self {
        let size = format!("{rows} x {padded_length} x {n_features}");
        let reason = format!("a tensor of {size} elements is larger than the address space");
        Self::InvalidTensor { reason }
    }
}

fn padding_note(length: u64, padded_length: u64) -> String {
    if padded_length == length { String::new() } else { format!(" ({padded_length} with padding)") }
}
