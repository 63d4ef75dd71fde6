//! What can be wrong with a checkpoint.

use std::{
    fmt, io,
    path::{Path, PathBuf},
};

use crate::error::Error;

/// Why a checkpoint cannot be written or read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CheckpointError {
    /// The system cannot read or write a file or folder.
    #[error("{}: {cause}", path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// What the system says.
        cause: io::Error,
    },
    /// The index, or the run's state in it, cannot be written or read as JSON.
    #[error("{}: {cause}", path.display())]
    Json {
        /// The index.
        path: PathBuf,
        /// What is wrong with it.
        cause: serde_json::Error,
    },
    /// The index, most of which is the run's own state, is longer than one may be.
    #[error("{}: the index has {found} bytes, at most {max} can be read", path.display())]
    IndexTooLong {
        /// The index.
        path: PathBuf,
        /// Its length in bytes.
        found: u64,
        /// The largest length.
        max: u64,
    },
    /// The index was written in another form.
    #[error("{}: format version {found} is not supported, 1 to {supported} are", path.display())]
    FormatVersion {
        /// The index.
        path: PathBuf,
        /// Its version.
        found: u32,
        /// The newest version that can be read.
        supported: u32,
    },
    /// The bytes of a file are not those that were written.
    #[error("{}: {part} is damaged, its checksum is {found:08x} instead of {expected:08x}", path.display())]
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
    #[error("{}: {part} does not have the checksums that belong to it", path.display())]
    NoChecksum {
        /// The file.
        path: PathBuf,
        /// What the checksum would be of.
        part: FilePart,
    },
    /// A number is infinite or not a number, which has to be allowed by
    /// [`Checkpoints::allow_non_finite`](crate::Checkpoints::allow_non_finite).
    #[error("{}: item {item} of tensor {tensor} is not a finite number", path.display())]
    NotFinite {
        /// The file.
        path: PathBuf,
        /// The tensor's name in the file.
        tensor: String,
        /// The first such item of this tensor.
        item: usize,
    },
    /// A file belongs to another run, step or slot.
    #[error("{}: the file was written as {found}, not as {expected}", path.display())]
    OtherFile {
        /// The file.
        path: PathBuf,
        /// Its slot, step and run.
        found: String,
        /// Those that the index says.
        expected: String,
    },
    /// A checkpoint belongs to another run than the one that reads it.
    #[error("{}: this is a checkpoint of run {found}, not of {expected}", path.display())]
    OtherRun {
        /// The checkpoint's folder.
        path: PathBuf,
        /// Its run.
        found: String,
        /// The run that reads it: [`Checkpoints::run`](crate::Checkpoints::run).
        expected: String,
    },
    /// A checkpoint's folder is called after another step.
    #[error("{}: this is the checkpoint of step {step}, in a folder of another step", path.display())]
    Renamed {
        /// The folder.
        path: PathBuf,
        /// The step in its index.
        step: u64,
    },
    /// There are checkpoints, and none of them can be used.
    #[error("no checkpoint in {} can be used: {}", path.display(), join(passed_over))]
    NoneLeft {
        /// Their folder.
        path: PathBuf,
        /// All of them, the newest first, and why each cannot be used.
        passed_over: Vec<PassedOver>,
    },
    /// Another process writes the checkpoints of this folder.
    #[error("the run in {} is being trained by {holder}", path.display())]
    Locked {
        /// The folder.
        path: PathBuf,
        /// Which process it is, as far as it is known.
        holder: String,
    },
    /// The folder was removed or taken over by another process since this one began to write there.
    #[error("{} was removed, or taken over by another process, while this one trained", path.display())]
    Lost {
        /// The folder.
        path: PathBuf,
    },
    /// A process does not see the folder that the first one has made.
    #[error(
        "{} is not here, which the first process has made: all processes must reach the same folder",
        path.display()
    )]
    NotShared {
        /// The folder of the checkpoint that is being written.
        path: PathBuf,
    },
    /// The index lists a file that is not a shard in its own folder, or lists one twice.
    #[error("{}: {file:?} is listed, which is not a shard beside it, or is listed twice", path.display())]
    Listed {
        /// The index.
        path: PathBuf,
        /// The name in the list.
        file: String,
    },
    /// A file has another length than the index says.
    #[error("{}: the file has {found} bytes, the index says {expected}", path.display())]
    Length {
        /// The file.
        path: PathBuf,
        /// Its length in bytes.
        found: u64,
        /// The length in the index.
        expected: u64,
    },
    /// The header of a file cannot be read, or would be one that cannot.
    #[error("{}: {cause}", path.display())]
    Header {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        cause: fsdp_plan::Error,
    },
    /// The header of a file describes more or fewer bytes than there are.
    #[error("{}: the header describes {described} bytes, the file has {found}", path.display())]
    Extent {
        /// The file.
        path: PathBuf,
        /// The length that follows from the header.
        described: u64,
        /// The length of the file.
        found: u64,
    },
    /// The name of a tensor is not one of a checkpoint, or its items end beyond all numbers.
    #[error("{}: {key:?} is not {{kind}}/{{parameter}}@{{first item}}", path.display())]
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
    #[error("{}: there is a whole checkpoint of step {step} already", path.display())]
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
    #[error("{}: step {step} here, and step {other} in another process", path.display())]
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
    #[error("{}: the process of slot {slot} saves the checkpoint of another run", path.display())]
    RunsDiffer {
        /// The checkpoint's folder.
        path: PathBuf,
        /// A slot of the other process.
        slot: usize,
    },
    /// Another process loads a checkpoint of the same step with another content.
    #[error("{}: the process of slot {slot} loads another checkpoint of this step", path.display())]
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
            Self::Tensor(name) => write!(f, "tensor {name}"),
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
        write!(f, "{} is passed over: {}", self.path.display(), self.error)
    }
}

fn join(passed_over: &[PassedOver]) -> String {
    let texts: Vec<_> = passed_over.iter().map(PassedOver::to_string).collect();
    texts.join("; ")
}
