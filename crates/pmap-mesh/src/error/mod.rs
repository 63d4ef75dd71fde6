//! What can go wrong on a mesh, before a replica starts and inside it.

pub(crate) mod call;
pub(crate) mod fault;

use std::{error::Error as StdError, iter, panic::Location, sync::Arc, time::Duration};

use candle_core::Device;
#[cfg(feature = "nccl")]
use candle_core::DeviceLocation;

use crate::error::{call::CollectiveCall, fault::SpecFault};

/// The result of making or calling a parallel function.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why a mesh could not be made, or a call on it did not return a result.
///
/// An error that was caused by another, such as one of candle's, has it in a field `cause` and says
/// it in its message, in one line and without the backtrace that candle adds. So
/// [`source`](std::error::Error::source) is `None`: who prints a chain of errors says nothing
/// twice.
///
/// # Examples
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use pmap_mesh::{DeviceMesh, Error, MeshError, ReplicaError};
///
/// let refused = DeviceMesh::cpu(0).unwrap_err();
/// assert!(matches!(refused, Error::Mesh(MeshError::Size { count: 0, .. })));
///
/// let reshape = DeviceMesh::cpu(2)?.pmap(|_, x: Tensor| x.reshape(5));
/// let failed = reshape.call(Tensor::zeros(4, DType::F32, &Device::Cpu)?).unwrap_err();
/// assert!(failed.to_string().starts_with("replica 0 on Cpu failed: "));
/// assert!(matches!(failed, Error::Replica(ReplicaError::Failed { slot: 0, .. })));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A mesh cannot be made, or lacks what was asked of it.
    #[error(transparent)]
    Mesh(#[from] MeshError),
    /// Specs do not fit the tensors; all that is wrong with them.
    #[error("{}", .0.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "))]
    Specs(Vec<SpecFault>),
    /// An argument cannot be cut, or the results of the replicas cannot be put together.
    #[error(transparent)]
    Value(#[from] ValueError),
    /// A replica failed.
    #[error(transparent)]
    Replica(#[from] ReplicaError),
    /// Replicas do not come together in a collective.
    #[error(transparent)]
    Collective(#[from] CollectiveError),
    /// The processes of a mesh do not come together.
    #[error(transparent)]
    Process(#[from] ProcessError),
}

/// Why a mesh cannot be made, or lacks what was asked of it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MeshError {
    /// A mesh needs at least one device and takes at most
    /// [`DeviceMesh::MAX_DEVICES`](crate::DeviceMesh::MAX_DEVICES).
    #[error("a mesh of {count} devices cannot be made, the number must be from 1 to {max}")]
    Size {
        /// The number of devices asked for: the product of the sizes of all axes.
        count: usize,
        /// The largest number of devices in a mesh.
        max: usize,
    },
    /// A mesh has too many axes.
    #[error("a mesh of {count} axes cannot be made, there may be up to {max}")]
    AxisCount {
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
    /// An axis of a mesh has an empty name.
    #[error("axis {position} of the mesh has no name")]
    UnnamedAxis {
        /// The place of the axis among those of the mesh, from 0.
        position: usize,
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
    #[error("device {index} cannot be opened: {}", one_line(cause))]
    Device {
        /// The number of the device.
        index: usize,
        /// What candle says of it.
        cause: candle_core::Error,
    },
    /// It is too late to say how many threads candle's kernels use; see
    /// [`init_threads`](crate::init_threads).
    #[error(
        "the number of candle's threads can be set only while the process has one thread, it has {threads}: call \
         `init_threads` in the first line of `main`, or set RAYON_NUM_THREADS and CANDLE_NUM_THREADS before the \
         program starts"
    )]
    ThreadsRun {
        /// How many threads the process has.
        threads: usize,
    },
    /// This system does not say how many threads a process has; see
    /// [`init_threads`](crate::init_threads).
    #[error(
        "the number of candle's threads cannot be set safely on this system: set RAYON_NUM_THREADS and \
         CANDLE_NUM_THREADS before the program starts"
    )]
    ThreadsUnknown,
    /// The worker threads of a slot could not be started.
    #[error("the worker of slot {slot} cannot be started: {cause}")]
    Worker {
        /// The slot.
        slot: usize,
        /// What the operating system says of it.
        cause: rayon::ThreadPoolBuildError,
    },
}

/// Why an argument cannot be cut, or results cannot be put together.
///
/// Inputs and outputs are counted in the order in which their tensors stand in the arguments, from
/// 0.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ValueError {
    /// Cutting an input, or moving it to its device, failed in candle.
    #[error("input {index} cannot be sharded: {}", one_line(cause))]
    Shard {
        /// Which input.
        index: usize,
        /// What candle says of it.
        cause: candle_core::Error,
    },
    /// A value lies on the devices of another mesh.
    #[error("the value lies on another mesh; gather it there and shard it here")]
    OtherMesh,
    /// [`DeviceMesh::process_allgather`](crate::DeviceMesh::process_allgather) was not given one
    /// list for each slot of this process.
    #[error("{lists} lists were given for the {slots} slots of this process")]
    ListCount {
        /// The number of lists given.
        lists: usize,
        /// The number of slots in this process.
        slots: usize,
    },
    /// The replicas returned different numbers of tensors.
    #[error("replica {slot} returned {tensors} tensors, {expected} were expected")]
    OutputCount {
        /// The replica that differs from replica 0, or 0 if it is the kept tensors that differ.
        slot: usize,
        /// How many tensors it returned.
        tensors: usize,
        /// How many replica 0 returned, or are kept.
        expected: usize,
    },
    /// Two processes put the results of a call together in different ways.
    #[error(
        "replica {slot} has other out_axes than replica 0, or only one of them trusts replicated results; all \
         processes must put results together in the same way"
    )]
    OutAxes {
        /// The first replica that differs from replica 0.
        slot: usize,
    },
    /// An output is not the same on two replicas though its spec says that it is replicated; see
    /// [`PMap::trust_replicated`](crate::PMap::trust_replicated).
    #[error(
        "output {index} of replica {slot} differs from replica {first}'s, but its spec says that it is replicated"
    )]
    NotReplicated {
        /// Which output.
        index: usize,
        /// The replica that differs.
        slot: usize,
        /// The first replica that should have the same.
        first: usize,
    },
    /// A [`RunLayout`](crate::support::RunLayout) does not give every item one owner.
    #[error("invalid layout {layout}: {fault}")]
    Layout {
        /// The name of the layout.
        layout: String,
        /// What is wrong with it.
        fault: LayoutFault,
    },
    /// The outputs of the replicas do not fit together.
    #[error("output {index} cannot be gathered: {}", one_line(cause))]
    Gather {
        /// Which output.
        index: usize,
        /// What candle says of it.
        cause: candle_core::Error,
    },
}

