//! How a mesh is made: its axes and options, then its devices.

use std::{num::NonZeroU64, sync::Arc, time::Duration};

use candle_core::Device;

#[cfg(feature = "mpi")]
use crate::engine::mpi::{Mpi, Session};
#[cfg(feature = "nccl")]
use crate::engine::nccl::{Nccl, NcclStore};
#[cfg(any(feature = "mpi", feature = "nccl"))]
use crate::{engine::Backend, grid::PROCESS_DEADLINE};
use crate::{
    engine::threads::Threads,
    error::{MeshError, Result},
    grid::{MAX_DEVICES, Topology},
    mesh::DeviceMesh,
    sync::catch,
};

/// Options of a mesh, which its sub-meshes have too.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Options {
    /// Whether workers are bound to cores.
    pub(crate) pin: bool,
    /// How long a replica waits in a collective; for ever without.
    pub(crate) deadline: Option<Duration>,
    /// How fast lists of tensors travel between threads, if not at once.
    pub(crate) bytes_per_second: Option<NonZeroU64>,
}

/// The axes and options of a mesh to be made.
///
/// # Examples
///
/// ```
/// use pmap_mesh::DeviceMesh;
///
/// let minute = std::time::Duration::from_secs(60);
/// let mesh = DeviceMesh::builder().axis("data", 2).deadline(minute).cpu()?;
/// # Ok::<(), pmap_mesh::Error>(())
/// ```
#[derive(Clone, Debug)]
#[must_use = "a builder makes no mesh until it is given devices"]
pub struct DeviceMeshBuilder {
    /// Names and sizes, unchecked.
    pub(crate) axes: Vec<(String, usize)>,
    pub(crate) options: Options,
}

impl DeviceMeshBuilder {
    /// Adds an axis; the last one varies fastest.
    pub fn axis(mut self, name: &str, size: usize) -> Self {
        self.axes.push((name.to_owned(), size));
        self
    }

    /// Whether the workers of a mesh of processors are bound to cores; they are unless told
    /// otherwise, if there are at least two.
    ///
    /// Bound workers keep their caches, but cannot step aside for another busy process.
    pub fn pin(mut self, pin: bool) -> Self {
        self.options.pin = pin;
        self
    }

