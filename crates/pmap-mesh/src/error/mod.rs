//! The errors of meshes: from before a replica starts, and from inside a replica.

pub(crate) mod call;
pub(crate) mod fault;

use std::{error::Error as StdError, iter, panic::Location, time::Duration};

use candle_core::Device;

use crate::error::fault::SpecFault;

/// The result of a fallible function of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why a mesh could not be made, or a call on a mesh failed.
///
/// An error with an underlying cause, such as one of candle's errors, has the cause in its field
/// `cause`. Its message includes the cause's message in one line, without candle's backtrace, and
/// [`source`](std::error::Error::source) is `None`, so printing the chain of errors repeats
/// nothing.
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
    /// A mesh cannot be made, or lacks a requested axis or device.
    #[error(transparent)]
    Mesh(#[from] MeshError),
    /// Specs do not fit the tensors. Lists the messages of all faults: a wrong number of specs, an
    /// axis that the mesh lacks or that is named twice, an argument that is neither sharded nor
    /// replicated, or a dimension that is out of range or that does not split over the devices.
    #[error("{}", .0.join("; "))]
    Specs(Vec<String>),
    /// An argument cannot be cut, or the results of the replicas cannot be joined.
    #[error(transparent)]
    Value(#[from] ValueError),
    /// A replica failed.
    #[error(transparent)]
    Replica(#[from] ReplicaError),
    /// Replicas do not complete a collective.
    #[error(transparent)]
    Collective(#[from] CollectiveError),
    /// The processes of a mesh cannot start or communicate.
    #[error(transparent)]
    Process(#[from] ProcessError),
}

/// Why a mesh cannot be made, or lacks a requested axis or device.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MeshError {
    /// A mesh needs at least one device and takes at most
    /// [`DeviceMesh::MAX_DEVICES`](crate::DeviceMesh::MAX_DEVICES).
    #[error("invalid mesh size {count}: must be between 1 and {max} devices")]
    Size {
        /// The requested number of devices: the product of the sizes of all axes.
        count: usize,
        /// The largest number of devices in a mesh.
        max: usize,
    },
    /// Names or number of the axes are invalid, devices do not fill them, or a coordinate is beyond
    /// its axis.
    #[error("{reason}")]
    Axes {
        /// The axis or number at fault, and its limit.
        reason: String,
    },
    /// The mesh has no axis of this name.
    #[error("the mesh has no axis named {name}; its axes are {}", known.join(", "))]
    UnknownAxis {
        /// The requested name.
        name: String,
        /// The names of the mesh's axes.
        known: Vec<String>,
    },
    /// The device does not exist, or this build does not support its kind.
    #[error("device {index} cannot be opened: {}", one_line(cause))]
    Device {
        /// The index of the device among devices of its kind.
        index: usize,
        /// candle's error.
        cause: candle_core::Error,
    },
    /// The thread counts of candle's kernels can no longer be set, or this system cannot count the
    /// threads of a process; see [`init_threads`](crate::init_threads).
    #[error("the number of candle's threads cannot be set {reason} before the program starts")]
    Threads {
        /// The reason, with the number of threads in the process if it is known, and the way out.
        reason: String,
    },
    /// The worker threads of a slot could not be started.
    #[error("the worker of slot {slot} cannot be started: {cause}")]
    Worker {
        /// The slot.
        slot: usize,
        /// The error of the operating system.
        cause: rayon::ThreadPoolBuildError,
    },
}

/// Why an argument cannot be cut, or results cannot be joined.
///
/// The index of an input or output is the position of its tensor among all tensors of the arguments
/// or results, from 0.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ValueError {
    /// candle failed to cut an input or to move it to its device.
    #[error("input {index} cannot be sharded: {}", one_line(cause))]
    Shard {
        /// The index of the input.
        index: usize,
        /// candle's error.
        cause: candle_core::Error,
    },
    /// A value is on the devices of another mesh.
    #[error("the value is on another mesh; gather it there and shard it here")]
    MeshMismatch,
    /// The replicas returned different numbers of tensors, or not as many as
    /// [`PMap::call_into`](crate::PMap::call_into) got for the results.
    #[error("replica {slot} returned {tensors} tensors, expected {expected}")]
    OutputCount {
        /// The first replica whose number of tensors is wrong.
        slot: usize,
        /// The number of tensors that this replica returned.
        tensors: usize,
        /// The number of tensors that replica 0 returned, or that the caller passed.
        expected: usize,
    },
    /// Two processes join the results of a call in different ways.
    #[error(
        "replicas 0 and {slot} have different out_axes, or only one of them trusts replicated results; all processes \
         must join results in the same way"
    )]
    OutAxes {
        /// The first replica that differs from replica 0.
        slot: usize,
    },
    /// An output differs between two replicas, although its spec declares it replicated; see
    /// [`PMap::trust_replicated`](crate::PMap::trust_replicated).
    #[error(
        "output {index} differs between replicas {first} and {slot}, but its spec declares it replicated"
    )]
    NotReplicated {
        /// The index of the output.
        index: usize,
        /// The replica that differs.
        slot: usize,
        /// The first replica with the same part of the output.
        first: usize,
    },
    /// A [`RunLayout`](crate::support::RunLayout) does not give every item exactly one owner.
    #[error("invalid layout {layout}: {reason}")]
    Layout {
        /// The name of the layout.
        layout: String,
        /// The fault: the rank, tensor and items, and the limit.
        reason: String,
    },
    /// The outputs of the replicas cannot be joined.
    #[error("output {index} cannot be gathered: {}", one_line(cause))]
    Gather {
        /// The index of the output.
        index: usize,
        /// candle's error.
        cause: candle_core::Error,
    },
}

