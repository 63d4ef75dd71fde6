//! Positions of the sequences of a batch in its tensors.

use std::ops::Range;

use candle_core::{Device, Error as CandleError, Result, Tensor, WithDType};

use crate::{batch::Batch, collate::Collator, error::Error};

/// The positions of the sequences of a batch in tensors of shape `[rows, padded_length]`, from
/// [`Collator::layout`].
///
/// Each method makes the tensor of one field, of any data type, on the device of the layout. Its
/// closure returns the field of a sequence by the index in the data set. Fields are truncated as
/// the collator says.
///
/// # Examples
///
/// Two series of three and two time steps with two features each:
///
/// ```
/// use candle_core::Device;
/// use dyn_batch::{Batch, Collator};
///
/// let series: [&[f32]; 2] = [&[1., 2., 3., 4., 5., 6.], &[7., 8., 9., 10.]];
/// let classes = [1_u32, 0];
/// let n_steps = |index| series[index as usize].len() / 2;
/// let batch = Batch::from_indices([1, 0], |index| n_steps(index) as u64)?;
///
/// let layout = Collator::default().layout(&batch, n_steps, &Device::Cpu)?;
/// let values = layout.frames(0., 2, |index| series[index as usize])?;
/// assert_eq!(
///     values.to_vec3::<f32>()?,
///     [[[7., 8.], [9., 10.], [0., 0.]], [[1., 2.], [3., 4.], [5., 6.]]]
/// );
/// assert_eq!(layout.mask()?.to_vec2::<u8>()?, [[1, 1, 0], [1, 1, 1]]);
/// let labels = layout.per_sequence(|index| classes[index as usize])?;
/// assert_eq!(labels.to_vec1::<u32>()?, [0, 1]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct SequenceLayout {
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
    /// Number of tokens. Fields with a different number of items are rejected.
    n_tokens: usize,
    /// Number of tokens that are kept; the rest is truncated.
    n_kept: usize,
}

impl SequenceSpan {
    pub(crate) fn range(&self) -> Range<usize> {
        self.start..self.start + self.n_kept
    }

    /// Checks that a field has `width` items per token.
    fn check_items(&self, n_items: usize, width: usize) -> Result<()> {
        if self.n_tokens.checked_mul(width) == Some(n_items) {
            return Ok(());
        }
        let Self { index, n_tokens, .. } = *self;
        let expected = (n_tokens as u64).saturating_mul(width as u64);
        Err(invalid(format!(
            "sequence {index} has {n_items} items and {n_tokens} tokens, expected {expected} items"
        )))
    }
}

impl SequenceLayout {
    /// Lays out a batch with one row per sequence.
    pub(crate) fn padded(
        batch: &Batch,
        lengths: impl Iterator<Item = usize>,
        collator: &Collator,
        device: &Device,
    ) -> Result<Self> {
        let (rows, row_len) = shape(batch)?;
        let sequences = batch.len() as u64;
        if sequences > batch.rows {
            return Err(invalid(format!(
                "{} rows cannot hold {sequences} sequences, use Collator::pack for packed batches",
                batch.rows
            )));
        }
        let mut spans = Vec::with_capacity(batch.len());
        for (row, (&index, n_tokens)) in batch.indices.iter().zip(lengths).enumerate() {
            let n_kept = collator.n_kept(n_tokens);
            check_row(n_kept, row_len)?;
            spans.push(SequenceSpan { index, start: row * row_len, n_tokens, n_kept });
        }
        check_counted(batch, &spans)?;
        Ok(Self { rows, row_len, spans, device: device.clone() })
    }

    /// Lays out a batch with all sequences in one row.
    pub(crate) fn packed(
        batch: &Batch,
        lengths: impl Iterator<Item = usize>,
        collator: &Collator,
        device: &Device,
    ) -> Result<Self> {
        let (_, row_len) = shape(batch)?;
        let mut start = 0_usize;
        let mut spans = Vec::with_capacity(batch.len());
        for (&index, n_tokens) in batch.indices.iter().zip(lengths) {
            let n_kept = collator.n_kept(n_tokens);
            spans.push(SequenceSpan { index, start, n_tokens, n_kept });
            start = start.saturating_add(n_kept);
        }
        check_row(start, row_len)?;
        check_counted(batch, &spans)?;
        Ok(Self { rows: 1, row_len, spans, device: device.clone() })
    }

