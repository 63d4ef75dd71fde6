//! The errors of tensors on disk.

pub(crate) mod file_part;
pub(crate) mod listed;
pub(crate) mod parameter;
pub(crate) mod skipped;

use std::{
    error, io,
    path::{Path, PathBuf},
};

use core_types::human::Printable;
use pmap_mesh::{ProcessError, one_line};

use self::{
    parameter::ParameterError,
    skipped::{SkippedCheckpoint, reasons},
};

/// The result of writing or reading tensors.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of writing or reading tensors.
///
/// An error with a cause shows it in the same line, so [`source`](std::error::Error::source) does
/// not repeat it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The mesh failed.
    #[error(transparent)]
    Mesh(pmap_mesh::Error),
    /// Another process of the mesh failed, so this one stopped.
    #[error("the process of slot {slot} failed: {reason}")]
    OtherProcess {
        /// A slot of the process that failed.
        slot: usize,
        /// The message of its error.
        reason: String,
    },
    /// A parameter is missing, or has another shape or dtype.
    #[error(transparent)]
    Parameter(#[from] ParameterError),
    /// An index does not fit its files.
    #[error(transparent)]
    Plan(#[from] fsdp_plan::Error),
    /// Tensors could not be copied, converted or joined.
    #[error("{doing} failed: {}", one_line(cause))]
    Tensor {
        /// The operation.
        doing: &'static str,
        /// The error of candle.
        cause: candle_core::Error,
    },
    /// The function that reads a checkpoint's tensors returned an error of another type.
    #[error(transparent)]
    Load {
        /// The error that it returned.
        cause: Box<dyn error::Error + Send + Sync>,
    },
    /// The system failed to read or write a file or folder.
    #[error("{}: {cause}", Printable(path.display()))]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// The error of the system.
        cause: io::Error,
    },
    /// The index, or the state of the run in the index, is not valid JSON.
    #[error("{}: {}", Printable(path.display()), Printable(cause))]
    Json {
        /// The index.
        path: PathBuf,
        /// The error of the JSON.
        cause: serde_json::Error,
    },
    /// A file is not as it was written: its length or a checksum differs.
    #[error("{}: {}", Printable(path.display()), Printable(reason))]
    Damaged {
        /// The file.
        path: PathBuf,
        /// The part that differs, with the value found and the value expected.
        reason: String,
    },
    /// An intact file or folder belongs to another run, step, slot or version of this crate, or its
    /// content exceeds a limit.
    #[error("{}: {}", Printable(path.display()), Printable(reason))]
    Unsuitable {
        /// The file or folder.
        path: PathBuf,
        /// The value found, and the value or limit expected.
        reason: String,
    },
    /// A number is infinite or NaN, and
    /// [`Checkpoints::allow_non_finite`](crate::Checkpoints::allow_non_finite) is not set.
    #[error(
        "{}: item {item} of tensor {} is not a finite number",
        Printable(path.display()), Printable(tensor)
    )]
    NotFinite {
        /// The file.
        path: PathBuf,
        /// The tensor's name in the file.
        tensor: String,
        /// The first such item of this tensor.
        item: usize,
    },
    /// There are checkpoints, but no checkpoint can be used.
    #[error("no checkpoint in {} can be used: {}", Printable(path.display()), reasons(skipped))]
    NoUsableCheckpoint {
        /// Their folder.
        path: PathBuf,
        /// All checkpoints, newest first, with their errors.
        skipped: Vec<SkippedCheckpoint>,
    },
    /// Another process writes checkpoints to this folder.
    #[error(
        "the run in {} is being trained by {}",
        Printable(path.display()), Printable(holder)
    )]
    Locked {
        /// The folder.
        path: PathBuf,
        /// A description of the other process.
        holder: String,
    },
    /// The folder was removed, or another process took it over, since this one began to write.
    #[error(
        "{} was removed, or taken over by another process, while this one trained",
        Printable(path.display())
    )]
    Lost {
        /// The folder.
        path: PathBuf,
    },
    /// A process does not see the folder that rank 0 created.
    #[error(
        "{} is not visible here, but rank 0 created it: all processes must see the same folder",
        Printable(path.display())
    )]
    NotShared {
        /// The folder of the checkpoint that was being written.
        path: PathBuf,
    },
    /// The header of a file cannot be read, or is too long to be written.
    #[error("{}: {cause}", Printable(path.display()))]
    Header {
        /// The file.
        path: PathBuf,
        /// The error of the header.
        cause: fsdp_plan::Error,
    },
    /// An optimizer's name for its state is invalid: it is used twice, is `model`, or contains a
    /// `/`.
    #[error("an optimizer cannot name its state {kind:?}: tensor {key:?} would be ambiguous")]
    Kind {
        /// The name.
        kind: String,
        /// The tensor's name in the file.
        key: String,
    },
    /// A complete checkpoint of this step exists, and is never overwritten.
    #[error("{}: a complete checkpoint of step {step} exists already", Printable(path.display()))]
    Exists {
        /// Its folder.
        path: PathBuf,
        /// The step.
        step: u64,
    },
    /// The tensors belong to another mesh.
    #[error(
        "cannot save the state of {found} slots: the mesh has {expected} slots in this process"
    )]
    Slots {
        /// The number of slots in the state.
        found: usize,
        /// The number of the mesh's slots in this process.
        expected: usize,
    },
    /// Processes save or load different checkpoints.
    #[error("{}: {reason}", Printable(path.display()))]
    ProcessesDiffer {
        /// The checkpoint's folder.
        path: PathBuf,
        /// The difference.
        reason: String,
    },
}

