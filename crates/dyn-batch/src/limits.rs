//! A configuration that has been checked, and what it answers: is this sequence allowed, how long
//! is its batch padded, and how many such sequences does a batch hold?
//!
//! With a multiple m, a batch grows by groups of m sequences. A group fits by itself, because each
//! member was admitted only if m sequences of its length are within the limits; so a batch can
//! always be closed at a multiple, and fewer than m sequences are ever carried over.

use std::cmp::Ordering;

use crate::{
    batch::{Batch, Sequence},
    config::{BatchConfig, Buckets, DynamicBatchStrategy, Overlong, Packing, Remainder},
    error::{Error, Result},
};

/// The longest row of best-fit packing, which has a table entry of 4 bytes for each of its tokens:
/// 64 MiB at most.
const MAX_ROW_LENGTH: u64 = 1 << 24;

/// A limit that was not set. No sum of lengths that fits 64 bits is above it.
const UNLIMITED: u64 = u64::MAX;

/// A configuration without contradictions, with what follows from it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Limits {
    config: BatchConfig,
    max_batch_size: u64,
    max_tokens: u64,
    /// The longest sequence that fits a batch; `None` if not even an empty one does.
    longest: Option<u64>,
    /// The multiple.
    group_len: usize,
}

/// What the limits make of a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Admission {
    /// It counts with its whole length.
    Whole(Sequence),
    /// It counts with the length to which it is cut.
    Truncated(Sequence),
    /// It is in no batch.
    Skipped,
}

/// The room in a packed row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Row {
    pub(crate) tokens: u64,
    pub(crate) sequences: u64,
}

impl Row {
    /// How many sequences of this length fit.
    pub(crate) fn capacity(self, length: u64) -> u64 {
        times(self.tokens, length).min(self.sequences)
    }

    /// The room that is left beside so many sequences of this length, which must fit.
    #[must_use]
    pub(crate) fn without(self, length: u64, count: u64) -> Self {
        Self { tokens: self.tokens - count * length, sequences: self.sequences - count }
    }
}

impl Limits {
    pub(crate) fn new(config: BatchConfig) -> Result<Self> {
        check_nonzero(&config)?;
        check_strategy(&config)?;
        let (max_batch_size, max_tokens) = size_limits(&config)?;
        check_multiple(&config, max_tokens)?;
        // A multiple beyond the address space never fills, nor does the largest `usize`.
        let group_len = usize::try_from(config.batch_size_multiple).unwrap_or(usize::MAX);
        let mut limits = Self { config, max_batch_size, max_tokens, longest: None, group_len };
        limits.longest = limits.find_longest();
        Ok(limits)
    }

    /// By bisection: if a sequence fits a batch, then all shorter ones do.
    fn find_longest(&self) -> Option<u64> {
        if !self.fits(0) {
            return None;
        }
        if self.fits(u64::MAX) {
            return Some(u64::MAX);
        }
        let mut fitting = 0;
        let mut too_long = u64::MAX;
        while too_long - fitting > 1 {
            let length = fitting.midpoint(too_long);
            if self.fits(length) {
                fitting = length;
            } else {
                too_long = length;
            }
        }
        Some(fitting)
    }

