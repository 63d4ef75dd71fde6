//! Ranks, world sizes, and ranks checked against their world.

mod error;

use std::fmt;

pub use error::{Error, Result};

/// The number of ranks that work together; `num_replicas` in PyTorch's samplers.
///
/// # Examples
///
/// ```
/// # use core_types::WorldSize;
/// assert_eq!(WorldSize::new(8)?.as_u64(), 8);
/// assert!(WorldSize::new(0).is_err());
/// # Ok::<(), core_types::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(try_from = "u64", into = "u64"))]
pub struct WorldSize(u32);

impl WorldSize {
    /// Limit on the world size: 2^20 ranks.
    ///
    /// No cluster has more today, and a product of a rank and a world size never overflows.
    pub const MAX: Self = Self(1 << 20);

    /// A world of one rank.
    pub const ONE: Self = Self(1);

    /// Creates a world of `size` ranks.
    ///
    /// # Errors
    ///
    /// [`Error::WorldSizeOutOfRange`] if `size` is 0 or above [`WorldSize::MAX`].
    pub fn new(size: u64) -> Result<Self> {
        match u32::try_from(size) {
            Ok(value) if (1..=Self::MAX.0).contains(&value) => Ok(Self(value)),
            _ => Err(Error::WorldSizeOutOfRange { value: size }),
        }
    }

    /// Returns the number of ranks.
    pub fn as_u64(self) -> u64 {
        u64::from(self.0)
    }

    /// Returns the number of ranks, for indexing.
    pub fn as_usize(self) -> usize {
        self.0 as usize
    }

    /// Returns every rank of this world in order, with its world.
    ///
    /// # Examples
    ///
    /// ```
    /// # use core_types::{Placement, WorldSize};
    /// let all: Vec<_> = WorldSize::new(2)?.placements().collect();
    /// assert_eq!(all, [Placement::new(0, 2)?, Placement::new(1, 2)?]);
    /// # Ok::<(), core_types::Error>(())
    /// ```
    pub fn placements(self) -> impl ExactSizeIterator<Item = Placement> + DoubleEndedIterator {
        (0..self.0).map(move |rank| Placement { rank: Rank(rank), world_size: self })
    }
}

impl fmt::Display for WorldSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl TryFrom<u64> for WorldSize {
    type Error = Error;

    fn try_from(size: u64) -> Result<Self> {
        Self::new(size)
    }
}

impl From<WorldSize> for u64 {
    fn from(world_size: WorldSize) -> Self {
        world_size.as_u64()
    }
}

/// The number of one worker among its world, from 0.
///
/// A rank does not know its world; functions that need both take a [`Placement`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(transparent))]
pub struct Rank(u32);

impl Rank {
    /// The first rank, which logs and writes for all ranks.
    pub const ZERO: Self = Self(0);

    /// Creates a rank. The caller checks that it is less than the size of its world.
    #[expect(clippy::cast_possible_truncation, reason = "world sizes fit into 32 bits")]
    pub(crate) fn in_world(rank: u64) -> Self {
        debug_assert!(rank < WorldSize::MAX.as_u64());
        Self(rank as u32)
    }

    /// Returns the rank's number.
    pub fn as_u64(self) -> u64 {
        u64::from(self.0)
    }

    /// Returns the rank's number, for indexing.
    pub fn as_usize(self) -> usize {
        self.0 as usize
    }
}

impl fmt::Display for Rank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A rank checked against its world: "rank 3 of 8".
///
/// # Examples
///
/// ```
/// # use core_types::Placement;
/// let place = Placement::new(3, 8)?;
/// assert_eq!((place.rank().as_u64(), place.world_size().as_u64()), (3, 8));
///
/// let error = Placement::new(8, 8).unwrap_err();
/// assert_eq!(error.to_string(), "rank 8 is out of range for a world of 8");
/// # Ok::<(), core_types::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Placement {
    rank: Rank,
    world_size: WorldSize,
}

impl Placement {
    /// The only rank of a world of one.
    pub const SINGLE: Self = Self { rank: Rank::ZERO, world_size: WorldSize::ONE };

    /// Creates the placement of `rank` in a world of `world_size`.
    ///
    /// # Errors
    ///
    /// [`Error::WorldSizeOutOfRange`], or [`Error::RankOutOfRange`] if `rank` is not less than
    /// `world_size`.
    pub fn new(rank: u64, world_size: u64) -> Result<Self> {
        let world_size = WorldSize::new(world_size)?;
        match u32::try_from(rank) {
            Ok(value) if value < world_size.0 => Ok(Self { rank: Rank(value), world_size }),
            _ => Err(Error::RankOutOfRange { rank, world_size }),
        }
    }

    /// Creates a placement of `rank`, which must be less than `world_size`.
    pub(crate) fn from_checked(rank: Rank, world_size: WorldSize) -> Self {
        debug_assert!(rank.0 < world_size.0);
        Self { rank, world_size }
    }

    /// Returns the rank.
    pub fn rank(self) -> Rank {
        self.rank
    }

    /// Returns the size of the world.
    pub fn world_size(self) -> WorldSize {
        self.world_size
    }

    /// Returns true if this is the last rank.
    pub fn is_last(self) -> bool {
        self.rank.0 + 1 == self.world_size.0
    }
}

impl fmt::Display for Placement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {} of {}", self.rank, self.world_size)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn invalid_world_sizes_are_rejected() {
        let max = WorldSize::MAX.as_u64();
        assert_eq!(WorldSize::new(max).unwrap(), WorldSize::MAX);
        for value in [0, max + 1, u64::MAX] {
            assert_eq!(WorldSize::new(value), Err(Error::WorldSizeOutOfRange { value }));
        }
    }

    #[test]
    fn invalid_ranks_are_rejected() {
        let world_size = WorldSize::new(4).unwrap();
        for rank in [4, u64::MAX] {
            assert_eq!(Placement::new(rank, 4), Err(Error::RankOutOfRange { rank, world_size }));
        }
        assert!(Placement::new(3, 4).unwrap().is_last());
    }

    #[cfg(feature = "serde")]
    #[test]
    fn deserializing_checks_world_sizes() {
        assert_eq!(serde_json::from_str::<WorldSize>("4").unwrap(), WorldSize::new(4).unwrap());
        assert!(serde_json::from_str::<WorldSize>("0").is_err());
    }
}
