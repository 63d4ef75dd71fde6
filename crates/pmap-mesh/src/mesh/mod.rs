//! The devices that work together.

pub(crate) mod axes;
pub(crate) mod topology;
pub(crate) mod workers;

use std::{
    fmt,
    ops::Range,
    sync::{Arc, Once},
    time::Duration,
};

use candle_core::{Device, Tensor};

#[cfg(feature = "nccl")]
use core_types::Placement;

#[cfg(feature = "mpi")]
use crate::engine::mpi::{Mpi, Session};
#[cfg(feature = "nccl")]
use crate::engine::nccl::{Nccl, NcclStore};
use crate::{
    engine::{
        Engine,
        threads::{Threads, rendezvous::Hub},
    },
    error::{Error, Result},
    mesh::{topology::Topology, workers::Workers},
};

/// Devices in a grid with named axes, each with a worker that waits for calls.
///
/// Cloning is cheap and shares the workers; they end when the last clone is dropped.
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
    /// Of this process's slots.
    devices: Vec<Device>,
    first_slot: usize,
    topology: Arc<Topology>,
    deadline: Option<Duration>,
    pin: bool,
    engines: Engines,
    workers: Workers,
}

/// How the slots of a mesh talk to each other.
#[derive(Debug)]
enum Engines {
    Threads,
    #[cfg(feature = "mpi")]
    Mpi(Mpi),
    #[cfg(feature = "nccl")]
    Nccl(Nccl),
}

/// The axes and options of a mesh to be made.
///
/// # Examples
///
/// ```
/// use pmap_mesh::DeviceMesh;
///
/// let mesh = DeviceMesh::builder().axis("data", 2).deadline(std::time::Duration::from_secs(60)).cpu()?;
/// # Ok::<(), pmap_mesh::Error>(())
/// ```
#[derive(Clone, Debug)]
#[must_use = "a builder makes no mesh until it is given devices"]
pub struct DeviceMeshBuilder {
    axes: Vec<(String, usize)>,
    pin: bool,
    deadline: Option<Duration>,
}

impl DeviceMesh {
    /// The largest number of devices in one mesh; each has a thread of its own.
    pub const MAX_DEVICES: usize = 1024;

    /// How long a process waits for others, unless told otherwise: ten minutes, as PyTorch's NCCL
    /// groups do.
    pub const PROCESS_DEADLINE: Duration = Duration::from_mins(10);

    /// The name of the axis of a mesh that was made without a builder.
    pub const AXIS: &str = "devices";

    /// Starts a mesh with axes of its own.
    pub fn builder() -> DeviceMeshBuilder {
        DeviceMeshBuilder { axes: Vec::new(), pin: true, deadline: None }
    }

    /// Returns a row of these devices, in this order; they may be of different kinds, or the same
    /// one several times.
    ///
    /// # Errors
    ///
    /// [`Error::MeshSize`] for no devices or more than [`MAX_DEVICES`](Self::MAX_DEVICES),
    /// [`Error::Worker`] if the system gives no more threads.
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
    /// [`Error::Device`] if one of them is not there or the crate was built without feature `cuda`,
    /// and those of [`new`](Self::new).
    pub fn cuda(count: usize) -> Result<Self> {
        Self::builder().axis(Self::AXIS, count).cuda()
    }

    /// Returns a row of the first `count` Metal devices.
    ///
    /// # Errors
    ///
    /// [`Error::Device`] if one of them is not there or the crate was built without feature
    /// `metal`, and those of [`new`](Self::new).
    pub fn metal(count: usize) -> Result<Self> {
        Self::builder().axis(Self::AXIS, count).metal()
    }

