//! What can be wrong with a file that lists parameters.

use std::io;

use core_types::human::Printable;

/// What is wrong with a file that lists parameters.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SourceError {
    /// The reader of a safetensors header fails.
    #[error("cannot read the safetensors header: {reason}", reason = Printable(reason))]
    Unreadable {
        /// The kind of the failure.
        kind: io::ErrorKind,
        /// What the reader says.
        reason: String,
    },
    /// A safetensors header says it is longer than any header may be.
    #[error("safetensors header of {len} bytes is longer than the {max} allowed")]
    HeaderTooLong {
        /// The length it states.
        len: u64,
        /// The largest length accepted.
        max: u64,
    },
    /// A safetensors file ends before its header does.
    #[error("safetensors header ends at byte {needed}, but there are only {available}")]
    HeaderTruncated {
        /// Bytes from the start of the file to the end of the header.
        needed: u64,
        /// Bytes there are.
        available: u64,
    },
    /// A text is not the JSON it should be.
    #[error("malformed {what}: {reason}", reason = Printable(reason))]
    Malformed {
        /// Which kind of document it should be.
        what: &'static str,
        /// What the parser found, and where.
        reason: String,
    },
    /// A tensor's bytes in a safetensors file are not where, or not as many as, they must be.
    #[error(
        "tensor {name} lies at bytes {begin}..{end}, but must lie at {expected_begin}..{expected_end}",
        name = Printable(name)
    )]
    BadOffsets {
        /// The tensor.
        name: String,
        /// Its first byte.
        begin: u64,
        /// The end of its bytes.
        end: u64,
        /// The end of the tensor before it.
        expected_begin: u64,
        /// `expected_begin` and the size that shape and dtype ask for.
        expected_end: u64,
    },
    /// An index names a file that is not a plain file name.
    #[error("index names the file {file:?}, which is not a plain file name")]
    BadFileName {
        /// The name.
        file: String,
    },
    /// A file has a tensor that the model's index does not place there.
    #[error(
        "{file} has tensor {tensor}, which the index does not place there",
        file = Printable(file),
        tensor = Printable(tensor)
    )]
    NotInIndex {
        /// The tensor.
        tensor: String,
        /// The file that has it.
        file: String,
    },
    /// A model's index places a tensor in a file that does not have it.
    #[error(
        "the index places tensor {tensor} in {file}, which does not have it",
        tensor = Printable(tensor),
        file = Printable(file)
    )]
    NotInFile {
        /// The tensor.
        tensor: String,
        /// The file where it should be.
        file: String,
    },
}