    /// Whether the smallest batch may hold a sequence of this length.
    fn fits(&self, length: u64) -> bool {
        if self.is_packing() {
            return length <= self.max_tokens;
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

    /// What an empty packed row has room for.
    pub(crate) fn empty_row(&self) -> Row {
        Row { tokens: self.max_tokens, sequences: self.max_batch_size }
    }

    /// The size of a group.
    pub(crate) fn group_len(&self) -> usize {
        self.group_len
    }

    /// Whether batches are rows that hold several sequences.
    pub(crate) fn is_packing(&self) -> bool {
        self.config.strategy.is_packing()
    }

    /// Decides on a sequence by the policy for long ones, and checks that what is left of it fits
    /// the smallest batch.
    pub(crate) fn admit(&self, sequence: Sequence) -> Result<Admission> {
        let Sequence { index, length } = sequence;
        let too_short = self.config.max_sequence_length.filter(|&max| max < length);
        let Some(max_sequence_length) = too_short else {
            return self.check(sequence).map(Admission::Whole);
        };
        match self.config.overlong {
            Overlong::Error => Err(Error::SequenceTooLong { index, length, max_sequence_length }),
            Overlong::Truncate => self.check(self.counted(sequence)).map(Admission::Truncated),
            Overlong::Skip => Ok(Admission::Skipped),
        }
    }

    /// An admitted sequence as it counts: cut if it is too long.
    pub(crate) fn counted(&self, sequence: Sequence) -> Sequence {
        let max = or_unlimited(self.config.max_sequence_length);
        Sequence { length: sequence.length.min(max), ..sequence }
    }

    fn check(&self, sequence: Sequence) -> Result<Sequence> {
        if self.longest.is_some_and(|longest| sequence.length <= longest) {
            return Ok(sequence);
        }
        Err(self.misfit(sequence))
    }

    /// Which limit a sequence breaks in the smallest batch: that of its buckets, tokens or cost.
    fn misfit(&self, Sequence { index, length }: Sequence) -> Error {
        let (multiple, max_tokens) = (self.config.batch_size_multiple, self.max_tokens);
        if let Some(largest) = self.last_boundary().filter(|&largest| largest < length) {
            return Error::NoBucket { index, length, largest };
        }
        let is_in_budget = length.checked_mul(multiple).is_some_and(|tokens| tokens <= max_tokens);
        match self.config.max_cost {
            Some(max_cost) if is_in_budget => {
                Error::SequenceOverCost { index, length, multiple, max_cost }
            }
            Some(_) | None => Error::SequenceOverBudget { index, length, multiple, max_tokens },
        }
    }

    /// Returns which of the open batches a sequence of this length joins.
    pub(crate) fn bucket(&self, length: u64) -> u64 {
        match self.config.strategy.buckets() {
            Some(buckets) => buckets.of(length),
            None => 0,
        }
    }

    /// The batch of these sequences, which were admitted: a row each, or one row if the strategy
    /// packs.
    pub(crate) fn batch(&self, sequences: impl ExactSizeIterator<Item = Sequence>) -> Batch {
        let mut indices = Vec::with_capacity(sequences.len());
        let mut longest = 0;
        let mut real_tokens = 0;
        for Sequence { index, length } in sequences {
            indices.push(index);
            longest = length.max(longest);
            // No overflow: the padded tokens, which are no fewer, are within the limits.
            real_tokens += length;
        }
        let rows = self.rows(indices.len());
        Batch { indices, rows, padded_length: self.row_length(longest), real_tokens }
    }

    /// The rows of a batch of `len` sequences: one if they are packed, else one each.
    pub(crate) fn rows(&self, len: usize) -> u64 {
        if self.is_packing() { 1 } else { len as u64 }
    }

    /// The length of each row, if the longest sequence of the batch has this one.
    fn row_length(&self, longest: u64) -> u64 {
        if self.is_packing() { self.max_tokens } else { self.padded_length(longest) }
    }

    /// The length to which a batch is padded if its longest sequence, which was admitted, has this
    /// one.
    #[expect(clippy::expect_used, reason = "`fits` asked before the sequence was admitted")]
    pub(crate) fn padded_length(&self, longest: u64) -> u64 {
        self.checked_padded_length(longest).expect("an admitted sequence has a padded length")
    }

    fn checked_padded_length(&self, longest: u64) -> Option<u64> {
        let length = match self.config.strategy.buckets() {
            Some(buckets) if self.config.fixed_shapes => buckets.longest(buckets.of(longest))?,
            Some(_) | None => longest,
        };
        length.checked_next_multiple_of(self.config.length_multiple)
    }

    /// The most sequences of a batch that is padded to this length; a multiple of the group.
    pub(crate) fn max_rows(&self, padded_length: u64) -> u64 {
        let by_tokens = times(self.max_tokens, padded_length);
        let by_cost = match self.config.max_cost {
            Some(max_cost) => times(max_cost, self.config.cost.of(padded_length)),
            None => UNLIMITED,
        };
        let rows = self.max_batch_size.min(by_tokens).min(by_cost);
        rows - rows % self.config.batch_size_multiple
    }

    /// Returns how many of the first sequences of an open batch, which may hold `max_rows`, are a
    /// full one, or `None` if it may still grow.
    ///
    /// It is full as soon as the next group, however short, would pass a limit. The answer does not
    /// depend on what comes later, so waiting for the next sequence would give the same batches,
    /// only later.
    pub(crate) fn full(&self, len: usize, max_rows: u64) -> Option<usize> {
        // `max_rows` is a multiple of the group, so a batch below it has room for a whole one.
        match (len as u64).cmp(&max_rows) {
            Ordering::Less => None,
            Ordering::Equal => Some(len),
            Ordering::Greater => Some((len.div_ceil(self.group_len) - 1) * self.group_len),
        }
    }

    /// Returns how many of the `len` sequences left at the end are batches of whole groups, and how
    /// many are one more.
    pub(crate) fn last(&self, len: usize) -> (usize, usize) {
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

/// How many times `size` fits into `limit`; nothing fits any number of times.
fn times(limit: u64, size: u64) -> u64 {
    match limit.checked_div(size) {
        Some(times) => times,
        None => UNLIMITED,
    }
}

fn check_nonzero(config: &BatchConfig) -> Result<()> {
    let of_strategy = match &config.strategy {
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
        of_strategy,
        config.max_batch_size.map(|value| ("max_batch_size", value)),
        config.max_tokens.map(|value| ("max_tokens", value)),
        config.max_cost.map(|value| ("max_cost", value)),
        config.max_sequence_length.map(|value| ("max_sequence_length", value)),
        Some(("batch_size_multiple", config.batch_size_multiple)),
        Some(("length_multiple", config.length_multiple)),
    ];
    match settings.into_iter().flatten().find(|&(_, value)| value == 0) {
        Some((setting, _)) => Err(Error::Zero { setting }),
        None => Ok(()),
    }
}

fn check_strategy(config: &BatchConfig) -> Result<()> {
    if config.fixed_shapes && config.strategy.buckets().is_none() {
        return Err(Error::NoBuckets);
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
    let is_set = [
        ("max_cost", config.max_cost.is_some()),
        ("batch_size_multiple", config.batch_size_multiple != 1),
        ("length_multiple", config.length_multiple != 1),
    ];
    if let Some((setting, _)) = is_set.into_iter().find(|(_, is_set)| *is_set) {
        return Err(Error::NotForPacking { setting });
    }
    let max_tokens = config.max_tokens.ok_or(Error::NoRowLength)?;
    let limit = match packing {
        Packing::BestFit | Packing::MinimumSlack => MAX_ROW_LENGTH,
        Packing::InOrder { .. } => UNLIMITED,
    };
    if max_tokens > limit { Err(Error::RowTooLong { max_tokens, limit }) } else { Ok(()) }
}

/// Returns the most sequences and the most padded tokens of a batch.
fn size_limits(config: &BatchConfig) -> Result<(u64, u64)> {
    if config.strategy == DynamicBatchStrategy::Dynamic && config.max_tokens.is_none() {
        return Ok((UNLIMITED, budget_of_full_lengths(config)?));
    }
    if (config.max_batch_size, config.max_tokens, config.max_cost) == (None, None, None) {
        return Err(Error::NoLimit);
    }
    Ok((or_unlimited(config.max_batch_size), or_unlimited(config.max_tokens)))
}

/// The token budget of the dynamic strategy where none is set.
fn budget_of_full_lengths(config: &BatchConfig) -> Result<u64> {
    let factors = config.max_batch_size.zip(config.max_sequence_length);
    let (max_batch_size, max_sequence_length) = factors.ok_or(Error::NoTokenBudget)?;
    max_batch_size
        .checked_mul(max_sequence_length)
        .ok_or(Error::TokenBudgetOverflow { max_batch_size, max_sequence_length })
}

fn check_multiple(config: &BatchConfig, max_tokens: u64) -> Result<()> {
    let multiple = config.batch_size_multiple;
    // `max_batch_size` as it was set: a budget made from it then holds a whole group of the longest
    // sequences.
    let limits = [("max_batch_size", config.max_batch_size), ("max_tokens", Some(max_tokens))];
    for (setting, limit) in limits {
        if let Some(limit) = limit.filter(|&limit| limit < multiple) {
            return Err(Error::MultipleOverLimit { multiple, setting, limit });
        }
    }
    Ok(())
}
