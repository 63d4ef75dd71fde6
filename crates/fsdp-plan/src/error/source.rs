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
    /// A safetensors header is too long, ends early, or places a tensor elsewhere than after the previous
    /// one.
    #[error("{reason}")]
    Header {
        /// What is wrong, with the found and the expected bytes.
        reason: String,
    },
    /// A document is not valid JSON of the expected form.
    #[error("malformed {what}: {reason}", reason = Printable(reason))]
    Malformed {
        /// Kind of the document.
        what: &'static str,
        /// Cause and position, from the parser.
        reason: String,
    },
    /// An index and its files list different tensors, or a file is not in the folder of the index.
    #[error("{reason}")]
    Index {
        /// What is wrong, with the file and the tensor.
        reason: String,
    },
}
