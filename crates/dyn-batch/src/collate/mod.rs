//! Tensors of batches.

mod layout;

use candle_core::{Device, Result, Tensor};

pub use self::layout::SequenceLayout;
use crate::batch::Batch;
#[cfg(doc)]
use crate::error::Error;

/// A converter from sequences of token ids to tensors.
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
/// let collator = Collator { pad_id: 0, ..Collator::default() };
///
/// for batch in sampler.iter() {
///     let batch = batch?;
///     let tensors = collator.pad(&batch, |index| texts[index as usize], &Device::Cpu)?;
///     if batch.len() == 2 {
///         assert_eq!(tensors.ids.to_vec2::<u32>()?, [[5, 6, 7], [8, 0, 0]]);
///         assert_eq!(tensors.rows.mask.to_vec2::<u8>()?, [[1, 1, 1], [1, 0, 0]]);
///         assert_eq!(tensors.labels.to_vec2::<i64>()?, [[5, 6, 7], [8, -100, -100]]);
///     }
/// }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// Other fields of sequences are laid out like the tokens:
/// [`per_sequence`](SequenceLayout::per_sequence) (class labels),
/// [`per_token`](SequenceLayout::per_token) (token types, token labels),
/// [`frames`](SequenceLayout::frames) (features) and
/// [`labels_where`](BatchTensors::labels_where) (masks of target tokens), like Hugging Face's
/// `DataCollatorWithPadding`, `DataCollatorForTokenClassification` and TRL's `completion_mask`. For
/// sequences without tokens, such as time series, make only the [`layout`](Collator::layout).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[expect(clippy::exhaustive_structs, reason = "callers take the other fields from `Default`")]
pub struct Collator {
    /// Padding token; 0 by default.
    pub pad_id: u32,
    /// Label of padding, which losses ignore; −100 by default, as in PyTorch.
    pub ignore_index: i64,
    /// Limit on the tokens of a sequence, which are truncated to it; none by default. If the batcher
    /// [truncates](crate::Overlong::Truncate), use its
    /// [`max_sequence_length`](crate::BatchConfig::max_sequence_length).
    pub max_sequence_length: Option<u64>,
}

impl Default for Collator {
    fn default() -> Self {
        Self { pad_id: 0, ignore_index: -100, max_sequence_length: None }
    }
}

/// The tensors of a batch, of shape `[rows, padded_length]`. `R` is [`PaddedRows`] or
/// [`PackedRow`], with the tensors that only padded or only packed rows have.
///
/// # Examples
///
/// ```
/// use candle_core::Device;
/// use dyn_batch::{BatchConfig, Collator, DynamicBatchSampler, DynamicBatchStrategy, Packing};
///
/// let texts: [&[u32]; 2] = [&[5, 6, 7], &[8, 9]];
/// let targets: [&[u8]; 2] = [&[0, 1, 1], &[0, 1]]; // 0 marks the prompt
/// let packed = DynamicBatchStrategy::Pack(Packing::BestFit);
/// let config = BatchConfig::default().with_strategy(packed).with_max_tokens(6);
/// let sampler = DynamicBatchSampler::new(texts.map(<[u32]>::len), config)?;
///
/// let batch = sampler.iter().next().ok_or("no batch")??;
/// let row = Collator::default().pack(&batch, |index| texts[index as usize], &Device::Cpu)?;
/// assert_eq!(row.ids.to_vec2::<u32>()?, [[5, 6, 7, 8, 9, 0]]);
/// assert_eq!(row.rows.segment_ids.to_vec2::<u32>()?, [[1, 1, 1, 2, 2, 0]]);
/// let labels = row.labels_where(|index| targets[index as usize])?;
/// assert_eq!(labels.to_vec2::<i64>()?, [[-100, 6, 7, -100, 9, -100]]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct BatchTensors<R> {
    /// Token ids, `U32`.
    pub ids: Tensor,
    /// Token ids as `I64`, with the ignore index for padding. They are not shifted: compare the
    /// logits of token i with label i + 1. In a packed row the first token of each sequence also
    /// has the ignore index, because the token before it belongs to another sequence.
    pub labels: Tensor,
    /// The tensors that depend on the kind of rows: the mask of [`PaddedRows`], or the segments of
    /// a [`PackedRow`].
    pub rows: R,
    /// Positions of the sequences, for further fields.
    pub layout: SequenceLayout,
    ignore_index: i64,
}

