//! Errors of plans on a mesh.

use dist_checkpoint::support::listed::Listed;

/// A mismatch between a plan or units and a mesh or model.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ShardingError {
    /// The plan's number of ranks differs from the mesh's number of slots.
    #[error("a plan for {ranks} ranks does not fit a mesh of {slots} slots")]
    World {
        /// The plan's world size.
        ranks: u64,
        /// The number of slots.
        slots: usize,
    },
    /// The plan has replicas, but the last axis of the mesh is not a shard group.
    #[error(
        "a plan of {replicas} replicas of {group} ranks needs a mesh of several axes, the last of \
         size {group}"
    )]
    ReplicaMismatch {
        /// The number of ranks of a shard group.
        group: u64,
        /// The number of groups.
        replicas: u64,
    },
    /// Some parameters belong to no unit, so they would never be gathered.
    #[error(
        "{} parameters are in no unit: {}. Numbered blocks are units automatically; assign others \
         with `unit(name, prefixes)`",
        parameters.len(), Listed(parameters)
    )]
    NoUnit {
        /// The names of the parameters.
        parameters: Vec<String>,
    },
    /// Two rules define the same unit.
    #[error("there are two units named {unit:?}: name all prefixes of a unit at once")]
    DuplicateUnit {
        /// The name.
        unit: String,
    },
    /// A prefix of a unit matches no parameter.
    #[error("the prefix {prefix:?} of unit {unit:?} matches none of the model's parameters")]
    UnmatchedPrefix {
        /// The unit.
        unit: String,
        /// The prefix.
        prefix: String,
    },
    /// A pattern of an option matches no unit.
    #[error("the pattern {pattern:?} of `{option}` matches none of the model's units")]
    UnmatchedUnit {
        /// The option.
        option: &'static str,
        /// The pattern.
        pattern: String,
    },
    /// A given plan differs from the model in its parameters or units.
    #[error("the plan does not fit the model: {reason}")]
    PlanMismatch {
        /// The difference.
        reason: String,
    },
    /// The model has a buffer. The forward pass changes buffers, so they cannot be sharded.
    #[error("{name} is a buffer, and a sharded model cannot have buffers: use a layer without one")]
    Buffer {
        /// The variable.
        name: String,
    },
}
