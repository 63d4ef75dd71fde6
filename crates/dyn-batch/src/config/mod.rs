//! Configuration of a batcher: strategy, limits, and policies.

mod buckets;
mod cost;

pub use self::{buckets::Buckets, cost::Cost};

/// The strategy that decides which sequences share a batch.
///
/// Every strategy respects all limits, with one exception: [`Dynamic`](Self::Dynamic) without
/// `max_tokens` computes a token budget, and then ignores `max_batch_size`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "snake_case"))]
#[non_exhaustive]
pub enum DynamicBatchStrategy {
    /// Neighbors in the order, up to `max_batch_size`.
    #[default]
    PadToMax,
    /// Sequences of similar length.
    ///
    /// A batch is returned as soon as it is full, so buckets alternate; the remaining batches
    /// follow at the end, in ascending order of length.
    Bucket(Buckets),
    /// As many neighbors in the order as fit the token budget: many short sequences, or few long
    /// ones.
    ///
    /// The budget is `max_tokens`, or else `max_batch_size` × `max_sequence_length`. In the latter
    /// case batches of short sequences may exceed `max_batch_size`.
    Dynamic,
    /// Neighbors in the order of lengths: the least padding.
    Sorted {
        /// Size of the sorting window in batches; the whole data set by default.
        ///
        /// Sequences that do not fill a batch move to the next window, alternately the shortest and
        /// the longest.
        window: Option<u64>,
        /// Rule for cutting the sorted sequences into batches.
        cut: Cut,
    },
    /// Several sequences in one row of `max_tokens` tokens: a batch is one row.
    ///
    /// `max_batch_size` limits the sequences in a row.
    Pack(Packing),
}

impl DynamicBatchStrategy {
    /// Returns the buckets of the bucket strategy.
    pub(crate) fn buckets(&self) -> Option<&Buckets> {
        match self {
            Self::Bucket(buckets) => Some(buckets),
            Self::PadToMax | Self::Dynamic | Self::Sorted { .. } | Self::Pack(_) => None,
        }
    }

    /// Returns true if a batch is one row shared by several sequences.
    pub(crate) fn is_packing(&self) -> bool {
        match self {
            Self::Pack(_) => true,
            Self::PadToMax | Self::Bucket(_) | Self::Dynamic | Self::Sorted { .. } => false,
        }
    }
}

/// The rule for cutting sorted sequences into batches.
///
/// Both make the fewest batches that the limits allow; the crate page has a proof.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "snake_case"))]
#[non_exhaustive]
pub enum Cut {
    /// Each batch takes as many of the longest remaining sequences as it can, or of the shortest,
    /// whichever gives fewer padded tokens in total.
    ///
    /// A sorting window has no such choice: the cut of one window starts at the longest sequence,
    /// the cut of the next window at the shortest.
    #[default]
    Greedy,
    /// The cut with the fewest padded tokens among all cuts into the fewest batches, by dynamic
    /// programming.
    Optimal,
}

/// The algorithm that fills rows with sequences.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "snake_case"))]
#[non_exhaustive]
pub enum Packing {
    /// Best-fit decreasing: longest sequences first, each into the fullest row with enough space.
    #[default]
    BestFit,
    /// Minimum bin slack: row by row, each as full as a bounded search can make it (Fleszar and
    /// Hindi, "New heuristics for one-dimensional bin-packing", 2002), and never more rows than
    /// best fit. The result is the best of seven searches. A search takes about as long as best
    /// fit, and a few times as long if rows are hard to fill. All searches together make at most 16
    /// choices per sequence, plus 2^24, and then stop.
    MinimumSlack,
    /// In the order of arrival, each into the fullest of a few open rows: for streams.
    InOrder {
        /// Number of open rows, at least 1. With 1, neighbors share a row.
        open_rows: usize,
    },
}

/// The policy for a sequence that is longer than `max_sequence_length`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "snake_case"))]
#[non_exhaustive]
pub enum Overlong {
    /// The batches end with an error for this sequence.
    #[default]
    Error,
    /// The sequence counts as `max_sequence_length` tokens, and the report counts the sequence. The
    /// reader of the tokens must truncate them; with the feature `candle`, set
    /// `Collator::max_sequence_length`.
    Truncate,
    /// The sequence is skipped, and the report counts it.
    Skip,
}

/// The policy for the last sequences that cannot fill `batch_size_multiple`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "snake_case"))]
#[doc(alias = "drop_last")]
#[non_exhaustive]
pub enum Remainder {
    /// The sequences are dropped, and the report counts them: every batch splits evenly.
    #[default]
    Drop,
    /// The sequences form a last batch smaller than the multiple, or one such batch per bucket.
    Keep,
}