/// The tensors of rows with one sequence each.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct PaddedRows {
    /// 1 for tokens, 0 for padding, `U8`.
    pub mask: Tensor,
}

/// The tensors of a row with several sequences.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct PackedRow {
    /// Number of each token's sequence, from 1, and 0 for padding, `U32`: attend between equal
    /// numbers.
    pub segment_ids: Tensor,
    /// Position of each token in its sequence, `U32`.
    pub position_ids: Tensor,
    /// Number of tokens before each sequence, and the total, `U32` of shape `[sequences + 1]`, as
    /// `flash_attn_varlen_func` of `FlashAttention` takes them.
    pub cu_seqlens: Tensor,
}

impl Collator {
    /// Returns the number of tokens of a sequence after truncation.
    fn n_kept(&self, n_tokens: usize) -> usize {
        // A limit beyond the address space has no effect.
        match self.max_sequence_length.map(usize::try_from) {
            Some(Ok(max)) => n_tokens.min(max),
            Some(Err(_)) | None => n_tokens,
        }
    }

    /// Lays out the sequences of a batch for fields of any kind: one sequence per row, or all in the
    /// row of a packed batch. `length_of` returns the number of tokens of an index.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidTensor`], wrapped in a candle error, if the batch exceeds the address space, if
    /// it has more sequences than rows and several rows, or if sequences are longer than their row, or
    /// have more tokens than the batch counts, or than 32 bits count.
    pub fn layout(
        &self,
        batch: &Batch,
        length_of: impl FnMut(u64) -> usize,
        device: &Device,
    ) -> Result<SequenceLayout> {
        let lengths = batch.indices.iter().copied().map(length_of);
        // One sequence in one row has the same position in both layouts.
        if batch.rows == 1 {
            SequenceLayout::packed(batch, lengths, self, device)
        } else {
            SequenceLayout::padded(batch, lengths, self, device)
        }
    }

    /// Pads the sequences of a batch, one per row; `tokens_of` returns the token ids of an index.
    ///
    /// Each token is copied once per tensor. If the batcher truncates sequences, set the same limit
    /// with [`max_sequence_length`](Self::max_sequence_length).
    ///
    /// # Errors
    ///
    /// Returns candle's error if the device fails, or [`Error::InvalidTensor`], wrapped in a candle
    /// error, if the batch exceeds the address space, if it has more sequences than rows, or if a
    /// sequence is longer than its row, or there are more tokens than the batch counts.
    pub fn pad<'a>(
        &self,
        batch: &Batch,
        mut tokens_of: impl FnMut(u64) -> &'a [u32],
        device: &Device,
    ) -> Result<BatchTensors<PaddedRows>> {
        let tokens: Vec<&[u32]> = batch.indices.iter().map(|&index| tokens_of(index)).collect();
        let lengths = tokens.iter().map(|tokens| tokens.len());
        let layout = SequenceLayout::padded(batch, lengths, self, device)?;
        let rows = PaddedRows { mask: layout.mask()? };
        self.tensors(&tokens, 0, rows, layout)
    }

    /// Concatenates the sequences of a packed batch in its row; `tokens_of` returns the token ids
    /// of an index.
    ///
    /// # Errors
    ///
    /// Returns candle's error if the device fails, or [`Error::InvalidTensor`], wrapped in a candle
    /// error, if the row exceeds the address space, or if the sequences are longer than the row, or
    /// there are more tokens than the batch counts.
    pub fn pack<'a>(
        &self,
        batch: &Batch,
        mut tokens_of: impl FnMut(u64) -> &'a [u32],
        device: &Device,
    ) -> Result<BatchTensors<PackedRow>> {
        let tokens: Vec<&[u32]> = batch.indices.iter().map(|&index| tokens_of(index)).collect();
        let lengths = tokens.iter().map(|tokens| tokens.len());
        let layout = SequenceLayout::packed(batch, lengths, self, device)?;
        let rows = PackedRow {
            segment_ids: layout.segment_ids()?,
            position_ids: layout.position_ids()?,
            cu_seqlens: layout.cu_seqlens()?,
        };
        // The first token follows another sequence, which must not predict it.
        self.tensors(&tokens, 1, rows, layout)
    }

    /// Creates the ids and the labels, without labels of the first tokens of each sequence.
    fn tensors<R>(
        &self,
        tokens: &[&[u32]],
        n_unlabeled: usize,
        rows: R,
        layout: SequenceLayout,
    ) -> Result<BatchTensors<R>> {
        let ids = layout.lay_out(self.pad_id, 1, tokens)?;
        let mut labels = vec![self.ignore_index; ids.len()];
        for span in layout.spans() {
            for position in span.range().skip(n_unlabeled) {
                labels[position] = ids[position].into();
            }
        }
        Ok(BatchTensors {
            ids: layout.tensor(ids)?,
            labels: layout.tensor(labels)?,
            rows,
            layout,
            ignore_index: self.ignore_index,
        })
    }
}