impl Error {
    /// Returns the error of a file that is not as it was written.
    pub(crate) fn damaged(path: &Path, reason: impl Into<String>) -> Self {
        Self::Damaged { path: path.to_owned(), reason: reason.into() }
    }

    /// Returns the error of a file or folder that does not belong here.
    pub(crate) fn unsuitable(path: &Path, reason: impl Into<String>) -> Self {
        Self::Unsuitable { path: path.to_owned(), reason: reason.into() }
    }

    /// Returns the error of two processes with different steps.
    pub(crate) fn step_mismatch(path: &Path, step: u64, other: u64) -> Self {
        let reason = format!("step {step} in this process, but step {other} in another one");
        Self::ProcessesDiffer { path: path.to_owned(), reason }
    }

    /// Returns the error of a safetensors header.
    pub(crate) fn header(path: &Path, cause: fsdp_plan::Error) -> Self {
        Self::Header { path: path.to_owned(), cause }
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

/// Adds the operation to an error of candle.
pub(crate) trait Doing<T> {
    /// Turns candle's error into [`Error::Tensor`].
    fn doing(self, doing: &'static str) -> Result<T>;
}

impl<T> Doing<T> for candle_core::Result<T> {
    fn doing(self, doing: &'static str) -> Result<T> {
        self.map_err(|cause| Error::Tensor { doing, cause })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn skipped(folder: &str, error: impl Into<Error>) -> SkippedCheckpoint {
        SkippedCheckpoint { path: folder.into(), error: error.into() }
    }

    #[test]
    fn every_unusable_checkpoint_is_named_once() {
        let damaged = Error::damaged("run/step-8/index.json".as_ref(), "the index is damaged");
        let failed = Error::OtherProcess { slot: 3, reason: "no such file".into() };
        let left = Error::NoUsableCheckpoint {
            path: "run".into(),
            skipped: vec![skipped("run/step-8", damaged), skipped("run/step-4", failed)],
        };
        assert_eq!(
            left.to_string(),
            "no checkpoint in run can be used: run/step-8/index.json: the index is damaged; \
             run/step-4: the process of slot 3 failed: no such file"
        );
    }

    #[test]
    fn control_characters_are_escaped() {
        let red = "\u{1b}[31mred\n";
        let path = || PathBuf::from(red);
        let text = || red.to_owned();
        let json = serde_json::from_str::<Vec<u8>>("[\"\u{9b}2J\"]").unwrap_err();
        for error in [
            Error::Io { path: path(), cause: io::ErrorKind::NotFound.into() },
            Error::Json { path: path(), cause: json },
            Error::damaged(&path(), red),
            Error::unsuitable(&path(), red),
            Error::NotFinite { path: path(), tensor: text(), item: 0 },
            Error::Locked { path: path(), holder: text() },
            Error::NoUsableCheckpoint {
                path: path(),
                skipped: vec![skipped(red, Error::Lost { path: path() })],
            },
        ] {
            let message = error.to_string();
            assert!(!message.contains(char::is_control), "{message:?}");
            assert!(message.contains("\\u{1b}[31mred"), "{message:?}");
        }
    }
}