/// The configuration of a [`DynamicBatchSampler`](crate::DynamicBatchSampler).
///
/// At least one of [`max_batch_size`](Self::max_batch_size), [`max_tokens`](Self::max_tokens) and
/// [`max_cost`](Self::max_cost) must be set, because nothing else ends a batch. Samplers reject
/// contradictory settings.
///
/// # Examples
///
/// ```
/// use dyn_batch::{BatchConfig, Buckets, DynamicBatchStrategy, Overlong};
///
/// let config = BatchConfig::default()
///     .with_strategy(DynamicBatchStrategy::Bucket(Buckets::Width(64)))
///     .with_max_batch_size(32)
///     .with_max_sequence_length(512)
///     .with_overlong(Overlong::Truncate);
/// assert_eq!(config.max_batch_size, Some(32));
/// assert_eq!(config.max_tokens, None);
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(default, deny_unknown_fields))]
#[non_exhaustive]
pub struct BatchConfig {
    /// Strategy; [`DynamicBatchStrategy::PadToMax`] by default.
    pub strategy: DynamicBatchStrategy,
    /// Limit on the sequences in a batch; none by default.
    pub max_batch_size: Option<u64>,
    /// Limit on the **padded** tokens in a batch, its size times its longest length; none by
    /// default.
    pub max_tokens: Option<u64>,
    /// Limit on the cost of a batch: its size times the [`cost`](Self::cost) of its padded length, or
    /// the sum over the sequences of a packed row; none by default. [`Packing::MinimumSlack`] does not
    /// support it.
    pub max_cost: Option<u64>,
    /// Cost of a sequence; its number of tokens by default.
    pub cost: Cost,
    /// Limit on the length of a sequence; none by default.
    pub max_sequence_length: Option<u64>,
    /// Policy for longer sequences; [`Overlong::Error`] by default.
    pub overlong: Overlong,
    /// Divisor of every batch size, so that batches split evenly over devices; 1 by default.
    pub batch_size_multiple: u64,
    /// Policy for sequences that cannot fill the multiple; [`Remainder::Drop`] by default.
    pub remainder: Remainder,
    /// Divisor of every padded length, for kernels that need one; 1 by default.
    pub length_multiple: u64,
    /// Whether batches of a bucket are padded to the longest length of the bucket; `false` by
    /// default.
    ///
    /// Then there are no more padded lengths than buckets. Compiled functions and captured graphs
    /// need such a fixed set of shapes.
    pub fixed_shapes: bool,
}

impl Default for BatchConfig {
    fn default() -> Self {
        Self {
            strategy: DynamicBatchStrategy::default(),
            max_batch_size: None,
            max_tokens: None,
            max_cost: None,
            cost: Cost::TOKENS,
            max_sequence_length: None,
            overlong: Overlong::default(),
            batch_size_multiple: 1,
            remainder: Remainder::default(),
            length_multiple: 1,
            fixed_shapes: false,
        }
    }
}

impl BatchConfig {
    /// Sets the strategy; [`DynamicBatchStrategy::PadToMax`] by default.
    #[must_use]
    pub fn with_strategy(self, strategy: DynamicBatchStrategy) -> Self {
        Self { strategy, ..self }
    }

    /// Sets the limit on sequences in a batch; none by default.
    ///
    /// It is rounded down to a multiple of [`batch_size_multiple`](Self::batch_size_multiple).
    #[must_use]
    pub fn with_max_batch_size(self, max_batch_size: u64) -> Self {
        Self { max_batch_size: Some(max_batch_size), ..self }
    }

    /// Sets the limit on padded tokens in a batch; none by default.
    #[must_use]
    pub fn with_max_tokens(self, max_tokens: u64) -> Self {
        Self { max_tokens: Some(max_tokens), ..self }
    }

    /// Sets the limit on the cost of a batch, and the cost of a sequence; no limit by default.
    #[must_use]
    pub fn with_max_cost(self, max_cost: u64, cost: Cost) -> Self {
        Self { max_cost: Some(max_cost), cost, ..self }
    }

    /// Sets the limit on the length of a sequence; none by default.
    #[must_use]
    pub fn with_max_sequence_length(self, max_sequence_length: u64) -> Self {
        Self { max_sequence_length: Some(max_sequence_length), ..self }
    }

    /// Sets the policy for longer sequences; [`Overlong::Error`] by default.
    #[must_use]
    pub fn with_overlong(self, overlong: Overlong) -> Self {
        Self { overlong, ..self }
    }

    /// Sets the divisor of every batch size; 1 by default.
    ///
    /// A batch that is full at another size is closed at the last multiple, and the surplus opens
    /// the next batch.
    #[must_use]
    pub fn with_batch_size_multiple(self, batch_size_multiple: u64) -> Self {
        Self { batch_size_multiple, ..self }
    }

    /// Sets the policy for sequences that cannot fill the multiple; [`Remainder::Drop`] by default.
    #[must_use]
    pub fn with_remainder(self, remainder: Remainder) -> Self {
        Self { remainder, ..self }
    }

    /// Sets the divisor of every padded length; 1 by default.
    #[must_use]
    pub fn with_length_multiple(self, length_multiple: u64) -> Self {
        Self { length_multiple, ..self }
    }

    /// Sets whether batches of a bucket are padded to the longest length of the bucket; `false` by
    /// default.
    #[must_use]
    pub fn with_fixed_shapes(self, fixed_shapes: bool) -> Self {
        Self { fixed_shapes, ..self }
    }
}

#[cfg(all(test, feature = "serde"))]
mod tests {
    use super::*;

    #[test]
    fn json_has_defaults_and_rejects_unknown_names() {
        let config: BatchConfig =
            serde_json::from_str(r#"{"strategy": {"bucket": {"width": 16}}, "max_tokens": 4096}"#)
                .unwrap();
        let bucket = DynamicBatchStrategy::Bucket(Buckets::Width(16));
        assert_eq!(config, BatchConfig::default().with_strategy(bucket).with_max_tokens(4096));
        assert!(serde_json::from_str::<BatchConfig>(r#"{"max_token": 4096}"#).is_err());
    }
}
