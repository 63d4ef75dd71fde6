//! What can go wrong in training.

/// The result of training on a mesh.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why a model could not be trained, saved or read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The mesh failed.
    #[error(transparent)]
    Mesh(#[from] pmap_mesh::Error),
    /// A sharding plan cannot be made of the tensors.
    #[error(transparent)]
    Plan(#[from] fsdp_plan::Error),
    /// A plan is for another number of ranks than the mesh has slots.
    #[error("a plan for {ranks} ranks cannot be carried out on a mesh of {slots} slots")]
    PlanWorld {
        /// The plan's world size.
        ranks: u64,
        /// The number of slots.
        slots: usize,
    },
    /// A plan with replicas needs a mesh whose last axis is a shard group.
    #[error(
        "a plan of {replicas} replicas of {group} ranks needs a mesh of several axes, the last of size {group}"
    )]
    PlanMesh {
        /// The ranks of a shard group.
        group: u64,
        /// The number of groups.
        replicas: u64,
    },
    /// The plan, or the model, has no parameter or unit of this name.
    #[error("there is no parameter or unit named {name}")]
    UnknownParameter {
        /// The name that was asked for.
        name: String,
    },
    /// Not all of a parameter was there to be cut or loaded.
    #[error("parameter {name} is incomplete: item {missing} is missing")]
    Incomplete {
        /// The parameter.
        name: String,
        /// Its first item that is missing, in row-major order.
        missing: usize,
    },
    /// A checkpoint has a parameter of another shape.
    #[error(
        "parameter {name} has the shape {found:?} in the checkpoint, {expected:?} was expected"
    )]
    OtherShape {
        /// The parameter.
        name: String,
        /// The shape in the checkpoint.
        found: Vec<usize>,
        /// The shape in the model or plan.
        expected: Vec<usize>,
    },
    /// Cutting, moving or putting together a parameter failed in candle.
    #[error("a parameter cannot be put together or taken apart")]
    Assemble(#[source] candle_core::Error),
    /// A checkpoint cannot be read or written.
    #[error("{}: {reason}", path.display())]
    File {
        /// The file or folder.
        path: std::path::PathBuf,
        /// What the system or the format's reader says.
        reason: String,
    },
    /// The model, its variables or an optimizer could not be made or read.
    #[error("the model of a data-parallel step failed")]
    Model(#[source] candle_core::Error),
    /// Variables that should be the same on all devices are not.
    #[error("variable {name} of replica {replica} differs from replica 0's")]
    Diverged {
        /// The first variable that differs, in the order of names.
        name: String,
        /// The replica that has another value.
        replica: usize,
    },
}
