//! Errors of files that list parameters.

use std::io;

use core_types::human::Printable;

/// An error about a file that lists parameters.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SourceError {
    /// Reading a safetensors header failed.
    #[error("cannot read the safetensors header: {reason}", reason = Printable(reason))]
    Unreadable {
        /// Kind of the I/O error.
        kind: io::ErrorKind,
        /// Message of the I/O error.
        reason: String,
    },
    /// A safetensors header states a length above the limit.
    #[error("safetensors header has {len} bytes, the limit is {max}")]
    HeaderTooLong {
        /// Stated length in bytes.
        len: u64,
        /// Limit in bytes.
        max: u64,
    },
    /// A safetensors file ends within its header.
    #[error("safetensors header ends at byte {needed}, but the file has only {available} bytes")]
    HeaderTruncated {
        /// Bytes from the start of the file to the end of the header.
        needed: u64,
        /// Bytes in the file.
        available: u64,
    },
    /// A document is not valid JSON of the expected form.
    #[error("malformed {what}: {reason}", reason = Printable(reason))]
    Malformed {
        /// Kind of the document.
        what: &'static str,
        /// Cause and position, from the parser.
        reason: String,
    },
    /// The byte range of a tensor does not follow the previous tensor or match its shape.
    #[error(
        "tensor {name} is at bytes {begin}..{end}, expected {expected_begin}..{expected_end}",
        name = Printable(name)
    )]
    OffsetMismatch {
        /// Name of the tensor.
        name: String,
        /// First byte.
        begin: u64,
        /// End of the bytes.
        end: u64,
        /// End of the previous tensor.
        expected_begin: u64,
        /// `expected_begin` plus the size of the tensor.
        expected_end: u64,
    },
    /// An index names a file that is not a plain file name.
    #[error("the index names file {file:?}, which is not a plain file name")]
    InvalidFileName {
        /// Name in the index.
        file: String,
    },
    /// A file has a tensor that the index does not list for it.
    #[error(
        "{file} has tensor {tensor}, which the index does not list for this file",
        file = Printable(file),
        tensor = Printable(tensor)
    )]
    NotInIndex {
        /// Name of the tensor.
        tensor: String,
        /// Name of the file.
        file: String,
    },
    /// The index lists a tensor for a file that lacks it.
    #[error(
        "the index lists tensor {tensor} for {file}, which lacks it",
        tensor = Printable(tensor),
        file = Printable(file)
    )]
    NotInFile {
        /// Name of the tensor.
        tensor: String,
        /// Name of the file.
        file: String,
    },
}