impl<R> BatchTensors<R> {
    /// Returns the [`labels`](Self::labels) of tokens with a nonzero `mask`, and the ignore index
    /// elsewhere, for example to train on completions and not on prompts.
    ///
    /// # Errors
    ///
    /// The errors of [`SequenceLayout::per_token`].
    pub fn labels_where<'a>(&self, mask: impl FnMut(u64) -> &'a [u8]) -> Result<Tensor> {
        let ignored = Tensor::full(self.ignore_index, self.labels.shape(), self.labels.device())?;
        self.layout.per_token(0, mask)?.where_cond(&self.labels, &ignored)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        config::{BatchConfig, DynamicBatchStrategy, Overlong, Packing},
        lengths::split::SplitLengths,
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
    fn padding_has_configured_id_and_label() {
        let batches =
            batches(BatchConfig::default().with_max_batch_size(2).with_length_multiple(4));
        let collator = Collator { pad_id: 99, ignore_index: -1, ..Collator::default() };
        let tensors = collator.pad(&batches[0], text, &Device::Cpu).unwrap();
        assert_eq!(tensors.ids.to_vec2::<u32>().unwrap(), [[1, 2, 3, 99], [4, 5, 99, 99]]);
        assert_eq!(tensors.rows.mask.to_vec2::<u8>().unwrap(), [[1, 1, 1, 0], [1, 1, 0, 0]]);
        assert_eq!(tensors.labels.to_vec2::<i64>().unwrap(), [[1, 2, 3, -1], [4, 5, -1, -1]]);
    }

    #[test]
    fn truncation_cuts_the_end() {
        let config = BatchConfig::default().with_max_batch_size(4).with_max_sequence_length(2);
        let batches = batches(config.with_overlong(Overlong::Truncate));
        let collator = Collator { max_sequence_length: Some(2), ..Collator::default() };
        let tensors = collator.pad(&batches[0], text, &Device::Cpu).unwrap();
        assert_eq!(tensors.ids.to_vec2::<u32>().unwrap(), [[1, 2], [4, 5], [6, 0], [7, 8]]);
        let error = Collator::default().pad(&batches[0], text, &Device::Cpu).unwrap_err();
        assert!(error.to_string().contains("of 3 tokens are above the 2 of their row"), "{error}");
    }

    #[test]
    fn truncation_follows_the_counted_length() {
        let config = BatchConfig::default().with_max_sequence_length(3);
        let config = config.with_overlong(Overlong::Truncate);
        let collator = Collator { max_sequence_length: Some(3), ..Collator::default() };
        let padded = batches(config.clone().with_max_batch_size(4).with_length_multiple(4));
        let tensors = collator.pad(&padded[0], text, &Device::Cpu).unwrap();
        assert_eq!(tensors.ids.to_vec2::<u32>().unwrap()[3], [7, 8, 9, 0]);
        let kept: u8 =
            tensors.rows.mask.flatten_all().unwrap().to_vec1::<u8>().unwrap().iter().sum();
        assert_eq!((u64::from(kept), padded[0].real_tokens), (9, 9));
        let error = Collator::default().pad(&padded[0], text, &Device::Cpu).unwrap_err();
        assert!(
            error.to_string().contains("of 10 tokens are above the 9 of their batch"),
            "{error}"
        );

        let pack = DynamicBatchStrategy::Pack(Packing::InOrder { open_rows: 1 });
        let packed = batches(config.with_strategy(pack).with_max_tokens(12));
        let tensors = collator.pack(&packed[0], text, &Device::Cpu).unwrap();
        assert_eq!(tensors.ids.to_vec2::<u32>().unwrap(), [[1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 0, 0]]);
        let error = Collator::default().pack(&packed[0], text, &Device::Cpu).unwrap_err();
        assert!(
            error.to_string().contains("of 10 tokens are above the 9 of their batch"),
            "{error}"
        );
    }

    #[test]
    fn overlong_packed_sequences_are_errors() {
        let pack = DynamicBatchStrategy::Pack(Packing::BestFit);
        let packed = batches(BatchConfig::default().with_strategy(pack).with_max_tokens(4));
        assert_eq!(packed[0].indices, [3]);
        let error = Collator::default()
            .pack(&packed[0], |_| &[1, 2, 3, 4, 5][..], &Device::Cpu)
            .unwrap_err();
        assert!(error.to_string().contains("of 5 tokens are above the 4 of their row"), "{error}");
    }

    #[test]
    fn packed_rows_have_segments() {
        let pack = DynamicBatchStrategy::Pack(Packing::BestFit);
        let batches = batches(BatchConfig::default().with_strategy(pack).with_max_tokens(6));
        assert_eq!(
            batches.iter().map(|batch| batch.indices.clone()).collect::<Vec<_>>(),
            [vec![3, 1], vec![0, 2]]
        );
        let tensors = Collator::default().pack(&batches[1], text, &Device::Cpu).unwrap();
        assert_eq!(tensors.ids.to_vec2::<u32>().unwrap(), [[1, 2, 3, 6, 0, 0]]);
        assert_eq!(tensors.rows.segment_ids.to_vec2::<u32>().unwrap(), [[1, 1, 1, 2, 0, 0]]);
        assert_eq!(tensors.rows.position_ids.to_vec2::<u32>().unwrap(), [[0, 1, 2, 0, 0, 0]]);
        assert_eq!(tensors.labels.to_vec2::<i64>().unwrap(), [[-100, 2, 3, -100, -100, -100]]);
        assert_eq!(tensors.rows.cu_seqlens.to_vec1::<u32>().unwrap(), [0, 3, 4]);
    }

    #[test]
    fn pieces_of_documents_are_segments() {
        let document: Vec<u32> = (0..8).collect();
        let pieces = SplitLengths::new([8_u64], 3).unwrap();
        let pack = DynamicBatchStrategy::Pack(Packing::BestFit);
        let config = BatchConfig::default().with_strategy(pack).with_max_tokens(6);
        let sampler = DynamicBatchSampler::new(&pieces, config).unwrap();
        let batches = sampler.iter();
        let batches: Vec<Batch> = batches.collect::<crate::error::Result<_>>().unwrap();
        let range = |number| pieces.piece(number).unwrap().range;
        let text = |number| {
            let range = range(number);
            &document[usize::try_from(range.start).unwrap()..usize::try_from(range.end).unwrap()]
        };
        let tensors =
            batches.iter().map(|b| Collator::default().pack(b, text, &Device::Cpu).unwrap());
        let (ids, ends): (Vec<_>, Vec<_>) = tensors
            .map(|tensors| (tensors.ids.to_vec2::<u32>(), tensors.rows.cu_seqlens.to_vec1::<u32>()))
            .map(|(ids, ends)| (ids.unwrap().concat(), ends.unwrap()))
            .unzip();
        assert_eq!(ids, [[3, 4, 5, 0, 1, 2], [6, 7, 0, 0, 0, 0]]);
        assert_eq!(ends, [vec![0, 3, 6], vec![0, 2]]);
    }

    /// Ten times each token, and whether it is even.
    const TENFOLD: [&[i64]; 4] = [&[10, 20, 30], &[40, 50], &[60], &[70, 80, 90, 100]];
    const EVEN: [&[u8]; 4] = [&[0, 1, 0], &[1, 0], &[1], &[0, 1, 0, 1]];

    fn at<T>(items: [&'static [T]; 4]) -> impl Fn(u64) -> &'static [T] {
        move |index| items[usize::try_from(index).unwrap()]
    }

    #[test]
    fn fields_align_with_tokens() {
        let config = BatchConfig::default().with_max_batch_size(4).with_max_sequence_length(3);
        let batches = batches(config.with_overlong(Overlong::Truncate));
        let collator = Collator { ignore_index: -1, ..Collator::default() };
        let collator = Collator { max_sequence_length: Some(3), ..collator };
        let tensors = collator.pad(&batches[0], text, &Device::Cpu).unwrap();
        assert_eq!(
            tensors.layout.per_token(-7, at(TENFOLD)).unwrap().to_vec2::<i64>().unwrap(),
            [[10, 20, 30], [40, 50, -7], [60, -7, -7], [70, 80, 90]]
        );
        assert_eq!(
            tensors.labels_where(at(EVEN)).unwrap().to_vec2::<i64>().unwrap(),
            [[-1, 2, -1], [4, -1, -1], [6, -1, -1], [-1, 8, -1]]
        );
        let halves =
            tensors.layout.per_sequence(|index| f64::from(u32::try_from(index).unwrap()) / 2.0);
        assert_eq!(halves.unwrap().to_vec1::<f64>().unwrap(), [0.0, 0.5, 1.0, 1.5]);
    }

    #[test]
    fn fields_of_packed_rows_are_packed() {
        let pack = DynamicBatchStrategy::Pack(Packing::BestFit);
        let batches = batches(BatchConfig::default().with_strategy(pack).with_max_tokens(6));
        let tensors = Collator::default().pack(&batches[0], text, &Device::Cpu).unwrap();
        assert_eq!(tensors.ids.to_vec2::<u32>().unwrap(), [[7, 8, 9, 10, 4, 5]]);
        let tenfold = tensors.layout.per_token(0, at(TENFOLD)).unwrap();
        assert_eq!(tenfold.to_vec2::<i64>().unwrap(), [[70, 80, 90, 100, 40, 50]]);
        // The 4 is even, but it is the first token of its sequence.
        let labels = tensors.labels_where(at(EVEN)).unwrap();
        assert_eq!(labels.to_vec2::<i64>().unwrap(), [[-100, 8, -100, 10, -100, -100]]);
        let indices = tensors.layout.per_sequence(|index| u32::try_from(index).unwrap()).unwrap();
        assert_eq!(indices.to_vec1::<u32>().unwrap(), [3, 1]);
    }

    #[test]
    fn field_length_mismatch_is_rejected() {
        let pack = DynamicBatchStrategy::Pack(Packing::BestFit);
        let packed = batches(BatchConfig::default().with_strategy(pack).with_max_tokens(6));
        let packed = Collator::default().pack(&packed[0], text, &Device::Cpu).unwrap();
        let padded = batches(BatchConfig::default().with_max_batch_size(4));
        let padded = Collator::default().pad(&padded[0], text, &Device::Cpu).unwrap();
        for (length, items) in [(1, &[1_u8; 1][..]), (5, &[1; 5])] {
            let wrong = |index| if index == 3 { items } else { at(EVEN)(index) };
            let expected = format!("sequence 3 has {length} items and 4 tokens, expected 4 items");
            for found in [
                packed.layout.per_token(0, wrong),
                packed.labels_where(wrong),
                padded.layout.per_token(0, wrong),
                padded.labels_where(wrong),
            ] {
                let error = found.unwrap_err().to_string();
                assert!(error.contains(&expected), "{error}");
            }
        }
    }

    #[test]
    fn padding_packed_batches_is_an_error() {
        let pack = DynamicBatchStrategy::Pack(Packing::BestFit);
        let batches = batches(BatchConfig::default().with_strategy(pack).with_max_tokens(6));
        let error = Collator::default().pad(&batches[0], text, &Device::Cpu).unwrap_err();
        assert!(error.to_string().contains("1 rows cannot hold 2 sequences"), "{error}");
    }

    #[test]
    fn row_overflow_is_rejected() {
        let pack = DynamicBatchStrategy::Pack(Packing::BestFit);
        let batches = batches(BatchConfig::default().with_strategy(pack).with_max_tokens(6));
        let error =
            Collator::default().pack(&batches[0], |_| &[1, 2, 3, 4, 5], &Device::Cpu).unwrap_err();
        assert!(
            error.to_string().contains("sequences of 10 tokens are above the 6 of their row"),
            "{error}"
        );
        let huge =
            Batch { indices: vec![0], rows: 1 << 40, padded_length: 1 << 40, real_tokens: 0 };
        let error = Collator::default().pad(&huge, text, &Device::Cpu).unwrap_err();
        assert!(
            error
                .to_string()
                .contains("a tensor of 1099511627776 x 1099511627776 x 1 elements is larger"),
            "{error}"
        );
    }
}
