//! A validated configuration: admission of sequences, padded lengths, and sizes of batches.
//!
//! With a multiple m, a batch grows by groups of m sequences. A group always fits, because a
//! sequence is admitted only if m sequences of its length are within the limits. So a batch can
//! always be closed at a multiple, and fewer than m sequences carry over.

use std::cmp::Ordering;

use crate::{
    batch::{Batch, Sequence},
    config::{BatchConfig, Buckets, DynamicBatchStrategy, Overlong, Packing, Remainder},
    error::{Error, Result},
};

/// Limit on the row length of best-fit packing, whose table has an entry of 4 bytes per token: 64
/// MiB at most.
const MAX_ROW_LENGTH: u64 = 1 << 24;

/// The value of an unset limit. No sum of lengths in 64 bits exceeds it.
const UNLIMITED: u64 = u64::MAX;

/// A validated configuration with derived limits.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct BatchLimits {
    config: BatchConfig,
    max_batch_size: u64,
    max_tokens: u64,
    /// Longest admitted sequence; `None` if even an empty one does not fit.
    longest: Option<u64>,
    /// Batch size multiple.
    group_len: usize,
}

/// The result of admitting a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Admission {
    /// The sequence counts with its full length.
    Whole(Sequence),
    /// The sequence counts with its truncated length.
    Truncated(Sequence),
    /// The sequence is in no batch.
    Skipped,
}

/// The free space of a packed row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct RowSpace {
    pub(crate) tokens: u64,
    pub(crate) sequences: u64,
    /// Cost left of `max_cost`.
    pub(crate) cost: u64,
}

/// The space that a sequence takes in a packed row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RowItem {
    pub(crate) length: u64,
    /// Cost that counts toward `max_cost`; 0 without this limit.
    pub(crate) cost: u64,
}

impl RowSpace {
    /// Returns the number of sequences like this one that fit.
    pub(crate) fn capacity(self, item: RowItem) -> u64 {
        let by_cost = max_repeats(self.cost, item.cost);
        max_repeats(self.tokens, item.length).min(by_cost).min(self.sequences)
    }

    /// Returns true if a sequence like this one fits.
    pub(crate) fn holds(self, item: RowItem) -> bool {
        self.tokens >= item.length && self.cost >= item.cost && self.sequences > 0
    }

    /// Returns the space left after a sequence is removed.
    #[must_use]
    pub(crate) fn after_removing(self, item: RowItem) -> Self {
        Self {
            tokens: self.tokens + item.length,
            sequences: self.sequences + 1,
            cost: self.cost + item.cost,
        }
    }

    /// Returns the space left after `count` sequences like this one, which must fit.
    #[must_use]
    pub(crate) fn after_adding(self, item: RowItem, count: u64) -> Self {
        Self {
            tokens: self.tokens - count * item.length,
            sequences: self.sequences - count,
            cost: self.cost - count * item.cost,
        }
    }
}

impl BatchLimits {
    /// Validates a configuration.
    pub(crate) fn new(config: BatchConfig) -> Result<Self> {
        check_nonzero(&config)?;
        check_strategy(&config)?;
        let (max_batch_size, max_tokens) = size_limits(&config)?;
        check_multiple(&config, max_tokens)?;
        // No group of more than `usize::MAX` sequences is ever complete, nor is a group of
        // `usize::MAX`, so clamping changes nothing.
        let group_len = usize::try_from(config.batch_size_multiple).unwrap_or(usize::MAX);
        let mut limits = Self { config, max_batch_size, max_tokens, longest: None, group_len };
        limits.longest = limits.find_longest();
        Ok(limits)
    }

    /// Finds the longest admitted sequence by bisection: if a sequence fits, all shorter sequences
    /// fit.
    fn find_longest(&self) -> Option<u64> {
        if !self.fits(0) {
            return None;
        }
        if self.fits(u64::MAX) {
            return Some(u64::MAX);
        }
        let mut fitting = 0;
        let mut too_long = u64::MAX;
        while fitting + 1 < too_long {
            let length = fitting.midpoint(too_long);
            if self.fits(length) {
                fitting = length;
            } else {
                too_long = length;
            }
        }
        Some(fitting)
    }

