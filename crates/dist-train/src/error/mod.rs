//! What can go wrong in training: the mesh, the plan, parameters, shards, checkpoints, candle.

pub(crate) mod gradient;
pub(crate) mod lora;
mod setting;
pub(crate) mod sharding;
pub(crate) mod training;

use std::{
    io,
    path::{Path, PathBuf},
};

use core_types::human::Printable;
use dist_checkpoint::{Error as CheckpointError, ParameterError};
use pmap_mesh::{ProcessError, one_line};

use self::{
    gradient::GradientError, lora::LoraError, sharding::ShardingError, training::TrainingError,
};

/// The result of training on a mesh.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why a model could not be trained, saved or loaded.
///
/// Large subjects have errors of their own, which this one shows in their words. An error that has
/// a cause shows it too, in the same line, so [`source`](std::error::Error::source) does not repeat
/// it.
///
/// In a replica `?` turns it into candle's error.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The mesh failed, or a replica on it.
    #[error(transparent)]
    Mesh(pmap_mesh::Error),
    /// A sharding plan cannot be made of the tensors.
    #[error(transparent)]
    Plan(#[from] fsdp_plan::Error),
    /// A parameter is missing, or is not as it should be.
    #[error(transparent)]
    Parameter(#[from] ParameterError),
    /// A plan cannot be carried out on this mesh.
    #[error(transparent)]
    Sharding(#[from] ShardingError),
    /// A checkpoint cannot be read or written.
    #[error(transparent)]
    Checkpoint(CheckpointError),
    /// A step would train something wrong, or the options of a model do not fit it.
    #[error(transparent)]
    Training(#[from] TrainingError),
    /// Gradients are not those of the loss.
    #[error(transparent)]
    Gradient(#[from] GradientError),
    /// Adapters do not fit the model, or cannot be those of the folder.
    #[error(transparent)]
    Lora(#[from] LoraError),
    /// A setting of an optimizer, of clipping or of a check is a number with which every result would
    /// be wrong.
    #[error("{name} is {value}, it must be {expected}")]
    Setting {
        /// The setting, in words.
        name: &'static str,
        /// Its value.
        value: f64,
        /// What it may be, in words.
        expected: &'static str,
    },

    /// A file that steps are to be written to has something else in it.
    #[error("{}: no line of it is a step", Printable(path.display()))]
    NoMetrics {
        /// The file.
        path: PathBuf,
    },
    /// A parameter cannot be initialized as the constructor wants it to be: a bound is no number, a
    /// width is negative, or integers are to be drawn.
    #[error("parameter {name} of {dtype} cannot be initialized by {init}", name = Printable(name))]
    Init {
        /// The parameter.
        name: String,
        /// The initializer, as `Debug` shows it.
        init: String,
        /// The type of its items.
        dtype: &'static str,
    },
    /// The model or an optimizer of a data-parallel step could not be built.
    #[error("the model cannot be built: {}", one_line(cause))]
    Model {
        /// What the function that builds it returned.
        cause: candle_core::Error,
    },
    /// What an optimizer keeps for a parameter could not be read from it, or given to it.
    #[error(
        "the optimizer state of parameter {parameter} cannot be read or set: {}",
        one_line(cause)
    )]
    Optimizer {
        /// The parameter.
        parameter: String,
        /// What the optimizer returned.
        cause: candle_core::Error,
    },
    /// Tensors could not be cut, moved or joined.
    #[error("{doing} failed: {}", one_line(cause))]
    Tensor {
        /// What was being done.
        doing: &'static str,
        /// What candle says about it.
        cause: candle_core::Error,
    },
    /// Another process of the mesh failed, and this one has stopped for that reason.
    #[error("the process of slot {slot} failed: {reason}")]
    OtherProcess {
        /// A slot of the process that failed.
        slot: usize,
        /// Its error, in its words.
        reason: String,
    },
    /// The threads of a [`feed`](crate::feed) could not be started.
    #[error("{threads} threads that make batches cannot be started: {cause}")]
    Threads {
        /// How many there should be.
        threads: usize,
        /// What the operating system says of it.
        cause: rayon::ThreadPoolBuildError,
    },
    /// Variables that should be the same on all devices are not.
    #[error("variable {name} of replica {replica} differs from that of the first that has it")]
    Diverged {
        /// The first variable that differs, in the order of names.
        name: String,
        /// The replica that has another value than the first that has this variable, or of one that
        /// is cut this part of it.
        replica: usize,
    },
}

impl From<pmap_mesh::Error> for Error {
    fn from(error: pmap_mesh::Error) -> Self {
        match error {
            pmap_mesh::Error::Process(ProcessError::Peer { slot, reason }) => {
                Self::OtherProcess { slot, reason }
            }
            error => Self::Mesh(error),
        }
    }
}

impl From<CheckpointError> for Error {
    fn from(error: CheckpointError) -> Self {
        match error {
            CheckpointError::Mesh(error) => Self::from(error),
            CheckpointError::OtherProcess { slot, reason } => Self::OtherProcess { slot, reason },
            CheckpointError::Parameter(error) => Self::Parameter(error),
            CheckpointError::Plan(error) => Self::Plan(error),
            CheckpointError::Tensor { doing, cause } => Self::Tensor { doing, cause },
            CheckpointError::Load { cause } => match cause.downcast::<Self>() {
                Ok(error) => *error,
                Err(cause) => Self::Checkpoint(CheckpointError::Load { cause }),
            },
            error => Self::Checkpoint(error),
        }
    }
}

impl From<Error> for CheckpointError {
    /// For functions that load a checkpoint: it decides by the error whether another one is tried.
    fn from(error: Error) -> Self {
        match error {
            Error::Mesh(error) => Self::from(error),
            Error::OtherProcess { slot, reason } => Self::OtherProcess { slot, reason },
            Error::Parameter(error) => Self::Parameter(error),
            Error::Tensor { doing, cause } => Self::Tensor { doing, cause },
            Error::Checkpoint(error) => error,
            error => Self::Load { cause: Box::new(error) },
        }
    }
}

impl From<Error> for candle_core::Error {
    /// For functions that run in replicas, which return candle's errors.
    fn from(error: Error) -> Self {
        Self::wrap(error)
    }
}

/// Names the path that an error of the system is about.
pub(crate) trait At<T> {
    /// Turns the system's error into [`CheckpointError::Io`].
    fn at(self, path: &Path) -> Result<T>;
}

impl<T> At<T> for io::Result<T> {
    fn at(self, path: &Path) -> Result<T> {
        self.map_err(|cause| CheckpointError::Io { path: path.to_owned(), cause }.into())
    }
}

/// Says what candle was doing when it failed.
pub(crate) trait Doing<T> {
    /// Turns candle's error into [`Error::Tensor`].
    fn doing(self, doing: &'static str) -> Result<T>;
}

impl<T> Doing<T> for candle_core::Result<T> {
    fn doing(self, doing: &'static str) -> Result<T> {
        self.map_err(|cause| Error::Tensor { doing, cause })
    }
}
