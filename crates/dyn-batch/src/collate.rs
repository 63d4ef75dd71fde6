//! Batches become tensors.

use candle_core::{Device, Error as CandleError, Result, Tensor};

use crate::{batch::Batch, error::Error, pack::Segments};

/// On which side of a sequence its padding is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum PaddingSide {
    /// Before it, so that all sequences end together: for generation.
    Left,
    /// Behind it: for training.
    #[default]
    Right,
}

/// How sequences of token ids become tensors.
///
/// # Examples
///
/// ```
/// use candle_core::Device;
/// use dyn_batch::{BatchConfig, Collator, DynamicBatchSampler};
///
/// let texts: [&[u32]; 3] = [&[5, 6, 7], &[8], &[9, 10]];
/// let lengths = texts.map(|text| text.len());
/// let sampler = DynamicBatchSampler::new(lengths, BatchConfig::default().with_max_batch_size(2))?;
/// let collator = Collator::default().with_pad_id(0);
///
/// for batch in sampler.iter() {
///     let batch = batch?;
///     let tensors = collator.pad(&batch, |index| texts[index as usize], &Device::Cpu)?;
///     if batch.len() == 2 {
///         assert_eq!(tensors.ids.to_vec2::<u32>()?, [[5, 6, 7], [8, 0, 0]]);
///         assert_eq!(tensors.mask.to_vec2::<u8>()?, [[1, 1, 1], [1, 0, 0]]);
///         assert_eq!(tensors.labels.to_vec2::<i64>()?, [[5, 6, 7], [8, -100, -100]]);
///     }
/// }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Collator {
    /// The token that fills up; 0 by default.
    pub pad_id: u32,
    /// The label of padding, which a loss leaves out; −100 by default, as in PyTorch.
    pub ignore_index: i64,
    /// Where padding goes; [`PaddingSide::Right`] by default. Packed rows have it at their end
    /// always.
    pub side: PaddingSide,
}

impl Default for Collator {
    fn default() -> Self {
        Self { pad_id: 0, ignore_index: -100, side: PaddingSide::default() }
    }
}

/// A batch of padded sequences, all tensors of shape `[rows, padded_length]`.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct PaddedTensors {
    /// The token ids, `U32`.
    pub ids: Tensor,
    /// 1 where there is a token, 0 where there is padding, `U8`.
    pub mask: Tensor,
    /// The token ids again, `I64`, with the ignore index for padding. They are not shifted: compare
    /// the logits of token i with label i + 1.
    pub labels: Tensor,
}

/// A packed row; tensors of shape `[1, padded_length]` but the last.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct PackedTensors {
    /// The token ids, `U32`.
    pub ids: Tensor,
    /// The number of the sequence that a token belongs to, from 1, and 0 for padding, `U32`: attend
    /// where they are equal.
    pub segment_ids: Tensor,
    /// Where in its sequence a token is, `U32`.
    pub position_ids: Tensor,
    /// The token ids again, `I64`, with the ignore index for padding and for the first token of
    /// each sequence, which the one before it, of another sequence, is not to predict.
    pub labels: Tensor,
    /// The tokens before each sequence, and those of all, `U32` of shape `[sequences + 1]`.
    pub cu_seqlens: Tensor,
}

impl Collator {
    /// Sets the token that fills up; 0 by default.
    #[must_use]
    pub fn with_pad_id(self, pad_id: u32) -> Self {
        Self { pad_id, ..self }
    }

    /// Sets the label of padding; −100 by default.
    #[must_use]
    pub fn with_ignore_index(self, ignore_index: i64) -> Self {
        Self { ignore_index, ..self }
    }

    /// Sets where padding goes; [`PaddingSide::Right`] by default.
    #[must_use]
    pub fn with_side(self, side: PaddingSide) -> Self {
        Self { side, ..self }
    }