    /// Returns true if the smallest batch can hold a sequence of this length.
    fn fits(&self, length: u64) -> bool {
        if self.is_packing() {
            return self.empty_row().holds(self.row_item(length));
        }
        let has_bucket = self.last_boundary().is_none_or(|largest| length <= largest);
        let padded_length = self.checked_padded_length(length);
        has_bucket && padded_length.is_some_and(|length| self.max_rows(length) > 0)
    }

    fn last_boundary(&self) -> Option<u64> {
        match self.config.strategy.buckets()? {
            Buckets::Boundaries(boundaries) => boundaries.last().copied(),
            Buckets::Width(_) => None,
        }
    }

    pub(crate) fn config(&self) -> &BatchConfig {
        &self.config
    }

    /// Returns the space of an empty packed row.
    pub(crate) fn empty_row(&self) -> RowSpace {
        let cost = or_unlimited(self.config.max_cost);
        RowSpace { tokens: self.max_tokens, sequences: self.max_batch_size, cost }
    }

    /// Returns the space that a sequence of this length takes in a packed row.
    pub(crate) fn row_item(&self, length: u64) -> RowItem {
        let cost = self.config.max_cost.map_or(0, |_| self.config.cost.for_length(length));
        RowItem { length, cost }
    }

    /// Returns the size of a group.
    pub(crate) fn group_len(&self) -> usize {
        self.group_len
    }

    /// Returns true if batches are packed rows.
    pub(crate) fn is_packing(&self) -> bool {
        self.config.strategy.is_packing()
    }

    /// Applies the policy for long sequences and checks that the result fits the smallest batch.
    pub(crate) fn admit(&self, sequence: Sequence) -> Result<Admission> {
        let Sequence { index, length } = sequence;
        let Some(max_sequence_length) = self.config.max_sequence_length.filter(|&max| max < length)
        else {
            return self.check(sequence).map(Admission::Whole);
        };
        match self.config.overlong {
            Overlong::Error => Err(Error::SequenceTooLong { index, length, max_sequence_length }),
            Overlong::Truncate => self.check(self.truncate(sequence)).map(Admission::Truncated),
            Overlong::Skip => Ok(Admission::Skipped),
        }
    }

    /// Truncates an admitted sequence to the limit.
    pub(crate) fn truncate(&self, sequence: Sequence) -> Sequence {
        let max = or_unlimited(self.config.max_sequence_length);
        Sequence { length: sequence.length.min(max), ..sequence }
    }

    /// Checks that a sequence fits the smallest batch.
    fn check(&self, sequence: Sequence) -> Result<Sequence> {
        if self.longest.is_some_and(|longest| sequence.length <= longest) {
            return Ok(sequence);
        }
        Err(self.misfit_error(sequence))
    }

    /// Returns the error for the limit that a sequence exceeds: buckets, tokens or cost.
    fn misfit_error(&self, Sequence { index, length }: Sequence) -> Error {
        let multiple = self.config.batch_size_multiple;
        let max_tokens = self.max_tokens;
        if let Some(largest) = self.last_boundary().filter(|&largest| largest < length) {
            let reason = format!(
                "sequence {index} of length {length} is above the last bucket boundary {largest}"
            );
            return Error::SequenceMisfit { index, reason };
        }
        let padded_length = self.checked_padded_length(length);
        let padded_tokens = padded_length.and_then(|padded| padded.checked_mul(multiple));
        let is_in_budget = padded_tokens.is_some_and(|tokens| tokens <= max_tokens);
        match self.config.max_cost {
            Some(max_cost) if is_in_budget => {
                let reason = format!(
                    "a batch of {multiple} with sequence {index} of length {length} is above max_cost \
                     {max_cost}"
                );
                Error::SequenceMisfit { index, reason }
            }
            Some(_) | None => {
                let padded_length = padded_length.unwrap_or(u64::MAX);
                Error::SequenceOverBudget { index, length, padded_length, multiple, max_tokens }
            }
        }
    }

    /// Returns the bucket of this length; 0 for strategies without buckets.
    pub(crate) fn bucket(&self, length: u64) -> u64 {
        match self.config.strategy.buckets() {
            Some(buckets) => buckets.index(length),
            None => 0,
        }
    }

