//! Errors of a list of parameters.

use core_types::human::Printable;

use crate::elem::ElemType;

/// An error about a list of parameters.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ParameterError {
    /// The list is empty.
    #[error("the list of parameters is empty")]
    Empty,
    /// Two parameters have the same name.
    #[error("parameter {name} is listed twice", name = Printable(name))]
    DuplicateName {
        /// Duplicate name.
        name: String,
    },
    /// The bytes of a parameter exceed 64 bits, or it ends within a block of its dtype.
    #[error(
        "parameter {name} of shape {shape:?} and dtype {dtype} {reason}",
        name = Printable(name)
    )]
    InvalidShape {
        /// Name of the parameter.
        name: String,
        /// Its shape.
        shape: Vec<u64>,
        /// Its element type.
        dtype: ElemType,
        /// The limit that it does not keep.
        reason: &'static str,
    },
    /// A tensor has an unknown dtype.
    #[error("tensor {name} has unknown dtype {dtype:?}", name = Printable(name))]
    UnknownDtype {
        /// Name of the tensor.
        name: String,
        /// Unknown dtype.
        dtype: String,
    },
    /// A parameter cannot be tied to its target.
    #[error(
        "parameter {name} cannot be tied to {target}: {reason}",
        name = Printable(name),
        target = Printable(target)
    )]
    InvalidTie {
        /// Name of the parameter.
        name: String,
        /// Name of the target.
        target: String,
        /// Cause of the conflict.
        reason: &'static str,
    },
}
