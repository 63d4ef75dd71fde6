//! Where in an epoch a sampler stands, as plain data.

use core_types::{Epoch, Seed, WorldSize};

use crate::{config::Order, partition::Rule};

/// A position in the middle of an epoch: a few numbers, the same on all ranks that are in step.
///
/// Made by [`DistributedSampler::state`](crate::DistributedSampler::state), read by
/// [`DistributedSampler::resume`](crate::DistributedSampler::resume). With feature `serde` it can
/// be written to a file.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct SamplerState {
    pub(crate) format_version: u32,
    pub(crate) order: Order,
    pub(crate) len: u64,
    /// Tells weights or classes of one data set from those of another; 0 for orders without.
    pub(crate) fingerprint: u64,
    pub(crate) seed: Seed,
    pub(crate) epoch: Epoch,
    /// The worlds that have read this epoch, one after the other; the last one, which is always
    /// there, is reading now.
    #[cfg_attr(feature = "serde", serde(deserialize_with = "at_least_one"))]
    pub(crate) stages: Vec<Stage>,
}

impl SamplerState {
    /// The version that is written and read.
    pub(crate) const VERSION: u32 = 1;

    /// The most worlds that may have read one epoch, one after the other.
    ///
    /// An index of a resumed epoch takes a step for each of them.
    pub(crate) const MAX_STAGES: usize = 1024;

    /// The epoch that was being read.
    pub fn epoch(&self) -> Epoch {
        self.epoch
    }

    /// How many indices every rank of the last world had read.
    pub fn consumed(&self) -> u64 {
        self.last_and_earlier().0.consumed
    }

    /// The world that is reading now, and those before it.
    #[expect(clippy::expect_used, reason = "a sampler adds its stage, and reading checks for one")]
    pub(crate) fn last_and_earlier(&self) -> (&Stage, &[Stage]) {
        self.stages.split_last().expect("a state has at least one stage")
    }
}

/// How a world has read (a part of) an epoch: each of its ranks has read its first `consumed`
/// indices.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub(crate) struct Stage {
    pub(crate) world_size: WorldSize,
    pub(crate) rule: Rule,
    pub(crate) consumed: u64,
}

#[cfg(feature = "serde")]
fn at_least_one<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<Vec<Stage>, D::Error> {
    use serde::{Deserialize as _, de::Error as _};

    let stages = Vec::deserialize(deserializer)?;
    if stages.is_empty() {
        return Err(D::Error::custom("a sampler state names at least one world"));
    }
    Ok(stages)
}
