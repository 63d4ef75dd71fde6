//! Examples, and the tensors of their steps.

use std::collections::BTreeMap;

use candle_core::{Device, Result, Tensor};
use dyn_batch::{Batch, Collator, PackedRow};
use pmap_mesh::tensor_tree;
use serde::{Deserialize, Serialize};

use crate::text::examples::Examples;

/// The layout of sequences in the rows of a batch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "clap", derive(clap::ValueEnum))]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Rows {
    /// A row for each, padded to the longest of its batch
    #[default]
    Padded,
    /// As many in a row as fit the context, none of which sees another
    Packed,
}

/// Sequences of tokens and their layout in rows.
#[derive(Debug)]
pub(crate) struct DataSet {
    examples: Examples,
    rows: Rows,
    devices: usize,
}

/// The tensors of a step, all [rows, length].
#[derive(Clone, Debug)]
pub(crate) struct BatchTensors {
    /// Token ids, `U32`, padded with 0 on the right.
    pub(crate) ids: Tensor,
    /// Labels of the tokens, `I64`.
    pub(crate) targets: Tensor,
    /// Places of the tokens in their sequences, if several share a row.
    pub(crate) packing: Option<RowPacking>,
}

/// The places of tokens in rows that several sequences share, `U32`.
#[derive(Clone, Debug)]
pub(crate) struct RowPacking {
    /// Sequence of its row that a token belongs to.
    pub(crate) segment_ids: Tensor,
    /// Position of a token in its sequence.
    pub(crate) position_ids: Tensor,
}

tensor_tree!(BatchTensors { data: [ids, targets, packing] });
tensor_tree!(RowPacking { data: [segment_ids, position_ids] });

impl DataSet {
    /// Lays examples in rows, which so many devices share: empty rows fill a step up to a multiple.
    pub(crate) fn new(examples: Examples, rows: Rows, devices: usize) -> Self {
        Self { examples, rows, devices }
    }

    /// Returns the length of every sequence, in tokens.
    pub(crate) fn lengths(&self) -> Vec<u64> {
        self.examples.lengths()
    }

    /// Returns the examples.
    pub(crate) fn examples(&self) -> &Examples {
        &self.examples
    }

    /// Returns the tensors of a step: of a batch of padded rows, or of batches that are packed rows.
    ///
    /// # Errors
    ///
    /// If the device has no memory left.
    pub(crate) fn collate(&self, batches: &[Batch], device: &Device) -> Result<BatchTensors> {
        match self.rows {
            Rows::Padded => self.padded(&batches[0], device),
            Rows::Packed => self.packed(batches, device),
        }
    }

    /// Returns tensors with a row for each sequence.
    fn padded(&self, batch: &Batch, device: &Device) -> Result<BatchTensors> {
        let mut batch = batch.clone();
        batch.rows = batch.rows.next_multiple_of(self.devices as u64);
        let masks = self.target_masks(&batch);
        let padded = Collator::default().pad(&batch, |index| self.examples.ids(index), device)?;
        let targets = padded.labels_where(|index| &masks[&index])?;
        Ok(BatchTensors { ids: padded.ids, targets, packing: None })
    }

    /// Returns tensors with a row for each batch, as long as the longest.
    fn packed(&self, batches: &[Batch], device: &Device) -> Result<BatchTensors> {
        let longest = batches.iter().map(|batch| batch.padded_length).fold(0, u64::max);
        let rows: Vec<BatchTensors> = batches
            .iter()
            .map(|batch| self.packed_row(batch, longest, device))
            .collect::<Result<_>>()?;
        let n_rows = rows.len().next_multiple_of(self.devices);
        let stack = |of: fn(&BatchTensors) -> &Tensor, fill| {
            let rows: Vec<&Tensor> = rows.iter().map(of).collect();
            filled_up(&Tensor::cat(&rows, 0)?, n_rows, fill)
        };
        Ok(BatchTensors {
            ids: stack(|row| &row.ids, 0)?,
            targets: stack(|row| &row.targets, Collator::default().ignore_index)?,
            packing: Some(RowPacking {
                segment_ids: stack(|row| &row.packing().segment_ids, 0)?,
                position_ids: stack(|row| &row.packing().position_ids, 0)?,
            }),
        })
    }

    fn packed_row(&self, batch: &Batch, length: u64, device: &Device) -> Result<BatchTensors> {
        let mut batch = batch.clone();
        batch.padded_length = length;
        let masks = self.target_masks(&batch);
        let row = Collator::default().pack(&batch, |index| self.examples.ids(index), device)?;
        let targets = row.labels_where(|index| &masks[&index])?;
        let PackedRow { segment_ids, position_ids, .. } = row.rows;
        let packing = RowPacking { segment_ids, position_ids };
        Ok(BatchTensors { ids: row.ids, targets, packing: Some(packing) })
    }

    /// Returns 1 for the targets of each sequence, and 0 for its other tokens.
    fn target_masks(&self, batch: &Batch) -> BTreeMap<u64, Vec<u8>> {
        let ignored = Collator::default().ignore_index;
        let mask = |index: u64| {
            let labels = self.examples.labels(index).into_iter();
            labels.map(|label| u8::from(label != ignored)).collect()
        };
        batch.indices.iter().map(|&index| (index, mask(index))).collect()
    }
}

impl BatchTensors {
    #[expect(clippy::expect_used, reason = "says why it cannot fail")]
    fn packing(&self) -> &RowPacking {
        self.packing.as_ref().expect("a packed row knows its sequences")
    }
}

/// Adds rows of one number up to so many.
fn filled_up(rows: &Tensor, n_rows: usize, fill: i64) -> Result<Tensor> {
    let (there, length) = rows.dims2()?;
    if there == n_rows {
        return Ok(rows.clone());
    }
    let empty = Tensor::full(fill, (n_rows - there, length), rows.device())?;
    Tensor::cat(&[rows, &empty.to_dtype(rows.dtype())?], 0)
}
