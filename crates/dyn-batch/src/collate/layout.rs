//! Positions of the sequences of a batch in a tensor.

use std::ops::Range;

use candle_core::{Device, Error as CandleError, Result, Tensor, WithDType};

use crate::{batch::Batch, collate::Collator, error::Error};

/// Rows of equal length and the positions of their sequences.
///
/// The layout stores the number of tokens of each sequence, to reject fields with a different
/// number of items.
#[derive(Clone, Debug)]
pub(crate) struct TokenLayout {
    rows: usize,
    row_len: usize,
    spans: Vec<SequenceSpan>,
    device: Device,
}

/// The position of a sequence.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SequenceSpan {
    /// Index in the data set.
    index: u64,
    /// Offset of the first token, over all rows.
    start: usize,
    /// Number of tokens.
    n_tokens: usize,
    /// Number of tokens that are kept; the rest is truncated.
    n_kept: usize,
}

impl SequenceSpan {
    pub(crate) fn range(&self) -> Range<usize> {
        self.start..self.start + self.n_kept
    }
}

impl TokenLayout {
    /// Lays out a batch with one row per sequence.
    pub(crate) fn padded(
        batch: &Batch,
        tokens: &[&[u32]],
        collator: &Collator,
        device: &Device,
    ) -> Result<Self> {
        let (rows, row_len) = shape(batch)?;
        let sequences = batch.len() as u64;
        if sequences > batch.rows {
            return Err(wrap_error(Error::PackedBatch { sequences, rows: batch.rows }));
        }
        let mut spans = Vec::with_capacity(tokens.len());
        for (row, (&index, tokens)) in batch.indices.iter().zip(tokens).enumerate() {
            let n_kept = collator.n_kept(tokens);
            check_row(n_kept, row_len)?;
            spans.push(SequenceSpan {
                index,
                start: row * row_len,
                n_tokens: tokens.len(),
                n_kept,
            });
        }
        check_counted(batch, &spans)?;
        Ok(Self { rows, row_len, spans, device: device.clone() })
    }

    /// Lays out a batch with all sequences in one row.
    pub(crate) fn packed(
        batch: &Batch,
        tokens: &[&[u32]],
        collator: &Collator,
        device: &Device,
    ) -> Result<Self> {
        let (_, row_len) = shape(batch)?;
        let mut start = 0;
        let mut spans = Vec::with_capacity(tokens.len());
        for (&index, tokens) in batch.indices.iter().zip(tokens) {
            let n_kept = collator.n_kept(tokens);
            spans.push(SequenceSpan { index, start, n_tokens: tokens.len(), n_kept });
            start += n_kept;
        }
        check_row(start, row_len)?;
        check_counted(batch, &spans)?;
        Ok(Self { rows: 1, row_len, spans, device: device.clone() })
    }

    pub(crate) fn row_len(&self) -> usize {
        self.row_len
    }

    /// Returns the positions of the sequences, in the order of the batch.
    pub(crate) fn spans(&self) -> &[SequenceSpan] {
        &self.spans
    }

    /// Returns the number of kept tokens of each sequence.
    pub(crate) fn lengths(&self) -> impl Iterator<Item = u64> {
        self.spans.iter().map(|span| span.n_kept as u64)
    }

    /// Returns the items of each sequence at its position, and `fill` elsewhere.
    pub(crate) fn lay_out<'a, T: Copy + 'a>(
        &self,
        fill: T,
        items: impl Iterator<Item = &'a [T]>,
    ) -> Result<Vec<T>> {
        let mut all = vec![fill; self.rows * self.row_len];
        for (span, items) in self.spans.iter().zip(items) {
            if items.len() != span.n_tokens {
                return Err(wrap_error(Error::FieldLength {
                    index: span.index,
                    items: items.len() as u64,
                    tokens: span.n_tokens as u64,
                }));
            }
            all[span.range()].copy_from_slice(&items[..span.n_kept]);
        }
        Ok(all)
    }

    /// Creates a tensor of shape `[rows, row length]`.
    pub(crate) fn tensor<T: WithDType>(&self, items: Vec<T>) -> Result<Tensor> {
        Tensor::from_vec(items, (self.rows, self.row_len), &self.device)
    }

    /// Creates a tensor of shape `[rows, row length]` from the items of each sequence, by its index
    /// in the data set.
    pub(crate) fn per_token<'a, T: WithDType>(
        &self,
        fill: T,
        items: impl FnMut(u64) -> &'a [T],
    ) -> Result<Tensor> {
        self.tensor(self.lay_out(fill, self.indices().map(items))?)
    }

    /// Creates a tensor of shape `[sequences]`.
    pub(crate) fn per_sequence<T: WithDType>(&self, value: impl FnMut(u64) -> T) -> Result<Tensor> {
        Tensor::from_iter(self.indices().map(value), &self.device)
    }

    fn indices(&self) -> impl Iterator<Item = u64> {
        self.spans.iter().map(|span| span.index)
    }
}

/// Checks that tokens fit into a row.
fn check_row(n_tokens: usize, row_len: usize) -> Result<()> {
    if n_tokens <= row_len {
        return Ok(());
    }
    let tokens = n_tokens as u64;
    Err(wrap_error(Error::RowOverflow { tokens, row_length: row_len as u64 }))
}

/// Checks that there are no more tokens than the batch counts, because its limits and reports would
/// be wrong.
fn check_counted(batch: &Batch, spans: &[SequenceSpan]) -> Result<()> {
    let tokens = spans.iter().map(|span| span.n_kept as u64).sum();
    let counted = batch.real_tokens;
    if tokens <= counted { Ok(()) } else { Err(wrap_error(Error::Uncounted { tokens, counted })) }
}

/// Returns the rows and their length, if a tensor can have that many elements of 8 bytes.
fn shape(batch: &Batch) -> Result<(usize, usize)> {
    let Batch { rows, padded_length, .. } = *batch;
    let bytes = rows.checked_mul(padded_length).and_then(|elements| elements.checked_mul(8));
    let is_addressable = bytes.is_some_and(|bytes| isize::try_from(bytes).is_ok());
    match (usize::try_from(rows), usize::try_from(padded_length)) {
        (Ok(rows), Ok(row_len)) if is_addressable => Ok((rows, row_len)),
        (Ok(_) | Err(_), Ok(_) | Err(_)) => {
            Err(wrap_error(Error::TensorTooLarge { rows, padded_length }))
        }
    }
}

/// Wraps an error in a candle error.
pub(crate) fn wrap_error(error: Error) -> CandleError {
    CandleError::wrap(error)
}