/// Why runs of tensors are no layout; see [`RunLayout`](crate::support::RunLayout).
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LayoutFault {
    /// A rank owns what is not there.
    #[error("rank {rank} owns items {items:?} of tensor {tensor}, which has {size}")]
    NoSuchItems {
        /// The rank.
        rank: usize,
        /// The tensor of which it owns them, from 0.
        tensor: usize,
        /// The items.
        items: std::ops::Range<usize>,
        /// How many items the tensor has.
        size: usize,
    },
    /// A rank owns a run of a tensor that is not there.
    #[error("rank {rank} owns items of tensor {tensor}, and there are {tensors} tensors")]
    NoSuchTensor {
        /// The rank.
        rank: usize,
        /// The tensor, from 0.
        tensor: usize,
        /// How many tensors there are.
        tensors: usize,
    },
    /// A tensor is larger than any memory.
    #[error("tensor {tensor} of shape {dims:?} has more bytes than can be addressed")]
    TooLarge {
        /// The tensor, from 0.
        tensor: usize,
        /// Its shape.
        dims: Vec<usize>,
    },
    /// An item belongs to nobody.
    #[error("item {item} of tensor {tensor} belongs to no rank")]
    NoOwner {
        /// The tensor, from 0.
        tensor: usize,
        /// The first item without an owner.
        item: usize,
    },
    /// An item belongs to two ranks, or to one of them twice.
    #[error("item {item} of tensor {tensor} belongs to rank {first} and to rank {second}")]
    TwoOwners {
        /// The tensor, from 0.
        tensor: usize,
        /// The first such item.
        item: usize,
        /// One of its owners.
        first: usize,
        /// The other one.
        second: usize,
    },
}

