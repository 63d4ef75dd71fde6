//! Errors of models.

use std::fmt::Display;

/// An error of an unsupported `config.json`, or of invalid input of a model.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ModelError {
    /// The text is not JSON, or a field is missing or has the wrong type.
    #[error("the config.json of a model cannot be read: {0}")]
    Json(#[from] serde_json::Error),
    /// A field has an unsupported value, which would change the model's results.
    #[error("{field} is {value}, it must be {expected}")]
    Field {
        /// The field of `config.json`.
        field: &'static str,
        /// Its value.
        value: String,
        /// Its range, in words.
        expected: String,
    },
    /// Two fields contradict each other, since the file has the layouts of both transformers 4 and 5.
    #[error("{first} and {second} differ, but mean the same: leave one of them out")]
    Differ {
        /// A field of `config.json`.
        first: &'static str,
        /// The other field.
        second: &'static str,
    },
    /// The weights are quantized.
    #[error(
        "the weights are quantized (quantization_config), which is not supported: take the model's folder with weights in f32, f16 or bf16"
    )]
    Quantized,
    /// Sequences may be longer than the attention window.
    #[error(
        "sliding_window is {window}, less than max_position_embeddings {context}: attention within a \
         window is not supported. Sequences of at most {window} tokens do not need it: lower \
         max_position_embeddings to {window}"
    )]
    Window {
        /// Number of positions that a token attends to.
        window: usize,
        /// Maximum length of a sequence.
        context: usize,
    },
    /// A sequence has more tokens than the model has positions.
    #[error(
        "a sequence has {length} tokens, but the model has {context} positions (max_position_embeddings)"
    )]
    TooLong {
        /// Number of tokens of the sequence.
        length: usize,
        /// Maximum length of a sequence.
        context: usize,
    },
}

impl From<ModelError> for candle_core::Error {
    /// Wraps the error for the loss of a replica.
    fn from(error: ModelError) -> Self {
        Self::wrap(error)
    }
}

/// Returns an error for a field with an unsupported value.
pub(super) fn field_error(
    field: &'static str,
    value: &dyn Display,
    expected: String,
) -> ModelError {
    ModelError::Field { field, value: value.to_string(), expected }
}
