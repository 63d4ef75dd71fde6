//! The devices that work together.

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
    engine::{Backend, Purpose},
    error::{MeshError, ProcessError, ReplicaError, Result, ValueError},
    grid::{self, Topology},
    mesh::{
        builder::{DeviceMeshBuilder, Options},
        workers::Workers,
    },
};

/// Devices in a grid with named axes, each with a worker that waits for calls.
///
/// Cloning is cheap and shares the workers; they end when the last clone is dropped. Dropping it
/// waits for them, except for one whose replica did not return by the
/// [deadline](DeviceMeshBuilder::deadline) of its call.
///
/// Several threads may call functions on a mesh of one process; their calls take turns. Over
/// several processes one thread calls, the first one that does: others are refused with
/// [`ProcessError::OtherThread`](crate::ProcessError::OtherThread). That is known of each mesh by
/// itself: a program with several meshes over the same processes calls all of them from one thread,
/// since nothing orders the calls of two.
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
pub struct DeviceMesh(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    /// The devices of the slots in this process.
    devices: Vec<Device>,
    /// The first slot in this process.
    first_slot: usize,
    /// The thread that calls, if the mesh spans several processes.
    caller: OnceLock<ThreadId>,
    topology: Arc<Topology>,
    options: Options,
    backend: Arc<dyn Backend>,
    workers: Workers,
}

impl DeviceMesh {
    /// The largest number of devices in one mesh; each has a thread of its own.
    pub const MAX_DEVICES: usize = grid::MAX_DEVICES;

    /// The name of the axis of a mesh that was made without a builder.
    pub const AXIS: &str = "devices";

    /// Starts a mesh with axes of its own.
    pub fn builder() -> DeviceMeshBuilder {
        DeviceMeshBuilder {
            axes: Vec::new(),
            options: Options { pin: true, deadline: None, bytes_per_second: None },
        }
    }

    /// Returns a row of these devices, in this order; they may be of different kinds, or the same
    /// one several times.
    ///
    /// # Errors
    ///
    /// [`MeshError::Size`] for no devices or more than [`MAX_DEVICES`](Self::MAX_DEVICES),
    /// [`MeshError::Worker`] if the system gives no more threads.
    pub fn new(devices: Vec<Device>) -> Result<Self> {
        Self::builder().axis(Self::AXIS, devices.len()).devices(devices)
    }

    /// Returns a row of `count` virtual devices, all of them this machine's processor.
    ///
    /// Each gets an equal share of the cores, at least one. So a program for several devices runs
    /// on a laptop.
    ///
    /// # Errors
    ///
    /// Those of [`new`](Self::new).
    pub fn cpu(count: usize) -> Result<Self> {
        Self::builder().axis(Self::AXIS, count).cpu()
    }

    /// Returns a row of the first `count` CUDA devices.
    ///
    /// # Errors
    ///
    /// [`MeshError::Device`] if one of them is not there or the crate was built without feature
    /// `cuda`, and those of [`new`](Self::new).
    pub fn cuda(count: usize) -> Result<Self> {
        Self::builder().axis(Self::AXIS, count).cuda()
    }

    /// Returns a row of the first `count` Metal devices.
    ///
    /// # Errors
    ///
    /// [`MeshError::Device`] if one of them is not there or the crate was built without feature
    /// `metal`, and those of [`new`](Self::new).
    pub fn metal(count: usize) -> Result<Self> {
        Self::builder().axis(Self::AXIS, count).metal()
    }

    /// Starts the workers of a mesh whose parts have been checked.
    ///
    /// `devices` are those of this process's slots, which begin with `first_slot`.
    pub(crate) fn start(
        devices: Vec<Device>,
        first_slot: usize,
        topology: Arc<Topology>,
        options: Options,
        backend: Arc<dyn Backend>,
    ) -> Result<Self> {
        let on_processor = devices.iter().all(Device::is_cpu);
        if threads::are_shared(&devices, topology.slots()) {
            threads::warn_if_shared(devices.len());
        }
        // A process with one slot is bound by its launcher, or is not, as that was told.
        let pin = options.pin && on_processor && devices.len() > 1;
        let workers = Workers::start(devices.len(), pin, options.deadline)?;
        Ok(Self(Arc::new(Inner {
            devices,
            first_slot,
            caller: OnceLock::new(),
            topology,
            options,
            backend,
            workers,
        })))
    }

    /// Returns a mesh, with workers of its own, of those devices of this one whose coordinate along
    /// `axis` is `coordinate`; it lacks that axis.
    ///
    /// # Errors
    ///
    /// [`MeshError::UnknownAxis`], [`MeshError::Coordinate`], [`ProcessError::Unsupported`], and
    /// those of [`new`](Self::new).
    ///
    /// # Examples
    ///
    /// ```
    /// use pmap_mesh::DeviceMesh;
    ///
    /// let grid = DeviceMesh::builder().axis("stage", 2).axis("data", 3).cpu()?;
    /// assert_eq!(grid.sub_mesh("stage", 1)?.axes().collect::<Vec<_>>(), [("data", 3)]);
    /// # Ok::<(), pmap_mesh::Error>(())
    /// ```
    pub fn sub_mesh(&self, axis: &str, coordinate: usize) -> Result<Self> {
        if self.spans_processes() {
            return Err(ProcessError::Unsupported { what: "a sub-mesh" }.into());
        }
        let set = self.topology().set(&axis.into())?;
        let size = self.topology().size(set);
        if coordinate >= size {
            let axis = axis.to_owned();
            return Err(MeshError::Coordinate { axis, coordinate, size }.into());
        }
        let groups = self.topology().groups(set);
        let slots = self.local_slots().filter(|&slot| groups.place(slot).rank == coordinate);
        let devices = slots.map(|slot| self.devices()[slot].clone()).collect();
        let others = self.topology().axes().iter().filter(|(name, _)| name != axis).cloned();
        DeviceMeshBuilder { axes: others.collect(), options: self.0.options }.devices(devices)
    }

