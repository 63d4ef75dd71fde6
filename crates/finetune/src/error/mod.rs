//! Errors of model folders, texts, runs and generation.

pub(crate) mod example;
pub(crate) mod folder;
pub(crate) mod generate;
pub(crate) mod run;
pub(crate) mod spec;
pub(crate) mod tokenizer;

use std::{
    io,
    path::{Path, PathBuf},
};

use core_types::human::Printable;
use pmap_mesh::one_line;

use self::{
    example::ExampleError, folder::FolderError, generate::GenerateError, run::RunError,
    spec::SpecError, tokenizer::TokenizerError,
};

/// The result of an operation of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of model folders, texts, runs or generation.
///
/// The message includes the cause in the same line, so [`source`](std::error::Error::source) does
/// not repeat it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The system cannot read a file or folder.
    #[error("cannot read {}: {cause}", Printable(path.display()))]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// The error of the system.
        cause: io::Error,
    },
    /// The system cannot write a file or folder.
    #[error("cannot write {}: {cause}", Printable(path.display()))]
    Write {
        /// The file or folder.
        path: PathBuf,
        /// The error of the system.
        cause: io::Error,
    },
    /// A JSON file does not hold the expected content.
    #[error("{} does not hold {expected}: {cause}", Printable(path.display()))]
    Json {
        /// The file.
        path: PathBuf,
        /// The expected content.
        expected: &'static str,
        /// The error of the parser.
        cause: serde_json::Error,
    },
    /// A model folder is incomplete or damaged, or its model is not supported.
    #[error(transparent)]
    Folder(#[from] FolderError),
    /// A tokenizer or its chat template cannot be used.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
    /// An example is malformed.
    #[error(transparent)]
    Example(#[from] ExampleError),
    /// A request for text is invalid.
    #[error(transparent)]
    Generate(#[from] GenerateError),
    /// The description of a run is invalid.
    #[error(transparent)]
    Spec(#[from] SpecError),
    /// A run cannot be started or resumed, or has no model.
    #[error(transparent)]
    Run(#[from] RunError),
    /// A number of ranks is out of range.
    #[error(transparent)]
    Types(#[from] core_types::Error),
    /// Examples cannot be shuffled.
    #[error(transparent)]
    Sampler(#[from] dist_sampler::Error),
    /// Examples cannot be put into batches.
    #[error(transparent)]
    Batch(#[from] dyn_batch::Error),
    /// The thread that makes batches cannot be started.
    #[error(transparent)]
    Data(#[from] data_loader::Error),
    /// Parameters cannot be sharded.
    #[error(transparent)]
    Plan(#[from] fsdp_plan::Error),
    /// Training failed, or a checkpoint is damaged.
    #[error(transparent)]
    Train(Box<dist_train::Error>),
    /// A tensor operation failed.
    #[error("the computation failed: {}", one_line(.0))]
    Tensor(#[from] candle_core::Error),
}

impl From<dist_train::Error> for Error {
    fn from(error: dist_train::Error) -> Self {
        Self::Train(Box::new(error))
    }
}

impl From<pmap_mesh::Error> for Error {
    fn from(error: pmap_mesh::Error) -> Self {
        dist_train::Error::from(error).into()
    }
}

impl From<dist_checkpoint::Error> for Error {
    fn from(error: dist_checkpoint::Error) -> Self {
        dist_train::Error::from(error).into()
    }
}

impl Error {
    /// Returns an error for a file or folder that cannot be written.
    pub(crate) fn write(path: impl AsRef<Path>, cause: io::Error) -> Self {
        Self::Write { path: path.as_ref().into(), cause }
    }

    /// Returns an error for an unreadable file or folder.
    pub(crate) fn io(path: impl AsRef<Path>, cause: io::Error) -> Self {
        Self::Io { path: path.as_ref().into(), cause }
    }
}
