//! What can be wrong with a rank or a world size.

use super::WorldSize;

/// The result of a checked constructor of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// A rank or world size outside its limits.
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
        /// The world it should belong to.
        world_size: WorldSize,
    },
}