    /// Pads the sequences of a batch, a row each; `tokens` gives the token ids of an index.
    ///
    /// Each token is copied once for each tensor, and to another device at once. Sequences that are
    /// longer than the rows, because the batcher was told to truncate them, are cut at their end.
    ///
    /// # Errors
    ///
    /// Candle's own for the device. Wrapped in one of candle's: [`Error::TensorTooLarge`] if the
    /// batch is larger than the address space, and [`Error::PackedBatch`] if it has more sequences
    /// than rows.
    pub fn pad<'a>(
        &self,
        batch: &Batch,
        mut tokens: impl FnMut(u64) -> &'a [u32],
        device: &Device,
    ) -> Result<PaddedTensors> {
        let shape = shape(batch)?;
        let (rows, row_len) = shape;
        let sequences = batch.len() as u64;
        if sequences > batch.rows {
            return Err(wrapped(Error::PackedBatch { sequences, rows: batch.rows }));
        }
        let mut ids = vec![self.pad_id; rows * row_len];
        let mut mask = vec![0_u8; rows * row_len];
        let mut labels = vec![self.ignore_index; rows * row_len];
        for (row, &index) in batch.indices.iter().enumerate() {
            let tokens = cut(tokens(index), row_len);
            let padding_before = match self.side {
                PaddingSide::Left => row_len - tokens.len(),
                PaddingSide::Right => 0,
            };
            let start = row * row_len + padding_before;
            let here = start..start + tokens.len();
            ids[here.clone()].copy_from_slice(tokens);
            mask[here.clone()].fill(1);
            for (label, &token) in labels[here].iter_mut().zip(tokens) {
                *label = token.into();
            }
        }
        Ok(PaddedTensors {
            ids: Tensor::from_vec(ids, shape, device)?,
            mask: Tensor::from_vec(mask, shape, device)?,
            labels: Tensor::from_vec(labels, shape, device)?,
        })
    }

    /// Puts the sequences of a packed batch into its row, one behind the other; `tokens` gives the
    /// token ids of an index.
    ///
    /// # Errors
    ///
    /// Candle's own for the device. Wrapped in one of candle's: [`Error::TensorTooLarge`] if the
    /// row is larger than the address space, and [`Error::RowOverflow`] if the sequences are longer
    /// than the row, so longer than the batcher was told.
    pub fn pack<'a>(
        &self,
        batch: &Batch,
        mut tokens: impl FnMut(u64) -> &'a [u32],
        device: &Device,
    ) -> Result<PackedTensors> {
        let (_, row_len) = shape(batch)?;
        let mut ids = Vec::with_capacity(row_len);
        let mut labels = Vec::with_capacity(row_len);
        let mut lengths = Vec::with_capacity(batch.len());
        for &index in &batch.indices {
            let tokens = cut(tokens(index), row_len);
            ids.extend_from_slice(tokens);
            if let [_, rest @ ..] = tokens {
                // What comes before the first token is another sequence, which must not predict it.
                labels.push(self.ignore_index);
                labels.extend(rest.iter().map(|&token| i64::from(token)));
            }
            lengths.push(tokens.len() as u64);
        }
        let overflow = Error::RowOverflow { tokens: ids.len() as u64, row_length: row_len as u64 };
        if ids.len() > row_len {
            return Err(wrapped(overflow));
        }
        let segments = Segments::new(lengths).ok_or_else(|| wrapped(overflow))?;
        ids.resize(row_len, self.pad_id);
        labels.resize(row_len, self.ignore_index);
        let row = (1, row_len);
        Ok(PackedTensors {
            ids: Tensor::from_vec(ids, row, device)?,
            segment_ids: Tensor::from_vec(segments.segment_ids(row_len), row, device)?,
            position_ids: Tensor::from_vec(segments.position_ids(row_len), row, device)?,
            labels: Tensor::from_vec(labels, row, device)?,
            cu_seqlens: Tensor::new(segments.cu_seqlens(), device)?,
        })
    }
}

