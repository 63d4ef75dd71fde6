//! Parts of a checkpoint that have checksums.

use std::fmt;

use core_types::human::Printable;

/// A part of a checkpoint with a separate checksum.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum FilePart {
    /// The whole index.
    Index,
    /// The header of a slot's file.
    Header,
    /// The tensor with this name.
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
