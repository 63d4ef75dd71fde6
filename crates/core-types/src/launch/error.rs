//! Errors of the variables of launchers.

use std::ffi::OsString;

use super::launcher::Launcher;
use crate::rank::{Placement, WorldSize};

pub(super) type Result<T, E = Error> = std::result::Result<T, E>;

/// An error about the rank in the environment.
///
/// It is separate from [`core_types::Error`](crate::Error) because only programs read the
/// environment, once at their start; errors of samplers and plans never involve variables.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The value of an environment variable is not Unicode.
    #[error("environment variable {name} is {value:?}, which is not Unicode")]
    VariableNotUnicode {
        /// Name of the variable.
        name: &'static str,
        /// Value of the variable.
        value: OsString,
    },
    /// The value of an environment variable is malformed.
    #[error("environment variable {name} is {value:?}, it must be {expected}")]
    VariableUnreadable {
        /// Name of the variable.
        name: &'static str,
        /// Value of the variable.
        value: String,
        /// Description of a valid value.
        expected: &'static str,
    },
    /// An environment variable is set without a second one that it needs.
    #[error("environment variable {found} is {value} but {name} is not set")]
    VariableMissing {
        /// Name of the missing variable.
        name: &'static str,
        /// Name of the variable that is set.
        found: &'static str,
        /// Value of the variable that is set.
        value: u64,
    },
    /// An environment variable has a world size out of range.
    #[error("environment variable {name} is {value}, it must be from 1 to {max}")]
    SizeVariableOutOfRange {
        /// Name of the variable.
        name: &'static str,
        /// Value of the variable.
        value: u64,
        /// Limit: [`WorldSize::MAX`], or the world size for a local size.
        max: WorldSize,
    },
    /// An environment variable has a rank out of range.
    #[error("environment variable {name} is {rank}, it must be below {size_name}, which is {size}")]
    RankVariableOutOfRange {
        /// Name of the variable.
        name: &'static str,
        /// Value of the variable.
        rank: u64,
        /// Name of the variable of the size.
        size_name: &'static str,
        /// Size.
        size: u64,
    },
    /// Two launchers disagree, and neither commonly starts the other.
    #[error(
        "{launcher} says {place} ({}), but {other_launcher} says {other_place} ({})",
        launcher.variables(),
        other_launcher.variables()
    )]
    LaunchersDisagree {
        /// Innermost launcher.
        launcher: Launcher,
        /// Placement by the innermost launcher.
        place: Placement,
        /// Other launcher.
        other_launcher: Launcher,
        /// Placement by the other launcher.
        other_place: Placement,
    },
}
