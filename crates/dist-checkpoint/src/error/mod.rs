//! The errors of tensors on disk.

pub(crate) mod file_part;
pub mod listed;
pub(crate) mod parameter;
pub(crate) mod skipped;

use std::{
    error, io,
    path::{Path, PathBuf},
};

use core_types::human::Printable;
use pmap_mesh::{ProcessError, one_line};

use self::{
    file_part::FilePart,
    parameter::ParameterError,
    skipped::{Reasons, SkippedCheckpoint},
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
    /// The index is too long; most of it is the run's state.
    #[error(
        "{}: the index has {found} bytes, more than the maximum of {max}",
        Printable(path.display())
    )]
    IndexTooLong {
        /// The index.
        path: PathBuf,
        /// Its length in bytes.
        found: u64,
        /// The largest length.
        max: u64,
    },
    /// The format version of the index is not supported.
    #[error(
        "{}: format version {found} is not supported, only {supported}",
        Printable(path.display())
    )]
    FormatVersion {
        /// The index.
        path: PathBuf,
        /// Its version.
        found: u32,
        /// The version that can be read.
        supported: u32,
    },
    /// The checksum of a part does not match its bytes.
    #[error(
        "{}: {part} is damaged, its checksum is {found:08x} instead of {expected:08x}",
        Printable(path.display())
    )]
    Checksum {
        /// The file.
        path: PathBuf,
        /// The damaged part.
        part: FilePart,
        /// The stored CRC-32.
        expected: u32,
        /// The CRC-32 of the bytes in the file.
        found: u32,
    },
    /// A file lacks a checksum, or has too many.
    #[error("{}: {part} has missing or extra checksums", Printable(path.display()))]
    NoChecksum {
        /// The file.
        path: PathBuf,
        /// The part without a valid checksum.
        part: FilePart,
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
    /// A file belongs to another run, step or slot.
    #[error(
        "{}: the file is {}, not {}",
        Printable(path.display()), Printable(found), Printable(expected)
    )]
    FileMismatch {
        /// The file.
        path: PathBuf,
        /// Its slot, step and run.
        found: String,
        /// The slot, step and run in the index.
        expected: String,
    },
    /// A checkpoint belongs to another run.
    #[error(
        "{}: this is a checkpoint of run {}, not of {}",
        Printable(path.display()), Printable(found), Printable(expected)
    )]
    RunMismatch {
        /// The checkpoint's folder.
        path: PathBuf,
        /// Its run.
        found: String,
        /// The expected run: [`Checkpoints::run`](crate::Checkpoints::run).
        expected: String,
    },
    /// A checkpoint's folder is named after another step than the step in its index.
    #[error(
        "{}: the folder is named after another step than its checkpoint, which has step {step}",
        Printable(path.display())
    )]
    Renamed {
        /// The folder.
        path: PathBuf,
        /// The step in its index.
        step: u64,
    },
    /// There are checkpoints, but no checkpoint can be used.
    #[error("no checkpoint in {} can be used: {}", Printable(path.display()), Reasons(skipped))]
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
    /// The index lists a file that is not a shard in its folder, or lists one twice.
    #[error(
        "{}: {file:?} is listed twice, or is not a shard in this folder",
        Printable(path.display())
    )]
    Listed {
        /// The index.
        path: PathBuf,
        /// The name in the list.
        file: String,
    },
    /// The length of a file differs from the length in the index.
    #[error("{}: the file has {found} bytes, expected {expected}", Printable(path.display()))]
    Length {
        /// The file.
        path: PathBuf,
        /// Its length in bytes.
        found: u64,
        /// The length in the index.
        expected: u64,
    },
    /// A file was given more or fewer tensors than its header describes.
    #[error(
        "{}: the header describes {expected} tensors, but {found} were written",
        Printable(path.display())
    )]
    TensorCount {
        /// The file.
        path: PathBuf,
        /// The number of tensors that were given.
        found: usize,
        /// The number of tensors in the header.
        expected: usize,
    },
    /// The header of a file cannot be read, or is too long to be written.
    #[error("{}: {cause}", Printable(path.display()))]
    Header {
        /// The file.
        path: PathBuf,
        /// The error of the header.
        cause: fsdp_plan::Error,
    },
    /// The header of a file describes more or fewer bytes than there are.
    #[error(
        "{}: the header describes {described} bytes, but the file has {found}",
        Printable(path.display())
    )]
    Extent {
        /// The file.
        path: PathBuf,
        /// The length that the header describes.
        described: u64,
        /// The length of the file.
        found: u64,
    },
    /// The name of a tensor is invalid in a checkpoint, or its items overflow.
    #[error("{}: {key:?} is not {{kind}}/{{parameter}}@{{first item}}", Printable(path.display()))]
    Key {
        /// The file.
        path: PathBuf,
        /// The tensor's name.
        key: String,
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
    /// Another process loads or saves a checkpoint of another step.
    #[error("{}: step {step} in this process, but step {other} in another one", Printable(path.display()))]
    StepMismatch {
        /// The checkpoint's folder.
        path: PathBuf,
        /// The step in this process.
        step: u64,
        /// The step in the other process.
        other: u64,
    },
    /// Another process saves a checkpoint of another run:
    /// [`Checkpoints::run`](crate::Checkpoints::run).
    #[error(
        "{}: the process of slot {slot} saves a checkpoint of another run",
        Printable(path.display())
    )]
    RunsDiffer {
        /// The checkpoint's folder.
        path: PathBuf,
        /// A slot of the other process.
        slot: usize,
    },
    /// Another process loads a different checkpoint of the same step.
    #[error(
        "{}: the process of slot {slot} loads a different checkpoint of this step",
        Printable(path.display())
    )]
    ContentMismatch {
        /// The checkpoint's folder.
        path: PathBuf,
        /// A slot of the other process.
        slot: usize,
    },
}

