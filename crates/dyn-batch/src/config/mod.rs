//! The choices of a batcher: strategy, limits, and what to do with sequences that do not fit them.

mod buckets;
mod cost;

pub use self::{buckets::Buckets, cost::Cost};

/// Which sequences share a batch.
///
/// Every strategy keeps all limits, but for [`Dynamic`](Self::Dynamic) with a budget that is computed:
/// it counts sequences by their tokens.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "snake_case"))]
#[non_exhaustive]
pub enum DynamicBatchStrategy {
    /// Neighbors in the order, usually `max_batch_size` of them.
    #[default]
    PadToMax,
    /// Sequences of similar length.
    ///
    /// A batch comes out as soon as it is full, so buckets alternate; what is left in them at the
    /// end comes in ascending order of length.
    Bucket(Buckets),
    /// Neighbors in the order, as many as fit the token budget: many short ones, few long ones.
    ///
    /// The budget is `max_tokens`. Without it, it is `max_batch_size` × `max_sequence_length`, and
    /// `max_batch_size` then counts sequences of full length: batches of shorter ones hold more.
    Dynamic,
    /// Neighbors by length: the least padding there is.
    Sorted {
        /// How many batches' worth of sequences are sorted together; all of them by default.
        ///
        /// What does not fill a batch moves on into the next window, in turn from its short end and
        /// from its long one.
        window: Option<u64>,
        /// Where the sorted sequences are cut into batches.
        cut: Cut,
    },
    /// Several sequences in one row of `max_tokens` tokens: each batch is such a row.
    ///
    /// `max_batch_size` limits the sequences in a row.
    Pack(Packing),
}

impl DynamicBatchStrategy {
    /// The buckets of the only strategy that has some.
    pub(crate) fn buckets(&self) -> Option<&Buckets> {
        match self {
            Self::Bucket(buckets) => Some(buckets),
            Self::PadToMax | Self::Dynamic | Self::Sorted { .. } | Self::Pack(_) => None,
        }
    }

    /// Whether a batch is one row that several sequences share.
    pub(crate) fn is_packing(&self) -> bool {
        match self {
            Self::Pack(_) => true,
            Self::PadToMax | Self::Bucket(_) | Self::Dynamic | Self::Sorted { .. } => false,
        }
    }
}

/// Where sorted sequences are cut into batches.
///
/// Both make as few batches as the limits allow of whole data sets; see the crate page for a proof.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "snake_case"))]
#[non_exhaustive]
pub enum Cut {
    /// Each batch takes as many of the longest sequences that are left as it can, or of the
    /// shortest: whichever has fewer padded tokens over all batches.
    ///
    /// A window knows too little to choose. It is cut from its two ends in turn.
    #[default]
    Greedy,
    /// Of all cuts into the fewest batches the one with the fewest padded tokens, by dynamic
    /// programming.
    Optimal,
}

/// How rows are filled with sequences.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "snake_case"))]
#[non_exhaustive]
pub enum Packing {
    /// The longest first, each into the fullest row that has room: best-fit decreasing.
    #[default]
    BestFit,
    /// Row by row, each as full as a bounded search can make it (Fleszar and Hindi, "New heuristics
    /// for one-dimensional bin-packing", 2002), and never more rows than by best fit. The best of
    /// seven searches, of which each takes up to as long as best fit, and a few times as long where
    /// rows are hard to fill; a search that would exceed 16 choices for each sequence and 2^24
    /// besides is given up, and those after it.
    MinimumSlack,
    /// In the order in which they come, each into the fullest of a few open rows: for streams.
    InOrder {
        /// How many rows are open at a time, 1 at least. With 1, neighbors share a row.
        open_rows: usize,
    },
}

/// What happens to a sequence that is longer than `max_sequence_length`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "snake_case"))]
#[non_exhaustive]
pub enum Overlong {
    /// The batches end with an error that names it.
    #[default]
    Error,
    /// It counts as cut to `max_sequence_length`, and the report counts it. Whoever reads the tokens
    /// cuts them: with the feature `candle`, `Collator::with_max_sequence_length`.
    Truncate,
    /// It is left out, and the report counts it.
    Skip,
}

/// What happens to the sequences that are left at the end and cannot fill up `batch_size_multiple`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "snake_case"))]
#[doc(alias = "drop_last")]
#[non_exhaustive]
pub enum Remainder {
    /// They are left out, and the report counts them: every batch splits evenly.
    #[default]
    Drop,
    /// They form a last batch, smaller than the multiple; of each bucket, with that strategy.
    Keep,
}

