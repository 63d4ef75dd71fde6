//! The description of a decoder: one for all families.

use candle_core::DType;
use fused_ops::Activation;

use crate::models::{
    error::{ModelError, field_error},
    rope::{RopeConfig, RopePairs},
};

/// The sizes and formulas of a decoder, from the `config.json` of any family.
///
/// A field that transformers also has keeps its name. The other fields say what differs between
/// families; nothing after the reader of `config.json` knows a family's name.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
#[expect(clippy::struct_excessive_bools, reason = "families combine these properties freely")]
pub struct DecoderConfig {
    /// Number of different tokens.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of the feed-forward network.
    pub intermediate_size: usize,
    /// Number of query heads.
    pub num_attention_heads: usize,
    /// Number of key and value heads, a divisor of the number of query heads.
    pub num_key_value_heads: usize,
    /// Number of elements of a head.
    pub head_dim: usize,
    /// Maximum length of a sequence.
    pub max_position_embeddings: usize,
    /// Epsilon of the norms, added to the mean square.
    pub rms_norm_eps: f64,
    /// The start of the names of all weights: empty, or `language_model.` for the text part of a model that
    /// also sees images.
    pub name_prefix: &'static str,
    /// Whether the head and the embedding share a weight.
    pub tie_word_embeddings: bool,
    /// The standard deviation of random weights: see
    /// [`Decoder::declare`](crate::models::Decoder::declare).
    pub initializer_range: f64,
    /// The type of the weights.
    pub dtype: DType,
    /// The properties of each block.
    pub layers: Vec<LayerConfig>,
    /// The rotary positions that the blocks choose from.
    pub ropes: Vec<RopeConfig>,
    /// The places of the norms in a block.
    pub norms: BlockNorms,
    /// The number that is added to the weights of norms: 1 in Gemma, 0 elsewhere.
    pub norm_offset: f64,
    /// The norm of queries and keys before their rotation, if there is one.
    pub qk_norm: Option<QkNorm>,
    /// The factor of a query's products with keys.
    pub attention_scale: f64,
    /// The cap c of the scores of attention, which become c·tanh(score / c).
    pub attention_softcap: Option<f64>,
    /// The factor of queries that grows with their position, if there is one.
    pub query_scale: Option<QueryScale>,
    /// Whether each head has a sink, as in gpt-oss: one more score of each query, without a value.
    pub sinks: bool,
    /// The experts of the blocks that have them.
    pub experts: Option<ExpertsConfig>,
    /// The linear layers with biases.
    pub biases: Biases,
    /// Whether queries, keys and values are the rows of one weight, `qkv_proj`.
    pub fused_qkv: bool,
    /// Whether gate and up are the rows of one weight, `gate_up_proj`.
    pub fused_gate_up: bool,
    /// The function of the gate.
    pub activation: Activation,
    /// The factor of embeddings.
    pub embedding_scale: f64,
    /// The factor of both additions to the residual stream, by attention and by the feed-forward network.
    pub residual_scale: f64,
    /// The factor of logits.
    pub logit_scale: f64,
    /// The cap c of logits, which become c·tanh(logit / c).
    pub logit_softcap: Option<f64>,
}

/// The properties of one block of a decoder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(clippy::exhaustive_structs, reason = "a description of plain data")]
pub struct LayerConfig {
    /// The index of its rotary positions in [`DecoderConfig::ropes`]; `None` for attention without
    /// positions.
    pub rope: Option<usize>,
    /// Number of positions that a token attends to, itself included, if limited.
    pub window: Option<usize>,
    /// Whether the feed-forward network consists of experts: see [`ExpertsConfig`].
    pub has_experts: bool,
}

/// The experts of a feed-forward network.
#[derive(Clone, Copy, Debug, PartialEq)]
#[expect(clippy::exhaustive_structs, reason = "a description of plain data")]
pub struct ExpertsConfig {
    /// Number of experts.
    pub n: usize,
    /// Number of experts that each token takes.
    pub per_token: usize,
    /// Width of an expert.
    pub inner: usize,
    /// The weights of the chosen experts.
    pub routing: Routing,
    /// The names and layout of the weights.
    pub names: ExpertNames,
}

impl ExpertsConfig {
    fn check(&self) -> Result<(), ModelError> {
        let Self { n, per_token, inner, names, .. } = *self;
        for (field, size, max) in [
            ("num_experts", n, DecoderConfig::MAX_LAYERS),
            ("num_experts_per_tok", per_token, n),
            ("moe_intermediate_size", inner, DecoderConfig::MAX_SIZE),
        ] {
            if !(1..=max).contains(&size) {
                return Err(field_error(field, &size, format!("1 to {max}")));
            }
        }
        let ExpertNames::Stacked(Clamp { alpha, limit }) = names else { return Ok(()) };
        for (field, value) in [("swiglu_alpha", alpha), ("swiglu_limit", limit)] {
            if !(value > 0. && value.is_finite()) {
                return Err(field_error(field, &value, "a positive number".into()));
            }
        }
        Ok(())
    }
}