    /// How long a replica waits for the others, in a collective and when it has returned, before
    /// the call ends with [`CollectiveError::Deadline`](crate::CollectiveError::Deadline).
    ///
    /// In one process for ever by default, since failures of others end it anyway; over several
    /// processes, of which one may never come, for ten minutes.
    ///
    /// A replica that computes on cannot be stopped from outside. In one process the call returns
    /// without it, and further calls on the mesh are refused with
    /// [`ReplicaError::Stuck`](crate::ReplicaError::Stuck), which names its slot and the line of
    /// the call, until it returns; then the mesh works again. (A replica of
    /// [`pmap_scoped`](DeviceMesh::pmap_scoped) ends the process.) A mesh that is dropped meanwhile
    /// leaves the threads of that slot behind, which end when it returns. Only a call of which no
    /// replica returns or enters a collective has no limit.
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.options.deadline = Some(deadline);
        self
    }

    /// Lets the lists of tensors that threads of one process hand each other, such as the parameters
    /// and gradients of a sharded model, take their time, as over a network of this bandwidth: each
    /// slot receives one after the other. By default they are there at once.
    ///
    /// It is for experiments on one machine: what a slower network would cost, and how much of that
    /// is hidden by collectives that are [started](crate::Replica::start_gather_runs) ahead. Results
    /// do not change. Processes have the network that they have.
    ///
    /// # Examples
    ///
    /// ```
    /// use std::num::NonZeroU64;
    ///
    /// use pmap_mesh::DeviceMesh;
    ///
    /// let gigabyte = NonZeroU64::new(1_000_000_000).unwrap();
    /// let mesh = DeviceMesh::builder().axis("data", 2).simulated_bandwidth(gigabyte).cpu()?;
    /// # Ok::<(), pmap_mesh::Error>(())
    /// ```
    #[doc(hidden)]
    pub fn simulated_bandwidth(mut self, bytes_per_second: NonZeroU64) -> Self {
        self.options.bytes_per_second = Some(bytes_per_second);
        self
    }

    /// Makes the mesh of virtual devices, all of them this machine's processor.
    ///
    /// # Errors
    ///
    /// Those of [`devices`](Self::devices).
    pub fn cpu(self) -> Result<DeviceMesh> {
        self.open(|_| Ok(Device::Cpu))
    }

    /// Makes the mesh of the first CUDA devices.
    ///
    /// # Errors
    ///
    /// Those of [`DeviceMesh::cuda`] and [`devices`](Self::devices).
    pub fn cuda(self) -> Result<DeviceMesh> {
        // A stream of its own for each: candle's default streams are not ordered among threads.
        self.open(Device::new_cuda_with_stream)
    }

    /// Makes the mesh of the first Metal devices.
    ///
    /// # Errors
    ///
    /// Those of [`DeviceMesh::metal`] and [`devices`](Self::devices).
    pub fn metal(self) -> Result<DeviceMesh> {
        self.open(Device::new_metal)
    }

    /// Makes the mesh of these devices.
    ///
    /// # Errors
    ///
    /// [`MeshError::Size`] for no slots or more than [`DeviceMesh::MAX_DEVICES`],
    /// [`MeshError::AxisCount`] for too many axes, [`MeshError::UnnamedAxis`],
    /// [`MeshError::DuplicateAxis`], [`MeshError::DeviceCount`] if there are more or fewer devices
    /// than slots, and [`MeshError::Worker`] if the system gives no more threads.
    pub fn devices(self, devices: Vec<Device>) -> Result<DeviceMesh> {
        let topology = Topology::new(self.axes, MAX_DEVICES)?;
        let slots = topology.slots();
        if devices.len() != slots {
            return Err(MeshError::DeviceCount { devices: devices.len(), slots }.into());
        }
        let backend =
            Arc::new(Threads::new(slots, self.options.deadline, self.options.bytes_per_second));
        DeviceMesh::start(devices, 0, Arc::new(topology), self.options, backend)
    }

    fn open(self, device: impl Fn(usize) -> candle_core::Result<Device>) -> Result<DeviceMesh> {
        // Axes that make no mesh are refused before devices are opened.
        let slots = Topology::new(self.axes.clone(), MAX_DEVICES)?.slots();
        let open = |index| {
            // candle panics for some devices that are not there.
            let opened = catch(|| device(index));
            let opened = opened.unwrap_or_else(|panic| Err(candle_core::Error::msg(panic)));
            opened.map_err(|cause| MeshError::Device { index, cause })
        };
        let devices: Result<_, MeshError> = (0..slots).map(open).collect();
        self.devices(devices?)
    }
}

/// Meshes of one process per slot.
#[cfg(any(feature = "mpi", feature = "nccl"))]
impl DeviceMeshBuilder {
    /// Makes the mesh of all processes that MPI has started, one slot each, by rank; this one's
    /// runs on `device`.
    ///
    /// Every process makes the same mesh and calls the same functions with the same arguments, and
    /// takes its own shard of them; results come back to all of them. All compute the same: sums
    /// are formed in rank order. A replica that fails ends all processes, with its error on the
    /// standard error of its own, since the others may wait for it: there is no call that returns
    /// an error for it.
    ///
    /// Neither is there a panic that one process survives: from the first mesh over MPI on, a panic
    /// on any thread of a process ends all of them, also one that the program would catch by
    /// [`catch_unwind`](std::panic::catch_unwind) or by joining its thread. A rank that unwinds
    /// would wait for the others when MPI ends, and they for it.
    ///
    /// One thread of a process calls all its meshes over MPI, which has begun with support for one
    /// thread at a time. A call from a second thread is refused, whichever mesh it is of, and so is a
    /// mesh that a second thread makes once another one calls.
    ///
    /// A process that drops its last mesh waits there for the others to do so. Those that still wait
    /// for it in a collective end the program at once, with an error that names it.
    ///
    /// A mesh without axes is a row named [`DeviceMesh::AXIS`].
    ///
    /// # Errors
    ///
    /// Those of [`devices`](Self::devices), [`ProcessError::OtherThread`], and [`ProcessError::Mpi`] if
    /// MPI cannot be started, or a second time, if not all processes come within the mesh's
    /// [deadline](Self::deadline), if they are not as many as the mesh has slots, or if MPI grants its
    /// calls to one thread only.
    ///
    /// [`ProcessError::Mpi`]: crate::ProcessError::Mpi
    /// [`ProcessError::OtherThread`]: crate::ProcessError::OtherThread
    #[cfg(feature = "mpi")]
    pub fn mpi(self, device: Device) -> Result<DeviceMesh> {
        let deadline = self.options.deadline.unwrap_or(PROCESS_DEADLINE);
        let session = Session::start_within(deadline)?;
        let slot = session.rank();
        let processes = session.size();
        self.over_processes(slot, processes, device, |topology, deadline, _| {
            Ok(Arc::new(Mpi::new(session, Arc::clone(topology), deadline)?))
        })
    }

