//! What a run learns from, and the tensors of its steps.

use std::collections::BTreeMap;

use candle_core::{Device, Result, Tensor};
use candle_distributed::{
    batch::{Batch, Collator, PackedRow},
    mesh::tensor_tree,
};

use crate::{hf::examples::Examples, train::finetune::Rows};

/// Sequences of tokens, and how they lie in rows.
#[derive(Debug)]
pub(crate) struct DataSet {
    pub(crate) examples: Examples,
    pub(crate) rows: Rows,
    /// How many devices share the rows of a step: empty ones fill it up to a multiple.
    pub(crate) devices: usize,
}

/// The tensors of a step, all [rows, length].
pub(crate) struct Tensors {
    /// Token ids, `U32`, padded with 0 on the right.
    pub(crate) ids: Tensor,
    /// The labels of the tokens, `I64`.
    pub(crate) targets: Tensor,
    /// How sequences lie in rows, if several share one.
    pub(crate) packing: Option<Packing>,
}

/// Which sequence of its row a token belongs to, and where in it the token is, `U32`.
pub(crate) struct Packing {
    pub(crate) segment_ids: Tensor,
    pub(crate) position_ids: Tensor,
}

tensor_tree!(Tensors { data: [ids, targets, packing] });
tensor_tree!(Packing { data: [segment_ids, position_ids] });

impl DataSet {
    /// Returns the length of every sequence, in tokens.
    pub(crate) fn lengths(&self) -> Vec<u64> {
        self.examples.lengths()
    }

    /// Returns the first tokens of the first sequence, at most so many.
    pub(crate) fn beginning(&self, n_tokens: usize) -> Vec<u32> {
        self.examples.ids(0).iter().take(n_tokens).copied().collect()
    }

    /// Returns the tensors of a step: of a batch of padded rows, or of batches that are packed rows.
    pub(crate) fn collate(&self, batches: &[Batch], device: &Device) -> Result<Tensors> {
        match self.rows {
            Rows::Padded => self.padded(&batches[0], device),
            Rows::Packed => self.packed(batches, device),
        }
    }

    /// A row for each sequence.
    fn padded(&self, batch: &Batch, device: &Device) -> Result<Tensors> {
        let mut batch = batch.clone();
        batch.rows = batch.rows.next_multiple_of(self.devices as u64);
        let answers = self.answers(&batch);
        let padded = Collator::default().pad(&batch, |index| self.examples.ids(index), device)?;
        let targets = padded.labels_where(|index| &answers[&index])?;
        Ok(Tensors { ids: padded.ids, targets, packing: None })
    }

    /// Rows that sequences share, each of them a batch, as long as the longest.
    fn packed(&self, batches: &[Batch], device: &Device) -> Result<Tensors> {
        let longest = batches.iter().map(|batch| batch.padded_length).fold(0, u64::max);
        let rows: Vec<Tensors> = batches
            .iter()
            .map(|batch| self.packed_row(batch, longest, device))
            .collect::<Result<_>>()?;
        let n_rows = rows.len().next_multiple_of(self.devices);
        let stack = |of: fn(&Tensors) -> &Tensor, fill| {
            let rows: Vec<&Tensor> = rows.iter().map(of).collect();
            filled_up(&Tensor::cat(&rows, 0)?, n_rows, fill)
        };
        Ok(Tensors {
            ids: stack(|row| &row.ids, 0)?,
            targets: stack(|row| &row.targets, Collator::default().ignore_index)?,
            packing: Some(Packing {
                segment_ids: stack(|row| &row.packing().segment_ids, 0)?,
                position_ids: stack(|row| &row.packing().position_ids, 0)?,
            }),
        })
    }

    fn packed_row(&self, batch: &Batch, length: u64, device: &Device) -> Result<Tensors> {
        let mut batch = batch.clone();
        batch.padded_length = length;
        let answers = self.answers(&batch);
        let row = Collator::default().pack(&batch, |index| self.examples.ids(index), device)?;
        let targets = row.labels_where(|index| &answers[&index])?;
        let PackedRow { segment_ids, position_ids, .. } = row.rows;
        let packing = Packing { segment_ids, position_ids };
        Ok(Tensors { ids: row.ids, targets, packing: Some(packing) })
    }

    /// 1 for the tokens of each sequence that are to be predicted, and 0 for the others.
    fn answers(&self, batch: &Batch) -> BTreeMap<u64, Vec<u8>> {
        let ignored = Collator::default().ignore_index;
        let is_answer = |index: u64| {
            let labels = self.examples.labels(index).into_iter();
            labels.map(|label| u8::from(label != ignored)).collect()
        };
        batch.indices.iter().map(|&index| (index, is_answer(index))).collect()
    }
}

impl Tensors {
    #[expect(clippy::expect_used, reason = "says why it cannot fail")]
    fn packing(&self) -> &Packing {
        self.packing.as_ref().expect("a packed row knows its sequences")
    }
}

/// As many rows, of which the last ones hold one number alone.
fn filled_up(rows: &Tensor, n_rows: usize, fill: i64) -> Result<Tensor> {
    let (there, length) = rows.dims2()?;
    if there == n_rows {
        return Ok(rows.clone());
    }
    let empty = Tensor::full(fill, (n_rows - there, length), rows.device())?;
    Tensor::cat(&[rows, &empty.to_dtype(rows.dtype())?], 0)
}
