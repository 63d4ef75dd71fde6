//! Errors of plans on a mesh.

use dist_checkpoint::support::Listed;

/// A plan or unit that does not fit the mesh or model.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ShardingError {
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
    /// A rule of units, or an option about units, does not fit the model.
    #[error("{reason}")]
    UnitRule {
        /// The message, with the unit and its prefix or pattern.
        reason: String,
    },
    /// A plan differs from the mesh in its ranks or replicas, or from the model in its parameters or
    /// units.
    #[error("the plan does not fit: {reason}")]
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
