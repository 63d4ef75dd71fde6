//! What can be wrong with the variables of a launcher.

use std::ffi::OsString;

use super::launcher::Launcher;
use crate::rank::{Placement, WorldSize};

pub(super) type Result<T, E = Error> = std::result::Result<T, E>;

/// An environment that does not say which rank this process is.
///
/// It is not a variant of [`core_types::Error`](crate::Error): only a program asks its environment,
/// and only at its start, so whoever handles the errors of a sampler or of a plan need not think of
/// variables.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The value of an environment variable is not Unicode.
    #[error("environment variable {name} is {value:?}, which is not Unicode")]
    VariableNotUnicode {
        /// The variable.
        name: &'static str,
        /// What it is set to.
        value: OsString,
    },
    /// The value of an environment variable is not what it should be.
    #[error("environment variable {name} is {value:?}, it must be {expected}")]
    VariableUnreadable {
        /// The variable.
        name: &'static str,
        /// What it is set to.
        value: String,
        /// What it should be, in words.
        expected: &'static str,
    },
    /// An environment variable is set without another that gives it a meaning.
    #[error("environment variable {found} is {value} but {name} is not set")]
    VariableMissing {
        /// The variable that is missing.
        name: &'static str,
        /// The variable that is set.
        found: &'static str,
        /// The value of that one.
        value: u64,
    },
    /// An environment variable names a world without ranks, or one with too many.
    #[error("environment variable {name} is {value}, it must be from 1 to {max}")]
    SizeVariableOutOfRange {
        /// The variable.
        name: &'static str,
        /// What it is set to.
        value: u64,
        /// [`WorldSize::MAX`], or for the part of a world on this machine the whole world.
        max: WorldSize,
    },
    /// An environment variable names a rank that does not exist in its world.
    #[error("environment variable {name} is {rank}, it must be below {size_name}, which is {size}")]
    RankVariableOutOfRange {
        /// The variable.
        name: &'static str,
        /// What it is set to.
        rank: u64,
        /// The variable that names the size.
        size_name: &'static str,
        /// The size it names.
        size: u64,
    },
    /// Two launchers say different things, and it is not clear which of them started the other.
    #[error(
        "{launcher} says {place} ({}), but {other_launcher} says {other_place} ({})",
        launcher.variables(),
        other_launcher.variables()
    )]
    LaunchersDisagree {
        /// The innermost launcher.
        launcher: Launcher,
        /// What it says.
        place: Placement,
        /// The other launcher.
        other_launcher: Launcher,
        /// What the other one says.
        other_place: Placement,
    },
}
