//! The mesh of devices: construction, devices and axes, exchange between its processes.

mod agree;
pub(crate) mod builder;
mod traffic;
pub(crate) mod workers;

use std::{
    fmt,
    ops::Range,
    sync::{Arc, OnceLock},
    thread::{self, ThreadId},
};

use candle_core::{Device, Tensor};

use crate::{
    device::{threads, to_device::synchronize_all},
    engine::{AllgatherPurpose, Backend},
    error::{ProcessError, ReplicaError, Result},
    grid::{self, Topology},
    mesh::{
        builder::{DeviceMeshBuilder, Options},
        workers::Workers,
    },
};

/// Devices in a grid with named axes, each with a worker thread that waits for calls.
///
/// Cloning is cheap and shares the workers; they end when the last clone is dropped. The drop waits
/// for them, except for a worker with a replica that did not return by the
/// [deadline](DeviceMeshBuilder::deadline) of its call.
///
/// In one process several threads may call functions on a mesh; their calls take turns. Over
/// several processes only the first calling thread may call: other threads get
/// [`ProcessError::WrongThread`](crate::ProcessError::WrongThread). Each mesh checks this
/// separately. A program with several meshes over the same processes must call all of them from one
/// thread, since nothing orders the calls of two threads.
///
/// # Examples
///
/// ```
/// use pmap_mesh::DeviceMesh;
///
/// let row = DeviceMesh::cpu(4)?; // four virtual devices on one processor
/// assert_eq!(row.len(), 4);
///
/// let grid = DeviceMesh::builder().axis("data", 2).axis("model", 2).cpu()?;
/// assert_eq!(grid.to_string(), "data 2 x model 2\n[0: Cpu, 1: Cpu]\n[2: Cpu, 3: Cpu]");
/// # Ok::<(), pmap_mesh::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct DeviceMesh(Arc<MeshInner>);

#[derive(Debug)]
struct MeshInner {
    /// The devices of the slots in this process.
    devices: Vec<Device>,
    /// The first slot in this process.
    first_slot: usize,
    /// The calling thread, if the mesh spans several processes.
    caller: OnceLock<ThreadId>,
    topology: Arc<Topology>,
    backend: Arc<dyn Backend>,
    workers: Workers,
}

impl DeviceMesh {
    /// The largest number of devices in one mesh. Each has its own thread.
    pub const MAX_DEVICES: usize = grid::MAX_DEVICES;

    /// The axis name of a mesh that was built without a builder.
    pub const AXIS: &str = "devices";

    /// Returns a builder for a mesh with named axes.
    pub fn builder() -> DeviceMeshBuilder {
        DeviceMeshBuilder { axes: Vec::new(), options: Options { pin: true, deadline: None } }
    }

    /// Returns a row of these devices, in this order. They may be of different kinds, and the same
    /// device may appear several times.
    ///
    /// # Errors
    ///
    /// [`MeshError::Size`](crate::MeshError::Size) for no devices or more than [`MAX_DEVICES`](Self::MAX_DEVICES),
    /// [`MeshError::Worker`](crate::MeshError::Worker) if the system gives no more threads.
    pub fn new(devices: Vec<Device>) -> Result<Self> {
        Self::builder().axis(Self::AXIS, devices.len()).devices(devices)
    }

    /// Returns a row of `count` virtual devices, all of them this machine's processor.
    ///
    /// Each device gets an equal share of the cores, at least one, so a program for several devices
    /// runs on a laptop.
    ///
    /// # Errors
    ///
    /// The errors of [`new`](Self::new).
    pub fn cpu(count: usize) -> Result<Self> {
        Self::builder().axis(Self::AXIS, count).cpu()
    }

    /// Returns a row of the first `count` CUDA devices.
    ///
    /// # Errors
    ///
    /// [`MeshError::Device`](crate::MeshError::Device) if a device does not exist or the crate was built
    /// without feature `cuda`, and the errors of [`new`](Self::new).
    pub fn cuda(count: usize) -> Result<Self> {
        Self::builder().axis(Self::AXIS, count).cuda()
    }

    /// Returns a row of the first `count` Metal devices.
    ///
    /// # Errors
    ///
    /// [`MeshError::Device`](crate::MeshError::Device) if a device does not exist or the crate was built
    /// without feature `metal`, and the errors of [`new`](Self::new).
    pub fn metal(count: usize) -> Result<Self> {
        Self::builder().axis(Self::AXIS, count).metal()
    }

    /// Starts the workers of a mesh with checked parts. `devices` are the devices of this process's
    /// slots, beginning with `first_slot`.
    pub(crate) fn start(
        devices: Vec<Device>,
        first_slot: usize,
        topology: Arc<Topology>,
        options: Options,
        backend: Arc<dyn Backend>,
    ) -> Result<Self> {
        let on_processor = devices.iter().all(Device::is_cpu);
        if threads::compete_for_threads(&devices, topology.slots()) {
            threads::warn_unless_threads_are_set(devices.len());
        }
        // The launcher decides whether a process with one slot is bound.
        let pin = options.pin && on_processor && devices.len() > 1;
        let workers = Workers::start(devices.len(), pin, options.deadline)?;
        Ok(Self(Arc::new(MeshInner {
            devices,
            first_slot,
            caller: OnceLock::new(),
            topology,
            backend,
            workers,
        })))
    }

    /// Returns the devices of this process's slots, by slot: the last axis varies fastest.
    pub fn devices(&self) -> &[Device] {
        &self.0.devices
    }

    /// Returns the number of devices in all processes.
    #[expect(clippy::len_without_is_empty, reason = "a mesh is never empty")]
    pub fn len(&self) -> usize {
        self.topology().slots()
    }

