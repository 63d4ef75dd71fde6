//! Seeds and epochs, which determine all randomness.

use std::fmt;

/// The root of a reproducible stream of randomness.
///
/// Two runs with the same seed read the same samples in the same order. Every use of randomness
/// derives a separate seed with [`Seed::derive`], so that no two uses share a stream.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(transparent))]
pub struct Seed(u64);

impl Seed {
    /// Creates a seed.
    pub const fn new(value: u64) -> Self {
        Self(value)
    }

    /// Returns the seed's value.
    pub const fn as_u64(self) -> u64 {
        self.0
    }

    /// Returns the seed of sub-stream `label`, such as an epoch, a step, a coordinate or a purpose.
    ///
    /// Hashing separates (seed 0, epoch 1) from (seed 1, epoch 0), which PyTorch's `seed + epoch`
    /// makes equal.
    ///
    /// # Determinism
    ///
    /// Tests pin the values, which are equal on every machine. For a fixed seed, different labels
    /// always give different seeds.
    ///
    /// # Examples
    ///
    /// ```
    /// # use core_types::Seed;
    /// assert_ne!(Seed::new(0).derive(1), Seed::new(1).derive(0));
    /// ```
    #[must_use]
    pub const fn derive(self, label: u64) -> Self {
        Self(mix(mix(self.0.wrapping_add(GOLDEN_GAMMA)) ^ label.wrapping_add(GOLDEN_GAMMA)))
    }
}

impl fmt::Display for Seed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// The increment of SplitMix64: keeps `mix` away from its fixed point at 0.
const GOLDEN_GAMMA: u64 = 0x9e37_79b9_7f4a_7c15;

/// Applies the finalizer of SplitMix64 (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number
/// Generators", 2014), a bijection in which every input bit affects every output bit.
const fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// One pass over the data set, counted from 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(transparent))]
pub struct Epoch(u64);

impl Epoch {
    /// The first epoch.
    pub const ZERO: Self = Self(0);

    /// Creates an epoch.
    pub const fn new(value: u64) -> Self {
        Self(value)
    }

    /// Returns the epoch's number.
    pub const fn as_u64(self) -> u64 {
        self.0
    }
}

impl fmt::Display for Epoch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn derived_seeds_are_pinned() {
        let derived = [(0, 0), (0, 1), (1, 0), (u64::MAX, u64::MAX)]
            .map(|(s, n)| Seed::new(s).derive(n).as_u64());
        assert_eq!(
            derived,
            [
                258_863_698_125_685_209,
                5_219_921_735_007_109_793,
                15_979_313_559_291_895_140,
                10_860_540_985_812_312_241
            ]
        );
    }

    #[test]
    fn derived_seeds_are_distinct() {
        let all: BTreeSet<_> =
            (0..200).flat_map(|s| (0..200).map(move |n| Seed::new(s).derive(n))).collect();
        assert_eq!(all.len(), 200 * 200);
    }
}
