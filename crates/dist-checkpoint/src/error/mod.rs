//! What can go wrong with tensors on disk.

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

/// Why tensors cannot be written or read.
///
/// An error that has a cause shows it in the same line, so
/// [`source`](std::error::Error::source) does not repeat it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The mesh failed.
    #[error(transparent)]
    Mesh(pmap_mesh::Error),
    /// Another process of the mesh failed, and this one has stopped for that reason.
    #[error("the process of slot {slot} failed: {reason}")]
    OtherProcess {
        /// A slot of the process that failed.
        slot: usize,
        /// Its error, in its words.
        reason: String,
    },
    /// A parameter is missing, or is not as it should be.
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
    /// The function that takes a checkpoint's tensors failed, for a reason of its own.
    #[error(transparent)]
    Load {
        /// The error that it returned.
        cause: Box<dyn error::Error + Send + Sync>,
    },
    /// The system cannot read or write a file or folder.
    #[error("{}: {cause}", Printable(path.display()))]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// What the system says.
        cause: io::Error,
    },
    /// The index, or the run's state in it, cannot be written or read as JSON.
    #[error("{}: {}", Printable(path.display()), Printable(cause))]
    Json {
        /// The index.
        path: PathBuf,
        /// What is wrong with it.
        cause: serde_json::Error,
    },
    /// The index, most of which is the run's own state, is longer than one may be.
    #[error(
        "{}: the index has {found} bytes, at most {max} can be read",
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
    /// The index was written in another form.
    #[error(
        "{}: format version {found} is not supported, {supported} is",
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
    /// The bytes of a file are not those that were written.
    #[error(
        "{}: {part} is damaged, its checksum is {found:08x} instead of {expected:08x}",
        Printable(path.display())
    )]
    Checksum {
        /// The file.
        path: PathBuf,
        /// What is damaged.
        part: FilePart,
        /// The CRC-32 of what was written.
        expected: u32,
        /// The CRC-32 of what is there.
        found: u32,
    },
    /// A file lacks a checksum, or has too many.
    #[error("{}: {part} does not have the checksums that belong to it", Printable(path.display()))]
    NoChecksum {
        /// The file.
        path: PathBuf,
        /// What the checksum would be of.
        part: FilePart,
    },
    /// A number is infinite or not a number, which has to be allowed by
    /// [`Checkpoints::allow_non_finite`](crate::Checkpoints::allow_non_finite).
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
        "{}: the file was written as {}, not as {}",
        Printable(path.display()), Printable(found), Printable(expected)
    )]
    FileMismatch {
        /// The file.
        path: PathBuf,
        /// Its slot, step and run.
        found: String,
        /// Those that the index says.
        expected: String,
    },
    /// A checkpoint belongs to another run than the one that reads it.
    #[error(
        "{}: this is a checkpoint of run {}, not of {}",
        Printable(path.display()), Printable(found), Printable(expected)
    )]
    RunMismatch {
        /// The checkpoint's folder.
        path: PathBuf,
        /// Its run.
        found: String,
        /// The run that reads it: [`Checkpoints::run`](crate::Checkpoints::run).
        expected: String,
    },
    /// A checkpoint's folder is called after another step.
    #[error(
        "{}: this is the checkpoint of step {step}, in a folder of another step",
        Printable(path.display())
    )]
    Renamed {
        /// The folder.
        path: PathBuf,
        /// The step in its index.
        step: u64,
    },
    /// There are checkpoints, and none of them can be used.
    #[error("no checkpoint in {} can be used: {}", Printable(path.display()), Reasons(skipped))]
    NoUsableCheckpoint {
        /// Their folder.
        path: PathBuf,
        /// All of them, the newest first, and why each cannot be used.
        skipped: Vec<SkippedCheckpoint>,
    },
    /// Another process writes the checkpoints of this folder.
    #[error(
        "the run in {} is being trained by {}",
        Printable(path.display()), Printable(holder)
    )]
    Locked {
        /// The folder.
        path: PathBuf,
        /// Which process it is, as far as it is known.
        holder: String,
    },
    /// The folder was removed or taken over by another process since this one began to write there.
    #[error(
        "{} was removed, or taken over by another process, while this one trained",
        Printable(path.display())
    )]
    Lost {
        /// The folder.
        path: PathBuf,
    },
    /// A process does not see the folder that the first one has made.
    #[error(
        "{} is not here, which the first process has made: all processes must reach the same folder",
        Printable(path.display())
    )]
    NotShared {
        /// The folder of the checkpoint that is being written.
        path: PathBuf,
    },
    /// The index lists a file that is not a shard in its own folder, or lists one twice.
    #[error(
        "{}: {file:?} is listed, which is not a shard beside it, or is listed twice",
        Printable(path.display())
    )]
    Listed {
        /// The index.
        path: PathBuf,
        /// The name in the list.
        file: String,
    },
    /// A file has another length than the index says.
    #[error("{}: the file has {found} bytes, the index says {expected}", Printable(path.display()))]
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
        "{}: the header describes {expected} tensors, {found} were written",
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
    /// The header of a file cannot be read, or would be one that cannot.
    #[error("{}: {cause}", Printable(path.display()))]
    Header {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        cause: fsdp_plan::Error,
    },
    /// The header of a file describes more or fewer bytes than there are.
    #[error(
        "{}: the header describes {described} bytes, the file has {found}",
        Printable(path.display())
    )]
    Extent {
        /// The file.
        path: PathBuf,
        /// The length that follows from the header.
        described: u64,
        /// The length of the file.
        found: u64,
    },
    /// The name of a tensor is not one of a checkpoint, or its items end beyond all numbers.
    #[error("{}: {key:?} is not {{kind}}/{{parameter}}@{{first item}}", Printable(path.display()))]
    Key {
        /// The file.
        path: PathBuf,
        /// The tensor's name.
        key: String,
    },
    /// An optimizer names its state so that it could not be told from other tensors: twice the
    /// same, `model`, or with a `/` in the name.
    #[error(
        "an optimizer cannot name its state {kind:?}, as tensor {key:?} would not be one of a kind"
    )]
    Kind {
        /// The name.
        kind: String,
        /// The tensor's name in the file.
        key: String,
    },
    /// There is a whole checkpoint of this step, which is never overwritten.
    #[error("{}: there is a whole checkpoint of step {step} already", Printable(path.display()))]
    Exists {
        /// Its folder.
        path: PathBuf,
        /// The step.
        step: u64,
    },
    /// The tensors to be written are those of another mesh.
    #[error("the state of {found} slots cannot be saved from a mesh that has {expected} here")]
    Slots {
        /// The slots whose tensors they are.
        found: usize,
        /// The slots of the mesh in this process.
        expected: usize,
    },
    /// Another process loads or saves the checkpoint of another step.
    #[error("{}: step {step} here, and step {other} in another process", Printable(path.display()))]
    StepMismatch {
        /// The checkpoint's folder.
        path: PathBuf,
        /// The step of the checkpoint here.
        step: u64,
        /// The step of the checkpoint there.
        other: u64,
    },
    /// Another process saves the checkpoint of another run:
    /// [`Checkpoints::run`](crate::Checkpoints::run).
    #[error(
        "{}: the process of slot {slot} saves the checkpoint of another run",
        Printable(path.display())
    )]
    RunsDiffer {
        /// The checkpoint's folder.
        path: PathBuf,
        /// A slot of the other process.
        slot: usize,
    },
    /// Another process loads a checkpoint of the same step with another content.
    #[error(
        "{}: the process of slot {slot} loads another checkpoint of this step",
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
    /// Returns the error of a process that has another step.
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

/// Names the operation in which candle failed.
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
    fn every_checkpoint_that_could_not_be_used_is_named_once() {
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
    fn names_of_files_and_tensors_cannot_act_on_a_terminal() {
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
