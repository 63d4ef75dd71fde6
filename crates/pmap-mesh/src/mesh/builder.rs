//! The builder of a mesh: its axes and options, then its devices.

#[cfg(feature = "nccl")]
use std::path::Path;
use std::{sync::Arc, time::Duration};

use candle_core::Device;

#[cfg(feature = "mpi")]
use crate::engine::mpi::{Mpi, MpiSession};
#[cfg(feature = "nccl")]
use crate::engine::nccl::Nccl;
#[cfg(any(feature = "mpi", feature = "nccl"))]
use crate::{engine::Backend, grid::PROCESS_DEADLINE};
use crate::{
    engine::threads::ThreadBackend,
    error::{MeshError, Result},
    grid::{MAX_DEVICES, Topology, axes_error},
    mesh::DeviceMesh,
    sync::catch,
};

/// Options of a mesh.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Options {
    /// Whether workers are bound to cores.
    pub(crate) pin: bool,
    /// Time limit for a replica to wait in a collective; `None` for no limit.
    pub(crate) deadline: Option<Duration>,
}

/// A builder for [`DeviceMesh`]: set axes and options, then choose devices.
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

    /// Sets whether the workers of a mesh on the processor are bound to cores. By default they are,
    /// if there are at least two.
    ///
    /// Bound workers keep their caches, but cannot move away from another busy process.
    pub fn pin(mut self, pin: bool) -> Self {
        self.options.pin = pin;
        self
    }

    /// Sets how long a replica waits for the others, in a collective or after it has returned,
    /// before the call fails with [`CollectiveError::Deadline`](crate::CollectiveError::Deadline).
    ///
    /// By default there is no limit in one process, since a failing replica ends the call anyway,
    /// and a limit of ten minutes over several processes, since one of them may never start.
    ///
    /// A replica that keeps computing cannot be stopped from outside. In one process the call
    /// returns without it. Until the replica returns, further calls on the mesh fail with
    /// [`ReplicaError::Stuck`](crate::ReplicaError::Stuck), which names the slot and the line of
    /// the call; then the mesh works again. (A replica of [`pmap_scoped`](DeviceMesh::pmap_scoped)
    /// ends the process.) A mesh that is dropped meanwhile leaves the threads of that slot running
    /// until the replica returns. A call in which no replica returns or enters a collective has no
    /// limit, but the calls of other threads that wait for their turn do not wait longer for it than
    /// the deadline, and fail with [`ReplicaError::Stuck`](crate::ReplicaError::Stuck).
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.options.deadline = Some(deadline);
        self
    }

    /// Builds the mesh of virtual devices, all of them this machine's processor.
    ///
    /// # Errors
    ///
    /// The errors of [`devices`](Self::devices).
    pub fn cpu(self) -> Result<DeviceMesh> {
        self.open(|_| Ok(Device::Cpu))
    }

    /// Builds the mesh of the first CUDA devices.
    ///
    /// # Errors
    ///
    /// The errors of [`DeviceMesh::cuda`] and [`devices`](Self::devices).
    pub fn cuda(self) -> Result<DeviceMesh> {
        // Each device needs a separate stream: candle does not order its default streams among
        // threads.
        self.open(Device::new_cuda_with_stream)
    }

    /// Builds the mesh of the first Metal devices.
    ///
    /// # Errors
    ///
    /// The errors of [`DeviceMesh::metal`] and [`devices`](Self::devices).
    pub fn metal(self) -> Result<DeviceMesh> {
        self.open(Device::new_metal)
    }

    /// Builds the mesh of these devices.
    ///
    /// # Errors
    ///
    /// [`MeshError::Size`] for no slots or more than [`DeviceMesh::MAX_DEVICES`],
    /// [`MeshError::Axes`] for too many axes, an axis without a name, two axes of one name, and more
    /// or fewer devices than slots, and [`MeshError::Worker`] if the system gives no more threads.
    pub fn devices(self, devices: Vec<Device>) -> Result<DeviceMesh> {
        let topology = Topology::new(self.axes, MAX_DEVICES)?;
        let slots = topology.slots();
        if devices.len() != slots {
            let devices = devices.len();
            let reason = format!("{devices} devices do not fill a mesh of {slots} slots");
            return Err(axes_error(reason).into());
        }
        let backend = Arc::new(ThreadBackend::new(slots, self.options.deadline));
        DeviceMesh::start(devices, 0, Arc::new(topology), self.options, backend)
    }

    fn open(self, device: impl Fn(usize) -> candle_core::Result<Device>) -> Result<DeviceMesh> {
        // Check the axes before opening any device.
        let slots = Topology::new(self.axes.clone(), MAX_DEVICES)?.slots();
        let mut devices = Vec::with_capacity(slots);
        for index in 0..slots {
            // candle panics for some devices that do not exist.
            let opened = catch(|| device(index));
            let opened = opened.unwrap_or_else(|panic| Err(candle_core::Error::msg(panic)));
            devices.push(opened.map_err(|cause| MeshError::Device { index, cause })?);
        }
        self.devices(devices)
    }
}

