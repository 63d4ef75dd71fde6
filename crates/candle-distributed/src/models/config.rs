//! The sizes and properties of a model.

use std::fmt::Display;

use candle_core::DType;

use crate::models::{error::ModelError, read::read, rope::RopeScaling};

/// What a `config.json` of the Llama family says: of the architectures `LlamaForCausalLM`,
/// `Qwen2ForCausalLM` and `MistralForCausalLM`. Fields have the names that they have there.
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
    /// Heads of the queries.
    pub num_attention_heads: usize,
    /// Heads of keys and values, by which those of the queries are divisible.
    pub num_key_value_heads: usize,
    /// Elements of a head, an even number.
    pub head_dim: usize,
    /// The most positions of a sequence.
    pub max_position_embeddings: usize,
    /// What is added to the mean square before its root is taken.
    pub rms_norm_eps: f64,
    /// The base of the rotary frequencies.
    pub rope_theta: f64,
    /// What becomes of the rotary frequencies for contexts longer than those of the first training.
    pub rope_scaling: RopeScaling,
    /// Whether the embedding is the head as well.
    pub tie_word_embeddings: bool,
    /// Whether queries, keys and values have a bias, as in Qwen 2.
    pub attention_bias: bool,
    /// The positions that a token sees, if that is fewer than all before it.
    pub sliding_window: Option<usize>,
    /// The standard deviation of random weights.
    pub initializer_range: f64,
    /// The type of the weights.
    pub dtype: DType,
}

impl LlamaConfig {
    /// The largest size, and the most layers: beyond any model, and far from overflow in whatever is
    /// computed from them.
    const LARGEST: usize = 1 << 24;
    const MOST_LAYERS: usize = 1 << 14;

    /// Reads a `config.json`, in the layout of transformers 4 (`rope_theta`, `rope_scaling`,
    /// `torch_dtype`) or 5 (`rope_parameters`, `dtype`).
    ///
    /// # Errors
    ///
    /// [`ModelError::Json`] if it cannot be read; [`ModelError::Field`], [`ModelError::Differ`] and
    /// [`ModelError::Quantized`] for what would be another model: an architecture, an activation, a
    /// bias or a scaling that is not here. Sizes are checked by
    /// [`Llama::from_config`](crate::models::Llama::from_config).
    ///
    /// # Examples
    ///
    /// ```
    /// use candle_distributed::models::LlamaConfig;
    ///
    /// let config = r#"{
    ///     "architectures": ["MistralForCausalLM"], "vocab_size": 320, "hidden_size": 40,
    ///     "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    ///     "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128,
    ///     "rms_norm_eps": 1e-5, "dtype": "bfloat16",
    ///     "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}
    /// }"#;
    /// let config = LlamaConfig::from_json(config)?;
    /// assert_eq!((config.head_dim, config.rope_theta), (8, 1e6));
    /// # Ok::<(), candle_distributed::models::ModelError>(())
    /// ```
    pub fn from_json(json: &str) -> Result<Self, ModelError> {
        read(json)
    }

    /// Refuses sizes of no model.
    pub(super) fn check(&self) -> Result<(), ModelError> {
        for (field, size, most) in [
            ("vocab_size", self.vocab_size, Self::LARGEST),
            ("hidden_size", self.hidden_size, Self::LARGEST),
            ("intermediate_size", self.intermediate_size, Self::LARGEST),
            ("num_hidden_layers", self.num_hidden_layers, Self::MOST_LAYERS),
            ("num_attention_heads", self.num_attention_heads, Self::LARGEST),
            ("num_key_value_heads", self.num_key_value_heads, Self::LARGEST),
            ("head_dim", self.head_dim, Self::LARGEST),
            ("max_position_embeddings", self.max_position_embeddings, Self::LARGEST),
        ] {
            if !(1..=most).contains(&size) {
                return Err(refused(field, &size, format!("1 to {most}")));
            }
        }
        if !self.head_dim.is_multiple_of(2) {
            return Err(refused("head_dim", &self.head_dim, "even".into()));
        }
        if !self.num_attention_heads.is_multiple_of(self.num_key_value_heads) {
            let expected = format!("a divisor of num_attention_heads {}", self.num_attention_heads);
            return Err(refused("num_key_value_heads", &self.num_key_value_heads, expected));
        }
        for (field, value) in [
            ("rms_norm_eps", self.rms_norm_eps),
            ("rope_theta", self.rope_theta),
            ("initializer_range", self.initializer_range),
        ] {
            if !(value > 0. && value.is_finite()) {
                return Err(refused(field, &value, "a positive number".into()));
            }
        }
        self.rope_scaling.check()?;
        self.check_window()
    }

    fn check_window(&self) -> Result<(), ModelError> {
        let context = self.max_position_embeddings;
        match self.sliding_window {
            Some(window) if window < context => Err(ModelError::Window { window, context }),
            _ => Ok(()),
        }
    }
}

/// What is said of a field that has a value that it cannot have.
pub(super) fn refused(field: &'static str, value: &dyn Display, expected: String) -> ModelError {
    ModelError::Field { field, value: value.to_string(), expected }
}
