//! What is trained: a small transformer over bytes, or the model of a Hugging Face folder.
//!
//! Here and in [`data`](crate::train::data) is all that differs between them: whatever shards,
//! trains, resumes or predicts knows a [`Model`] and its batches.

use candle_core::{DType, Device, Result as CandleResult, Tensor};
use candle_distributed::{
    models::{Llama, Tokens},
    plan::{ElemType, ParameterInfo},
    train::{self, Lora, Loss, UnitRules, Units},
};
use candle_nn::VarBuilder;

use crate::{
    error::{Error, Result},
    hint,
    train::{
        dataset::{Packing, Tensors},
        transformer::{self, Config, Transformer},
    },
};

/// A model that a run trains.
#[derive(Clone, Debug)]
pub(crate) enum Model {
    /// A small transformer over bytes.
    Bytes(Transformer),
    /// The model of a Hugging Face folder.
    Llama(Llama),
}

/// What decides how much memory a token takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Sizes {
    pub(crate) layers: usize,
    /// Width of the residual stream.
    pub(crate) hidden: usize,
    /// Numbers that a layer computes for a token.
    pub(crate) of_layer: usize,
    pub(crate) vocabulary: usize,
}

impl Model {
    /// Asks for all parameters.
    pub(crate) fn declare(&self, vb: &VarBuilder<'_>) -> CandleResult<()> {
        match self {
            Self::Bytes(transformer) => transformer.build(vb),
            Self::Llama(llama) => llama.declare(vb),
        }
    }

    /// Which parameters form which unit: blocks do by their numbers.
    pub(crate) fn units(&self) -> UnitRules {
        match self {
            Self::Bytes(_) => transformer::units(),
            Self::Llama(llama) => llama.units(),
        }
    }

    /// The loss of a shard.
    pub(crate) fn loss(&self, units: &Units, batch: Tensors) -> CandleResult<Loss> {
        match self {
            Self::Bytes(transformer) => transformer::loss(transformer, units, batch),
            Self::Llama(llama) => {
                let Tensors { ids, targets: labels, packing } = batch;
                let tokens = match packing {
                    None => Tokens::rows(ids),
                    Some(Packing { segment_ids, position_ids }) => {
                        Tokens::packed(ids, segment_ids, position_ids)
                    }
                };
                llama.loss(units, &tokens, &labels)
            }
        }
    }

    /// The logits [rows, length, vocabulary] of the token after each of `ids` [rows, length].
    pub(crate) fn logits(&self, units: &Units, ids: Tensor) -> CandleResult<Tensor> {
        match self {
            Self::Bytes(transformer) => transformer::logits(transformer, units, &ids),
            Self::Llama(llama) => llama.logits(units, &Tokens::rows(ids)),
        }
    }

    /// The most tokens of a sequence.
    pub(crate) fn context(&self) -> usize {
        match self {
            Self::Bytes(transformer) => transformer.config.context,
            Self::Llama(llama) => llama.config().max_position_embeddings,
        }
    }

    /// The adapters that are trained, if the model itself is not.
    pub(crate) fn lora(&self) -> Option<&Lora> {
        match self {
            Self::Bytes(transformer) => transformer.lora.as_ref(),
            Self::Llama(llama) => llama.lora(),
        }
    }

    /// Patterns of the parameters that are not decayed.
    pub(crate) fn undecayed(&self) -> Vec<&'static str> {
        match self {
            // Adapters are matrices, and nothing else learns beside them.
            Self::Llama(llama) if llama.lora().is_none() => {
                let biases = llama.config().attention_bias.then_some("bias");
                Llama::NORMS.into_iter().chain(biases).collect()
            }
            Self::Llama(_) | Self::Bytes(_) => Vec::new(),
        }
    }

    /// Patterns of the tensors that weights may have and the model does not: frequencies, which the
    /// first Llamas were written with, and the head where it is the embedding.
    pub(crate) fn passed_over(&self) -> Vec<&'static str> {
        let Self::Llama(llama) = self else { return Vec::new() };
        let head = llama.config().tie_word_embeddings.then_some("lm_head");
        ["rotary_emb"].into_iter().chain(head).collect()
    }

    /// The parameters in the order of their names. They take no memory.
    pub(crate) fn parameters(&self) -> Result<Vec<ParameterInfo>> {
        let declared = train::declare(|vb| self.declare(&vb), DType::F32, &Device::Cpu);
        let mut declared = match (declared, self) {
            (Ok(declared), _) => declared,
            // Nothing else can be wrong with what is declared.
            (Err(fault), Self::Llama(_)) => {
                return Err(Error::usage(fault.to_string()).hinted(hint::LORA_ON));
            }
            (Err(fault), Self::Bytes(_)) => return Err(fault.into()),
        };
        declared.sort_by(|left, right| left.name.cmp(&right.name));
        let info = |declared: train::Declared| {
            let shape = declared.shape.dims().iter().map(|&size| size as u64);
            let info = ParameterInfo::new(declared.name, shape.collect::<Vec<_>>(), ElemType::F32)?;
            let is_trained = self.lora().is_none() || is_of_adapter(info.name());
            let unit = self.unit_of(info.name());
            Ok(info.with_requires_grad(is_trained).with_unit(unit))
        };
        declared.into_iter().map(info).collect()
    }

    /// The unit of a parameter.
    fn unit_of(&self, name: &str) -> String {
        match self {
            Self::Bytes(_) => transformer::unit_of(name),
            Self::Llama(_) => match name.split('.').collect::<Vec<_>>()[..] {
                ["model", "layers", layer, ..] => format!("model.layers.{layer}"),
                ["model", "embed_tokens", ..] => "embed".to_owned(),
                _ => "head".to_owned(),
            },
        }
    }

    /// What decides how much memory a token takes.
    pub(crate) fn sizes(&self) -> Sizes {
        match self {
            Self::Bytes(transformer) => {
                let Config { layers, hidden, vocabulary, .. } = transformer.config;
                Sizes { layers, hidden, of_layer: 12 * hidden, vocabulary }
            }
            Self::Llama(llama) => {
                let config = llama.config();
                let queries = config.num_attention_heads * config.head_dim;
                let keys = config.num_key_value_heads * config.head_dim;
                // Norms, sums and what projections give; queries and keys before and after they are
                // turned, values, and what attention mixes; gate and up.
                let hidden = config.hidden_size;
                let of_attention = 3 * queries + 3 * keys;
                let of_layer = 6 * hidden + of_attention + 2 * config.intermediate_size;
                let layers = config.num_hidden_layers;
                Sizes { layers, hidden, of_layer, vocabulary: config.vocab_size }
            }
        }
    }
}

/// Whether a parameter belongs to an adapter.
pub(crate) fn is_of_adapter(name: &str) -> bool {
    name.split('.').any(|part| Lora::PATTERNS.contains(&part))
}

#[cfg(test)]
impl Model {
    /// The transformer over bytes of the usual sizes, without adapters.
    pub(crate) const PLAIN: Self = Self::Bytes(Transformer::plain(transformer::MODEL));
}