/// Meshes of one process per slot.
#[cfg(any(feature = "mpi", feature = "nccl"))]
impl DeviceMeshBuilder {
    /// Builds the mesh of all processes that MPI has started, one slot each, by rank. This
    /// process's slot runs on `device`.
    ///
    /// Every process builds the same mesh and calls the same functions with the same arguments.
    /// Each takes its shard of the arguments, and all get the results. All compute the same values,
    /// because sums are formed in rank order. A failing replica ends all processes, since the
    /// others may wait for it; its process prints the error on standard error, and no call returns
    /// it.
    ///
    /// A panic ends all processes too: from the first mesh over MPI on, a panic on any thread ends
    /// the program, even one that the program would catch by
    /// [`catch_unwind`](std::panic::catch_unwind) or by joining the thread. Otherwise an unwinding
    /// rank would wait for the others in MPI's finalization while they wait for it in a collective.
    ///
    /// MPI is initialized for one thread at a time. So one thread of a process builds all its meshes
    /// over MPI and makes all calls on them; calls from a second thread fail.
    ///
    /// A process that drops its last mesh waits until the other processes drop theirs. If another
    /// process still waits in a collective, it ends the program with an error that names the process
    /// that dropped its mesh.
    ///
    /// A mesh without axes is a row named [`DeviceMesh::AXIS`].
    ///
    /// # Errors
    ///
    /// The errors of [`devices`](Self::devices); [`ProcessError::WrongThread`]; and
    /// [`ProcessError::Mpi`] if MPI cannot be started, or is started twice, if not all processes
    /// start within the mesh's [deadline](Self::deadline), if their number is not the number of
    /// slots, or if MPI restricts its calls to the main thread.
    ///
    /// [`ProcessError::Mpi`]: crate::ProcessError::Mpi
    /// [`ProcessError::WrongThread`]: crate::ProcessError::WrongThread
    #[cfg(feature = "mpi")]
    pub fn mpi(self, device: Device) -> Result<DeviceMesh> {
        let deadline = self.options.deadline.unwrap_or(PROCESS_DEADLINE);
        let session = MpiSession::start_within(deadline)?;
        let slot = session.rank();
        let processes = session.size();
        self.over_processes(slot, processes, device, |topology, deadline, _| {
            Ok(Arc::new(Mpi::new(session, Arc::clone(topology), deadline)?))
        })
    }

    /// Builds the mesh of the processes in the world of `place`, one slot each, by rank. This
    /// process's slot runs on CUDA device `device` of its machine, and NCCL moves tensors from
    /// device to device.
    ///
    /// The launcher knows the rank and the device of each process: pass on the placement and the
    /// local rank of `core_types::LaunchEnv`. The processes find each other through `store`, the
    /// path of a file that does not exist yet, on a file system that all machines share; they wait
    /// up to ten minutes. Each rank creates a file of this name with its rank appended, such as
    /// `name.3`. When rank 0 has read the files of all ranks, it writes the file `name`. Each rank
    /// removes its files when all ranks have joined. Make the name unique, for example with the id
    /// of the job: files of an earlier run are rejected.
    ///
    /// As over MPI, every process builds the same mesh and calls the same functions with the same
    /// arguments, and sums are formed in rank order. A failing replica ends its process with the
    /// error on standard error; the launcher then ends the other processes, which wait for it.
    /// Collectives reject tensors of other devices, and dtypes that cannot be sent or summed: all
    /// but `U8`, `U32`, `I64` and floating point of 16 to 64 bits.
    ///
    /// A started collective has a separate communicator and stream, and proceeds while the GPU
    /// computes.
    ///
    /// A mesh without axes is a row named [`DeviceMesh::AXIS`].
    ///
    /// # Errors
    ///
    /// The errors of [`devices`](Self::devices), [`MeshError::Device`] if the device does not
    /// exist, [`ProcessError::Store`] if the processes cannot find each other, and
    /// [`ProcessError::Nccl`] if NCCL cannot be started, two processes take the same GPU, or the
    /// number of processes is not the number of slots.
    ///
    /// [`ProcessError::Nccl`]: crate::ProcessError::Nccl
    /// [`ProcessError::Store`]: crate::ProcessError::Store
    #[cfg(feature = "nccl")]
    pub fn nccl(
        self,
        place: core_types::Placement,
        device: usize,
        store: impl AsRef<Path>,
    ) -> Result<DeviceMesh> {
        let opened = Device::new_cuda_with_stream(device)
            .map_err(|cause| MeshError::Device { index: device, cause })?;
        let slot = place.rank().as_usize();
        let processes = place.world_size().as_usize();
        self.over_processes(slot, processes, opened, |topology, deadline, device| {
            Ok(Arc::new(Nccl::new(place, device, store.as_ref(), Arc::clone(topology), deadline)?))
        })
    }

    /// Builds the mesh of several processes, with slot `slot` in this one. `backend` runs after the
    /// axes are checked.
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
    fn panic_while_opening_a_device_is_reported() {
        let refused = DeviceMesh::builder()
            .axis("a", 2)
            .open(|index| {
                assert_eq!(index, 0, "no such device");
                Ok(Device::Cpu)
            })
            .unwrap_err();
        let text = refused.to_string();
        assert!(matches!(refused, Error::Mesh(MeshError::Device { index: 1, .. })), "{text}");
        assert!(text.contains("no such device"), "{text}");
    }
}