    /// Makes the mesh of as many processes as the world of `place` has, one slot each, by rank;
    /// this one's runs on CUDA device `device` of its machine, and tensors go from device to device
    /// through NCCL.
    ///
    /// The launcher knows which process this is and which device it takes: a program passes on the
    /// placement and the local rank of `core_types::LaunchEnv`. The processes find each other at
    /// `store`, and wait there for each other for up to ten minutes.
    ///
    /// As over MPI, every process makes the same mesh and calls the same functions with the same
    /// arguments, sums are formed in rank order, and a replica that fails ends its process with its
    /// error on the standard error; the launcher then ends the others, which wait for it. Tensors
    /// of other devices are refused in collectives, and types that cannot be sent or added up: all
    /// but `U8`, `U32`, `I64` and floating point of 16 to 64 bits.
    ///
    /// A collective that was started has a communicator and a stream of its own, and is carried out
    /// while the GPU computes.
    ///
    /// A mesh without axes is a row named [`DeviceMesh::AXIS`].
    ///
    /// # Errors
    ///
    /// Those of [`devices`](Self::devices), [`MeshError::Device`] if there is no such device,
    /// [`ProcessError::Store`] if the processes cannot find each other, and [`ProcessError::Nccl`]
    /// if NCCL cannot be started, two processes take one GPU, or the mesh has not as many slots as
    /// there are processes.
    ///
    /// [`ProcessError::Nccl`]: crate::ProcessError::Nccl
    /// [`ProcessError::Store`]: crate::ProcessError::Store
    #[cfg(feature = "nccl")]
    pub fn nccl(
        self,
        place: core_types::Placement,
        device: usize,
        store: &NcclStore,
    ) -> Result<DeviceMesh> {
        let opened = Device::new_cuda_with_stream(device)
            .map_err(|cause| MeshError::Device { index: device, cause })?;
        let slot = place.rank().as_usize();
        let processes = place.world_size().as_usize();
        self.over_processes(slot, processes, opened, |topology, deadline, device| {
            Ok(Arc::new(Nccl::new(place, device, store, Arc::clone(topology), deadline)?))
        })
    }

    /// Makes the mesh of several processes, of which this one's slot is `slot`; its backend is made
    /// when the axes have been checked.
    fn over_processes(
        self,
        slot: usize,
        processes: usize,
        device: Device,
        backend: impl FnOnce(&Arc<Topology>, Duration, &Device) -> Result<Arc<dyn Backend>>,
    ) -> Result<DeviceMesh> {
        let builder = match self.axes[..] {
            [] => self.axis(DeviceMesh::AXIS, processes),
            _ => self,
        };
        let topology = Arc::new(Topology::new(builder.axes, MAX_DEVICES)?);
        let deadline = builder.options.deadline.unwrap_or(PROCESS_DEADLINE);
        let backend = backend(&topology, deadline, &device)?;
        DeviceMesh::start(vec![device], slot, topology, builder.options, backend)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Error;

    #[test]
    fn a_device_whose_opening_panics_is_named_with_the_reason() {
        let open = |index| {
            assert_eq!(index, 0, "no such device");
            Ok(Device::Cpu)
        };
        let refused = DeviceMesh::builder().axis("a", 2).open(open).unwrap_err();
        let text = refused.to_string();
        assert!(matches!(refused, Error::Mesh(MeshError::Device { index: 1, .. })), "{text}");
        assert!(text.contains("no such device"), "{text}");
    }
}
