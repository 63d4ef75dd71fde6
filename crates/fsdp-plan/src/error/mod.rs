//! Errors of parameters, files and plans.

mod cut;
mod parameters;
mod source;

use core_types::human::Printable;

pub use self::{cut::CutError, parameters::ParameterError, source::SourceError};
use crate::format::FORMAT_VERSION;

/// The result of reading, planning or costing.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of reading, planning or costing.
///
/// Errors of the large subjects are nested enums; their messages pass through unchanged.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A rank or world size outside its limits.
    #[error(transparent)]
    World(#[from] core_types::Error),
    /// The list of parameters is invalid.
    #[error(transparent)]
    Parameters(#[from] ParameterError),
    /// A cut of the plan is invalid.
    #[error(transparent)]
    Cut(#[from] CutError),
    /// The file is not a valid list of parameters.
    #[error(transparent)]
    Source(#[from] SourceError),

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
    /// Makes the error of an index of a parameter.
    pub(crate) fn unknown_index(index: usize, len: usize) -> Self {
        Self::Unknown { what: "parameter", name: format!("{index} of {len}") }
    }
}
