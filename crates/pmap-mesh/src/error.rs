//! What can go wrong on a mesh, before a replica starts and inside it.

use std::{sync::Arc, time::Duration};

use candle_core::Device;
#[cfg(feature = "nccl")]
use candle_core::DeviceLocation;

use crate::{
    engine::call::CollectiveCall,
    spec::fault::{Side, SpecFault},
};

/// The result of making or calling a parallel function.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why a mesh could not be made, or a call on it did not return a result.
///
/// Inputs and outputs are counted in the order in which their tensors stand in the arguments, from
/// 0.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A mesh needs at least one device and takes at most
    /// [`DeviceMesh::MAX_DEVICES`](crate::DeviceMesh::MAX_DEVICES).
    #[error("a mesh of {count} devices cannot be made, the number must be from 1 to {max}")]
    MeshSize {
        /// The number of devices asked for: the product of the sizes of all axes.
        count: usize,
        /// The largest number of devices in a mesh.
        max: usize,
    },
    /// A mesh has too many axes.
    #[error("a mesh of {count} axes cannot be made, there may be up to {max}")]
    MeshAxes {
        /// The number of axes asked for.
        count: usize,
        /// The largest number of axes.
        max: usize,
    },
    /// Two axes of a mesh have one name.
    #[error("the mesh has two axes named {name}")]
    DuplicateAxis {
        /// The name.
        name: String,
    },
    /// The mesh has no axis of this name.
    #[error("the mesh has no axis named {name}, its axes are {}", known.join(", "))]
    UnknownAxis {
        /// The name that was asked for.
        name: String,
        /// The names of the mesh's axes.
        known: Vec<String>,
    },
    /// An axis is not that long.
    #[error("axis {axis} has no coordinate {coordinate}, its size is {size}")]
    Coordinate {
        /// The name of the axis.
        axis: String,
        /// The coordinate that was asked for.
        coordinate: usize,
        /// The size of the axis.
        size: usize,
    },
    /// The axes make a grid of another size than there are devices.
    #[error("{devices} devices do not fill a mesh of {slots} slots")]
    DeviceCount {
        /// The number of devices given.
        devices: usize,
        /// The product of the sizes of all axes.
        slots: usize,
    },
    /// Device number `index` of its kind is not there, or this build does not support its kind.
    #[error("device {index} cannot be opened")]
    Device {
        /// The number of the device.
        index: usize,
        /// What candle says of it.
        source: candle_core::Error,
    },
    /// The worker threads of a device could not be started.
    #[error("the worker of device {index} cannot be started")]
    Worker {
        /// The device's place in the mesh.
        index: usize,
        /// What the operating system says of it.
        source: rayon::ThreadPoolBuildError,
    },
    /// The number of specs fits neither the arguments nor the tensors.
    #[error(
        "{side}_axes has {specs} specs for {arguments} arguments of {tensors} tensors; give one, or one for each"
    )]
    SpecCount {
        /// `in_axes` or `out_axes`.
        side: Side,
        /// The number of specs given.
        specs: usize,
        /// The number of arguments or results: the elements of a tuple.
        arguments: usize,
        /// The number of tensors in them.
        tensors: usize,
    },
    /// Specs do not fit the tensors; all that is wrong with them.
    #[error("{}", .0.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "))]
    Specs(Vec<SpecFault>),
    /// Cutting an input, or moving it to its device, failed in candle.
    #[error("input {index} cannot be sharded")]
    Shard {
        /// Which input.
        index: usize,
        /// What candle says of it.
        source: candle_core::Error,
    },
    /// A value lies on the devices of another mesh.
    #[error("the value lies on another mesh; gather it there and shard it here")]
    OtherMesh,
    /// The function returned an error on one device; of several, this is the one with the lowest
    /// index.
    #[error("replica {index} on {device:?} failed")]
    Replica {
        /// The replica's place in the mesh.
        index: usize,
        /// The device it ran on.
        device: Device,
        /// The error that the function returned.
        source: candle_core::Error,
    },
    /// The function panicked on one device.
    #[error("replica {index} on {device:?} panicked: {message}")]
    Panicked {
        /// The replica's place in the mesh.
        index: usize,
        /// The device it ran on.
        device: Device,
        /// The panic's message.
        message: String,
    },
    /// What a collective returns to a replica because another one has failed. A call never returns
    /// this, but the cause.
    #[error("ended by replica {by}: {cause}")]
    Aborted {
        /// The replica that failed.
        by: usize,
        /// Its error.
        cause: String,
    },
    /// Two replicas of a group called different collectives.
    #[error("replica {left} calls {left_call}, replica {right} calls {right_call}")]
    Mismatch {
        /// The replica that came first.
        left: usize,
        /// What it called.
        left_call: Arc<CollectiveCall>,
        /// The other replica; the same one if two of its threads called at once.
        right: usize,
        /// What the other called.
        right_call: Arc<CollectiveCall>,
    },
    /// Two processes of a group called different collectives.
    #[cfg(any(feature = "mpi", feature = "nccl"))]
    #[error("replica {left} calls {left_call}, replica {right} calls {right_call}")]
    MismatchAcross {
        /// The first member of the group.
        left: usize,
        /// What it called.
        left_call: String,
        /// The first member that called something else.
        right: usize,
        /// What the other called.
        right_call: String,
    },
    /// A replica returned while another one waits for it in a collective.
    #[error("replica {index} has returned while replica {waiting} waits for it in {call}")]
    Deserted {
        /// The replica that returned.
        index: usize,
        /// The replica that waits.
        waiting: usize,
        /// What it waits in.
        call: Arc<CollectiveCall>,
    },
    /// Every replica that has not returned waits, in groups that cannot become complete.
    #[error("all replicas wait for each other: {}", .waiting.iter().map(|(replica, call)| format!("replica {replica} in {call}")).collect::<Vec<_>>().join(", "))]
    Deadlock {
        /// Who waits, and in what.
        waiting: Vec<(usize, Arc<CollectiveCall>)>,
    },
    /// A replica waited in a collective for longer than the mesh allows.
    #[error("replica {index} waited for more than {after:?} in {call}{}", not_come(missing))]
    Deadline {
        /// The replica that waited.
        index: usize,
        /// The members of its group that have not come, or not finished; none where that cannot be
        /// known, as over NCCL.
        missing: Vec<usize>,
        /// What it waited in.
        call: Arc<CollectiveCall>,
        /// The mesh's deadline.
        after: Duration,
    },
    /// The replicas returned different numbers of tensors.
    #[error("replica {index} returned {tensors} tensors, {expected} were expected")]
    OutputsDiffer {
        /// The replica that differs from replica 0, or 0 if it is the kept tensors that differ.
        index: usize,
        /// How many tensors it returned.
        tensors: usize,
        /// How many replica 0 returned, or are kept.
        expected: usize,
    },
    /// An output is not the same on two replicas though its spec says that it is replicated; found
    /// in debug builds.
    #[error(
        "output {index} of replica {replica} differs from replica {first}'s, but its spec says that it is replicated"
    )]
    NotReplicated {
        /// Which output.
        index: usize,
        /// The replica that differs.
        replica: usize,
        /// The first replica that should have the same.
        first: usize,
    },
    /// The outputs of the replicas do not fit together.
    #[error("output {index} cannot be gathered")]
    Gather {
        /// Which output.
        index: usize,
        /// What candle says of it.
        source: candle_core::Error,
    },
    /// A replica called a parallel function; its worker would wait for itself.
    #[error(
        "a parallel function cannot be called inside a replica of another: its worker would wait for itself, or for a \
         mesh whose workers wait for this one; call it between two calls instead"
    )]
    Nested,
    /// MPI could not be started, or its processes are not as many as the mesh has slots.
    #[cfg(feature = "mpi")]
    #[error("MPI: {reason}")]
    Mpi {
        /// What is wrong.
        reason: String,
    },
    /// NCCL or its device could not be started, or its processes are not as many as the mesh has
    /// slots.
    #[cfg(feature = "nccl")]
    #[error("NCCL: {reason}")]
    Nccl {
        /// What is wrong.
        reason: String,
    },
    /// The file by which the processes of a mesh find each other could not be used.
    ///
    /// The kind of its source is [`AlreadyExists`](std::io::ErrorKind::AlreadyExists) for the file
    /// of another mesh, [`TimedOut`](std::io::ErrorKind::TimedOut) if rank 0 has not written it in
    /// time, and [`InvalidData`](std::io::ErrorKind::InvalidData) for one that is not of this
    /// version, or is of another world.
    #[cfg(feature = "nccl")]
    #[error("the processes cannot meet at {}", path.display())]
    Store {
        /// The file.
        path: std::path::PathBuf,
        /// What is wrong with it.
        source: std::io::Error,
    },
    /// A tensor in a collective over NCCL is not on the device of its process.
    #[cfg(feature = "nccl")]
    #[error(
        "the tensor of {call} is on {found:?}, over NCCL it must be on the device of its replica, {expected:?}"
    )]
    OtherDevice {
        /// The collective.
        call: Arc<CollectiveCall>,
        /// Where the tensor is.
        found: DeviceLocation,
        /// Where it should be; candle tells apart devices that were opened twice.
        expected: DeviceLocation,
    },
    /// Something is not there yet for meshes of several processes.
    #[error("{what} of a mesh that spans several processes is not supported")]
    SeveralProcesses {
        /// What was asked for.
        what: &'static str,
    },
    /// A worker ended without a result, though nothing failed.
    #[error("a replica ended without a result")]
    NoResult,
}

/// Who is to blame for a deadline, as far as it is known.
fn not_come(missing: &[usize]) -> String {
    let numbers: Vec<String> = missing.iter().map(ToString::to_string).collect();
    match missing.len() {
        0 => String::new(),
        1 => format!("; replica {} did not come", numbers[0]),
        _ => format!("; replicas {} did not come", numbers.join(", ")),
    }
}

impl From<SpecFault> for Error {
    fn from(fault: SpecFault) -> Self {
        Self::Specs(vec![fault])
    }
}
