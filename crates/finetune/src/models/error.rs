//! Errors of models.

use std::fmt::Display;

/// Why a model cannot be made of a `config.json`, or cannot read its input.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ModelError {
    /// The text is not JSON, or a field is missing or of another type.
    #[error("the config.json of a model cannot be read: {0}")]
    Json(#[from] serde_json::Error),
    /// A field has a value that would give other numbers than the author's model.
    #[error("{field} is {value}, it must be {expected}")]
    Field {
        /// The field of `config.json`.
        field: &'static str,
        /// Its value.
        value: String,
        /// Its range, in words.
        expected: String,
    },
    /// Two fields say different things of one property: the layouts of transformers 4 and 5 stand
    /// beside each other.
    #[error("{first} and {second} differ, and mean the same: leave one of them out")]
    Differ {
        /// A field of `config.json`.
        first: &'static str,
        /// The other one.
        second: &'static str,
    },
    /// The weights are quantized.
    #[error(
        "the weights are quantized (quantization_config), which cannot be trained here: take the model's folder with weights in f32, f16 or bf16"
    )]
    Quantized,
    /// Attention would have to leave out positions of long sequences.
    #[error(
        "sliding_window is {window}, less than max_position_embeddings {context}: attention within a \
         window is not here. Sequences of at most {window} tokens have the same attention without it: \
         lower max_position_embeddings to that"
    )]
    Window {
        /// The positions that a token sees.
        window: usize,
        /// The most positions of a sequence.
        context: usize,
    },
    /// A sequence is longer than the model's positions.
    #[error(
        "a sequence has {length} tokens, the model has {context} positions (max_position_embeddings)"
    )]
    TooLong {
        /// The tokens of the sequence.
        length: usize,
        /// The most positions of a sequence.
        context: usize,
    },
}

impl From<ModelError> for candle_core::Error {
    /// Wraps the error for the loss of a replica.
    fn from(error: ModelError) -> Self {
        Self::wrap(error)
    }
}

/// Returns the error of a field that is out of range.
pub(super) fn refused(field: &'static str, value: &dyn Display, expected: String) -> ModelError {
    ModelError::Field { field, value: value.to_string(), expected }
}