    /// Creates the batch of these admitted sequences: one row each, or one row if the strategy
    /// packs.
    pub(crate) fn batch(&self, sequences: impl ExactSizeIterator<Item = Sequence>) -> Batch {
        let mut indices = Vec::with_capacity(sequences.len());
        let mut longest = 0;
        let mut real_tokens = 0;
        for Sequence { index, length } in sequences {
            indices.push(index);
            longest = length.max(longest);
            // This cannot overflow: padded tokens are at least as many and within the limits.
            real_tokens += length;
        }
        let rows = self.rows(indices.len());
        Batch { indices, rows, padded_length: self.row_length(longest), real_tokens }
    }

    /// Returns the number of rows of a batch of `len` sequences: one if packed, else one per
    /// sequence.
    pub(crate) fn rows(&self, len: usize) -> u64 {
        if self.is_packing() { 1 } else { len as u64 }
    }

    /// Returns the length of a row, given the longest sequence.
    fn row_length(&self, longest: u64) -> u64 {
        if self.is_packing() { self.max_tokens } else { self.padded_length(longest) }
    }

    /// Returns the padded length of a batch, given its longest admitted sequence.
    #[expect(clippy::expect_used, reason = "`fits` checked this before admission")]
    pub(crate) fn padded_length(&self, longest: u64) -> u64 {
        self.checked_padded_length(longest).expect("an admitted sequence has a padded length")
    }

    fn checked_padded_length(&self, longest: u64) -> Option<u64> {
        let length = match self.config.strategy.buckets() {
            Some(buckets) if self.config.fixed_shapes => buckets.longest(buckets.index(longest))?,
            Some(_) | None => longest,
        };
        length.checked_next_multiple_of(self.config.length_multiple)
    }

    /// Returns the limit on the sequences of a batch with this padded length, a multiple of the
    /// group size.
    pub(crate) fn max_rows(&self, padded_length: u64) -> u64 {
        let by_tokens = max_repeats(self.max_tokens, padded_length);
        let by_cost = match self.config.max_cost {
            Some(max_cost) => max_repeats(max_cost, self.config.cost.for_length(padded_length)),
            None => UNLIMITED,
        };
        let rows = self.max_batch_size.min(by_tokens).min(by_cost);
        rows - rows % self.config.batch_size_multiple
    }

    /// Returns how many of the first `len` sequences of an open batch to close as a batch, always
    /// the first ones, or `None` if the open batch can take another group. `max_rows` is the limit
    /// for a batch of all `len` sequences.
    ///
    /// A batch is full as soon as the next group, however short, would exceed `max_rows`. The
    /// result does not depend on later sequences, so waiting for them would only delay the batch.
    pub(crate) fn full_size(&self, len: usize, max_rows: u64) -> Option<usize> {
        // `max_rows` is a multiple of the group size, so a batch below it has space for a group.
        match (len as u64).cmp(&max_rows) {
            Ordering::Less => None,
            Ordering::Equal => Some(len),
            // The last group lowered `max_rows` below `len`. The batch without this group respects
            // the limit that held before.
            Ordering::Greater => Some((len.div_ceil(self.group_len) - 1) * self.group_len),
        }
    }

    /// Splits the last `len` sequences. Returns the number of sequences in complete groups, and the
    /// number of sequences in one more batch for the remainder.
    pub(crate) fn split_remainder(&self, len: usize) -> (usize, usize) {
        let surplus = len % self.group_len;
        match self.config.remainder {
            Remainder::Drop => (len - surplus, 0),
            Remainder::Keep => (len - surplus, surplus),
        }
    }
}

fn or_unlimited(limit: Option<u64>) -> u64 {
    limit.unwrap_or(UNLIMITED)
}

/// Returns how many times `size` fits into `limit`; `UNLIMITED` for size 0.
fn max_repeats(limit: u64, size: u64) -> u64 {
    match limit.checked_div(size) {
        Some(repeats) => repeats,
        None => UNLIMITED,
    }
}