impl Error {
    /// Returns the error of two processes with different steps.
    pub(crate) fn step_mismatch(path: &Path, step: u64, other: u64) -> Self {
        Self::StepMismatch { path: path.to_owned(), step, other }
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
        let damaged = Error::Checksum {
            path: "run/step-8/index.json".into(),
            part: FilePart::Index,
            expected: 1,
            found: 2,
        };
        let failed = Error::OtherProcess { slot: 3, reason: "no such file".into() };
        let left = Error::NoUsableCheckpoint {
            path: "run".into(),
            skipped: vec![skipped("run/step-8", damaged), skipped("run/step-4", failed)],
        };
        assert_eq!(
            left.to_string(),
            "no checkpoint in run can be used: run/step-8/index.json: the index is damaged, its \
             checksum is 00000002 instead of 00000001; run/step-4: the process of slot 3 failed: no \
             such file"
        );
    }

    #[test]
    fn control_characters_are_escaped() {
        let red = "\u{1b}[31mred\n";
        let path = || PathBuf::from(red);
        let text = || red.to_owned();
        let part = || FilePart::Tensor(text());
        let json = serde_json::from_str::<Vec<u8>>("[\"\u{9b}2J\"]").unwrap_err();
        for error in [
            Error::Io { path: path(), cause: io::ErrorKind::NotFound.into() },
            Error::Json { path: path(), cause: json },
            Error::NoChecksum { path: path(), part: part() },
            Error::Checksum { path: path(), part: part(), expected: 1, found: 2 },
            Error::NotFinite { path: path(), tensor: text(), item: 0 },
            Error::FileMismatch { path: path(), found: text(), expected: text() },
            Error::RunMismatch { path: path(), found: text(), expected: text() },
            Error::Locked { path: path(), holder: text() },
            Error::Listed { path: path(), file: text() },
            Error::Key { path: path(), key: text() },
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
