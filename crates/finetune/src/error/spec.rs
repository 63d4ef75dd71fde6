//! Errors of the options and the description of a run.

use std::fmt::Display;

use pmap_mesh::one_line;

use crate::models::ModelError;

/// An error of an invalid description of a run.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SpecError {
    /// A value is out of range.
    #[error("{name} is {value}, must be {expected}")]
    Setting {
        /// Field of the value.
        name: &'static str,
        /// The value.
        value: String,
        /// Its range, in words.
        expected: String,
    },
    /// An option of a resumed run differs from the value that the run started with.
    #[error("{name} is another than the run started with: {}", started.as_deref().unwrap_or("none"))]
    ResumeMismatch {
        /// Option.
        name: &'static str,
        /// Value that the run started with, if any; empty for the switch `merge`.
        started: Option<String>,
    },
    /// A model folder is given without training texts.
    #[error("a model folder needs training texts")]
    NoData,
    /// The `config.json` does not describe a supported model.
    #[error(transparent)]
    Model(ModelError),
    /// Adapters have no base model.
    #[error("adapters of rank {rank} need a model with weights")]
    AdaptersAlone {
        /// Rank of the adapters.
        rank: usize,
    },
    /// An adapter names a layer that the model does not have.
    #[error("{}", one_line(cause))]
    UnknownLayer {
        /// The error of the model.
        cause: candle_core::Error,
    },
}

impl SpecError {
    /// Returns an error for a value out of range.
    pub(crate) fn setting(name: &'static str, value: &dyn Display, expected: String) -> Self {
        Self::Setting { name, value: value.to_string(), expected }
    }
}
