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
    /// The budget of the dynamic strategy exceeds 64 bits.
    #[error(
        "a token budget of {max_batch_size} × {max_sequence_length} is above the limit of {}",
        u64::MAX
    )]
    TokenBudgetOverflow {
        /// First factor of the budget.
        max_batch_size: u64,
        /// Second factor of the budget.
        max_sequence_length: u64,
    },
    /// The multiple of the batch size exceeds a limit.
    #[error("batch_size_multiple {multiple} is above {setting} {limit}")]
    MultipleOverLimit {
        /// Requested multiple.
        multiple: u64,
        /// Name of the limit.
        setting: &'static str,
        /// Value of the limit.
        limit: u64,
    },
    /// Packed rows have no length.
    #[error("packed rows have no length, set max_tokens")]
    NoRowLength,
    /// Two settings exclude each other.
    #[error("{setting} cannot be used with {other}")]
    Conflict {
        /// Name of a setting.
        setting: &'static str,
        /// The other setting, and what to use instead.
        other: &'static str,
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
    /// Bucket boundaries do not ascend.
    #[error("bucket boundary {boundary} is followed by {next}, boundaries must ascend")]
    BoundariesNotAscending {
        /// A boundary.
        boundary: u64,
        /// Next boundary.
        next: u64,
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
    /// The smallest batch with this sequence exceeds the cost limit.
    #[error(
        "a batch of {multiple} with sequence {index} of length {length} is above max_cost {max_cost}"
    )]
    SequenceOverCost {
        /// Index of the sequence.
        index: u64,
        /// Length of the sequence, after truncation.
        length: u64,
        /// Size of the smallest batch.
        multiple: u64,
        /// Limit on the cost of a batch.
        max_cost: u64,
    },
    /// A sequence is longer than the last bucket boundary.
    #[error("sequence {index} of length {length} is above the last bucket boundary {largest}")]
    NoBucket {
        /// Index of the sequence.
        index: u64,
        /// Length of the sequence.
        length: u64,
        /// Last boundary.
        largest: u64,
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
    /// A setting is not a multiple of the batch size multiple.
    #[error("{setting} {value} is not a multiple of batch_size_multiple {multiple}")]
    NotAMultiple {
        /// Name of the setting.
        setting: &'static str,
        /// Value of the setting.
        value: u64,
        /// Batch size multiple.
        multiple: u64,
    },
    /// A global batch has too few sequences for the micro-batches of a step.
    #[error("{sequences} sequences in groups of {multiple} cannot fill {cells} micro-batches")]
    CannotFillGrid {
        /// Number of sequences in a step.
        sequences: u64,
        /// Batch size multiple.
        multiple: u64,
        /// Number of micro-batches of all ranks in a step.
        cells: u64,
    },
    /// The limits of batches do not allow as few micro-batches as a step has.
    #[error("{sequences} sequences need {needed} micro-batches, above the {cells} of a step")]
    GridTooSmall {
        /// Number of sequences in the step.
        sequences: u64,
        /// Number of micro-batches that they need.
        needed: u64,
        /// Number of micro-batches of all ranks.
        cells: u64,
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
    /// A tensor exceeds the address space.
    #[error(
        "a tensor of {rows} x {padded_length} x {n_features} elements is larger than the address space"
    )]
    TensorTooLarge {
        /// Number of rows.
        rows: u64,
        /// Length of a row.
        padded_length: u64,
        /// Elements per token.
        n_features: u64,
    },
    /// A packed batch, with several sequences per row, cannot be padded.
    #[error("{rows} rows cannot hold {sequences} sequences, use Collator::pack for packed batches")]
    PackedBatch {
        /// Number of sequences.
        sequences: u64,
        /// Number of rows.
        rows: u64,
    },
    /// A field has a number of items that does not match the tokens of its sequence.
    #[error("sequence {index} has {items} items and {tokens} tokens, expected {expected} items")]
    FieldLength {
        /// Index of the sequence.
        index: u64,
        /// Items of the field for this sequence.
        items: u64,
        /// Tokens of the sequence.
        tokens: u64,
        /// Expected items: one per token, or one per token and feature.
        expected: u64,
    },
    /// The sequences of a batch have more tokens than the batch counts, or than their row has places.
    #[error(
        "sequences of {tokens} tokens are above the {limit} of {holder}: set \
         Collator::with_max_sequence_length to truncate"
    )]
    TooManyTokens {
        /// Tokens of the sequences.
        tokens: u64,
        /// Tokens that the batch counts, or length of the row.
        limit: u64,
        /// Batch or row.
        holder: &'static str,
    },
}

/// Returns the note of a message on a length that padding increases, or an empty string.
fn padding_note(length: u64, padded_length: u64) -> String {
    if padded_length == length { String::new() } else { format!(" ({padded_length} with padding)") }
}
