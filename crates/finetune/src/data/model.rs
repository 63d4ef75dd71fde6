//! What is trained: a model of the Llama family, with or without adapters.

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
    train::dataset::{Packing, Tensors},
};

/// A model that a run trains.
///
/// One loop trains models with and without adapters, of folders and of bytes: a second loop would
/// repeat locks, checkpoints, agreement of processes and recovery.
#[derive(Clone, Debug)]
pub(crate) struct Model(pub(crate) Llama);

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
        self.0.declare(vb)
    }

    /// Which parameters form which unit: blocks do by their numbers.
    pub(crate) fn units(&self) -> UnitRules {
        self.0.units()
    }

    /// Returns the loss of a shard.
    pub(crate) fn loss(&self, units: &Units, batch: Tensors) -> CandleResult<Loss> {
        let Tensors { ids, targets: labels, packing } = batch;
        let tokens = match packing {
            None => Tokens::rows(ids),
            Some(Packing { segment_ids, position_ids }) => {
                Tokens::packed(ids, segment_ids, position_ids)
            }
        };
        self.0.loss(units, &tokens, &labels)
    }

    /// Returns the logits [rows, length, vocabulary] of the token after each of `ids` [rows, length].
    pub(crate) fn logits(&self, units: &Units, ids: Tensor) -> CandleResult<Tensor> {
        self.0.logits(units, &Tokens::rows(ids))
    }

    /// Returns the most tokens of a sequence.
    pub(crate) fn context(&self) -> usize {
        self.0.config().max_position_embeddings
    }

    /// Returns the adapters that are trained, if the model itself is not.
    pub(crate) fn lora(&self) -> Option<&Lora> {
        self.0.lora()
    }

    /// Returns the patterns of the parameters that are not decayed.
    pub(crate) fn undecayed(&self) -> Vec<&'static str> {
        // Adapters are matrices, and nothing else learns beside them.
        if self.lora().is_some() {
            return Vec::new();
        }
        let biases = self.0.config().attention_bias.then_some("bias");
        Llama::NORMS.into_iter().chain(biases).collect()
    }

    /// Returns the patterns of the tensors that weights may have and the model does not: frequencies,
    /// which the first Llamas were written with, and the head where it is the embedding.
    pub(crate) fn passed_over(&self) -> Vec<&'static str> {
        let head = self.0.config().tie_word_embeddings.then_some("lm_head");
        ["rotary_emb"].into_iter().chain(head).collect()
    }

    /// Returns the parameters in the order of their names. They take no memory.
    pub(crate) fn parameters(&self) -> Result<Vec<ParameterInfo>> {
        let declared = train::declare(|vb| self.declare(&vb), DType::F32, &Device::Cpu);
        // Nothing but the adapters can be wrong with what is declared.
        let mut declared =
            declared.map_err(|fault| Error::usage(fault.to_string()).hinted(hint::LORA_ON))?;
        declared.sort_by(|left, right| left.name.cmp(&right.name));
        let info = |declared: train::Declared| {
            let shape = declared.shape.dims().iter().map(|&size| size as u64);
            let info = ParameterInfo::new(declared.name, shape.collect::<Vec<_>>(), ElemType::F32)?;
            let is_trained = self.lora().is_none() || is_of_adapter(info.name());
            let unit = unit_of(info.name());
            Ok(info.with_requires_grad(is_trained).with_unit(unit))
        };
        declared.into_iter().map(info).collect()
    }

    /// Returns what decides how much memory a token takes.
    pub(crate) fn sizes(&self) -> Sizes {
        let config = self.0.config();
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

/// Returns the unit of a parameter.
fn unit_of(name: &str) -> String {
    match name.split('.').collect::<Vec<_>>()[..] {
        ["model", "layers", layer, ..] => format!("model.layers.{layer}"),
        ["model", "embed_tokens", ..] => "embed".to_owned(),
        _ => "head".to_owned(),
    }
}

/// Whether a parameter belongs to an adapter.
pub(crate) fn is_of_adapter(name: &str) -> bool {
    name.split('.').any(|part| Lora::PATTERNS.contains(&part))
}
