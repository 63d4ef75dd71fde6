//! What can be wrong with a plan that is carried out on a mesh.

use std::ops::Range;

use dist_checkpoint::support::listed::Listed;

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
    /// Parameters belong to no unit, so nobody would gather them.
    #[error(
        "{} parameters are in no unit: {}. Numbered blocks are units by themselves, others are put \
         into one by `unit(name, prefixes)`",
        parameters.len(), Listed(parameters)
    )]
    NoUnit {
        /// Their names.
        parameters: Vec<String>,
    },
    /// There are two rules for one unit.
    #[error("there are two units named {unit:?}: name all prefixes of a unit at once")]
    SameUnit {
        /// The name.
        unit: String,
    },
    /// No parameter begins with a prefix of a unit.
    #[error("the prefix {prefix:?} of unit {unit:?} matches none of the model's parameters")]
    UnmatchedPrefix {
        /// The unit.
        unit: String,
        /// The prefix.
        prefix: String,
    },
    /// A pattern of an option picks no unit.
    #[error("the pattern {pattern:?} of `{option}` matches none of the model's units")]
    UnmatchedUnit {
        /// The option.
        option: &'static str,
        /// The pattern.
        pattern: String,
    },
    /// A plan that was made elsewhere has other parameters, or other units, than the model.
    #[error("the plan does not fit the model: {reason}")]
    OtherPlan {
        /// What differs.
        reason: String,
    },
    /// A model has a buffer, which the forward pass changes and so cannot be cut.
    #[error("{name} is a buffer, and a sharded model cannot have any: use a layer without one")]
    Buffer {
        /// The variable.
        name: String,
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