    /// The devices of this process's slots, by slot: the last axis varies fastest.
    pub fn devices(&self) -> &[Device] {
        &self.0.devices
    }

    /// The number of devices, in all processes.
    #[expect(clippy::len_without_is_empty, reason = "a mesh is never empty")]
    pub fn len(&self) -> usize {
        self.topology().slots()
    }

    /// The slots that run in this process: all, unless the mesh spans several.
    pub fn local_slots(&self) -> Range<usize> {
        self.0.first_slot..self.0.first_slot + self.0.devices.len()
    }

    /// Names and sizes of the axes.
    pub fn axes(&self) -> impl ExactSizeIterator<Item = (&str, usize)> {
        self.topology().axes().iter().map(|(name, size)| (name.as_str(), *size))
    }

    /// Returns the tensors of all slots, given those of this process's slots; JAX's
    /// `process_allgather`.
    ///
    /// Every process of the mesh calls it, between two calls of parallel functions. In one process
    /// the argument comes back.
    ///
    /// # Shapes
    ///
    /// A list for each of the [`local_slots`](Self::local_slots) in, a list for each slot out.
    /// Lists may differ in length, and tensors in type and shape.
    ///
    /// # Errors
    ///
    /// [`ValueError::ListCount`] for another number of lists; over several processes
    /// [`ProcessError::OtherThread`] for a second calling thread, [`ProcessError::Exchange`] if what
    /// a process has cannot be sent, and [`ProcessError::Peer`] on all others then.
    #[doc(hidden)]
    pub fn process_allgather(&self, lists: Vec<Vec<Tensor>>) -> Result<Vec<Vec<Tensor>>> {
        let slots = self.devices().len();
        if lists.len() != slots {
            return Err(ValueError::ListCount { lists: lists.len(), slots }.into());
        }
        self.refuse_other_thread()?;
        self.0.backend.process_allgather(Purpose::User, Ok(lists))
    }

    /// The lists of all slots at the end of a call, given those of this process's slots, or why it
    /// has none.
    pub(crate) fn exchange_results(
        &self,
        lists: Result<Vec<Vec<Tensor>>>,
    ) -> Result<Vec<Vec<Tensor>>> {
        self.refuse_other_thread()?;
        self.0.backend.process_allgather(Purpose::Results, lists)
    }

    /// Refuses a call on a mesh of several processes from a second thread.
    ///
    /// Their calls meet in the order in which each process makes them. Those of two threads come in
    /// any order, another one in every process, and their tensors would be mixed up without an
    /// error.
    pub(crate) fn refuse_other_thread(&self) -> Result<(), ProcessError> {
        if !self.spans_processes() {
            return Ok(());
        }
        let current = thread::current();
        if *self.0.caller.get_or_init(|| current.id()) == current.id() {
            return self.0.backend.check_caller();
        }
        let name = current.name().unwrap_or("without a name").to_owned();
        Err(ProcessError::OtherThread { name })
    }

    /// Waits until all devices of this process have done what any thread has begun there: a
    /// function may have captured what is still being written.
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

    /// Whether both are clones of one mesh.
    pub(crate) fn ptr_eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl fmt::Display for DeviceMesh {
    /// Names and sizes of the axes, then this process's slots with their devices, a row for each
    /// step of all axes but the last.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let axes: Vec<String> = self.axes().map(|(name, size)| format!("{name} {size}")).collect();
        f.write_str(&axes.join(" x "))?;
        // A mesh without axes has one slot.
        let columns = self.axes().last().map_or(1, |(_, size)| size);
        let slots: Vec<String> = self
            .local_slots()
            .zip(self.devices())
            .map(|(slot, device)| format!("{slot}: {}", name_of(device)))
            .collect();
        slots.chunks(columns).try_for_each(|row| write!(f, "\n[{}]", row.join(", ")))
    }
}

fn name_of(device: &Device) -> String {
    format!("{:?}", device.location())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{engine::threads::Threads, error::Error};

    /// The process of slot 0 of two, without the other one: functions without collectives can run.
    fn one_of_two_processes() -> DeviceMesh {
        let topology = Arc::new(Topology::new(vec![("a".into(), 2)], 2).unwrap());
        let options = Options { pin: false, deadline: None, bytes_per_second: None };
        let backend = Arc::new(Threads::new(2, None, None));
        DeviceMesh::start(vec![Device::Cpu], 0, topology, options, backend).unwrap()
    }

    #[test]
    fn over_processes_one_thread_calls() {
        let mesh = one_of_two_processes();
        let nothing = mesh.pmap(|_, ()| Ok(()));
        let refused = |outcome: Result<()>| {
            matches!(
                outcome,
                Err(Error::Process(ProcessError::OtherThread { name })) if name == "two"
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
