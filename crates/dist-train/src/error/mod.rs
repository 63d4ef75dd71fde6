//! What can go wrong in training: the mesh, the plan, parameters, shards, checkpoints, candle.

pub(crate) mod checkpoint;
pub(crate) mod gradient;
mod listed;
pub(crate) mod lora;
pub(crate) mod parameter;
pub(crate) mod setting;
pub(crate) mod sharding;
pub(crate) mod training;

use pmap_mesh::one_line;

use self::{
    checkpoint::CheckpointError, gradient::GradientError, lora::LoraError,
    parameter::ParameterError, setting::SettingError, sharding::ShardingError,
    training::TrainingError,
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
    Mesh(#[from] pmap_mesh::Error),
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
    Checkpoint(#[from] CheckpointError),
    /// A step would train something wrong, or the options of a model do not fit it.
    #[error(transparent)]
    Training(#[from] TrainingError),
    /// Gradients are not those of the loss.
    #[error(transparent)]
    Gradient(#[from] GradientError),
    /// Adapters do not fit the model, or cannot be those of the folder.
    #[error(transparent)]
    Lora(#[from] LoraError),
    /// A setting is a number that it cannot be.
    #[error(transparent)]
    Setting(#[from] SettingError),

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

impl From<Error> for candle_core::Error {
    /// For functions that run in replicas, which return candle's errors.
    fn from(error: Error) -> Self {
        Self::wrap(error)
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