    /// Returns the positions of the sequences, in the order of the batch.
    pub(crate) fn spans(&self) -> &[SequenceSpan] {
        &self.spans
    }

    /// Returns the `width` items per token of each sequence at its position, and `fill` elsewhere.
    pub(crate) fn lay_out<T: Copy>(
        &self,
        fill: T,
        width: usize,
        fields: &[&[T]],
    ) -> Result<Vec<T>> {
        let n_items = self.n_items(width)?;
        // A wrong width is an error before memory is allocated for it.
        for (span, field) in self.spans.iter().zip(fields) {
            span.check_items(field.len(), width)?;
        }
        let mut all = vec![fill; n_items];
        for (span, field) in self.spans.iter().zip(fields) {
            let n_kept = span.n_kept * width;
            all[span.start * width..][..n_kept].copy_from_slice(&field[..n_kept]);
        }
        Ok(all)
    }

    /// Returns the number of items of a field, if a tensor can have that many of 8 bytes.
    fn n_items(&self, width: usize) -> Result<usize> {
        let n_items = (self.rows * self.row_len).checked_mul(width);
        n_items.filter(|&n_items| n_items <= MAX_ITEMS).ok_or_else(|| {
            let (rows, row_len) = (self.rows as u64, self.row_len as u64);
            CandleError::wrap(Error::tensor_too_large(rows, row_len, width as u64))
        })
    }

    /// Creates a tensor of shape `[rows, padded_length]`.
    pub(crate) fn tensor<T: WithDType>(&self, items: Vec<T>) -> Result<Tensor> {
        Tensor::from_vec(items, (self.rows, self.row_len), &self.device)
    }

    /// Creates a tensor of a number per token, which `write` writes for each sequence by its number
    /// from 1, and 0 for padding.
    fn numbers<T: WithDType + Default>(&self, write: impl Fn(u32, &mut [T])) -> Result<Tensor> {
        let mut all = vec![T::default(); self.rows * self.row_len];
        for (number, span) in (1..).zip(&self.spans) {
            write(number, &mut all[span.range()]);
        }
        self.tensor(all)
    }

