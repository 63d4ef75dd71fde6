//! What can be wrong with a rank or a world size.

use std::ffi::OsString;

use crate::{Launcher, Placement, WorldSize};

/// The result of a checked constructor of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// A rank or world size outside its limits, or an environment that does not tell them.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The world has no ranks, or more than [`WorldSize::MAX`].
    #[error("world size {value} is out of range, it must be from 1 to {}", WorldSize::MAX)]
    WorldSizeOutOfRange {
        /// The world size that was asked for.
        value: u64,
    },
    /// The rank does not exist in its world.
    #[error("rank {rank} is out of range for a world of {world_size}")]
    RankOutOfRange {
        /// The rank that was asked for.
        rank: u64,
        /// The world it was to be part of.
        world_size: WorldSize,
    },
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
        /// What that is set to.
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
        /// What that is set to.
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
        /// What that says.
        other_place: Placement,
    },
}
