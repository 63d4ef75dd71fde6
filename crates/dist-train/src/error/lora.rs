//! What can be wrong with the adapters of a model.

use std::path::PathBuf;

use core_types::human::Printable;

use crate::error::listed::Listed;

/// Why a model cannot have these adapters.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LoraError {
    /// No layer is to have an adapter.
    #[error("no layers are named that adapters are for")]
    NoTargets,
    /// Targets are no linear layers of the model.
    #[error("no linear layer of the model is named {}", Listed(targets))]
    Unmatched {
        /// All that match nothing.
        targets: Vec<String>,
    },
    /// A target has a weight that is no matrix.
    #[error("{} has the shape {shape:?}, adapters are for matrices", Printable(name))]
    NoMatrix {
        /// The weight.
        name: String,
        /// Its shape.
        shape: Vec<usize>,
    },
    /// The model has no adapters that could be saved.
    #[error("none of the {parameters} parameters belongs to an adapter")]
    NoAdapters {
        /// How many parameters there are.
        parameters: usize,
    },
    /// The configuration of saved adapters asks for something else than `B · A · alpha / rank`.
    #[error("{}: {} is {}, {expected} was expected", Printable(path.display()), Printable(field), Printable(found))]
    Config {
        /// The file.
        path: PathBuf,
        /// The field.
        field: String,
        /// What it says, in JSON.
        found: String,
        /// What it may say.
        expected: &'static str,
    },
}

impl From<LoraError> for candle_core::Error {
    /// For the constructors of models, which return candle's errors.
    fn from(error: LoraError) -> Self {
        Self::wrap(error)
    }
}
