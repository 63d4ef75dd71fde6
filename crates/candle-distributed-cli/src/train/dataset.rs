//! What a run learns from, and the tensors of its steps.

use std::collections::BTreeMap;

use candle_core::{DType, Device, Result, Tensor};
use candle_distributed::{
    batch::{Batch, Collator},
    mesh::tensor_tree,
};

use crate::{
    hf::examples::Examples,
    train::{corpus::Corpus, finetune::Rows},
};

/// Sequences, and how they become tensors.
#[derive(Debug)]
pub(crate) enum DataSet {
    /// Bytes, a row for each sequence.
    Bytes(Corpus),
    /// Tokens of a model's tokenizer.
    Texts(Texts),
}

/// Sequences of tokens, and how they lie in rows.
#[derive(Debug)]
pub(crate) struct Texts {
    pub(crate) examples: Examples,
    pub(crate) rows: Rows,
    /// How many devices share the rows of a step: empty ones fill it up to a multiple.
    pub(crate) devices: usize,
}

/// The tensors of a step, all [rows, length] but the targets of bytes.
pub(crate) struct Tensors {
    /// Token ids, `U32`, padded with 0 on the right.
    pub(crate) ids: Tensor,
    /// What is predicted. Of bytes: the weights of all but the first [rows, length − 1], `F32`, 1
    /// where there is a prediction and 0 where there is padding. Of tokens: their labels, `I64`.
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
    /// The length of every sequence, in tokens.
    pub(crate) fn lengths(&self) -> Vec<u64> {
        match self {
            Self::Bytes(corpus) => corpus.lengths(),
            Self::Texts(texts) => texts.examples.lengths(),
        }
    }

    /// The first tokens of the first sequence, at most so many.
    pub(crate) fn beginning(&self, n_tokens: usize) -> Vec<u32> {
        match self {
            Self::Bytes(corpus) => {
                corpus.sequence(0).iter().take(n_tokens).map(|&byte| byte.into()).collect()
            }
            Self::Texts(texts) => texts.examples.ids(0).iter().take(n_tokens).copied().collect(),
        }
    }

    /// The tensors of a step: of a batch of padded rows, or of batches that are packed rows.
    pub(crate) fn collate(&self, batches: &[Batch], device: &Device) -> Result<Tensors> {
        match self {
            Self::Bytes(corpus) => of_bytes(&batches[0], corpus, device),
            Self::Texts(texts) => match texts.rows {
                Rows::Padded => texts.padded(&batches[0], device),
                Rows::Packed => texts.packed(batches, device),
            },
        }
    }
}

/// The bytes of a batch.
fn of_bytes(batch: &Batch, corpus: &Corpus, device: &Device) -> Result<Tensors> {
    let tokens = |index: u64| corpus.sequence(index).iter().map(|&byte| byte.into()).collect();
    let sequences: BTreeMap<u64, Vec<u32>> =
        batch.indices.iter().map(|&index| (index, tokens(index))).collect();
    let padded = Collator::default().pad(batch, |index| &sequences[&index], device)?;
    // What predicts a token is the one before it.
    let weights = padded.mask.narrow(1, 1, padded.mask.dim(1)? - 1)?.to_dtype(DType::F32)?;
    Ok(Tensors { ids: padded.ids, targets: weights, packing: None })
}

impl Texts {
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
        let packing = Packing { segment_ids: row.segment_ids, position_ids: row.position_ids };
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

#[cfg(test)]
mod tests {
    use candle_distributed::batch::{BatchConfig, DynamicBatchSampler};

    use super::*;

    #[test]
    fn padding_has_no_weight() {
        let corpus = Corpus::new(["ab\n\ncdef"], 129);
        let config = BatchConfig::default().with_max_batch_size(2);
        let sampler = DynamicBatchSampler::new(corpus.lengths(), config).unwrap();
        let batch = sampler.iter_in([1, 0]).next().unwrap().unwrap();
        let Tensors { ids, targets, .. } =
            DataSet::Bytes(corpus).collate(&[batch], &Device::Cpu).unwrap();
        assert_eq!(ids.to_vec2::<u32>().unwrap(), [[99, 100, 101, 102], [97, 98, 0, 0]]);
        assert_eq!(targets.to_vec2::<f32>().unwrap(), [[1.0, 1.0, 1.0], [1.0, 0.0, 0.0]]);
    }
}
