//! What can be wrong with a list of parameters.

use core_types::human::Printable;

use crate::elem::ElemType;

/// What is wrong with a list of parameters.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ParameterError {
    /// There is nothing to plan.
    #[error("the list of parameters is empty")]
    Empty,
    /// Two parameters share a name.
    #[error("parameter {name} is listed twice", name = Printable(name))]
    DuplicateName {
        /// The name they share.
        name: String,
    },
    /// A parameter's size does not fit into 64 bits.
    #[error(
        "parameter {name} of shape {shape:?} and dtype {dtype} has more than {} bytes",
        u64::MAX,
        name = Printable(name)
    )]
    TooLarge {
        /// The parameter.
        name: String,
        /// Its shape.
        shape: Vec<u64>,
        /// Its element type.
        dtype: ElemType,
    },
    /// A parameter ends within a block of its type; blocks cannot be split.
    #[error(
        "parameter {name} of shape {shape:?} does not consist of whole blocks of {dtype}, which have {} elements",
        dtype.block_numel(),
        name = Printable(name)
    )]
    PartialBlock {
        /// The parameter.
        name: String,
        /// Its shape.
        shape: Vec<u64>,
        /// Its element type.
        dtype: ElemType,
    },
    /// A tensor has an element type this crate does not know.
    #[error("tensor {name} has unknown dtype {dtype:?}", name = Printable(name))]
    UnknownDtype {
        /// The tensor.
        name: String,
        /// The name of its element type.
        dtype: String,
    },
    /// A parameter cannot be another name of the one it is tied to.
    #[error(
        "parameter {name} cannot be tied to {target}: {reason}",
        name = Printable(name),
        target = Printable(target)
    )]
    BadTie {
        /// The parameter.
        name: String,
        /// The parameter it is tied to.
        target: String,
        /// What is in the way.
        reason: &'static str,
    },
}
