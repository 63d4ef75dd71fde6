//! Where in a tensor the sequences of a batch go.

use std::ops::Range;

use candle_core::{Device, Error as CandleError, Result, Tensor, WithDType};

use crate::{batch::Batch, collate::Collator, error::Error};

/// Rows of equal length, and the sequences in them.
///
/// It remembers how many tokens each sequence had, so that a further field which has more items or
/// fewer is not laid beside the wrong tokens.
#[derive(Clone, Debug)]
pub(crate) struct Layout {
    rows: usize,
    row_len: usize,
    places: Vec<Place>,
    device: Device,
}

/// Where a sequence goes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place {
    /// Its position in the data set.
    index: u64,
    /// The tokens before it, of all rows.
    start: usize,
    /// How many tokens it has, and how many of them are kept: the others are cut off its end.
    n_tokens: usize,
    n_kept: usize,
}

impl Place {
    pub(crate) fn range(&self) -> Range<usize> {
        self.start..self.start + self.n_kept
    }
}

impl Layout {
    /// A row for each sequence of a batch; `tokens` are theirs.
    pub(crate) fn padded(
        batch: &Batch,
        tokens: &[&[u32]],
        collator: &Collator,
        device: &Device,
    ) -> Result<Self> {
        let (rows, row_len) = shape(batch)?;
        let sequences = batch.len() as u64;
        if sequences > batch.rows {
            return Err(wrapped(Error::PackedBatch { sequences, rows: batch.rows }));
        }
        let place = |(row, (&index, tokens)): (usize, (&u64, &&[u32]))| {
            let n_kept = collator.n_kept(tokens);
            check_row(n_kept, row_len)?;
            let start = row * row_len;
            Ok::<_, CandleError>(Place { index, start, n_tokens: tokens.len(), n_kept })
        };
        let places = batch.indices.iter().zip(tokens).enumerate().map(place);
        let places: Vec<Place> = places.collect::<Result<_>>()?;
        check_counted(batch, &places)?;
        Ok(Self { rows, row_len, places, device: device.clone() })
    }

    /// One row for all sequences of a batch, one behind the other; `tokens` are theirs.
    pub(crate) fn packed(
        batch: &Batch,
        tokens: &[&[u32]],
        collator: &Collator,
        device: &Device,
    ) -> Result<Self> {
        let (_, row_len) = shape(batch)?;
        let mut start = 0;
        let mut places = Vec::with_capacity(tokens.len());
        for (&index, tokens) in batch.indices.iter().zip(tokens) {
            let n_kept = collator.n_kept(tokens);
            places.push(Place { index, start, n_tokens: tokens.len(), n_kept });
            start += n_kept;
        }
        check_row(start, row_len)?;
        check_counted(batch, &places)?;
        Ok(Self { rows: 1, row_len, places, device: device.clone() })
    }

    pub(crate) fn row_len(&self) -> usize {
        self.row_len
    }

    /// The sequences, in the order of the batch.
    pub(crate) fn places(&self) -> &[Place] {
        &self.places
    }

    /// The number of tokens of each sequence that are there.
    pub(crate) fn lengths(&self) -> impl Iterator<Item = u64> {
        self.places.iter().map(|place| place.n_kept as u64)
    }

    /// The items of each sequence at their place, and `fill` everywhere else.
    pub(crate) fn lay<'a, T: Copy + 'a>(
        &self,
        fill: T,
        items: impl Iterator<Item = &'a [T]>,
    ) -> Result<Vec<T>> {
        let mut all = vec![fill; self.rows * self.row_len];
        for (place, items) in self.places.iter().zip(items) {
            if items.len() != place.n_tokens {
                return Err(wrapped(Error::FieldLength {
                    index: place.index,
                    items: items.len() as u64,
                    tokens: place.n_tokens as u64,
                }));
            }
            all[place.range()].copy_from_slice(&items[..place.n_kept]);
        }
        Ok(all)
    }

    /// A tensor [rows, row length].
    pub(crate) fn tensor<T: WithDType>(&self, items: Vec<T>) -> Result<Tensor> {
        Tensor::from_vec(items, (self.rows, self.row_len), &self.device)
    }

    /// A tensor [rows, row length] of the items of each sequence, by its position in the data set.
    pub(crate) fn per_token<'a, T: WithDType>(
        &self,
        fill: T,
        items: impl FnMut(u64) -> &'a [T],
    ) -> Result<Tensor> {
        self.tensor(self.lay(fill, self.indices().map(items))?)
    }

    /// A tensor [sequences].
    pub(crate) fn per_sequence<T: WithDType>(&self, value: impl FnMut(u64) -> T) -> Result<Tensor> {
        Tensor::from_iter(self.indices().map(value), &self.device)
    }

    fn indices(&self) -> impl Iterator<Item = u64> {
        self.places.iter().map(|place| place.index)
    }
}

/// Refuses tokens that are more than a row has.
fn check_row(n_tokens: usize, row_len: usize) -> Result<()> {
    let (tokens, row_length) = (n_tokens as u64, row_len as u64);
    if n_tokens <= row_len {
        Ok(())
    } else {
        Err(wrapped(Error::RowOverflow { tokens, row_length }))
    }
}

/// Refuses more tokens than the batch counts: its limits and reports would not be about them.
fn check_counted(batch: &Batch, places: &[Place]) -> Result<()> {
    let tokens = places.iter().map(|place| place.n_kept as u64).sum();
    let counted = batch.real_tokens;
    if tokens <= counted { Ok(()) } else { Err(wrapped(Error::Uncounted { tokens, counted })) }
}

/// Rows and their length, if a tensor can have so many elements of 8 bytes.
fn shape(batch: &Batch) -> Result<(usize, usize)> {
    let Batch { rows, padded_length, .. } = *batch;
    let bytes = rows.checked_mul(padded_length).and_then(|elements| elements.checked_mul(8));
    let is_addressable = bytes.is_some_and(|bytes| isize::try_from(bytes).is_ok());
    match (usize::try_from(rows), usize::try_from(padded_length)) {
        (Ok(rows), Ok(row_len)) if is_addressable => Ok((rows, row_len)),
        (Ok(_) | Err(_), Ok(_) | Err(_)) => {
            Err(wrapped(Error::TensorTooLarge { rows, padded_length }))
        }
    }
}

pub(crate) fn wrapped(error: Error) -> CandleError {
    CandleError::wrap(error)
}