/// The weights of the experts that a router chooses by their logits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Routing {
    /// Their shares of a softmax over all experts.
    Softmax,
    /// These shares, divided by their sum.
    SoftmaxRenormalized,
    /// A softmax over the chosen experts only.
    SoftmaxChosen,
}

/// The names and layout of the weights of experts.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum ExpertNames {
    /// Three matrices for each expert, without biases: the names of gate, up and down.
    Separate([&'static str; 3]),
    /// Two stacked weights, with biases and a clamped gate, as in gpt-oss.
    Stacked(Clamp),
}

/// The gate of gpt-oss: (up + 1) · gate · sigmoid(α · gate), with a gate of at most `limit` and `up`
/// within ±`limit`.
#[derive(Clone, Copy, Debug, PartialEq)]
#[expect(clippy::exhaustive_structs, reason = "the two numbers of a formula")]
pub struct Clamp {
    /// α, `swiglu_alpha`.
    pub alpha: f64,
    /// `swiglu_limit`.
    pub limit: f64,
}

/// The places of the norms in a block, which are named after the families that began with them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum BlockNorms {
    /// Before attention and before the feed-forward network, as in Llama.
    Before,
    /// After each of the two, as in OLMo 2.
    After,
    /// Before and after each of the two, with the names of Gemma 2.
    Gemma,
    /// Before and after each of the two, with the names of GLM 4.
    Glm,
}

/// The names of the norms of a block.
#[derive(Clone, Copy, Debug)]
pub(super) struct NormNames {
    pub(super) before_attention: Option<&'static str>,
    pub(super) after_attention: Option<&'static str>,
    pub(super) before_mlp: Option<&'static str>,
    pub(super) after_mlp: Option<&'static str>,
}

impl NormNames {
    /// Returns the names that there are.
    pub(super) fn all(self) -> impl Iterator<Item = &'static str> {
        [self.before_attention, self.after_attention, self.before_mlp, self.after_mlp]
            .into_iter()
            .flatten()
    }
}

impl BlockNorms {
    pub(super) fn names(self) -> NormNames {
        let [before_attention, after_attention, before_mlp, after_mlp] = match self {
            Self::Before => [Some("input_layernorm"), None, Some("post_attention_layernorm"), None],
            Self::After => {
                [None, Some("post_attention_layernorm"), None, Some("post_feedforward_layernorm")]
            }
            Self::Gemma => [
                Some("input_layernorm"),
                Some("post_attention_layernorm"),
                Some("pre_feedforward_layernorm"),
                Some("post_feedforward_layernorm"),
            ],
            Self::Glm => [
                Some("input_layernorm"),
                Some("post_self_attn_layernorm"),
                Some("post_attention_layernorm"),
                Some("post_mlp_layernorm"),
            ],
        };
        NormNames { before_attention, after_attention, before_mlp, after_mlp }
    }
}

/// The elements that a norm of queries and keys takes together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum QkNorm {
    /// Each head alone, with the same weights for all heads.
    PerHead,
    /// All heads of a token.
    AllHeads,
}

/// The factor 1 + β·ln(1 + ⌊position / length⌋) of queries, as in Ministral 3.
#[derive(Clone, Copy, Debug, PartialEq)]
#[expect(clippy::exhaustive_structs, reason = "the two numbers of a formula")]
pub struct QueryScale {
    /// β, `llama_4_scaling_beta`.
    pub beta: f64,
    /// `original_max_position_embeddings`, in tokens.
    pub length: usize,
}

impl QueryScale {
    /// Returns the factor at a position.
    pub(super) fn at(self, position: usize) -> f64 {
        1. + self.beta * ((position / self.length) as f64).ln_1p()
    }
}

/// The linear layers of a block with biases.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[expect(clippy::exhaustive_structs, reason = "all linear layers of a block")]
pub struct Biases {
    /// The projections to queries, keys and values.
    pub qkv: bool,
    /// The projection of attention's result.
    pub output: bool,
    /// The layers of the feed-forward network.
    pub mlp: bool,
}

impl DecoderConfig {
    /// Limit on sizes, above those of any model, and low enough that products do not overflow.
    const MAX_SIZE: usize = 1 << 24;
    /// Limit on the number of layers, above that of any model.
    pub(super) const MAX_LAYERS: usize = 1 << 14;

    /// Returns the width of the queries of all heads.
    pub(crate) fn query_width(&self) -> usize {
        self.num_attention_heads * self.head_dim
    }

    /// Returns the width of the keys of all heads, and of the values.
    pub(crate) fn key_width(&self) -> usize {
        self.num_key_value_heads * self.head_dim
    }

