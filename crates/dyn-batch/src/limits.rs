//! A configuration that has been checked, and what it answers: is this sequence allowed, how long
//! is its batch padded, and how many such sequences does a batch hold?
//!
//! With a multiple m, a batch grows by groups of m sequences. A group fits by itself, because each
//! member was admitted only if m sequences of its length are within the limits; so a batch can
//! always be closed at a multiple, and fewer than m sequences are ever carried over.

use std::cmp::Ordering;

use crate::{
    batch::Sequence,
    config::{BatchConfig, Buckets, DynamicBatchStrategy, Overlong, Packing, Remainder},
    error::{Error, Result},
    pack::Row,
    report::PaddingReport,
};

/// The longest row of best-fit packing, which has a table entry of 4 bytes for each of its tokens.
const MAX_ROW_LENGTH: u64 = 1 << 24;

/// A configuration without contradictions, with what follows from it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Limits {
    config: BatchConfig,
    max_batch_size: u64,
    max_tokens: u64,
    /// The longest sequence that fits a batch; `None` if not even an empty one does.
    longest: Option<u64>,
    /// The multiple. One beyond the address space never fills, nor does the largest `usize`.
    group_len: usize,
}

impl Limits {
    pub(crate) fn new(config: BatchConfig) -> Result<Self> {
        check_nonzero(&config)?;
        check_strategy(&config)?;
        let (max_batch_size, max_tokens) = limits(&config)?;
        let multiple = config.batch_size_multiple;
        // `max_batch_size` as it was set: a budget made from it then holds a whole group of the
        // longest sequences.
        for (setting, limit) in
            [("max_batch_size", config.max_batch_size), ("max_tokens", Some(max_tokens))]
        {
            if let Some(limit) = limit.filter(|&limit| limit < multiple) {
                return Err(Error::MultipleOverLimit { multiple, setting, limit });
            }
        }
        let group_len = usize::try_from(multiple).unwrap_or(usize::MAX);
        let mut limits = Self { config, max_batch_size, max_tokens, longest: None, group_len };
        limits.longest = limits.find_longest();
        Ok(limits)
    }

    /// By bisection: if a sequence fits a batch, then all shorter ones do.
    fn find_longest(&self) -> Option<u64> {
        let (mut fitting, mut too_long) = (self.fits(0).then_some(0)?, u64::MAX);
        if self.fits(too_long) {
            return Some(too_long);
        }
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
        match self.checked_padded_length(length) {
            Some(_) if self.is_packing() => length <= self.max_tokens,
            Some(_) if self.last_boundary().is_some_and(|largest| largest < length) => false,
            Some(padded_length) => self.max_rows(padded_length) > 0,
            None => false,
        }
    }