fn check_nonzero(config: &BatchConfig) -> Result<()> {
    let strategy_setting = match &config.strategy {
        DynamicBatchStrategy::Bucket(Buckets::Width(width)) => Some(("bucket width", *width)),
        DynamicBatchStrategy::Sorted { window, .. } => window.map(|window| ("window", window)),
        DynamicBatchStrategy::Pack(Packing::InOrder { open_rows }) => {
            Some(("open_rows", *open_rows as u64))
        }
        DynamicBatchStrategy::PadToMax
        | DynamicBatchStrategy::Bucket(Buckets::Boundaries(_))
        | DynamicBatchStrategy::Dynamic
        | DynamicBatchStrategy::Pack(Packing::BestFit | Packing::MinimumSlack) => None,
    };
    let settings = [
        strategy_setting,
        config.max_batch_size.map(|value| ("max_batch_size", value)),
        config.max_tokens.map(|value| ("max_tokens", value)),
        config.max_cost.map(|value| ("max_cost", value)),
        config.max_sequence_length.map(|value| ("max_sequence_length", value)),
        Some(("batch_size_multiple", config.batch_size_multiple)),
        Some(("length_multiple", config.length_multiple)),
    ];
    for (setting, value) in settings.into_iter().flatten() {
        if value == 0 {
            return Err(Error::Zero { setting });
        }
    }
    Ok(())
}

fn check_strategy(config: &BatchConfig) -> Result<()> {
    if config.fixed_shapes && config.strategy.buckets().is_none() {
        let other = "a strategy without buckets";
        return Err(Error::conflict("fixed_shapes", other));
    }
    match &config.strategy {
        DynamicBatchStrategy::Bucket(buckets) => buckets.check(),
        DynamicBatchStrategy::Pack(packing) => check_packing(config, *packing),
        DynamicBatchStrategy::PadToMax
        | DynamicBatchStrategy::Dynamic
        | DynamicBatchStrategy::Sorted { .. } => Ok(()),
    }
}

fn check_packing(config: &BatchConfig, packing: Packing) -> Result<()> {
    for (setting, is_set) in [
        ("max_cost", config.max_cost.is_some() && packing == Packing::MinimumSlack),
        ("batch_size_multiple", config.batch_size_multiple != 1),
        ("length_multiple", config.length_multiple != 1),
    ] {
        if is_set {
            return Err(Error::conflict(setting, "packed rows"));
        }
    }
    let max_tokens = config
        .max_tokens
        .ok_or_else(|| Error::config("packed rows have no length, set max_tokens"))?;
    let limit = match packing {
        Packing::BestFit | Packing::MinimumSlack => MAX_ROW_LENGTH,
        Packing::InOrder { .. } => UNLIMITED,
    };
    if max_tokens <= limit {
        return Ok(());
    }
    Err(Error::TooMany { count: max_tokens, what: "tokens in a row for best-fit packing", limit })
}

/// Returns the limits on the sequences and the padded tokens of a batch.
fn size_limits(config: &BatchConfig) -> Result<(u64, u64)> {
    if config.strategy == DynamicBatchStrategy::Dynamic && config.max_tokens.is_none() {
        return Ok((UNLIMITED, implied_budget(config)?));
    }
    if (config.max_batch_size, config.max_tokens, config.max_cost) == (None, None, None) {
        return Err(Error::NoLimit);
    }
    Ok((or_unlimited(config.max_batch_size), or_unlimited(config.max_tokens)))
}

/// Computes the token budget of the dynamic strategy if `max_tokens` is unset.
fn implied_budget(config: &BatchConfig) -> Result<u64> {
    let factors = config.max_batch_size.zip(config.max_sequence_length);
    let (max_batch_size, max_sequence_length) = factors.ok_or(Error::NoTokenBudget)?;
    max_batch_size.checked_mul(max_sequence_length).ok_or_else(|| {
        Error::config(format!(
            "a token budget of {max_batch_size} × {max_sequence_length} is above the limit of {}",
            u64::MAX
        ))
    })
}

fn check_multiple(config: &BatchConfig, max_tokens: u64) -> Result<()> {
    let multiple = config.batch_size_multiple;
    // Check the configured `max_batch_size` even where `size_limits` replaced it by a token budget:
    // if it holds a group, then the budget, `max_batch_size` × `max_sequence_length`, holds a group
    // of the longest sequences.
    let limits = [("max_batch_size", config.max_batch_size), ("max_tokens", Some(max_tokens))];
    for (setting, limit) in limits {
        if let Some(limit) = limit.filter(|&limit| limit < multiple) {
            let reason = format!("batch_size_multiple {multiple} is above {setting} {limit}");
            return Err(Error::config(reason));
        }
    }
    Ok(())
}