/// Why a replica failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ReplicaError {
    /// The function returned an error on one device. If it failed on several devices, this is the
    /// error of the lowest slot.
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
    /// A replica called a parallel function, so that its worker would wait for itself.
    ///
    /// A call from a thread that a replica has started is not detected. If the replica waits for
    /// that thread, the call ends with [`Stuck`](Self::Stuck) on a mesh with a deadline, and
    /// otherwise never.
    #[error(
        "a parallel function cannot be called inside a replica of another: its worker would wait for itself, or for a \
         mesh whose workers wait for this one; call it between two calls instead"
    )]
    Nested,
    /// A replica of an earlier call has run for longer than the mesh's deadline: it has missed the
    /// deadline of its own call, or this call has waited for its turn as long.
    ///
    /// The likely cause of the latter is that the replica waits for this call, which a thread made
    /// that it started. The rejected call has not begun in that slot; it has begun in other slots
    /// only if it was made before the deadline. The mesh can be used again when the replica returns.
    #[error(
        "slot {slot} is busy: its replica of the call at {call} has run for longer than the mesh's deadline; a replica \
         must not wait for a call on its own mesh, even of another thread"
    )]
    Stuck {
        /// The slot of the running replica.
        slot: usize,
        /// The source location of the earlier call.
        call: &'static Location<'static>,
    },
}

/// Why replicas do not complete a collective.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CollectiveError {
    /// A collective ended because another replica failed. Only replicas get this error; the call
    /// itself returns the cause.
    #[error("ended by replica {slot}: {cause}")]
    Aborted {
        /// The replica that failed.
        slot: usize,
        /// The message of its error.
        cause: String,
    },
    /// Two replicas of a group called different collectives.
    #[error("replica {left} calls {left_call}, replica {right} calls {right_call}")]
    Mismatch {
        /// The replica that arrived first; over several processes, the first of the group.
        left: usize,
        /// The first replica's call and its location.
        left_call: String,
        /// The other replica; equal to `left` if two threads of this replica called at once.
        right: usize,
        /// The other replica's call and its location.
        right_call: String,
    },
    /// A replica returned while another replica waits for it in a collective.
    #[error("replica {slot} has returned while replica {waiting} waits for it in {call}")]
    PeerReturned {
        /// The replica that returned.
        slot: usize,
        /// The waiting replica.
        waiting: usize,
        /// The call in which it waits.
        call: String,
    },
    /// A replica calls a collective after its function has returned.
    #[error("replica {slot} calls {call} after its function has returned")]
    Ended {
        /// The replica.
        slot: usize,
        /// The call.
        call: String,
    },
    /// A replica returned without waiting for a collective that it had started.
    #[error("replica {slot} has returned without having waited for {call}")]
    NeverAwaited {
        /// The replica.
        slot: usize,
        /// The collective that it started.
        call: String,
    },
    /// Every replica that has not returned waits, in groups that cannot complete.
    #[error("all replicas wait for each other: {}", list_waiting(waiting))]
    Deadlock {
        /// The waiting replicas and their calls.
        waiting: Vec<(usize, String)>,
    },
    /// A replica waited in a collective for longer than the mesh allows.
    #[error("replica {slot} waited for more than {limit:?} in {call}{}", list_missing(missing))]
    Deadline {
        /// The replica that waited.
        slot: usize,
        /// The replicas of the group that have not arrived or not finished; empty if they are
        /// unknown, as over NCCL.
        missing: Vec<usize>,
        /// The call in which it waited.
        call: String,
        /// The mesh's deadline.
        limit: Duration,
    },
}

