//! Errors of model folders.

use std::{io, path::PathBuf};

use core_types::human::Printable;

use crate::models::ModelError;

/// An error of a folder that is not a valid model folder.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FolderError {
    /// The path is not a folder.
    #[error("{} is not a folder", Printable(path.display()))]
    NotAFolder {
        /// The path.
        path: PathBuf,
    },
    /// The folder has no `config.json` that can be read.
    #[error("cannot read {}: {cause}", Printable(path.display()))]
    Config {
        /// The file.
        path: PathBuf,
        /// The error of the system.
        cause: io::Error,
    },
    /// The `config.json` describes another kind of model.
    #[error("{}: {cause}", Printable(path.display()))]
    Model {
        /// The file.
        path: PathBuf,
        /// The field that is wrong.
        cause: ModelError,
    },
    /// The weights are in another format than safetensors.
    #[error("{} has weights only in {}", Printable(path.display()), Printable(file))]
    OtherFormat {
        /// The folder.
        path: PathBuf,
        /// A file of the weights.
        file: String,
    },
    /// The folder has no weights.
    #[error(
        "{} has no model.safetensors and no model.safetensors.index.json",
        Printable(path.display())
    )]
    NoWeights {
        /// The folder.
        path: PathBuf,
    },
    /// The folder has adapters without their model.
    #[error("{} holds adapters, but not their model", Printable(path.display()))]
    AdaptersAlone {
        /// The folder.
        path: PathBuf,
    },
    /// The weights cannot be read, or have other names than the model.
    #[error(transparent)]
    Weights(#[from] Box<dist_checkpoint::Error>),
    /// A file in the folder of a run has changed since the run wrote it with the weights.
    #[error("{} has changed since the run wrote it, or is missing", Printable(path.display()))]
    ChangedFile {
        /// The file.
        path: PathBuf,
    },
    /// A tensor of the weights has another shape or type than the model's.
    #[error("{}: {cause}", Printable(path.display()))]
    TensorMismatch {
        /// The folder.
        path: PathBuf,
        /// The tensor that differs.
        cause: dist_checkpoint::ParameterError,
    },
    /// The adapters cannot be read.
    #[error("{}: {cause}", Printable(path.display()))]
    Adapters {
        /// The folder.
        path: PathBuf,
        /// The error of the reader.
        cause: Box<dist_train::Error>,
    },
    /// The adapters belong to another model.
    #[error("{}", pmap_mesh::one_line(cause))]
    AdapterMismatch {
        /// The layer that is missing.
        cause: candle_core::Error,
    },
}
