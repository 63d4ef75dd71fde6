//! What can be wrong with a checkpoint.

use std::{io, path::PathBuf};

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
    #[error("{}: format version {found} is not supported, only {supported} is", path.display())]
    FormatVersion {
        /// The index.
        path: PathBuf,
        /// Its version.
        found: u32,
        /// The version that can be read.
        supported: u32,
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
    /// Another process loads the checkpoint of another step.
    #[error("{}: step {step} is loaded here, and step {other} in another process", path.display())]
    OtherStep {
        /// The checkpoint's folder.
        path: PathBuf,
        /// The step of the checkpoint here.
        step: u64,
        /// The step of the checkpoint there.
        other: u64,
    },
}
