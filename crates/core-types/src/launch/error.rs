//! Errors of the variables of launchers.

use std::ffi::OsString;

use super::launcher::Launcher;
use crate::rank::Placement;

pub(super) type Result<T, E = Error> = std::result::Result<T, E>;

/// An error about the rank in the environment.
///
/// It is separate from [`core_types::Error`](crate::Error) because only programs read the
/// environment, once at their start; errors of samplers and plans never involve variables.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The value of an environment variable is no number, or a rank or size out of range.
    #[error("environment variable {name} is {value:?}, it must be {expected}")]
    VariableInvalid {
        /// Name of the variable.
        name: &'static str,
        /// Value of the variable.
        value: OsString,
        /// Description of a valid value.
        expected: String,
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
