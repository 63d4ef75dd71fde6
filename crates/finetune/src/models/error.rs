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
    /// A layer cannot have an adapter.
    #[error("{layer} cannot have an adapter: {reason}")]
    Adapter {
        /// Name of the layer.
        layer: String,
        /// The reason, in words.
        reason: &'static str,
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

/// Returns an error for two fields that differ, but mean the same: a file may have the layouts of both
/// transformers 4 and 5.
pub(super) fn difference(field: &'static str, other: &'static str) -> ModelError {
    let expected = "the same, since both have the same meaning: leave one of them out".into();
    field_error(field, &format_args!("another value than {other}"), expected)
}