/// Why the processes of a mesh cannot start or communicate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ProcessError {
    /// MPI could not be started, or the number of processes is not the number of slots.
    #[cfg(feature = "mpi")]
    #[error("MPI: {reason}")]
    Mpi {
        /// The reason.
        reason: String,
    },
    /// NCCL or its device could not be started, or the number of processes is not the number of
    /// slots.
    #[cfg(feature = "nccl")]
    #[error("NCCL: {reason}")]
    Nccl {
        /// The reason.
        reason: String,
    },
    /// The rendezvous file of the processes could not be used.
    ///
    /// The kind of the cause is [`AlreadyExists`](std::io::ErrorKind::AlreadyExists) for the file
    /// of another mesh, [`TimedOut`](std::io::ErrorKind::TimedOut) if another rank has not written
    /// the file in time, and [`InvalidData`](std::io::ErrorKind::InvalidData) for a file of another
    /// version or for another number of processes.
    #[cfg(feature = "nccl")]
    #[error("the processes cannot find each other at {}: {}", path.display(), in_one_line(cause))]
    Store {
        /// The file.
        path: std::path::PathBuf,
        /// The error of the file.
        cause: std::io::Error,
    },
    /// A second thread of a process called a function on a mesh that spans several processes. This
    /// is rejected because collectives are matched in the order in which each process makes them,
    /// and two threads have no common order. Over MPI one thread must make the calls on all meshes
    /// of a process.
    #[error(
        "thread {name} uses a mesh of several processes, but another thread has called on one before: make all calls \
         from one thread, since two threads would make them in a different order in every process"
    )]
    WrongThread {
        /// The name of the rejected thread.
        name: String,
    },
    /// The processes of a mesh failed to exchange data, at the end of a call or in
    /// [`DeviceMesh::process_allgather`](crate::DeviceMesh::process_allgather). This happens, for
    /// example, if one process reaches the end of a call while another calls `process_allgather`.
    #[error("failed to exchange results between processes: {}", one_line(cause))]
    Exchange {
        /// The error of the exchange.
        cause: candle_core::Error,
    },
    /// Another process failed before an exchange of all processes, at the end of a call or in
    /// [`DeviceMesh::process_allgather`](crate::DeviceMesh::process_allgather).
    #[error("the process of slot {slot} has failed: {reason}")]
    Peer {
        /// The slot of the failed process.
        slot: usize,
        /// The message of its error.
        reason: String,
    },
}

impl Error {
    /// Returns a function that wraps candle's error from cutting or moving input number `index`.
    pub(crate) fn shard(index: usize) -> impl FnOnce(candle_core::Error) -> Self {
        move |cause| ValueError::Shard { index, cause }.into()
    }

    /// Returns a function that wraps candle's error from joining output number `index`.
    pub(crate) fn gather(index: usize) -> impl FnOnce(candle_core::Error) -> Self {
        move |cause| ValueError::Gather { index, cause }.into()
    }
}

impl From<SpecFault> for Error {
    fn from(fault: SpecFault) -> Self {
        Self::Specs(vec![fault.0])
    }
}

/// Returns the message of a candle error and its causes in one line, for the message of an error
/// that wraps it.
///
/// candle's own text has many lines and, with `RUST_BACKTRACE`, a backtrace of a hundred more.
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

/// Returns the messages of an error and its sources in one line.
fn in_one_line(error: &(dyn StdError + 'static)) -> String {
    let chain = iter::successors(Some(error), |&error| error.source());
    let messages: Vec<String> = chain
        .map(|error| error.to_string().split_whitespace().collect::<Vec<_>>().join(" "))
        .collect();
    messages.join(": ")
}

/// Lists the waiting replicas and their calls.
fn list_waiting(waiting: &[(usize, String)]) -> String {
    let replicas: Vec<String> =
        waiting.iter().map(|(slot, call)| format!("replica {slot} in {call}")).collect();
    replicas.join(", ")
}

/// Lists the replicas that missed a deadline; empty if they are unknown.
fn list_missing(missing: &[usize]) -> String {
    let slots: Vec<String> = missing.iter().map(ToString::to_string).collect();
    match slots.len() {
        0 => String::new(),
        1 => format!("; replica {} did not arrive", slots[0]),
        _ => format!("; replicas {} did not arrive", slots.join(", ")),
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
    fn cause_appears_once_without_backtrace() {
        let error = failed(with_backtrace(CandleError::Msg("no data".into())));
        assert_eq!(error.to_string(), "replica 2 on Cpu failed: no data");
        assert!(error.source().is_none());
    }

    #[test]
    fn context_and_path_stay_in_one_line() {
        let missing = CandleError::Io(io::Error::new(io::ErrorKind::NotFound, "no\nfile"));
        let cause = with_backtrace(missing).context("reading a shard").with_path("a/b");
        assert_eq!(
            failed(with_backtrace(cause)).to_string(),
            "replica 2 on Cpu failed: a/b: reading a shard: no file"
        );
    }
}
