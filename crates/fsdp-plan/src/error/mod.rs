//! Errors of parameters, files and plans.

mod source;

use core_types::human::Printable;

pub use self::source::SourceError;
use crate::format::FORMAT_VERSION;

/// The result of reading, planning or costing.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of reading, planning or costing.
///
/// Errors of files are a nested enum; their messages pass through unchanged.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A rank or world size outside its limits.
    #[error(transparent)]
    World(#[from] core_types::Error),
    /// The file is not a valid list of parameters.
    #[error(transparent)]
    Source(#[from] SourceError),

    /// The list of parameters is empty.
    #[error("the list of parameters is empty")]
    NoParameters,
    /// A tensor has an unknown dtype.
    #[error("tensor {name} has unknown dtype {dtype:?}", name = Printable(name))]
    UnknownDtype {
        /// Name of the tensor.
        name: String,
        /// Unknown dtype.
        dtype: String,
    },
    /// A parameter is listed twice, has an impossible shape, or is tied to one that differs.
    #[error("parameter {name} {reason}", name = Printable(name))]
    InvalidParameter {
        /// Name of the parameter.
        name: String,
        /// What is wrong, with the value and the limit.
        reason: String,
    },
    /// A parameter without dims would be cut along dim 0.
    #[error(
        "parameter {name} has no dims, so there is no dim 0 to cut; gather it always, use the flat layout, or give it shape [1]",
        name = Printable(name)
    )]
    Scalar {
        /// Name of the parameter.
        name: String,
    },
    /// A parameter does not allow its cut, or does not fit to its buffer.
    #[error("parameter {name} {reason}", name = Printable(name))]
    InvalidCut {
        /// Name of the parameter.
        name: String,
        /// What is wrong, with the found and the expected values.
        reason: String,
    },
    /// A sum of sizes exceeds 64 bits.
    #[error("{what} exceed {} in total", u64::MAX)]
    TotalTooLarge {
        /// Description of the summands.
        what: &'static str,
    },
    /// A number is 0 but must be at least 1.
    #[error("{what} is 0 but must be at least 1")]
    Zero {
        /// Description of the number.
        what: &'static str,
    },
    /// The world size is not a multiple of the number of replicas.
    #[error("a world of {world_size} ranks does not divide into {replicas} replicas")]
    ReplicaMismatch {
        /// Number of ranks.
        world_size: u64,
        /// Requested number of replicas.
        replicas: u64,
    },
    /// The plan has no parameter or unit of this name or index.
    #[error("the plan has no {what} {name}", name = Printable(name))]
    Unknown {
        /// `parameter` or `unit`.
        what: &'static str,
        /// Requested name, or the index and the number of parameters.
        name: String,
    },
    /// A pattern is malformed.
    #[error("malformed pattern {pattern:?}: {reason}", reason = Printable(reason))]
    InvalidPattern {
        /// Pattern, truncated if long.
        pattern: String,
        /// Cause, from the parser.
        reason: String,
    },
    /// There are more or longer rules than [`Hybrid`](crate::strategy::Hybrid) allows.
    #[error("there are more than {max} {what}")]
    TooManyRules {
        /// `rules`, or the bytes of their patterns.
        what: &'static str,
        /// Limit.
        max: usize,
    },
    /// Two plans describe different parameters.
    #[error("the plans differ in parameter {name}: {what}", name = Printable(name))]
    ParameterMismatch {
        /// Name of the first parameter that differs.
        name: String,
        /// Description of the difference.
        what: &'static str,
    },
    /// The format version of a plan is unsupported.
    #[error("plan format version {found} is not supported, only version {FORMAT_VERSION}")]
    UnsupportedFormat {
        /// Version of the plan.
        found: u32,
    },
}

impl Error {
    /// Makes the error of a parameter that is listed twice.
    pub(crate) fn listed_twice(name: &str) -> Self {
        Self::InvalidParameter { name: name.to_owned(), reason: "is listed twice".to_owned() }
    }

    /// Makes the error of an index of a parameter.
    pub(crate) fn unknown_index(index: usize, len: usize) -> Self {
        Self::Unknown { what: "parameter", name: format!("{index} of {len}") }
    }
}
