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
    /// The `config.json` does not describe a supported model.
    #[error("{}: {cause}", Printable(path.display()))]
    Model {
        /// The file.
        path: PathBuf,
        /// The error, which names the field.
        cause: ModelError,
    },
    /// The folder has weights, but not in the safetensors format.
    #[error("{} has weights only in {}", Printable(path.display()), Printable(file))]
    UnsupportedFormat {
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
    /// The folder has adapters, but not their base model.
    #[error("{} holds adapters, but not their model", Printable(path.display()))]
    AdaptersAlone {
        /// The folder.
        path: PathBuf,
    },
    /// The weights cannot be read, or their names differ from the model's names.
    #[error(transparent)]
    Weights(#[from] Box<dist_checkpoint::Error>),
    /// A file in the folder of a run has changed since the run wrote it with the weights.
    #[error("{} has changed since the run wrote it, or is missing", Printable(path.display()))]
    ChangedFile {
        /// The file.
        path: PathBuf,
    },
    /// The shape or dtype of a tensor of the weights does not fit the model.
    #[error("{}: {cause}", Printable(path.display()))]
    TensorMismatch {
        /// The folder.
        path: PathBuf,
        /// The error, which names the tensor.
        cause: dist_checkpoint::ParameterError,
    },
    /// The model ignores the head of the weights, and has the embedding in its place.
    #[error(
        "{}: tie_word_embeddings is true, but lm_head.weight is another matrix than \
         model.embed_tokens.weight",
        Printable(path.display())
    )]
    TiedHead {
        /// The folder.
        path: PathBuf,
    },
    /// The adapters cannot be read.
    #[error("{}: {cause}", Printable(path.display()))]
    Adapters {
        /// The folder.
        path: PathBuf,
        /// The error of the reader.
        cause: Box<dist_train::Error>,
    },
    /// The adapters belong to another model: it has a layer that this model does not have.
    #[error("{}", pmap_mesh::one_line(cause))]
    AdapterMismatch {
        /// The error, which names the layer.
        cause: candle_core::Error,
    },
}
