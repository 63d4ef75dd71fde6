//! Converts the examples of steps to tensors.

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
    /// One sequence per row, padded to the longest of its batch
    #[default]
    Padded,
    /// As many sequences per row as fit the context, without attention between them
    Packed,
}

/// Sequences of tokens and their layout in rows.
#[derive(Debug)]
pub(crate) struct DataSet {
    examples: Examples,
    rows: Rows,
    n_devices: usize,
}

/// The tensors of a step, all [rows, length].
#[derive(Clone, Debug)]
pub(crate) struct BatchTensors {
    /// Token ids, `U32`, padded with 0 on the right.
    pub(crate) ids: Tensor,
    /// Labels of the tokens, `I64`.
    pub(crate) targets: Tensor,
    /// Layout of the rows, if several sequences share a row.
    pub(crate) packing: Option<RowPacking>,
}

/// The layout of packed rows, `U32`.
#[derive(Clone, Debug)]
pub(crate) struct RowPacking {
    /// Number of a token's sequence in its row.
    pub(crate) segment_ids: Tensor,
    /// Position of a token in its sequence.
    pub(crate) position_ids: Tensor,
}

tensor_tree!(BatchTensors { data: [ids, targets, packing] });
tensor_tree!(RowPacking { data: [segment_ids, position_ids] });

impl DataSet {
    /// Makes a data set for `n_devices` devices. Each step is padded with empty rows, to a multiple of
    /// this number.
    pub(crate) fn new(examples: Examples, rows: Rows, n_devices: usize) -> Self {
        Self { examples, rows, n_devices }
    }

    /// Returns the length of every sequence, in tokens.
    pub(crate) fn lengths(&self) -> Vec<u64> {
        self.examples.lengths()
    }

    /// Returns the examples.
    pub(crate) fn examples(&self) -> &Examples {
        &self.examples
    }

    /// Returns the tensors of a step. A step with padded rows is one batch; with packed rows, each row
    /// is a batch.
    ///
    /// # Errors
    ///
    /// If the device runs out of memory.
    pub(crate) fn collate(&self, batches: &[Batch], device: &Device) -> Result<BatchTensors> {
        match self.rows {
            Rows::Padded => self.collate_padded(&batches[0], device),
            Rows::Packed => self.collate_packed(batches, device),
        }
    }

    /// Returns tensors with one row per sequence.
    fn collate_padded(&self, batch: &Batch, device: &Device) -> Result<BatchTensors> {
        let mut batch = batch.clone();
        batch.rows = batch.rows.next_multiple_of(self.n_devices as u64);
        let masks = self.target_masks(&batch);
        let padded = Collator::default().pad(&batch, |index| self.examples.ids(index), device)?;
        let targets = padded.labels_where(|index| &masks[&index])?;
        Ok(BatchTensors { ids: padded.ids, targets, packing: None })
    }

    /// Returns tensors with one row per batch, all padded to the length of the longest row.
    fn collate_packed(&self, batches: &[Batch], device: &Device) -> Result<BatchTensors> {
        let longest = batches.iter().map(|batch| batch.padded_length).fold(0, u64::max);
        let rows: Vec<BatchTensors> = batches
            .iter()
            .map(|batch| self.collate_packed_row(batch, longest, device))
            .collect::<Result<_>>()?;
        let n_rows = rows.len().next_multiple_of(self.n_devices);
        let stack = |field: fn(&BatchTensors) -> &Tensor, fill| {
            let tensors: Vec<&Tensor> = rows.iter().map(field).collect();
            pad_rows(&Tensor::cat(&tensors, 0)?, n_rows, fill)
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

    fn collate_packed_row(
        &self,
        batch: &Batch,
        length: u64,
        device: &Device,
    ) -> Result<BatchTensors> {
        let mut batch = batch.clone();
        batch.padded_length = length;
        let masks = self.target_masks(&batch);
        let row = Collator::default().pack(&batch, |index| self.examples.ids(index), device)?;
        let targets = row.labels_where(|index| &masks[&index])?;
        let PackedRow { segment_ids, position_ids, .. } = row.rows;
        let packing = RowPacking { segment_ids, position_ids };
        Ok(BatchTensors { ids: row.ids, targets, packing: Some(packing) })
    }

    /// Returns a mask for each sequence of a batch: 1 for targets, and 0 for other tokens.
    fn target_masks(&self, batch: &Batch) -> BTreeMap<u64, Vec<u8>> {
        let ignored = Collator::default().ignore_index;
        let mut masks = BTreeMap::new();
        for &index in &batch.indices {
            let labels = self.examples.labels(index).into_iter();
            masks.insert(index, labels.map(|label| u8::from(label != ignored)).collect());
        }
        masks
    }
}

impl BatchTensors {
    #[expect(clippy::expect_used, reason = "the message says why it cannot fail")]
    fn packing(&self) -> &RowPacking {
        self.packing.as_ref().expect("packed rows have a layout")
    }
}

/// Adds rows filled with `fill` up to `n_rows` rows.
fn pad_rows(rows: &Tensor, n_rows: usize, fill: i64) -> Result<Tensor> {
    let (n_present, length) = rows.dims2()?;
    if n_present == n_rows {
        return Ok(rows.clone());
    }
    let empty = Tensor::full(fill, (n_rows - n_present, length), rows.device())?;
    Tensor::cat(&[rows, &empty.to_dtype(rows.dtype())?], 0)
}
