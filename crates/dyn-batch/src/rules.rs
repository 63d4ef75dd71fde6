//! A configuration that has been checked, and what it answers: is this sequence allowed, which batch does it join,
//! and is that batch full?
//!
//! With a multiple m, a batch grows by groups of m sequences. A group fits by itself, because each member was admitted
//! only if m sequences of its length are within the budget; so a batch can always be closed at a multiple, and fewer
//! than m sequences are ever carried over.

use crate::{BatchConfig, DynamicBatchStrategy, Error, Overlong, PaddingReport, Remainder, Result, Sequence};

/// A configuration without contradictions, with what follows from it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Rules {
    config: BatchConfig,
    max_tokens: u64,
    /// The most groups in a batch.
    max_groups: u64,
    /// The budget of every m-th row: groups × m × length ≤ `max_tokens` is groups × length ≤ ⌊`max_tokens` / m⌋.
    max_tokens_per_stride: u64,
    /// The size of a group. One beyond the address space never fills, nor does the largest `usize`.
    group_len: usize,
}

impl Rules {
    pub(crate) fn new(config: BatchConfig) -> Result<Self> {
        check_nonzero(&config)?;
        let (max_batch_size, max_tokens) = limits(&config)?;
        let multiple = config.batch_size_multiple;
        // `max_batch_size` as it was set: a budget made from it then holds a whole group of the longest sequences.
        for (setting, limit) in [("max_batch_size", config.max_batch_size), ("max_tokens", Some(max_tokens))] {
            if let Some(limit) = limit.filter(|&limit| limit < multiple) {
                return Err(Error::MultipleOverLimit { multiple, setting, limit });
            }
        }
        Ok(Self {
            config,
            max_tokens,
            max_groups: max_batch_size / multiple,
            max_tokens_per_stride: max_tokens / multiple,
            group_len: usize::try_from(multiple).unwrap_or(usize::MAX),
        })
    }

    pub(crate) fn config(&self) -> &BatchConfig {
        &self.config
    }

    /// Returns the sequence as it counts in a batch, or `None` if it is skipped; keeps count of what the policy did.
    pub(crate) fn admit(&self, sequence: Sequence, report: &mut PaddingReport) -> Result<Option<Sequence>> {
        let Sequence { index, length } = sequence;
        let Some(max_sequence_length) = self.config.max_sequence_length.filter(|&max| max < length) else {
            return self.check_budget(sequence).map(Some);
        };
        match self.config.overlong {
            Overlong::Error => Err(Error::SequenceTooLong { index, length, max_sequence_length }),
            Overlong::Truncate => {
                report.truncated += 1;
                self.check_budget(Sequence { index, length: max_sequence_length }).map(Some)
            }
            Overlong::Skip => {
                report.skipped += 1;
                Ok(None)
            }
        }
    }

    /// Returns which of the open batches a sequence of this length joins.
    pub(crate) fn bucket(&self, length: u64) -> u64 {
        match self.config.strategy {
            DynamicBatchStrategy::Bucket { width } => length / width,
            DynamicBatchStrategy::PadToMax | DynamicBatchStrategy::Dynamic => 0,
        }
    }

    /// Returns how many of the first sequences of an open batch are a full batch, or `None` if it may still grow.
    ///
    /// It is full as soon as the next group, however short, would pass a limit. The answer does not depend on what
    /// comes later, so waiting for the next sequence would give the same batches, only later.
    pub(crate) fn full(&self, len: usize, padded_length: u64) -> Option<usize> {
        let groups = len.div_ceil(self.group_len);
        if !self.fits(groups, padded_length) {
            Some((groups - 1) * self.group_len)
        } else if len % self.group_len == 0 && !self.fits(groups + 1, padded_length) {
            Some(len)
        } else {
            None
        }
    }

    /// Returns how many of the `len` sequences left at the end are batches of whole groups, and how many are one more.
    pub(crate) fn last(&self, len: usize) -> (usize, usize) {
        let surplus = len % self.group_len;
        match self.config.remainder {
            Remainder::Drop => (len - surplus, 0),
            Remainder::Keep => (len - surplus, surplus),
        }
    }

    fn check_budget(&self, sequence: Sequence) -> Result<Sequence> {
        let Sequence { index, length } = sequence;
        if self.fits(1, length) {
            return Ok(sequence);
        }
        let (multiple, max_tokens) = (self.config.batch_size_multiple, self.max_tokens);
        Err(Error::SequenceOverBudget { index, length, multiple, max_tokens })
    }

    fn fits(&self, groups: usize, padded_length: u64) -> bool {
        let groups = groups as u64;
        groups <= self.max_groups
            && groups.checked_mul(padded_length).is_some_and(|tokens| tokens <= self.max_tokens_per_stride)
    }
}

fn check_nonzero(config: &BatchConfig) -> Result<()> {
    let width = match config.strategy {
        DynamicBatchStrategy::Bucket { width } => Some(width),
        DynamicBatchStrategy::PadToMax | DynamicBatchStrategy::Dynamic => None,
    };
    let settings = [
        ("bucket width", width),
        ("max_batch_size", config.max_batch_size),
        ("max_tokens", config.max_tokens),
        ("max_sequence_length", config.max_sequence_length),
        ("batch_size_multiple", Some(config.batch_size_multiple)),
    ];
    match settings.into_iter().find(|(_, value)| *value == Some(0)) {
        Some((setting, _)) => Err(Error::Zero { setting }),
        None => Ok(()),
    }
}

/// Returns the most sequences and the most padded tokens of a batch.
fn limits(config: &BatchConfig) -> Result<(u64, u64)> {
    match (config.strategy, config.max_batch_size, config.max_tokens, config.max_sequence_length) {
        (DynamicBatchStrategy::Dynamic, Some(max_batch_size), None, Some(max_sequence_length)) => max_batch_size
            .checked_mul(max_sequence_length)
            .map(|max_tokens| (u64::MAX, max_tokens))
            .ok_or(Error::TokenBudgetOverflow { max_batch_size, max_sequence_length }),
        (DynamicBatchStrategy::Dynamic, _, None, _) => Err(Error::NoTokenBudget),
        (_, None, None, _) => Err(Error::NoLimit),
        (_, max_batch_size, max_tokens, _) => Ok((max_batch_size.unwrap_or(u64::MAX), max_tokens.unwrap_or(u64::MAX))),
    }
}
