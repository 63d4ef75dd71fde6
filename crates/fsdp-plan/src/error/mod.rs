//! What can be wrong with a list of parameters, a file that names them, or a plan.

mod cut;
mod parameters;
mod source;

use core_types::human::Printable;

pub use self::{cut::CutError, parameters::ParameterError, source::SourceError};
use crate::format::FORMAT_VERSION;

/// The result of reading, planning or costing.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why a model cannot be read, planned or costed.
///
/// Errors of the large subjects are nested; the message is that of the nested error.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A rank or world size outside its limits.
    #[error(transparent)]
    World(#[from] core_types::Error),
    /// The list of parameters is not that of a model.
    #[error(transparent)]
    Parameters(#[from] ParameterError),
    /// The plan cuts parameters in a way that is not possible.
    #[error(transparent)]
    Cut(#[from] CutError),
    /// The file does not hold a list of parameters.
    #[error(transparent)]
    Source(#[from] SourceError),

    /// The sizes of several parameters together do not fit into 64 bits.
    #[error("{what} add up to more than {}", u64::MAX)]
    TotalTooLarge {
        /// What was summed up.
        what: &'static str,
    },
    /// A number that must be at least 1 is 0.
    #[error("{what} is 0, it must be at least 1")]
    Zero {
        /// What the number counts.
        what: &'static str,
    },
    /// The world size is not a multiple of the number of replicas.
    #[error("a world of {world_size} ranks does not divide into {replicas} replicas")]
    Replicas {
        /// The ranks.
        world_size: u64,
        /// The replicas that were asked for.
        replicas: u64,
    },
    /// There is no such parameter in the plan.
    #[error("parameter {index} is out of range for a plan of {len}")]
    ParameterOutOfRange {
        /// The position that was asked for.
        index: usize,
        /// The number of parameters.
        len: usize,
    },
    /// No parameter of the plan has this name.
    #[error("the plan has no parameter {name}", name = Printable(name))]
    UnknownParameter {
        /// The name that was asked for.
        name: String,
    },
    /// No parameter of the plan is in this unit.
    #[error("the plan has no unit {unit:?}")]
    UnknownUnit {
        /// The unit that was asked for.
        unit: String,
    },
    /// A pattern cannot be read.
    #[error("malformed pattern {pattern:?}: {reason}", reason = Printable(reason))]
    BadPattern {
        /// The pattern; of a long one the beginning.
        pattern: String,
        /// What is wrong with it.
        reason: String,
    },
    /// There are more rules than [`Hybrid`](crate::strategy::Hybrid) takes.
    #[error("there are more than {max} rules")]
    TooManyRules {
        /// The most that are taken.
        max: usize,
    },
    /// The patterns of all rules together are longer than [`Hybrid`](crate::strategy::Hybrid) takes.
    #[error("the patterns of the rules have more than {max} bytes")]
    RulesTooLong {
        /// The most bytes that are taken.
        max: usize,
    },
    /// Two plans are not of the same parameters.
    #[error("the plans differ in parameter {name}: {what}", name = Printable(name))]
    DifferentParameters {
        /// The first parameter that differs.
        name: String,
        /// In what it differs.
        what: &'static str,
    },
    /// A plan was written by another version of this crate.
    #[error("plan format version {found} is not supported, only {FORMAT_VERSION} is")]
    FormatVersion {
        /// The version of the plan.
        found: u32,
    },
}