    /// Returns the slots that run in this process: all of them, unless the mesh spans several
    /// processes.
    pub fn local_slots(&self) -> Range<usize> {
        self.0.first_slot..self.0.first_slot + self.0.devices.len()
    }

    /// Returns the names and sizes of the axes.
    pub fn axes(&self) -> impl ExactSizeIterator<Item = (&str, usize)> {
        self.topology().axes().iter().map(|(name, size)| (name.as_str(), *size))
    }

    /// Returns the tensors of all slots, given the tensors of this process's slots; JAX's
    /// `process_allgather`.
    ///
    /// Every process of the mesh makes this call, between two calls of parallel functions. In one
    /// process it returns its argument.
    ///
    /// # Shapes
    ///
    /// Takes a list for each of the [`local_slots`](Self::local_slots) and returns a list for each
    /// slot. Lists may differ in length, and tensors in dtype and shape.
    ///
    /// # Errors
    ///
    /// [`ProcessError::Exchange`] for a wrong number of lists. Over several processes:
    /// [`ProcessError::WrongThread`] for a second calling thread, [`ProcessError::Exchange`] if a
    /// process cannot send its tensors, and then [`ProcessError::Peer`] on all others.
    #[doc(hidden)]
    pub fn process_allgather(&self, lists: Vec<Vec<Tensor>>) -> Result<Vec<Vec<Tensor>>> {
        let slots = self.devices().len();
        if lists.len() != slots {
            let cause = format!("got {} lists for the {slots} slots of this process", lists.len());
            return Err(ProcessError::Exchange { cause: candle_core::Error::msg(cause) }.into());
        }
        self.check_caller_thread()?;
        self.0.backend.process_allgather(AllgatherPurpose::User, Ok(lists))
    }

    /// Returns the results of all slots at the end of a call, given the results of this process's
    /// slots or its error.
    pub(crate) fn exchange_results(
        &self,
        lists: Result<Vec<Vec<Tensor>>>,
    ) -> Result<Vec<Vec<Tensor>>> {
        self.check_caller_thread()?;
        self.0.backend.process_allgather(AllgatherPurpose::Results, lists)
    }

    /// Rejects a call on a mesh of several processes from a second thread.
    ///
    /// The calls of the processes are matched in the order in which each process makes them. Two
    /// threads make calls in an order that varies between processes, so their tensors would be
    /// mixed up without an error.
    pub(crate) fn check_caller_thread(&self) -> Result<(), ProcessError> {
        if !self.spans_processes() {
            return Ok(());
        }
        let current = thread::current();
        if *self.0.caller.get_or_init(|| current.id()) == current.id() {
            return self.0.backend.check_caller();
        }
        let name = current.name().unwrap_or("without a name").to_owned();
        Err(ProcessError::WrongThread { name })
    }

    /// Waits for all pending work on the devices of this process: a captured tensor may still be in
    /// the middle of a write.
    pub(crate) fn synchronize_all(&self) -> Result<()> {
        for (slot, device) in self.local_slots().zip(self.devices()) {
            synchronize_all(device).map_err(|cause| {
                let device = device.clone();
                ReplicaError::Failed { slot, device, cause }
            })?;
        }
        Ok(())
    }

    pub(crate) fn backend(&self) -> &dyn Backend {
        &*self.0.backend
    }

    pub(crate) fn workers(&self) -> &Workers {
        &self.0.workers
    }

    pub(crate) fn topology(&self) -> &Topology {
        &self.0.topology
    }

    pub(crate) fn topology_arc(&self) -> Arc<Topology> {
        Arc::clone(&self.0.topology)
    }

    /// Returns true if both are clones of the same mesh.
    pub(crate) fn ptr_eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl fmt::Display for DeviceMesh {
    /// Writes names and sizes of the axes, then this process's slots with their devices, in rows
    /// along the last axis.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let axes: Vec<String> = self.axes().map(|(name, size)| format!("{name} {size}")).collect();
        f.write_str(&axes.join(" x "))?;
        // A mesh without axes has one slot.
        let columns = self.axes().last().map_or(1, |(_, size)| size);
        let slots: Vec<String> = self
            .local_slots()
            .zip(self.devices())
            .map(|(slot, device)| format!("{slot}: {}", device_name(device)))
            .collect();
        slots.chunks(columns).try_for_each(|row| write!(f, "\n[{}]", row.join(", ")))
    }
}

fn device_name(device: &Device) -> String {
    format!("{:?}", device.location())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{engine::threads::ThreadBackend, error::Error};

    /// Returns the mesh of slot 0 of two processes, without the other process. It can run functions
    /// without collectives.
    fn one_of_two_processes() -> DeviceMesh {
        let topology = Arc::new(Topology::new(vec![("a".into(), 2)], 2).unwrap());
        let options = Options { pin: false, deadline: None };
        let backend = Arc::new(ThreadBackend::new(2, None));
        DeviceMesh::start(vec![Device::Cpu], 0, topology, options, backend).unwrap()
    }

    #[test]
    fn second_calling_thread_is_rejected() {
        let mesh = one_of_two_processes();
        let nothing = mesh.pmap(|_, ()| Ok(()));
        let refused = |outcome: Result<()>| {
            matches!(
                outcome,
                Err(Error::Process(ProcessError::WrongThread { name })) if name == "two"
            )
        };
        nothing.call_sharded(()).unwrap();
        thread::scope(|scope| {
            let second = thread::Builder::new().name("two".into()).spawn_scoped(scope, || {
                assert!(refused(nothing.call_sharded(()).map(drop)));
                assert!(refused(nothing.call(())));
                assert!(refused(mesh.process_allgather(vec![Vec::new()]).map(drop)));
            });
            second.unwrap().join().unwrap();
        });
        nothing.call_sharded(()).unwrap();
    }
}
