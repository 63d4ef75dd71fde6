//! What can be wrong with a checkpoint.

use std::{
    fmt, io,
    path::{Path, PathBuf},
};

use core_types::human::Printable;

use crate::error::Error;

/// Why a checkpoint cannot be written or read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CheckpointError {
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
        "{}: format version {found} is not supported, 1 to {supported} are",
        Printable(path.display())
    )]
    FormatVersion {
        /// The index.
        path: PathBuf,
        /// Its version.
        found: u32,
        /// The newest version that can be read.
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
    /// A file of format version 2 lacks a checksum, or has too many.
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
    OtherFile {
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
    OtherRun {
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
    #[error("no checkpoint in {} can be used: {}", Printable(path.display()), Reasons(passed_over))]
    NoneLeft {
        /// Their folder.
        path: PathBuf,
        /// All of them, the newest first, and why each cannot be used.
        passed_over: Vec<PassedOver>,
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
    /// A file that steps are to be written to has something else in it.
    #[error("{}: no line of it is a step", Printable(path.display()))]
    NoMetrics {
        /// The file.
        path: PathBuf,
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
    OtherStep {
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
    OtherContent {
        /// The checkpoint's folder.
        path: PathBuf,
        /// A slot of the other process.
        slot: usize,
    },
}

impl CheckpointError {
    /// Another process has another step.
    pub(crate) fn other_step(path: &Path, step: u64, other: u64) -> Self {
        Self::OtherStep { path: path.to_owned(), step, other }
    }
}

/// A part of a checkpoint that has a checksum of its own.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum FilePart {
    /// All of the index.
    Index,
    /// What the file of a slot says about its tensors.
    Header,
    /// The tensor of this name.
    Tensor(String),
}

impl fmt::Display for FilePart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Index => f.write_str("the index"),
            Self::Header => f.write_str("the header"),
            Self::Tensor(name) => write!(f, "tensor {}", Printable(name)),
        }
    }
}

/// A checkpoint that could not be used, so that an earlier one was taken.
#[derive(Debug)]
#[non_exhaustive]
pub struct PassedOver {
    /// Its folder.
    pub path: PathBuf,
    /// Why.
    pub error: Error,
}

impl fmt::Display for PassedOver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let path = Printable(self.path.display()).to_string();
        let reason = self.error.to_string();
        // Most errors begin with a file of the checkpoint.
        if !reason.starts_with(&path) {
            write!(f, "{path}: ")?;
        }
        f.write_str(&reason)
    }
}

/// Why checkpoints could not be used, one after the other.
struct Reasons<'a>(&'a [PassedOver]);

impl fmt::Display for Reasons<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (n, passed_over) in self.0.iter().enumerate() {
            write!(f, "{}{passed_over}", if n == 0 { "" } else { "; " })?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn passed_over(folder: &str, error: impl Into<Error>) -> PassedOver {
        PassedOver { path: folder.into(), error: error.into() }
    }

    #[test]
    fn every_checkpoint_that_could_not_be_used_is_named_once() {
        let damaged = CheckpointError::Checksum {
            path: "run/step-8/index.json".into(),
            part: FilePart::Index,
            expected: 1,
            found: 2,
        };
        let failed = Error::OtherProcess { slot: 3, reason: "no such file".into() };
        let left = CheckpointError::NoneLeft {
            path: "run".into(),
            passed_over: vec![
                passed_over("run/step-8", damaged),
                passed_over("run/step-4", failed),
            ],
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
            CheckpointError::Io { path: path(), cause: io::ErrorKind::NotFound.into() },
            CheckpointError::Json { path: path(), cause: json },
            CheckpointError::NoChecksum { path: path(), part: part() },
            CheckpointError::Checksum { path: path(), part: part(), expected: 1, found: 2 },
            CheckpointError::NotFinite { path: path(), tensor: text(), item: 0 },
            CheckpointError::OtherFile { path: path(), found: text(), expected: text() },
            CheckpointError::OtherRun { path: path(), found: text(), expected: text() },
            CheckpointError::Locked { path: path(), holder: text() },
            CheckpointError::Listed { path: path(), file: text() },
            CheckpointError::Key { path: path(), key: text() },
            CheckpointError::NoneLeft {
                path: path(),
                passed_over: vec![passed_over(red, CheckpointError::Lost { path: path() })],
            },
        ] {
            let message = error.to_string();
            assert!(!message.contains(char::is_control), "{message:?}");
            assert!(message.contains("\\u{1b}[31mred"), "{message:?}");
        }
    }
}