/// How a replica failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ReplicaError {
    /// The function returned an error on one device; of several, this is the one with the lowest
    /// slot.
    #[error("replica {slot} on {device:?} failed: {}", one_line(cause))]
    Failed {
        /// The replica's slot in the mesh.
        slot: usize,
        /// The device it ran on.
        device: Device,
        /// The error that the function returned.
        cause: candle_core::Error,
    },
    /// The function panicked on one device.
    #[error("replica {slot} on {device:?} panicked: {message}")]
    Panicked {
        /// The replica's slot in the mesh.
        slot: usize,
        /// The device it ran on.
        device: Device,
        /// The panic's message.
        message: String,
    },
    /// A replica called a parallel function; its worker would wait for itself.
    ///
    /// A call from a thread that a replica has started is not noticed, and waits for ever if the
    /// replica waits for that thread.
    #[error(
        "a parallel function cannot be called inside a replica of another: its worker would wait for itself, or for a \
         mesh whose workers wait for this one; call it between two calls instead"
    )]
    Nested,
    /// A replica of an earlier call, which has returned without it at the mesh's deadline, still
    /// runs; the mesh can be used again when it returns. The refused call has not begun in that slot;
    /// in others it has only if it was made before the deadline.
    #[error(
        "slot {slot} is busy: its replica of the call at {call} has not returned since that call missed the mesh's \
         deadline"
    )]
    Stuck {
        /// The slot in which it runs.
        slot: usize,
        /// Where the function was called.
        call: &'static Location<'static>,
    },
}

/// Why replicas do not come together in a collective.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CollectiveError {
    /// What a collective returns to a replica because another one has failed. A call never returns
    /// this, but the cause.
    #[error("ended by replica {by}: {cause}")]
    Aborted {
        /// The replica that failed.
        by: usize,
        /// The message of its error.
        cause: String,
    },
    /// Two replicas of a group called different collectives.
    #[error("replica {left} calls {left_call}, replica {right} calls {right_call}")]
    Mismatch {
        /// The replica that came first; over several processes, the first of the group.
        left: usize,
        /// What it called, and where.
        left_call: String,
        /// The other replica; the same one if two of its threads called at once.
        right: usize,
        /// What the other called, and where.
        right_call: String,
    },
    /// A replica returned while another one waits for it in a collective.
    #[error("replica {slot} has returned while replica {waiting} waits for it in {call}")]
    PeerReturned {
        /// The replica that returned.
        slot: usize,
        /// The replica that waits.
        waiting: usize,
        /// What it waits in.
        call: Arc<CollectiveCall>,
    },
    /// The process of a replica has dropped its last mesh while another one waits for it in a
    /// collective.
    #[error(
        "the process of replica {slot} has left while replica {waiting} waits for it in {call}"
    )]
    Left {
        /// The replica whose process has left.
        slot: usize,
        /// The replica that waits.
        waiting: usize,
        /// What it waits in.
        call: Arc<CollectiveCall>,
    },
    /// A replica calls a collective after the call of the parallel function has ended for it.
    #[error("replica {slot} calls {call} after its function has returned")]
    Ended {
        /// The replica.
        slot: usize,
        /// What it called.
        call: Arc<CollectiveCall>,
    },
    /// A replica returned without having waited for a collective that it has started.
    #[error("replica {slot} has returned without having waited for {call}")]
    NeverAwaited {
        /// The replica.
        slot: usize,
        /// What it has started.
        call: Arc<CollectiveCall>,
    },
    /// Every replica that has not returned waits, in groups that cannot become complete.
    #[error("all replicas wait for each other: {}", waiters(waiting))]
    Deadlock {
        /// The replicas that wait, and in what.
        waiting: Vec<(usize, Arc<CollectiveCall>)>,
    },
    /// A replica waited in a collective for longer than the mesh allows.
    #[error("replica {slot} waited for more than {after:?} in {call}{}", absent(missing))]
    Deadline {
        /// The replica that waited.
        slot: usize,
        /// The replicas of its group that have not come, or not finished; none where that cannot be
        /// known, as over NCCL.
        missing: Vec<usize>,
        /// What it waited in.
        call: Arc<CollectiveCall>,
        /// The mesh's deadline.
        after: Duration,
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
}

