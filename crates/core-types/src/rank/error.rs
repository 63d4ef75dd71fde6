//! Errors of ranks and world sizes.

use super::WorldSize;

/// The result of a checked constructor.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// A rank or world size outside its limits.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The world has no ranks, or more than [`WorldSize::MAX`].
    #[error("world size {value} is out of range, it must be from 1 to {}", WorldSize::MAX)]
    WorldSizeOutOfRange {
        /// Requested world size.
        value: u64,
    },
    /// The rank does not exist in its world.
    #[error("rank {rank} is out of range for a world of {world_size}")]
    RankOutOfRange {
        /// Requested rank.
        rank: u64,
        /// Size of the world.
        world_size: WorldSize,
    },
}