    /// Returns a value per token, such as a type, a label or a weight, and `fill` for padding, of
    /// shape `[rows, padded_length]`.
    ///
    /// For token labels, use the ignore index as `fill`, −100 for losses that follow PyTorch. The
    /// first token of a packed sequence keeps its value; for next-token labels use
    /// [`labels_where`](crate::BatchTensors::labels_where).
    ///
    /// # Errors
    ///
    /// Returns candle's error if the device fails, or [`Error::InvalidTensor`], wrapped in a candle
    /// error, if a sequence has a different number of items than tokens.
    ///
    /// # Examples
    ///
    /// ```
    /// use candle_core::Device;
    /// use dyn_batch::{Batch, Collator};
    ///
    /// let texts: [&[u32]; 2] = [&[5, 6, 7], &[8]];
    /// let tags: [&[i64]; 2] = [&[2, 0, 1], &[3]];
    /// let batch = Batch::from_indices([0, 1], |index| texts[index as usize].len() as u64)?;
    /// let tensors = Collator::default().pad(&batch, |index| texts[index as usize], &Device::Cpu)?;
    /// let labels = tensors.layout.per_token(-100, |index| tags[index as usize])?;
    /// assert_eq!(labels.to_vec2::<i64>()?, [[2, 0, 1], [3, -100, -100]]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn per_token<'a, T: WithDType>(
        &self,
        fill: T,
        items: impl FnMut(u64) -> &'a [T],
    ) -> Result<Tensor> {
        let fields: Vec<&[T]> = self.indices().map(items).collect();
        self.tensor(self.lay_out(fill, 1, &fields)?)
    }

    /// Returns `n_features` values per token, such as a frame of audio or a step of a time series,
    /// and `fill` for padding, of shape `[rows, padded_length, n_features]`.
    ///
    /// A sequence has the features of its first token, then those of its second, and so on.
    ///
    /// # Errors
    ///
    /// Returns candle's error if the device fails, or [`Error::InvalidTensor`], wrapped in a candle
    /// error, if a sequence has a different number of items than tokens × `n_features`, or the tensor
    /// exceeds the address space.
    pub fn frames<'a, T: WithDType>(
        &self,
        fill: T,
        n_features: usize,
        items: impl FnMut(u64) -> &'a [T],
    ) -> Result<Tensor> {
        let fields: Vec<&[T]> = self.indices().map(items).collect();
        let all = self.lay_out(fill, n_features, &fields)?;
        Tensor::from_vec(all, (self.rows, self.row_len, n_features), &self.device)
    }

    /// Returns a value per sequence, such as a class label, a regression target or a weight, of
    /// shape `[sequences]`.
    ///
    /// # Errors
    ///
    /// Returns candle's error if the device fails.
    pub fn per_sequence<T: WithDType>(&self, value: impl FnMut(u64) -> T) -> Result<Tensor> {
        Tensor::from_iter(self.indices().map(value), &self.device)
    }

    /// Returns 1 for tokens and 0 for padding, `U8` of shape `[rows, padded_length]`.
    ///
    /// # Errors
    ///
    /// Returns candle's error if the device fails.
    #[doc(alias = "attention_mask")]
    pub fn mask(&self) -> Result<Tensor> {
        self.numbers(|_, mask: &mut [u8]| mask.fill(1))
    }

    /// Returns the number of each token's sequence, from 1, and 0 for padding, `U32` of shape
    /// `[rows, padded_length]`.
    ///
    /// # Errors
    ///
    /// Returns candle's error if the device fails.
    pub fn segment_ids(&self) -> Result<Tensor> {
        self.numbers(|number, ids: &mut [u32]| ids.fill(number))
    }

    /// Returns the position of each token in its sequence, and 0 for padding, `U32` of shape
    /// `[rows, padded_length]`.
    ///
    /// # Errors
    ///
    /// Returns candle's error if the device fails.
    pub fn position_ids(&self) -> Result<Tensor> {
        self.numbers(|_, ids: &mut [u32]| ids.iter_mut().zip(0..).for_each(|(id, n)| *id = n))
    }

    /// Returns the number of tokens before each sequence, and the total, `U32` of shape
    /// `[sequences + 1]`.
    ///
    /// # Errors
    ///
    /// Returns candle's error if the device fails.
    #[expect(clippy::cast_possible_truncation, reason = "a layout has at most `u32::MAX` tokens")]
    pub fn cu_seqlens(&self) -> Result<Tensor> {
        let mut end = 0;
        let mut ends = vec![end];
        for span in &self.spans {
            end += span.n_kept as u32;
            ends.push(end);
        }
        Tensor::new(ends, &self.device)
    }

    fn indices(&self) -> impl Iterator<Item = u64> {
        self.spans.iter().map(|span| span.index)
    }
}

/// Limit on the items of a tensor: items of 8 bytes fill half of the address space.
const MAX_ITEMS: usize = isize::MAX as usize / 8;

/// Checks that tokens fit into a row.
fn check_row(n_tokens: usize, row_len: usize) -> Result<()> {
    if n_tokens <= row_len {
        return Ok(());
    }
    let (tokens, limit) = (n_tokens as u64, row_len as u64);
    Err(too_many_tokens(tokens, limit, "their row"))
}

/// Checks that there are no more tokens than the batch counts, because its limits and reports would
/// be wrong, nor more than position ids can count.
fn check_counted(batch: &Batch, spans: &[SequenceSpan]) -> Result<()> {
    let tokens = spans.iter().map(|span| span.n_kept as u64).sum();
    let limit = batch.real_tokens.min(u32::MAX.into());
    if tokens <= limit {
        return Ok(());
    }
    Err(too_many_tokens(tokens, limit, "their batch"))
}

