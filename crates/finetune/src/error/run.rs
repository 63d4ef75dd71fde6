//! Errors of runs.

use std::path::PathBuf;

use core_types::human::Printable;

use crate::error::Error;

/// An error of a run that cannot be started or resumed, or has no model.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RunError {
    /// The description is damaged, or has another format version.
    #[error("{} {reason}", Printable(path.display()))]
    Description {
        /// The file.
        path: PathBuf,
        /// The fault.
        reason: String,
    },
    /// A folder does not hold the model that the run started with.
    #[error("{} is not the model that the run started with", Printable(path.display()))]
    ModelMismatch {
        /// The folder.
        path: PathBuf,
    },
    /// The texts have changed since the run started.
    #[error("the text is not the one that the run started with")]
    TextMismatch,
    /// Another program started or continued the run while this program read it.
    #[error("the run in {} went on while it was read", Printable(path.display()))]
    ChangedWhileRead {
        /// The folder of the run.
        path: PathBuf,
    },
    /// A folder holds parts of a run without its description.
    #[error("{} holds {}, but no run.json", Printable(path.display()), contents.join(" and "))]
    NoDescription {
        /// The folder.
        path: PathBuf,
        /// Its files and folders that belong to a run.
        contents: Vec<&'static str>,
    },
    /// A process does not see the folder that the first process writes into.
    #[error("rank {rank} does not see the files of rank 0 in {}", Printable(path.display()))]
    NotShared {
        /// First rank of the process.
        rank: usize,
        /// The folder.
        path: PathBuf,
    },
    /// A step computed an infinite number or NaN.
    #[error(
        "step {step} of {steps} failed on batch {batch} of epoch {epoch} with learning rate \
         {learning_rate}: {cause}"
    )]
    Diverged {
        /// Number of the step, from 1.
        step: u64,
        /// Number of steps of the run.
        steps: u64,
        /// Number of its batch in the epoch, from 1.
        batch: u64,
        /// Epoch, from 0.
        epoch: u64,
        /// Learning rate of the step.
        learning_rate: f64,
        /// Step of the latest checkpoint, if there is one.
        checkpoint: Option<u64>,
        /// The error, which names the number.
        cause: Box<dist_train::Error>,
    },
    /// A checkpoint was written after more steps than the run has.
    #[error(
        "{} was written after step {step}, but the run has {steps} steps",
        Printable(path.display())
    )]
    CheckpointAhead {
        /// The checkpoint.
        path: PathBuf,
        /// Its step.
        step: u64,
        /// Number of steps of the run.
        steps: u64,
    },
    /// The run has not ended.
    #[error(
        "{} has not ended: there is no {}",
        Printable(path.display()),
        Printable(product.display())
    )]
    NotEnded {
        /// The folder of the run.
        path: PathBuf,
        /// The missing folder with the result.
        product: PathBuf,
    },
    /// The base model of a run's adapters cannot be opened.
    #[error(transparent)]
    Base {
        /// The error of the base model's folder.
        cause: Box<Error>,
    },
    /// The folder of a new run holds a run.
    #[error("{} already holds a run or a model", Printable(path.display()))]
    Occupied {
        /// The folder.
        path: PathBuf,
    },
    /// The last possible epoch has ended.
    #[error("no epoch comes after the last of 2^64")]
    LastEpoch,
    /// Fewer examples or tokens are held out than a step has.
    #[error("{found} {unit} are held out, fewer than one step ({least})")]
    ValidationTooSmall {
        /// Number of held-out examples or tokens.
        found: u64,
        /// Number of examples or tokens of a step.
        least: u64,
        /// `examples` or `tokens`.
        unit: &'static str,
    },
}