    /// Returns the numbers that a block's graph keeps for each token beside those of a Llama, whose
    /// additions, norms and rotations are fused with products.
    pub(crate) fn unfused_width(&self) -> usize {
        let hidden = self.hidden_size;
        let norms = match self.norms {
            BlockNorms::Before => 0,
            BlockNorms::After => 2 * hidden,
            BlockNorms::Gemma | BlockNorms::Glm => 4 * hidden,
        };
        // What is scaled, and its copy, of attention and of the feed-forward network.
        let scaled = if self.residual_scale.total_cmp(&1.).is_eq() { 0 } else { 4 * hidden };
        let heads = self.query_width() + self.key_width();
        let turns_apart = self.ropes.iter().any(|rope| rope.pairs == RopePairs::Neighbors)
            || self.query_scale.is_some();
        let heads = match (self.qk_norm.is_some(), turns_apart) {
            (true, _) => 2 * heads,
            (false, true) => heads,
            (false, false) => 0,
        };
        let experts = self.experts.map_or(0, |experts| {
            let stacked = if matches!(experts.names, ExpertNames::Stacked(_)) { 8 } else { 1 };
            let of_choice = 4 * hidden + stacked * experts.inner;
            experts.per_token * of_choice + 2 * hidden + 2 * experts.n
        });
        norms + scaled + heads + experts
    }

    /// Returns the width of the feed-forward networks that a token takes: its experts', side by side.
    pub(crate) fn active_width(&self) -> usize {
        let experts = self.experts.map_or(0, |experts| experts.per_token * experts.inner);
        let is_dense = self.layers.iter().any(|layer| !layer.has_experts);
        experts.max(if is_dense { self.intermediate_size } else { 0 })
    }

    /// Checks the ranges of all fields.
    pub(super) fn check(&self) -> Result<(), ModelError> {
        self.check_sizes()?;
        self.check_heads()?;
        for (field, value) in [
            ("rms_norm_eps", Some(self.rms_norm_eps)),
            ("initializer_range", Some(self.initializer_range)),
            ("the scale of attention", Some(self.attention_scale)),
            ("attn_logit_softcapping", self.attention_softcap),
            ("final_logit_softcapping", self.logit_softcap),
            ("the scale of embeddings", Some(self.embedding_scale)),
            ("residual_multiplier", Some(self.residual_scale)),
            ("the scale of logits", Some(self.logit_scale)),
        ] {
            if let Some(value) = value.filter(|value| !(*value > 0. && value.is_finite())) {
                return Err(field_error(field, &value, "a positive number".into()));
            }
        }
        if self.query_scale.is_some_and(|scale| scale.length == 0) {
            let field = "rope_scaling.original_max_position_embeddings";
            return Err(field_error(field, &0, "at least 1".into()));
        }
        self.experts.iter().try_for_each(ExpertsConfig::check)?;
        self.check_layers()?;
        self.ropes.iter().try_for_each(|rope| rope.check(self.head_dim))
    }

    /// Checks that each layer has a window with its own position, and the rope and the experts that it names.
    fn check_layers(&self) -> Result<(), ModelError> {
        for layer in &self.layers {
            if layer.window == Some(0) {
                return Err(field_error("sliding_window", &0, "at least 1".into()));
            }
            if let Some(rope) = layer.rope.filter(|rope| *rope >= self.ropes.len()) {
                let expected = format!("below {}, the number of ropes", self.ropes.len());
                return Err(field_error("the rope of a layer", &rope, expected));
            }
            if layer.has_experts && self.experts.is_none() {
                return Err(field_error(
                    "num_experts",
                    &"missing",
                    "given for these layers".into(),
                ));
            }
        }
        Ok(())
    }

    fn check_sizes(&self) -> Result<(), ModelError> {
        for (field, size, max) in [
            ("vocab_size", self.vocab_size, Self::MAX_SIZE),
            ("hidden_size", self.hidden_size, Self::MAX_SIZE),
            ("intermediate_size", self.intermediate_size, Self::MAX_SIZE),
            ("num_hidden_layers", self.layers.len(), Self::MAX_LAYERS),
            ("num_attention_heads", self.num_attention_heads, Self::MAX_SIZE),
            ("num_key_value_heads", self.num_key_value_heads, Self::MAX_SIZE),
            ("head_dim", self.head_dim, Self::MAX_SIZE),
            ("max_position_embeddings", self.max_position_embeddings, Self::MAX_SIZE),
        ] {
            if !(1..=max).contains(&size) {
                return Err(field_error(field, &size, format!("1 to {max}")));
            }
        }
        Ok(())
    }

    fn check_heads(&self) -> Result<(), ModelError> {
        if !self.num_attention_heads.is_multiple_of(self.num_key_value_heads) {
            let expected = format!("a divisor of num_attention_heads {}", self.num_attention_heads);
            return Err(field_error("num_key_value_heads", &self.num_key_value_heads, expected));
        }
        if self.query_width() > Self::MAX_SIZE {
            let expected = format!("at most {} / head_dim {}", Self::MAX_SIZE, self.head_dim);
            return Err(field_error("num_attention_heads", &self.num_attention_heads, expected));
        }
        Ok(())
    }
}
