//! What can go wrong on a mesh, before a replica starts and inside it.

use candle_core::{DType, Device};

/// The result of making or calling a parallel function.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why a mesh could not be made, or a call on it did not return a result.
///
/// Inputs and outputs are counted in the order in which their tensors stand in the arguments, from 0.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A mesh needs at least one device and takes at most [`DeviceMesh::MAX_DEVICES`](crate::DeviceMesh::MAX_DEVICES).
    #[error("a mesh of {count} devices cannot be made, the number must be from 1 to {max}")]
    MeshSize {
        /// The number of devices asked for.
        count: usize,
        /// The largest number of devices in a mesh.
        max: usize,
    },
    /// Device number `index` of its kind is not there, or this build does not support its kind.
    #[error("device {index} cannot be opened")]
    Device {
        /// The number of the device.
        index: usize,
        /// What candle says of it.
        source: candle_core::Error,
    },
    /// A sharding plan cannot be made of the tensors.
    #[cfg(feature = "plan")]
    #[error(transparent)]
    Plan(#[from] fsdp_plan::Error),
    /// The worker threads of a device could not be started.
    #[error("the worker of device {index} cannot be started")]
    Worker {
        /// The device's place in the mesh.
        index: usize,
        /// What the operating system says of it.
        source: rayon::ThreadPoolBuildError,
    },
    /// There are more or fewer axes than tensors to apply them to.
    #[error("{side}_axes names {axes} axes for {tensors} tensors")]
    AxesCount {
        /// `in` or `out`.
        side: &'static str,
        /// The number of axes given.
        axes: usize,
        /// The number of tensors in the arguments or results.
        tensors: usize,
    },
    /// An input or output has no such axis.
    #[error("axis {axis} is out of range for {side}put {index} of shape {shape:?}")]
    AxisOutOfRange {
        /// `in` or `out`.
        side: &'static str,
        /// Which input or output.
        index: usize,
        /// The axis that was asked for, negative ones count from the end.
        axis: isize,
        /// The shape it was asked of.
        shape: Vec<usize>,
    },
    /// The devices cannot get equal shards.
    #[error("axis {axis} of input {index} has size {size}, which does not split evenly over {devices} devices")]
    NotDivisible {
        /// Which input.
        index: usize,
        /// The axis to cut, as it was given.
        axis: isize,
        /// The input's size along that axis.
        size: usize,
        /// The number of devices in the mesh.
        devices: usize,
    },
    /// Cutting an input, or moving it to its device, failed in candle.
    #[error("input {index} cannot be sharded")]
    Shard {
        /// Which input.
        index: usize,
        /// What candle says of it.
        source: candle_core::Error,
    },
    /// The function returned an error on one device; of several, this is the one with the lowest index.
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
    /// The replicas returned different numbers of tensors.
    #[error("replica {index} returned {tensors} tensors, replica 0 returned {expected}")]
    OutputsDiffer {
        /// The replica that differs from replica 0.
        index: usize,
        /// How many tensors it returned.
        tensors: usize,
        /// How many tensors replica 0 returned.
        expected: usize,
    },
    /// A mean of integers would have to be rounded.
    #[error("output {index} of type {dtype:?} has no mean, only floats have; sum it")]
    MeanOfIntegers {
        /// Which output.
        index: usize,
        /// Its type.
        dtype: DType,
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
    #[error("a parallel function cannot be called inside a replica of another")]
    Nested,
}