/// Why the processes of a mesh do not come together.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ProcessError {
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
    /// The kind of its cause is [`AlreadyExists`](std::io::ErrorKind::AlreadyExists) for the file
    /// of another mesh, [`TimedOut`](std::io::ErrorKind::TimedOut) if another rank has not written it
    /// in time, and [`InvalidData`](std::io::ErrorKind::InvalidData) for one that is not of this
    /// version, or is of another world.
    #[cfg(feature = "nccl")]
    #[error("the processes cannot find each other at {}: {}", path.display(), in_one_line(cause))]
    Store {
        /// The file.
        path: std::path::PathBuf,
        /// What is wrong with it.
        cause: std::io::Error,
    },
    /// A second thread of a process called a function on a mesh that spans several processes; over
    /// them calls meet in the order in which each process makes them, which two threads do not keep.
    /// Over MPI one thread calls on all meshes of a process.
    #[error(
        "thread {name} uses a mesh of several processes after another thread has called on one: one thread makes all \
         calls, since those of two would come in another order in every process"
    )]
    OtherThread {
        /// The name of the thread that was refused.
        name: String,
    },
    /// The processes of a mesh cannot tell each other something, at the end of a call or in
    /// [`DeviceMesh::process_allgather`](crate::DeviceMesh::process_allgather); also because one of
    /// them has come to the one and another to the other.
    #[error("failed to exchange results between processes: {}", one_line(cause))]
    Exchange {
        /// What went wrong.
        cause: candle_core::Error,
    },
    /// Another process has failed where all processes tell each other something, at the end of a
    /// call or in [`DeviceMesh::process_allgather`](crate::DeviceMesh::process_allgather).
    #[error("the process of slot {slot} has failed: {reason}")]
    Peer {
        /// Its slot.
        slot: usize,
        /// Its error's message.
        reason: String,
    },
    /// Meshes that span several processes do not have this yet.
    #[error("{what} of a mesh that spans several processes is not supported")]
    Unsupported {
        /// What was asked for.
        what: &'static str,
    },
}

impl Error {
    /// The error of a failed cut or move of input number `index`.
    pub(crate) fn shard(index: usize) -> impl FnOnce(candle_core::Error) -> Self {
        move |cause| ValueError::Shard { index, cause }.into()
    }

    /// The error of a failed join of output number `index`.
    pub(crate) fn gather(index: usize) -> impl FnOnce(candle_core::Error) -> Self {
        move |cause| ValueError::Gather { index, cause }.into()
    }
}

impl From<SpecFault> for Error {
    fn from(fault: SpecFault) -> Self {
        Self::Specs(vec![fault])
    }
}