/// Returns the rows and their length, if a tensor can have that many elements of 8 bytes.
fn shape(batch: &Batch) -> Result<(usize, usize)> {
    let Batch { rows, padded_length, .. } = *batch;
    let is_addressable = rows
        .checked_mul(padded_length)
        .is_some_and(|n_items| usize::try_from(n_items).is_ok_and(|n_items| n_items <= MAX_ITEMS));
    match (usize::try_from(rows), usize::try_from(padded_length)) {
        (Ok(rows), Ok(row_len)) if is_addressable => Ok((rows, row_len)),
        (Ok(_) | Err(_), Ok(_) | Err(_)) => {
            Err(CandleError::wrap(Error::tensor_too_large(rows, padded_length, 1)))
        }
    }
}

fn too_many_tokens(tokens: u64, limit: u64, holder: &str) -> CandleError {
    invalid(format!(
        "sequences of {tokens} tokens are above the {limit} of {holder}: set \
         Collator::max_sequence_length to truncate"
    ))
}

/// Wraps an error in a candle error.
fn invalid(reason: String) -> CandleError {
    CandleError::wrap(Error::InvalidTensor { reason })
}

#[cfg(test)]
#[expect(clippy::cast_possible_truncation, reason = "the numbers are small")]
mod tests {
    use core_types::Seed;

    use super::*;

    /// Returns a batch of random lengths up to `longest`, with its sequences in one row each or all
    /// in one row.
    fn random_batch(seed: Seed, longest: u64, is_packed: bool) -> (Batch, Vec<u64>) {
        let n_sequences = seed.derive(0).as_u64() % 6;
        let length = |index| seed.derive(1 + index).as_u64() % (longest + 1);
        let mut batch = Batch::from_indices((0..n_sequences).rev(), length).unwrap();
        if is_packed {
            batch.rows = 1;
            batch.padded_length = batch.real_tokens;
        }
        batch.padded_length += seed.derive(100).as_u64() % 3;
        (batch, (0..n_sequences).map(length).collect())
    }

    /// A token of a batch: the number of its sequence from 1, the index of the sequence, and its
    /// position in the sequence.
    type Token = (u32, u64, u32);

    /// Returns the token in each column of each row, if there is one.
    fn naive_tokens(batch: &Batch, kept: &[u64]) -> Vec<Vec<Option<Token>>> {
        let mut rows = vec![Vec::new(); batch.rows as usize];
        for (nth, &index) in batch.indices.iter().enumerate() {
            let row = if batch.rows == 1 { 0 } else { nth };
            let tokens = 0..kept[index as usize] as u32;
            rows[row].extend(tokens.map(|position| Some((nth as u32 + 1, index, position))));
        }
        for row in &mut rows {
            row.resize(batch.padded_length as usize, None);
        }
        rows
    }

    /// Returns a value of each token, and `fill` for padding.
    fn map<T: Clone>(
        tokens: &[Vec<Option<Token>>],
        fill: &T,
        value: impl Fn(Token) -> T,
    ) -> Vec<Vec<T>> {
        let row = |row: &Vec<Option<Token>>| {
            row.iter().map(|token| token.map_or(fill.clone(), &value)).collect()
        };
        tokens.iter().map(row).collect()
    }

