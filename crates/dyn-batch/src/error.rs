//! What the crate refuses, and why.

/// The result of making a sampler, or a batch.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why no batches, steps or tensors can be made; each variant names the value and the limit.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    // A configuration that contradicts itself.
    /// A limit, a bucket width or a multiple is zero.
    #[error("{setting} is 0, it must be at least 1")]
    Zero {
        /// The name of the setting.
        setting: &'static str,
    },
    /// Nothing says when a batch is full.
    #[error("batches have no limit, set max_batch_size, max_tokens or max_cost")]
    NoLimit,
    /// The dynamic strategy has no budget, and not both of the numbers whose product it would be.
    #[error(
        "the dynamic strategy has no token budget, set max_tokens, or max_batch_size and max_sequence_length"
    )]
    NoTokenBudget,
    /// The budget of the dynamic strategy does not fit 64 bits.
    #[error(
        "a token budget of {max_batch_size} × {max_sequence_length} is above the limit of {}",
        u64::MAX
    )]
    TokenBudgetOverflow {
        /// One factor of the budget.
        max_batch_size: u64,
        /// The other factor.
        max_sequence_length: u64,
    },
    /// A batch of as many sequences as the multiple is over a limit, whatever it holds.
    #[error("batch_size_multiple {multiple} is above {setting} {limit}")]
    MultipleOverLimit {
        /// The multiple that was asked for.
        multiple: u64,
        /// The name of the limit.
        setting: &'static str,
        /// The limit's value.
        limit: u64,
    },
    /// Packed rows have no length.
    #[error("packed rows have no length, set max_tokens")]
    NoRowLength,
    /// The table of best-fit packing, an entry for each token of a row, would be too large.
    #[error("rows of {max_tokens} tokens are above the limit of {limit} for best-fit packing")]
    RowTooLong {
        /// The length of a row that was asked for.
        max_tokens: u64,
        /// The longest there may be.
        limit: u64,
    },
    /// The setting has no meaning for packed rows.
    #[error("{setting} cannot be set for packed rows")]
    NotForPacking {
        /// The name of the setting.
        setting: &'static str,
    },
    /// Fixed shapes are those of buckets, and the strategy has none.
    #[error("fixed shapes need buckets, set a bucket strategy")]
    NoBuckets,
    /// The boundaries of buckets are in the wrong order.
    #[error("bucket boundary {boundary} is followed by {next}, boundaries must ascend")]
    BoundariesNotAscending {
        /// A boundary.
        boundary: u64,
        /// The one that follows.
        next: u64,
    },

    // Buckets that cannot be made.
    /// There are no sequences to make buckets for.
    #[error("there are no sequences to make buckets for")]
    NoLengths,
    /// The table that finds the best boundaries would be too large.
    #[error(
        "{n_buckets} buckets for {n_lengths} different lengths are above the limit of {limit} table entries"
    )]
    TooManyBuckets {
        /// The number of buckets that was asked for.
        n_buckets: u64,
        /// How many different lengths there are.
        n_lengths: u64,
        /// The most that their product may be.
        limit: u64,
    },

    // A sequence that fits no batch.
    /// The sequence is longer than allowed, and the policy is
    /// [`Overlong::Error`](crate::Overlong::Error).
    #[error(
        "sequence {index} of length {length} is above max_sequence_length {max_sequence_length}"
    )]
    SequenceTooLong {
        /// Which sequence.
        index: u64,
        /// Its length.
        length: u64,
        /// The longest one allowed.
        max_sequence_length: u64,
    },
    /// Even the smallest batch that holds this sequence is over the token budget.
    #[error(
        "sequence {index} of length {length} in the smallest batch, of {multiple}, is above max_tokens {max_tokens}"
    )]
    SequenceOverBudget {
        /// Which sequence.
        index: u64,
        /// Its length, after truncation if that was asked for.
        length: u64,
        /// The size of the smallest batch.
        multiple: u64,
        /// The budget, `u64::MAX` if none was set.
        max_tokens: u64,
    },
    /// Even the smallest batch that holds this sequence costs too much.
    #[error(
        "sequence {index} of length {length} in the smallest batch, of {multiple}, is above max_cost {max_cost}"
    )]
    SequenceOverCost {
        /// Which sequence.
        index: u64,
        /// Its length, after truncation if that was asked for.
        length: u64,
        /// The size of the smallest batch.
        multiple: u64,
        /// The most that a batch may cost.
        max_cost: u64,
    },
    /// The sequence is longer than the last bucket boundary.
    #[error("sequence {index} of length {length} is above the last bucket boundary {largest}")]
    NoBucket {
        /// Which sequence.
        index: u64,
        /// Its length.
        length: u64,
        /// The last boundary.
        largest: u64,
    },

    // A data set or an order that cannot be batched.
    /// The order asks for a sequence that the data set does not have.
    #[error("index {index} is out of range for {count} sequences")]
    IndexOutOfRange {
        /// The index that was asked for.
        index: u64,
        /// The number of sequences there are.
        count: u64,
    },
    /// A whole set holds fewer sequences than that; a window has no limit.
    #[error("{count} sequences are above the limit of {limit} for a whole set, use a window")]
    TooManySequences {
        /// The number of sequences.
        count: u64,
        /// The most there may be.
        limit: u64,
    },

    // Steps of several ranks.
    /// Buckets and packed rows have no batch for all ranks that could be dealt out.
    #[error("buckets and packed rows cannot be dealt out, group their batches instead")]
    CannotDeal,
    /// There are too few sequences to give each rank a batch in every step.
    #[error("{n_batches} batches cannot be split into equally many for each of {world_size} ranks")]
    CannotFillStep {
        /// How many batches there were.
        n_batches: u64,
        /// How many ranks there are.
        world_size: core_types::WorldSize,
    },
    /// The state was saved with other lengths, another order or another configuration.
    #[error("the state belongs to other batches: it is at {found}, these are at {expected}")]
    OtherBatches {
        /// Where these batches begin.
        expected: String,
        /// Where the state is.
        found: String,
    },

    // Tensors.
    /// The batch is larger than the address space.
    #[error("a tensor of {rows} x {padded_length} tokens is larger than the address space")]
    TensorTooLarge {
        /// The number of rows.
        rows: u64,
        /// The length of each.
        padded_length: u64,
    },
    /// A packed batch, whose sequences share a row, was to be padded to a row for each.
    #[error("{rows} rows cannot hold {sequences} sequences, use Collator::pack for packed batches")]
    PackedBatch {
        /// The number of sequences.
        sequences: u64,
        /// The number of rows.
        rows: u64,
    },
    /// A field has a number of items that is not that of the tokens they belong to.
    #[error("sequence {index} has {items} items and {tokens} tokens, it must have one for each")]
    FieldLength {
        /// Which sequence.
        index: u64,
        /// The items that the field has for it.
        items: u64,
        /// The tokens of the sequence.
        tokens: u64,
    },
    /// The sequences of a batch have more tokens than it counts.
    #[error(
        "sequences of {tokens} tokens, {counted} are counted: longer sequences are cut by \
         Collator::with_max_sequence_length"
    )]
    Uncounted {
        /// The tokens that there are.
        tokens: u64,
        /// The tokens of the batch.
        counted: u64,
    },
    /// The sequences are longer than their lengths said.
    #[error(
        "sequences of {tokens} tokens do not fit a row of {row_length}: longer sequences are cut by \
         Collator::with_max_sequence_length"
    )]
    RowOverflow {
        /// The tokens of all sequences of the row.
        tokens: u64,
        /// The length of the row.
        row_length: u64,
    },
}
