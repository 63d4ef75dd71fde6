//! Errors of training: mesh, plan, parameters, shards, checkpoints, candle.

pub(crate) mod gradient;
mod setting;
pub(crate) mod training;

use std::{
    fmt, io,
    path::{Path, PathBuf},
};

use core_types::human::Printable;
use dist_checkpoint::{Error as CheckpointError, ParameterError};
use pmap_mesh::{ProcessError, one_line};

use self::{gradient::GradientError, training::TrainingError};

/// The result of an operation of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of training, saving or loading a model.
///
/// Large subjects have their own error types, and this type displays their messages. A message
/// includes its cause in the same line, so [`source`](std::error::Error::source) does not repeat
/// it.
///
/// Inside a replica, `?` converts it into candle's error.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The mesh or one of its replicas failed.
    #[error(transparent)]
    Mesh(pmap_mesh::Error),
    /// The tensors do not admit a sharding plan.
    #[error(transparent)]
    Plan(#[from] fsdp_plan::Error),
    /// A parameter is missing or does not match.
    #[error(transparent)]
    Parameter(#[from] ParameterError),
    /// Units, buffers or a plan do not fit the model or the mesh.
    #[error("{reason}")]
    Sharding {
        /// The message, with the parameter, unit or plan.
        reason: String,
    },
    /// Reading or writing a checkpoint failed.
    #[error(transparent)]
    Checkpoint(CheckpointError),
    /// A step failed a check, or the options of a model do not fit it.
    #[error(transparent)]
    Training(#[from] TrainingError),
    /// A gradient check failed.
    #[error(transparent)]
    Gradient(#[from] GradientError),
    /// Adapters do not fit the model, or their folder defines another function than
    /// `B · A · alpha / rank`.
    #[error("{reason}")]
    Lora {
        /// The message, with the layer, or the file and its field.
        reason: String,
    },
    /// A setting of an optimizer, a clip or a check has an invalid value.
    #[error("{name} is {value}, it must be {expected}")]
    Setting {
        /// The setting, in words.
        name: &'static str,
        /// The value.
        value: f64,
        /// The valid values, in words.
        expected: &'static str,
    },

    /// A file has content, but no line of it is the metrics of a step.
    #[error("{}: no line is a step", Printable(path.display()))]
    NoMetrics {
        /// The file.
        path: PathBuf,
    },
    /// A parameter's initializer is invalid: a bound is not a number, a width is negative, or
    /// random integers are requested.
    #[error("parameter {name} of {dtype} cannot be initialized by {init}", name = Printable(name))]
    Init {
        /// The parameter.
        name: String,
        /// The initializer in its `Debug` form.
        init: String,
        /// The dtype of the parameter.
        dtype: &'static str,
    },
    /// Building the model or an optimizer of a data-parallel step failed.
    #[error("the model cannot be built: {}", one_line(cause))]
    Model {
        /// The error of the constructor.
        cause: candle_core::Error,
    },
    /// Reading or setting the optimizer state of a parameter failed.
    #[error(
        "the optimizer state of parameter {parameter} cannot be read or set: {}",
        one_line(cause)
    )]
    Optimizer {
        /// The parameter.
        parameter: String,
        /// The error of the optimizer.
        cause: candle_core::Error,
    },
    /// Splitting, moving or joining tensors failed.
    #[error("{doing} failed: {}", one_line(cause))]
    Tensor {
        /// The operation that failed.
        doing: &'static str,
        /// The error of candle.
        cause: candle_core::Error,
    },
    /// Another process of the mesh failed, so this process stopped.
    #[error("the process of slot {slot} failed: {reason}")]
    OtherProcess {
        /// A slot of the process that failed.
        slot: usize,
        /// The message of its error.
        reason: String,
    },
    /// Replicated variables differ between devices.
    #[error("variable {name} of replica {replica} differs from the first replica's value")]
    Diverged {
        /// The first variable that differs, in the order of names.
        name: String,
        /// The first replica with another value than the first replica that stores the same
        /// variable or shard.
        replica: usize,
    },
}

impl Error {
    pub(crate) fn sharding(reason: impl Into<String>) -> Self {
        Self::Sharding { reason: reason.into() }
    }

    pub(crate) fn lora(reason: impl Into<String>) -> Self {
        Self::Lora { reason: reason.into() }
    }

    /// Returns the error of a plan that differs from the mesh in its ranks or replicas, or from
    /// the model in its parameters or units.
    pub(crate) fn plan_mismatch(reason: impl fmt::Display) -> Self {
        Self::sharding(format!("the plan does not fit: {reason}"))
    }
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
    /// Converts the error inside functions that load a checkpoint, where the kind of error decides
    /// whether another checkpoint is tried.
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
    /// Wraps the error for functions that run in replicas, which return candle's errors.
    fn from(error: Error) -> Self {
        Self::wrap(error)
    }
}

/// Adds the path to an I/O error.
pub(crate) trait AtPath<T> {
    /// Converts an I/O error into [`CheckpointError::Io`].
    fn at(self, path: &Path) -> Result<T>;
}

impl<T> AtPath<T> for io::Result<T> {
    fn at(self, path: &Path) -> Result<T> {
        self.map_err(|cause| CheckpointError::Io { path: path.to_owned(), cause }.into())
    }
}

/// Adds the failed operation to an error of candle.
pub(crate) trait Doing<T> {
    /// Converts candle's error into [`Error::Tensor`].
    fn doing(self, doing: &'static str) -> Result<T>;
}

impl<T> Doing<T> for candle_core::Result<T> {
    fn doing(self, doing: &'static str) -> Result<T> {
        self.map_err(|cause| Error::Tensor { doing, cause })
    }
}