/// The choices of a [`DynamicBatchSampler`](crate::DynamicBatchSampler) beside the lengths.
///
/// At least one of [`max_batch_size`](Self::max_batch_size), [`max_tokens`](Self::max_tokens) and
/// [`max_cost`](Self::max_cost) must be set, since nothing else ends a batch. What contradicts
/// itself is found when batches are made.
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
    /// Which sequences share a batch; [`DynamicBatchStrategy::PadToMax`] by default.
    pub strategy: DynamicBatchStrategy,
    /// The most sequences in a batch; no limit by default.
    pub max_batch_size: Option<u64>,
    /// The most **padded** tokens in a batch, which is its size times its longest length; no limit
    /// by default.
    pub max_tokens: Option<u64>,
    /// The most that a batch may cost, which is its size times the [`cost`](Self::cost) of its
    /// padded length; no limit by default.
    pub max_cost: Option<u64>,
    /// What a sequence costs; its number of tokens by default.
    pub cost: Cost,
    /// The longest sequence allowed; no limit by default.
    pub max_sequence_length: Option<u64>,
    /// What happens to longer sequences; [`Overlong::Error`] by default.
    pub overlong: Overlong,
    /// Every batch holds a multiple of this many sequences, so that it splits evenly over devices;
    /// 1 by default.
    pub batch_size_multiple: u64,
    /// What happens to sequences that cannot fill up the multiple; [`Remainder::Drop`] by default.
    pub remainder: Remainder,
    /// Batches are padded to the next multiple of this length, for kernels that like one; 1 by
    /// default.
    pub length_multiple: u64,
    /// Whether batches of a bucket are padded to the longest sequence that may be in it; `false` by
    /// default.
    ///
    /// There are as many padded lengths then as buckets: what compiled functions and captured
    /// graphs ask for.
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
    /// Sets which sequences share a batch; [`DynamicBatchStrategy::PadToMax`] by default.
    #[must_use]
    pub fn with_strategy(self, strategy: DynamicBatchStrategy) -> Self {
        Self { strategy, ..self }
    }

    /// Sets the most sequences in a batch; no limit by default.
    ///
    /// If it is not a multiple of [`batch_size_multiple`](Self::batch_size_multiple), the next
    /// smaller multiple rules.
    #[must_use]
    pub fn with_max_batch_size(self, max_batch_size: u64) -> Self {
        Self { max_batch_size: Some(max_batch_size), ..self }
    }

    /// Sets the most padded tokens in a batch; no limit by default (beyond `u64::MAX`).
    #[must_use]
    pub fn with_max_tokens(self, max_tokens: u64) -> Self {
        Self { max_tokens: Some(max_tokens), ..self }
    }

    /// Sets the most that a batch may cost, and what a sequence does; no limit by default.
    #[must_use]
    pub fn with_max_cost(self, max_cost: u64, cost: Cost) -> Self {
        Self { max_cost: Some(max_cost), cost, ..self }
    }

    /// Sets the longest sequence allowed; no limit by default.
    #[must_use]
    pub fn with_max_sequence_length(self, max_sequence_length: u64) -> Self {
        Self { max_sequence_length: Some(max_sequence_length), ..self }
    }

    /// Sets what happens to sequences longer than allowed; [`Overlong::Error`] by default.
    #[must_use]
    pub fn with_overlong(self, overlong: Overlong) -> Self {
        Self { overlong, ..self }
    }

    /// Sets the number that divides the size of every batch; 1 by default.
    ///
    /// A batch that is full in between is closed at the last multiple, and the surplus opens the
    /// next one.
    #[must_use]
    pub fn with_batch_size_multiple(self, batch_size_multiple: u64) -> Self {
        Self { batch_size_multiple, ..self }
    }

    /// Sets what happens to sequences that cannot fill up the multiple; [`Remainder::Drop`] by
    /// default.
    #[must_use]
    pub fn with_remainder(self, remainder: Remainder) -> Self {
        Self { remainder, ..self }
    }

    /// Sets the number that divides every padded length; 1 by default.
    #[must_use]
    pub fn with_length_multiple(self, length_multiple: u64) -> Self {
        Self { length_multiple, ..self }
    }

    /// Sets whether batches of a bucket are padded to the longest sequence that may be in it;
    /// `false` by default.
    #[must_use]
    pub fn with_fixed_shapes(self, fixed_shapes: bool) -> Self {
        Self { fixed_shapes, ..self }
    }
}

#[cfg(all(test, feature = "serde"))]
mod tests {
    use super::*;

    #[test]
    fn what_is_left_out_has_its_default_and_unknown_names_are_refused() {
        let config: BatchConfig =
            serde_json::from_str(r#"{"strategy": {"bucket": {"width": 16}}, "max_tokens": 4096}"#)
                .unwrap();
        let bucket = DynamicBatchStrategy::Bucket(Buckets::Width(16));
        assert_eq!(config, BatchConfig::default().with_strategy(bucket).with_max_tokens(4096));
        assert!(serde_json::from_str::<BatchConfig>(r#"{"max_token": 4096}"#).is_err());
    }
}