fn cut(tokens: &[u32], row_len: usize) -> &[u32] {
    &tokens[..tokens.len().min(row_len)]
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

fn wrapped(error: Error) -> CandleError {
    CandleError::wrap(error)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        config::{BatchConfig, DynamicBatchStrategy, Overlong, Packing},
        sampler::DynamicBatchSampler,
    };

    const TEXTS: [&[u32]; 4] = [&[1, 2, 3], &[4, 5], &[6], &[7, 8, 9, 10]];

    fn batches(config: BatchConfig) -> Vec<Batch> {
        let sampler = DynamicBatchSampler::new(TEXTS.map(<[u32]>::len), config).unwrap();
        sampler.iter().collect::<crate::error::Result<_>>().unwrap()
    }

    fn text(index: u64) -> &'static [u32] {
        TEXTS[usize::try_from(index).unwrap()]
    }

    #[test]
    fn padding_goes_to_the_left_if_asked() {
        let batches =
            batches(BatchConfig::default().with_max_batch_size(2).with_length_multiple(4));
        let collator =
            Collator::default().with_pad_id(99).with_side(PaddingSide::Left).with_ignore_index(-1);
        let tensors = collator.pad(&batches[0], text, &Device::Cpu).unwrap();
        assert_eq!(tensors.ids.to_vec2::<u32>().unwrap(), [[99, 1, 2, 3], [99, 99, 4, 5]]);
        assert_eq!(tensors.mask.to_vec2::<u8>().unwrap(), [[0, 1, 1, 1], [0, 0, 1, 1]]);
        assert_eq!(tensors.labels.to_vec2::<i64>().unwrap(), [[-1, 1, 2, 3], [-1, -1, 4, 5]]);
    }

    #[test]
    fn truncated_sequences_are_cut_at_their_end() {
        let config = BatchConfig::default().with_max_batch_size(4).with_max_sequence_length(2);
        let batches = batches(config.with_overlong(Overlong::Truncate));
        let tensors = Collator::default().pad(&batches[0], text, &Device::Cpu).unwrap();
        assert_eq!(tensors.ids.to_vec2::<u32>().unwrap(), [[1, 2], [4, 5], [6, 0], [7, 8]]);
    }

    #[test]
    fn packed_rows_know_their_sequences() {
        let pack = DynamicBatchStrategy::Pack(Packing::BestFit);
        let batches = batches(BatchConfig::default().with_strategy(pack).with_max_tokens(6));
        assert_eq!(
            batches.iter().map(|batch| batch.indices.clone()).collect::<Vec<_>>(),
            [vec![3, 1], vec![0, 2]]
        );
        let tensors = Collator::default().pack(&batches[1], text, &Device::Cpu).unwrap();
        assert_eq!(tensors.ids.to_vec2::<u32>().unwrap(), [[1, 2, 3, 6, 0, 0]]);
        assert_eq!(tensors.segment_ids.to_vec2::<u32>().unwrap(), [[1, 1, 1, 2, 0, 0]]);
        assert_eq!(tensors.position_ids.to_vec2::<u32>().unwrap(), [[0, 1, 2, 0, 0, 0]]);
        assert_eq!(tensors.labels.to_vec2::<i64>().unwrap(), [[-100, 2, 3, -100, -100, -100]]);
        assert_eq!(tensors.cu_seqlens.to_vec1::<u32>().unwrap(), [0, 3, 4]);
    }

    #[test]
    fn packed_batches_are_not_padded() {
        let pack = DynamicBatchStrategy::Pack(Packing::BestFit);
        let batches = batches(BatchConfig::default().with_strategy(pack).with_max_tokens(6));
        let error = Collator::default().pad(&batches[0], text, &Device::Cpu).unwrap_err();
        assert!(error.to_string().contains("1 rows cannot hold 2 sequences"), "{error}");
    }

    #[test]
    fn rows_that_do_not_hold_their_sequences_are_refused() {
        let pack = DynamicBatchStrategy::Pack(Packing::BestFit);
        let batches = batches(BatchConfig::default().with_strategy(pack).with_max_tokens(6));
        let error =
            Collator::default().pack(&batches[0], |_| &[1, 2, 3, 4, 5], &Device::Cpu).unwrap_err();
        assert!(
            error.to_string().contains("sequences of 10 tokens do not fit a row of 6"),
            "{error}"
        );
        let huge =
            Batch { indices: vec![0], rows: 1 << 40, padded_length: 1 << 40, real_tokens: 0 };
        let error = Collator::default().pad(&huge, text, &Device::Cpu).unwrap_err();
        assert!(
            error
                .to_string()
                .contains("a tensor of 1099511627776 x 1099511627776 tokens is larger than"),
            "{error}"
        );
    }
}
