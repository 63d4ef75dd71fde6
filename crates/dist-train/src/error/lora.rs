//! Errors of adapters.

use std::path::PathBuf;

use core_types::human::Printable;
use dist_checkpoint::support::Listed;

/// An invalid set of adapters for a model.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LoraError {
    /// Some targets are not linear layers of the model, or there are no targets.
    #[error("no linear layer of the model is named {}", Listed(targets))]
    Unmatched {
        /// All targets without a match.
        targets: Vec<String>,
    },
    /// A layer cannot have the adapter, or the model does not have the adapters to save.
    #[error("{reason}")]
    Layer {
        /// The message, with the layer and its shape or dtype.
        reason: String,
    },
    /// The configuration of saved adapters defines another function than `B · A · alpha / rank`.
    #[error("{}: {} is {}, {expected} was expected", Printable(path.display()), Printable(field), Printable(found))]
    Config {
        /// The file.
        path: PathBuf,
        /// The field.
        field: String,
        /// The value of the field, in JSON.
        found: String,
        /// The supported values.
        expected: &'static str,
    },
}

impl LoraError {
    pub(crate) fn layer(reason: impl Into<String>) -> Self {
        Self::Layer { reason: reason.into() }
    }
}

impl From<LoraError> for candle_core::Error {
    /// Wraps the error for constructors of models, which return candle's errors.
    fn from(error: LoraError) -> Self {
        Self::wrap(error)
    }
}
