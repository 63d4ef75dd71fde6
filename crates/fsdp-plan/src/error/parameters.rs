//! What can be wrong with a list of parameters.

use crate::elem::ElemType;

/// What is wrong with a list of parameters.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ParameterError {
    /// There is nothing to plan.
    #[error("the list of parameters is empty")]
    Empty,
    /// Two parameters share a name.
    #[error("parameter {name} is listed twice")]
    DuplicateName {
        /// The name they share.
        name: String,
    },
    /// A parameter's size does not fit into 64 bits.
    #[error(
        "parameter {name} of shape {shape:?} and dtype {dtype} has more than {} bytes",
        u64::MAX
    )]
    TooLarge {
        /// The parameter.
        name: String,
        /// Its shape.
        shape: Vec<u64>,
        /// Its element type.
        dtype: ElemType,
    },
    /// A parameter ends within a block of its type, of which only whole ones exist.
    #[error("parameter {name} of shape {shape:?} is no whole number of blocks of {} elements, which {dtype} consists of", dtype.block_numel())]
    PartialBlock {
        /// The parameter.
        name: String,
        /// Its shape.
        shape: Vec<u64>,
        /// Its element type.
        dtype: ElemType,
    },
    /// A tensor has an element type this crate does not know.
    #[error("tensor {name} has unknown dtype {dtype:?}")]
    UnknownDtype {
        /// The tensor.
        name: String,
        /// The name of its element type.
        dtype: String,
    },
    /// A parameter cannot be another name of the one it is tied to.
    #[error("parameter {name} cannot be tied to {target}: {reason}")]
    BadTie {
        /// The parameter.
        name: String,
        /// The parameter it is tied to.
        target: String,
        /// What is in the way.
        reason: &'static str,
    },
}
