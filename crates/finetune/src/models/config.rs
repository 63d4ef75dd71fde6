//! The sizes and properties of a model.

use candle_core::DType;

use crate::models::{
    error::{ModelError, field_error},
    scaling::RopeScaling,
};

/// The fields of a `config.json` of the Llama family, under the same names: architectures
/// `LlamaForCausalLM`, `Qwen2ForCausalLM` and `MistralForCausalLM`.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct LlamaConfig {
    /// Number of different tokens.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of the feed-forward network.
    pub intermediate_size: usize,
    /// Number of blocks.
    pub num_hidden_layers: usize,
    /// Number of query heads.
    pub num_attention_heads: usize,
    /// Number of key and value heads, a divisor of the number of query heads.
    pub num_key_value_heads: usize,
    /// Number of elements of a head, an even number.
    pub head_dim: usize,
    /// Maximum length of a sequence.
    pub max_position_embeddings: usize,
    /// Epsilon of the norms, added to the mean square.
    pub rms_norm_eps: f64,
    /// The base of the rotary frequencies.
    pub rope_theta: f64,
    /// Scaling of the rotary frequencies for long contexts.
    pub rope_scaling: RopeScaling,
    /// Whether the head and the embedding share a weight.
    pub tie_word_embeddings: bool,
    /// Whether queries, keys and values have a bias, as in Qwen 2.
    pub attention_bias: bool,
    /// Number of positions that a token attends to, if limited.
    pub sliding_window: Option<usize>,
    /// The standard deviation of random weights: see
    /// [`Llama::declare`](crate::models::Llama::declare).
    pub initializer_range: f64,
    /// The type of the weights.
    pub dtype: DType,
}

impl LlamaConfig {
    /// Limit on sizes, above those of any model, and low enough that products do not overflow.
    const MAX_SIZE: usize = 1 << 24;
    /// Limit on the number of layers, above that of any model.
    const MAX_LAYERS: usize = 1 << 14;

    /// Checks the sizes, and that no sequence is longer than the attention window.
    pub(super) fn check(&self) -> Result<(), ModelError> {
        for (field, size, max) in [
            ("vocab_size", self.vocab_size, Self::MAX_SIZE),
            ("hidden_size", self.hidden_size, Self::MAX_SIZE),
            ("intermediate_size", self.intermediate_size, Self::MAX_SIZE),
            ("num_hidden_layers", self.num_hidden_layers, Self::MAX_LAYERS),
            ("num_attention_heads", self.num_attention_heads, Self::MAX_SIZE),
            ("num_key_value_heads", self.num_key_value_heads, Self::MAX_SIZE),
            ("head_dim", self.head_dim, Self::MAX_SIZE),
            ("max_position_embeddings", self.max_position_embeddings, Self::MAX_SIZE),
        ] {
            if !(1..=max).contains(&size) {
                return Err(field_error(field, &size, format!("1 to {max}")));
            }
        }
        if !self.head_dim.is_multiple_of(2) {
            return Err(field_error("head_dim", &self.head_dim, "even".into()));
        }
        if !self.num_attention_heads.is_multiple_of(self.num_key_value_heads) {
            let expected = format!("a divisor of num_attention_heads {}", self.num_attention_heads);
            return Err(field_error("num_key_value_heads", &self.num_key_value_heads, expected));
        }
        let width = self.num_attention_heads * self.head_dim;
        if width > Self::MAX_SIZE {
            let expected = format!("at most {} / head_dim {}", Self::MAX_SIZE, self.head_dim);
            return Err(field_error("num_attention_heads", &self.num_attention_heads, expected));
        }
        for (field, value) in [
            ("rms_norm_eps", self.rms_norm_eps),
            ("rope_theta", self.rope_theta),
            ("initializer_range", self.initializer_range),
        ] {
            if !(value > 0. && value.is_finite()) {
                return Err(field_error(field, &value, "a positive number".into()));
            }
        }
        self.rope_scaling.check()?;
        self.check_window()
    }

    /// Rejects a window that is shorter than the longest sequence.
    fn check_window(&self) -> Result<(), ModelError> {
        let context = self.max_position_embeddings;
        match self.sliding_window {
            Some(window) if window < context => {
                let expected = format!(
                    "at least max_position_embeddings {context}: attention within a window is not \
                     supported. Sequences of at most {window} tokens do not need it: lower \
                     max_position_embeddings to {window}"
                );
                Err(field_error("sliding_window", &window, expected))
            }
            _ => Ok(()),
        }
    }
}