/// The message of an error of candle and of its causes in one line, for the message of an error that
/// wraps it.
///
/// candle's own text goes over many lines, and where `RUST_BACKTRACE` is set it ends in a backtrace
/// of a hundred more.
///
/// # Examples
///
/// ```
/// let error = candle_core::Error::msg("no such tensor").context("loading");
/// assert_eq!(pmap_mesh::one_line(&error), "loading: no such tensor");
/// ```
pub fn one_line(error: &candle_core::Error) -> String {
    match error {
        candle_core::Error::WithBacktrace { inner, .. } => one_line(inner),
        candle_core::Error::WithPath { inner, path } => {
            format!("{}: {}", path.display(), one_line(inner))
        }
        candle_core::Error::Context { inner, context } => {
            format!("{context}: {}", one_line(inner))
        }
        other => in_one_line(other),
    }
}

/// The messages of an error and of its sources, in one line.
fn in_one_line(error: &(dyn StdError + 'static)) -> String {
    let chain = iter::successors(Some(error), |&error| error.source());
    let messages: Vec<String> = chain
        .map(|error| error.to_string().split_whitespace().collect::<Vec<_>>().join(" "))
        .collect();
    messages.join(": ")
}

fn waiters(waiting: &[(usize, Arc<CollectiveCall>)]) -> String {
    let waiters: Vec<String> =
        waiting.iter().map(|(slot, call)| format!("replica {slot} in {call}")).collect();
    waiters.join(", ")
}

/// The replicas that a deadline is to blame on, as far as they are known.
fn absent(missing: &[usize]) -> String {
    let slots: Vec<String> = missing.iter().map(ToString::to_string).collect();
    match slots.len() {
        0 => String::new(),
        1 => format!("; replica {} did not come", slots[0]),
        _ => format!("; replicas {} did not come", slots.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use std::{backtrace::Backtrace, io};

    use candle_core::Error as CandleError;

    use super::*;

    fn with_backtrace(inner: CandleError) -> CandleError {
        CandleError::WithBacktrace {
            inner: Box::new(inner),
            backtrace: Box::new(Backtrace::force_capture()),
        }
    }

    fn failed(cause: CandleError) -> Error {
        ReplicaError::Failed { slot: 2, device: Device::Cpu, cause }.into()
    }

    #[test]
    fn the_cause_is_named_once_and_without_its_backtrace() {
        let error = failed(with_backtrace(CandleError::Msg("no data".into())));
        assert_eq!(error.to_string(), "replica 2 on Cpu failed: no data");
        assert!(error.source().is_none());
    }

    #[test]
    fn what_surrounds_a_cause_stays_in_one_line() {
        let missing = CandleError::Io(io::Error::new(io::ErrorKind::NotFound, "no\nfile"));
        let cause = with_backtrace(missing).context("reading a shard").with_path("a/b");
        assert_eq!(
            failed(with_backtrace(cause)).to_string(),
            "replica 2 on Cpu failed: a/b: reading a shard: no file"
        );
    }

    #[test]
    fn causes_of_a_cause_are_named() {
        #[derive(Debug, thiserror::Error)]
        #[error("outer")]
        struct Outer(#[source] io::Error);
        let inner = io::Error::other("inner");
        assert_eq!(in_one_line(&Outer(inner)), "outer: inner");
    }

    #[test]
    fn a_worker_that_cannot_be_started_is_named_with_its_reason() {
        let cause = rayon::ThreadPoolBuilder::new()
            .num_threads(1)
            .spawn_handler(|_| Err(io::Error::other("no more threads")))
            .build()
            .unwrap_err();
        let error = Error::from(MeshError::Worker { slot: 3, cause });
        assert_eq!(error.to_string(), "the worker of slot 3 cannot be started: no more threads");
        assert!(error.source().is_none());
    }

    #[test]
    fn causes_that_are_values_are_said_once() {
        let gather = Error::gather(1)(CandleError::Msg("shapes differ".into()));
        assert_eq!(gather.to_string(), "output 1 cannot be gathered: shapes differ");
        let shard = Error::shard(0)(CandleError::Msg("no memory".into()));
        assert_eq!(shard.to_string(), "input 0 cannot be sharded: no memory");
        assert!(gather.source().is_none() && shard.source().is_none());
    }
}