    /// Returns a mesh, with workers of its own, of those devices of this one whose coordinate along
    /// `axis` is `coordinate`; it lacks that axis.
    ///
    /// # Errors
    ///
    /// [`Error::UnknownAxis`], [`Error::Coordinate`], [`Error::SeveralProcesses`], and those of
    /// [`new`](Self::new).
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
        if self.local_slots().len() != self.len() {
            return Err(Error::SeveralProcesses { what: "a sub-mesh" });
        }
        let set = self.topology().set(&axis.into())?;
        let size = self.topology().size(set);
        if coordinate >= size {
            return Err(Error::Coordinate { axis: axis.to_owned(), coordinate, size });
        }
        let groups = self.topology().groups(set);
        let is_in = |slot: &usize| groups.seat(*slot).1 == coordinate;
        let devices =
            self.local_slots().filter(is_in).map(|slot| self.devices()[slot].clone()).collect();
        let rest = self.axes().filter(|(name, _)| *name != axis);
        let builder =
            DeviceMeshBuilder { axes: Vec::new(), pin: self.0.pin, deadline: self.0.deadline };
        rest.fold(builder, |builder, (name, size)| builder.axis(name, size)).devices(devices)
    }

    /// The devices of this process's slots, in the order in which shards are dealt to them: the
    /// last axis varies fastest.
    pub fn devices(&self) -> &[Device] {
        &self.0.devices
    }

    /// The number of devices, in all processes.
    #[allow(clippy::len_without_is_empty, reason = "a mesh is never empty")]
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

    /// What the replica of `slot` uses in one call, of which `hub` is the meeting place.
    pub(crate) fn engine(&self, hub: &Arc<Hub>, slot: usize) -> Box<dyn Engine> {
        match &self.0.engines {
            Engines::Threads => Box::new(Threads::new(Arc::clone(hub), slot)),
            #[cfg(feature = "mpi")]
            Engines::Mpi(mpi) => Box::new(mpi.clone()),
            #[cfg(feature = "nccl")]
            Engines::Nccl(nccl) => Box::new(nccl.clone()),
        }
    }

    /// Returns the tensors of all slots, given those of this process's slots; JAX's
    /// `process_allgather`.
    ///
    /// Every process of the mesh calls it, between calls of parallel functions. In one process the
    /// argument comes back.
    ///
    /// # Shapes
    ///
    /// A list for each of the [`local_slots`](Self::local_slots) in, a list for each slot out.
    /// Lists may differ in length, and tensors in type and shape.
    ///
    /// # Errors
    ///
    /// Those of [`PMap::call`](crate::PMap::call), over several processes.
    #[cfg_attr(
        not(any(feature = "mpi", feature = "nccl")),
        allow(clippy::unnecessary_wraps, reason = "other processes may fail")
    )]
    pub fn process_allgather(&self, lists: Vec<Vec<Tensor>>) -> Result<Vec<Vec<Tensor>>> {
        match &self.0.engines {
            Engines::Threads => Ok(lists),
            #[cfg(feature = "mpi")]
            Engines::Mpi(mpi) => {
                lists.first().map_or_else(|| Ok(Vec::new()), |list| mpi.exchange(list))
            }
            #[cfg(feature = "nccl")]
            Engines::Nccl(nccl) => {
                lists.first().map_or_else(|| Ok(Vec::new()), |list| nccl.exchange(list))
            }
        }
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

    pub(crate) fn deadline(&self) -> Option<Duration> {
        self.0.deadline
    }

    /// Whether both are clones of one mesh.
    pub(crate) fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
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
        self.pin = pin;
        self
    }

    /// How long a replica waits in a collective before the call ends with [`Error::Deadline`].
    ///
    /// In one process for ever by default, since failures of others end it anyway; over several
    /// processes, of which one may never come, for
    /// [`PROCESS_DEADLINE`](DeviceMesh::PROCESS_DEADLINE).
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.deadline = Some(deadline);
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
    /// [`Error::MeshSize`] for no slots or more than [`DeviceMesh::MAX_DEVICES`],
    /// [`Error::MeshAxes`] for too many axes, [`Error::DuplicateAxis`], [`Error::DeviceCount`] if
    /// there are more or fewer devices than slots, and [`Error::Worker`] if the system gives no
    /// more threads.
    pub fn devices(self, devices: Vec<Device>) -> Result<DeviceMesh> {
        let (topology, slots) = Topology::new(self.axes, DeviceMesh::MAX_DEVICES)?;
        if devices.len() != slots {
            return Err(Error::DeviceCount { devices: devices.len(), slots });
        }
        let (deadline, pin, topology) = (self.deadline, self.pin, Arc::new(topology));
        let workers = start_workers(&devices, pin)?;
        let inner = Inner {
            devices,
            first_slot: 0,
            topology,
            deadline,
            pin,
            engines: Engines::Threads,
            workers,
        };
        Ok(DeviceMesh(Arc::new(inner)))
    }

    /// Makes the mesh of all processes that MPI has started, one slot each, by rank; this one's
    /// runs on `device`.
    ///
    /// Every process makes the same mesh and calls the same functions with the same arguments, of
    /// which it takes its own shard; results come back to all of them. What is said of one process
    /// elsewhere holds of all: they compute the same, sums are formed in rank order. A replica that
    /// fails ends all processes, with its error on the standard error of its own, since the others
    /// may wait for it: there is no call that returns an error for it.
    ///
    /// A mesh without axes is a row named [`DeviceMesh::AXIS`].
    ///
    /// # Errors
    ///
    /// Those of [`devices`](Self::devices), and [`Error::Mpi`] if MPI cannot be started, or a
    /// second time, has not as many processes as the mesh has slots, or grants its calls to one
    /// thread only.
    #[cfg(feature = "mpi")]
    pub fn mpi(self, device: Device) -> Result<DeviceMesh> {
        let session = Session::start()?;
        let (first_slot, processes) = (session.rank(), session.size());
        self.of_processes(first_slot, processes, device, |topology, deadline, _| {
            Ok(Engines::Mpi(Mpi::new(session, Arc::clone(topology), deadline)?))
        })
    }

    /// Makes the mesh of as many processes as the world of `place` has, one slot each, by rank;
    /// this one's runs on CUDA device `device` of its machine, and tensors go from device to device
    /// through NCCL.
    ///
    /// Who this process is and which device it takes is known to what started it: a program hands
    /// on the placement and the local rank of `core_types::Launched`. The processes meet at
    /// `store`, and wait there for each other for up to ten minutes.
    ///
    /// As over MPI, every process makes the same mesh and calls the same functions with the same
    /// arguments, sums are formed in rank order, and a replica that fails ends its process with its
    /// error on the standard error; the launcher then ends the others, which wait for it. Tensors
    /// of other devices are refused in collectives.
    ///
    /// A mesh without axes is a row named [`DeviceMesh::AXIS`].
    ///
    /// This has been built, and has not been run on several GPUs.
    ///
    /// # Errors
    ///
    /// Those of [`devices`](Self::devices), [`Error::Device`] if there is no such device,
    /// [`Error::Store`] if the processes cannot meet, and [`Error::Nccl`] if NCCL cannot be started
    /// or the mesh has not as many slots as there are processes.
    #[cfg(feature = "nccl")]
    pub fn nccl(self, place: Placement, device: usize, store: &NcclStore) -> Result<DeviceMesh> {
        let opened = Device::new_cuda_with_stream(device)
            .map_err(|source| Error::Device { index: device, source })?;
        let (first_slot, processes) = (place.rank().as_usize(), place.world_size().as_usize());
        self.of_processes(first_slot, processes, opened, |topology, deadline, device| {
            Ok(Engines::Nccl(Nccl::new(place, device, store, Arc::clone(topology), deadline)?))
        })
    }

    /// The mesh of several processes, whose engine is made when its axes have been checked.
    #[cfg(any(feature = "mpi", feature = "nccl"))]
    fn of_processes(
        mut self,
        first_slot: usize,
        processes: usize,
        device: Device,
        engines: impl FnOnce(&Arc<Topology>, Duration, &Device) -> Result<Engines>,
    ) -> Result<DeviceMesh> {
        if self.axes.is_empty() {
            self = self.axis(DeviceMesh::AXIS, processes);
        }
        let topology = Arc::new(Topology::new(self.axes, DeviceMesh::MAX_DEVICES)?.0);
        let (deadline, pin) = (self.deadline.unwrap_or(DeviceMesh::PROCESS_DEADLINE), self.pin);
        let engines = engines(&topology, deadline, &device)?;
        let devices = vec![device];
        // The launcher binds processes, or not, as it was told.
        let workers = start_workers(&devices, false)?;
        Ok(DeviceMesh(Arc::new(Inner {
            devices,
            first_slot,
            topology,
            deadline: Some(deadline),
            pin,
            engines,
            workers,
        })))
    }

    fn open(self, device: impl Fn(usize) -> candle_core::Result<Device>) -> Result<DeviceMesh> {
        let slots = Topology::new(self.axes.clone(), DeviceMesh::MAX_DEVICES)?.1;
        let open = |index| device(index).map_err(|source| Error::Device { index, source });
        let devices = (0..slots).map(open).collect::<Result<_>>()?;
        self.devices(devices)
    }
}

impl fmt::Display for DeviceMesh {
    /// Names and sizes of the axes, then this process's slots with their devices, a row for each
    /// step of all axes but the last.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let axes: Vec<String> = self.axes().map(|(name, size)| format!("{name} {size}")).collect();
        f.write_str(&axes.join(" x "))?;
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

fn start_workers(devices: &[Device], pin: bool) -> Result<Workers> {
    let on_processor = devices.iter().all(Device::is_cpu);
    if on_processor {
        warn_of_threads();
    }
    Workers::start(devices.len(), pin && on_processor && devices.len() > 1)
}

/// Says once that candle would spread every kernel over all cores.
fn warn_of_threads() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        if std::env::var_os("RAYON_NUM_THREADS").is_none() || std::env::var_os("CANDLE_NUM_THREADS").is_none() {
            tracing::warn!(
                "RAYON_NUM_THREADS and CANDLE_NUM_THREADS are not both set: candle's kernels look up the machine's cores \
                 at every matrix product and share one pool for elementwise work; replicas will wait for each other"
            );
        }
    });
}