    fn last_boundary(&self) -> Option<u64> {
        match &self.config.strategy {
            DynamicBatchStrategy::Bucket(Buckets::Boundaries(boundaries)) => {
                boundaries.last().copied()
            }
            _ => None,
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
        matches!(self.config.strategy, DynamicBatchStrategy::Pack(_))
    }

    /// Returns the sequence as it counts in a batch, or `None` if it is skipped; keeps count of
    /// what the policy did.
    pub(crate) fn admit(
        &self,
        sequence: Sequence,
        report: &mut PaddingReport,
    ) -> Result<Option<Sequence>> {
        let Sequence { index, length } = sequence;
        let Some(max_sequence_length) = self.config.max_sequence_length.filter(|&max| max < length)
        else {
            return self.check(sequence).map(Some);
        };
        match self.config.overlong {
            Overlong::Error => Err(Error::SequenceTooLong { index, length, max_sequence_length }),
            Overlong::Truncate => {
                report.truncated += 1;
                self.check(self.counted(sequence)).map(Some)
            }
            Overlong::Skip => {
                report.skipped += 1;
                Ok(None)
            }
        }
    }

    /// An admitted sequence as it counts: cut if it is too long.
    pub(crate) fn counted(&self, sequence: Sequence) -> Sequence {
        let max = self.config.max_sequence_length.unwrap_or(u64::MAX);
        Sequence { length: sequence.length.min(max), ..sequence }
    }

    fn check(&self, sequence: Sequence) -> Result<Sequence> {
        if self.longest.is_some_and(|longest| sequence.length <= longest) {
            return Ok(sequence);
        }
        let Sequence { index, length } = sequence;
        let (multiple, max_tokens) = (self.config.batch_size_multiple, self.max_tokens);
        let is_in_budget = length.checked_mul(multiple).is_some_and(|tokens| tokens <= max_tokens);
        Err(
            match (self.last_boundary().filter(|&largest| largest < length), self.config.max_cost) {
                (Some(largest), _) => Error::NoBucket { index, length, largest },
                (None, Some(max_cost)) if is_in_budget => {
                    Error::SequenceOverCost { index, length, multiple, max_cost }
                }
                _ => Error::SequenceOverBudget { index, length, multiple, max_tokens },
            },
        )
    }

    /// Returns which of the open batches a sequence of this length joins.
    pub(crate) fn bucket(&self, length: u64) -> u64 {
        match &self.config.strategy {
            DynamicBatchStrategy::Bucket(buckets) => buckets.of(length),
            _ => 0,
        }
    }

    /// The length to which a batch is padded if its longest sequence, which was admitted, has this
    /// one.
    pub(crate) fn padded_length(&self, longest: u64) -> u64 {
        self.checked_padded_length(longest).unwrap_or(u64::MAX)
    }

    /// The rows of a batch of `len` sequences: one if they are packed, else one each.
    pub(crate) fn rows(&self, len: usize) -> u64 {
        if self.is_packing() { 1 } else { len as u64 }
    }

    /// The length of each row, if the longest sequence of the batch has this one.
    pub(crate) fn row_length(&self, longest: u64) -> u64 {
        if self.is_packing() { self.max_tokens } else { self.padded_length(longest) }
    }

    fn checked_padded_length(&self, longest: u64) -> Option<u64> {
        let length = match &self.config.strategy {
            DynamicBatchStrategy::Bucket(buckets) if self.config.fixed_shapes => {
                buckets.longest(buckets.of(longest))?
            }
            _ => longest,
        };
        length.checked_next_multiple_of(self.config.length_multiple)
    }

    /// The most sequences of a batch that is padded to this length; a multiple of the group.
    pub(crate) fn max_rows(&self, padded_length: u64) -> u64 {
        let cost =
            if self.config.max_cost.is_some() { self.config.cost.of(padded_length) } else { 0 };
        let by_tokens = self.max_tokens.checked_div(padded_length).unwrap_or(u64::MAX);
        let by_cost =
            self.config.max_cost.unwrap_or(u64::MAX).checked_div(cost).unwrap_or(u64::MAX);
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

fn check_nonzero(config: &BatchConfig) -> Result<()> {
    let strategy = match &config.strategy {
        DynamicBatchStrategy::Bucket(Buckets::Width(width)) => ("bucket width", Some(*width)),
        DynamicBatchStrategy::Sorted { window, .. } => ("window", *window),
        DynamicBatchStrategy::Pack(Packing::InOrder { open_rows }) => {
            ("open_rows", Some(*open_rows as u64))
        }
        _ => ("", None),
    };
    let settings = [
        strategy,
        ("max_batch_size", config.max_batch_size),
        ("max_tokens", config.max_tokens),
        ("max_cost", config.max_cost),
        ("max_sequence_length", config.max_sequence_length),
        ("batch_size_multiple", Some(config.batch_size_multiple)),
        ("length_multiple", Some(config.length_multiple)),
    ];
    match settings.into_iter().find(|(_, value)| *value == Some(0)) {
        Some((setting, _)) => Err(Error::Zero { setting }),
        None => Ok(()),
    }
}

fn check_strategy(config: &BatchConfig) -> Result<()> {
    match &config.strategy {
        DynamicBatchStrategy::Bucket(buckets) => return buckets.check(),
        _ if config.fixed_shapes => return Err(Error::NoBuckets),
        DynamicBatchStrategy::Pack(_) => {}
        _ => return Ok(()),
    }
    let is_set = [
        ("max_cost", config.max_cost.is_some()),
        ("batch_size_multiple", config.batch_size_multiple != 1),
        ("length_multiple", config.length_multiple != 1),
    ];
    match is_set.into_iter().find(|(_, is_set)| *is_set) {
        Some((setting, _)) => Err(Error::NotForPacking { setting }),
        None => check_row_length(config),
    }
}

fn check_row_length(config: &BatchConfig) -> Result<()> {
    let limit = MAX_ROW_LENGTH;
    let is_streamed =
        matches!(config.strategy, DynamicBatchStrategy::Pack(Packing::InOrder { .. }));
    match config.max_tokens {
        None => Err(Error::NoRowLength),
        Some(max_tokens) if max_tokens > limit && !is_streamed => {
            Err(Error::RowTooLong { max_tokens, limit })
        }
        Some(_) => Ok(()),
    }
}

/// Returns the most sequences and the most padded tokens of a batch.
fn limits(config: &BatchConfig) -> Result<(u64, u64)> {
    let is_dynamic = config.strategy == DynamicBatchStrategy::Dynamic;
    match (config.max_batch_size, config.max_tokens, config.max_sequence_length) {
        (Some(max_batch_size), None, Some(max_sequence_length)) if is_dynamic => max_batch_size
            .checked_mul(max_sequence_length)
            .map(|max_tokens| (u64::MAX, max_tokens))
            .ok_or(Error::TokenBudgetOverflow { max_batch_size, max_sequence_length }),
        (_, None, _) if is_dynamic => Err(Error::NoTokenBudget),
        (None, None, _) if config.max_cost.is_none() => Err(Error::NoLimit),
        (max_batch_size, max_tokens, _) => {
            Ok((max_batch_size.unwrap_or(u64::MAX), max_tokens.unwrap_or(u64::MAX)))
        }
    }
}
