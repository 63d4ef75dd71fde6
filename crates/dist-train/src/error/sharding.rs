//! What can be wrong with a plan that is carried out on a mesh.

use std::ops::Range;

/// Why a plan cannot be carried out on a mesh.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ShardingError {
    /// The plan is for another number of ranks than the mesh has slots.
    #[error("a plan for {ranks} ranks cannot be carried out on a mesh of {slots} slots")]
    World {
        /// The plan's world size.
        ranks: u64,
        /// The number of slots.
        slots: usize,
    },
    /// A plan with replicas needs a mesh whose last axis is a shard group.
    #[error(
        "a plan of {replicas} replicas of {group} ranks needs a mesh of several axes, the last of \
         size {group}"
    )]
    Replicas {
        /// The ranks of a shard group.
        group: u64,
        /// The number of groups.
        replicas: u64,
    },
    /// The slot's parts are not in this process.
    #[error("slot {slot} is not in this process, which has {} to {}", slots.start, slots.end - 1)]
    Slot {
        /// The slot that was asked for.
        slot: usize,
        /// The slots of this process.
        slots: Range<usize>,
    },
    /// A parameter was asked for in a replica of another mesh than that of the plan.
    #[error("a replica of {replicas} gathers parameters of a mesh of {slots} slots")]
    OtherMesh {
        /// The replicas of the mesh that asks.
        replicas: usize,
        /// The slots among which the parameters are divided.
        slots: usize,
    },
}
