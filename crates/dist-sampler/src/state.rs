//! The position of a sampler in an epoch, as plain data.

use core_types::{Epoch, Placement, Seed, WorldSize};

use crate::{
    config::{Order, Tail},
    order::PhaseWeights,
    partition::PartitionRule,
};

/// A position within an epoch: a few numbers, equal on all ranks that are in step.
///
/// [`DistributedSampler::state`](crate::DistributedSampler::state) creates it, and
/// [`DistributedSampler::resume`](crate::DistributedSampler::resume) continues from it. It is
/// serializable with the feature `serde`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct SamplerState {
    pub(crate) format_version: u32,
    pub(crate) order: Order,
    pub(crate) len: u64,
    /// Hash of weights, classes, shards or parts; 0 for orders without them.
    pub(crate) fingerprint: u64,
    pub(crate) seed: Seed,
    pub(crate) epoch: Epoch,
    /// Weights of a mixture; empty for other orders.
    #[cfg_attr(feature = "serde", serde(default, skip_serializing_if = "Vec::is_empty"))]
    pub(crate) phases: Vec<PhaseWeights>,
    /// Worlds that have read this epoch in turn; the last one reads now. There is at least one.
    #[cfg_attr(feature = "serde", serde(deserialize_with = "deserialize_stages"))]
    pub(crate) stages: Vec<WorldStage>,
}

impl SamplerState {
    /// The supported format version.
    pub(crate) const VERSION: u32 = 1;

    /// Limit on the worlds that read one epoch in turn.
    ///
    /// The cost of looking up an index in a resumed epoch grows with the number of worlds.
    pub(crate) const MAX_STAGES: usize = 1024;

    /// Returns the epoch.
    pub fn epoch(&self) -> Epoch {
        self.epoch
    }

    /// Returns the number of indices that each rank of the last world has read.
    pub fn consumed(&self) -> u64 {
        self.last_and_earlier().0.consumed
    }

    /// Returns the stage of the current world and the stages before it.
    #[expect(
        clippy::expect_used,
        reason = "samplers add a stage, and deserialization checks for one"
    )]
    pub(crate) fn last_and_earlier(&self) -> (&WorldStage, &[WorldStage]) {
        self.stages.split_last().expect("a state has at least one stage")
    }
}

/// The part of an epoch that one world has read: the first `consumed` indices of each rank.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub(crate) struct WorldStage {
    pub(crate) world_size: WorldSize,
    pub(crate) rule: PartitionRule,
    pub(crate) consumed: u64,
}

impl WorldStage {
    /// Returns the stage of a single rank that has read all positions before `position`.
    pub(crate) fn prefix(position: u64) -> Self {
        Self {
            world_size: Placement::SINGLE.world_size(),
            rule: PartitionRule::Strided(Tail::Drop),
            consumed: position,
        }
    }
}

#[cfg(feature = "serde")]
fn deserialize_stages<'de, D: serde::Deserializer<'de>>(
    deserializer: D,
) -> Result<Vec<WorldStage>, D::Error> {
    use serde::{Deserialize as _, de::Error as _};

    let stages = Vec::deserialize(deserializer)?;
    if stages.is_empty() {
        return Err(D::Error::custom("a sampler state must have at least one world"));
    }
    Ok(stages)
}