    #[test]
    fn fields_equal_a_naive_layout() {
        for case in 0..400_u64 {
            let width = case as usize / 2 % 4;
            let (batch, lengths) = random_batch(Seed::new(case), 5, case % 2 == 1);
            let max = 2 + case % 5;
            let kept: Vec<u64> = lengths.iter().map(|&length| length.min(max)).collect();
            let tokens = naive_tokens(&batch, &kept);
            let collator = Collator { max_sequence_length: Some(max), ..Collator::default() };
            let length = |index| lengths[index as usize] as usize;
            let layout = collator.layout(&batch, length, &Device::Cpu).unwrap();

            let mask = layout.mask().unwrap().to_vec2::<u8>().unwrap();
            assert_eq!(mask, map(&tokens, &0, |_| 1), "{batch:?}");
            let segments = layout.segment_ids().unwrap().to_vec2::<u32>().unwrap();
            assert_eq!(segments, map(&tokens, &0, |(number, ..)| number));
            let positions = layout.position_ids().unwrap().to_vec2::<u32>().unwrap();
            assert_eq!(positions, map(&tokens, &0, |(.., position)| position));
            let ends = layout.cu_seqlens().unwrap().to_vec1::<u32>().unwrap();
            let n_kept = |nth: usize| kept[batch.indices[nth] as usize] as u32;
            assert!((0..batch.len()).all(|nth| ends[nth + 1] - ends[nth] == n_kept(nth)));
            assert_eq!((ends[0], ends.len()), (0, batch.len() + 1));

            let item = |index: u64, nth: usize| 1000 * (index as u32 + 1) + nth as u32;
            let fields: Vec<Vec<u32>> = (0..lengths.len() as u64)
                .map(|index| (0..length(index) * width).map(|nth| item(index, nth)).collect())
                .collect();
            let frames = layout.frames(7, width, |index| &fields[index as usize]).unwrap();
            assert_eq!(frames.dims(), [tokens.len(), batch.padded_length as usize, width]);
            let expected = map(&tokens, &vec![7; width], |(_, index, position)| {
                (0..width).map(|nth| item(index, position as usize * width + nth)).collect()
            });
            let expected = expected.concat().concat();
            assert_eq!(frames.flatten_all().unwrap().to_vec1::<u32>().unwrap(), expected);
            let indices = layout.per_sequence(|index| index as u32).unwrap();
            let indices = indices.to_vec1::<u32>().unwrap();
            assert!(indices.into_iter().map(u64::from).eq(batch.indices.iter().copied()));
        }
    }

    /// Checks the message, because candle's error hides the type of a wrapped error.
    fn check_error(found: Result<impl Sized>, expected: &str) {
        let found = found.err().unwrap().to_string();
        assert!(found.contains(expected), "{found}");
    }

    #[test]
    fn frames_of_wrong_sizes_are_rejected() {
        let batch = Batch::from_indices([7, 8], |_| 3).unwrap();
        let layout = Collator::default().layout(&batch, |_| 3, &Device::Cpu).unwrap();
        let frames = |items: &'static [u8], n_features| {
            layout.frames(0, n_features, |index| if index == 8 { items } else { &[0; 6] })
        };
        for items in [0, 3, 5, 7, 12] {
            let found = frames(&[0; 12][..items], 2);
            check_error(found, &format!("sequence 8 has {items} items and 3 tokens, expected 6"));
        }
        let expected = "sequence 7 has 6 items and 3 tokens, expected 3298534883328 items";
        check_error(frames(&[], 1 << 40), expected);
        for n_features in [1 << 60, usize::MAX] {
            let found = frames(&[], n_features);
            check_error(found, &format!("a tensor of 2 x 3 x {n_features} elements"));
        }
    }

    #[test]
    fn lengths_beyond_the_batch_are_rejected() {
        let layout =
            |batch: &Batch, length| Collator::default().layout(batch, |_| length, &Device::Cpu);
        let mut batch = Batch::from_indices([0, 1], |_| 3).unwrap();
        check_error(layout(&batch, 4), "4 tokens are above the 3 of their row");
        batch.padded_length = 4;
        check_error(layout(&batch, 4), "8 tokens are above the 6 of their batch");
        batch.rows = 1;
        check_error(layout(&batch, usize::MAX), "tokens are above the 4 of their row");

        let batch = Batch::from_indices([0], |_| 1 << 32).unwrap();
        let expected = "4294967296 tokens are above the 4294967295 of their batch";
        check_error(layout(&batch, 1 << 32), expected);
    }
}
