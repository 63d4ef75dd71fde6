//! Which devices a command runs on, and whether other processes run with it.

use std::io::{self, Write};
#[cfg(feature = "nccl")]
use std::path::PathBuf;

#[cfg(feature = "mpi")]
use candle_core::Device;
#[cfg(feature = "nccl")]
use candle_distributed::mesh::NcclStore;
#[cfg(any(feature = "mpi", feature = "nccl"))]
use candle_distributed::types::Launched;
use candle_distributed::{
    mesh::{DeviceMesh, DeviceMeshBuilder, init_threads},
    types::{Placement, Rank, WorldSize},
};
use clap::ValueEnum;

use crate::{
    error::{Error, Result},
    output,
};

/// The variable by which `launch` names the rendezvous file of its processes.
pub(crate) const STORE_VARIABLE: &str = "CANDLE_DISTRIBUTED_STORE";

/// The options of commands that run on devices.
#[derive(Debug, clap::Args)]
pub(crate) struct DeviceArgs {
    /// Number of devices, virtual ones on a CPU [default: 2, or the number of processes]
    #[arg(long, value_name = "N")]
    world_size: Option<u64>,
    /// How the devices communicate
    #[arg(long, value_enum, default_value_t)]
    engine: Engine,
    /// Kind of device
    #[arg(long, value_enum, default_value_t)]
    device: DeviceArg,
    /// Rendezvous file of --engine nccl: a new one for every run, in a place that all processes can
    /// reach
    #[cfg(feature = "nccl")]
    #[arg(long, value_name = "FILE", env = STORE_VARIABLE)]
    store: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, Default, ValueEnum)]
enum Engine {
    /// One process, one thread per device
    #[default]
    Threads,
    /// One process per device, all started by `mpirun` or `srun`
    #[cfg(feature = "mpi")]
    Mpi,
    /// One process per CUDA device, all started by `torchrun` or `srun`
    #[cfg(feature = "nccl")]
    Nccl,
}

#[derive(Clone, Copy, Debug, Default, ValueEnum)]
enum DeviceArg {
    #[default]
    Cpu,
    Cuda,
    Metal,
}

/// The number of devices unless the user gives another.
pub(crate) const DEFAULT_WORLD_SIZE: u64 = 2;

/// This process among those of a run.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place {
    pub(crate) placement: Placement,
    /// How many devices share this machine's cores.
    devices_here: usize,
}

impl Place {
    /// Checks that the mesh, which may have its ranks from MPI itself, gives this process the rank
    /// that its launcher gives it.
    fn agrees_with(self, mesh: &DeviceMesh) -> Result<()> {
        let rank = self.placement.rank().as_usize();
        let world_size = self.placement.world_size().as_usize();
        let found_rank = mesh.local_slots().start;
        let found_size = mesh.len();
        if rank == found_rank && world_size == found_size {
            return Ok(());
        }
        Err(Error::usage(format!(
            "the launcher's variables say rank {rank} of {world_size}, but this process is rank \
             {found_rank} of {found_size}"
        )))
    }

    /// Prints a result, if this is the process that prints.
    pub(crate) fn print(self, write: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> Result<()> {
        if self.is_first() { output::text(write) } else { Ok(()) }
    }

    /// Whether this is the process that prints.
    pub(crate) fn is_first(self) -> bool {
        self.placement.rank() == Rank::ZERO
    }
}

impl DeviceArgs {
    /// The place of this process, in a world of `default` devices unless the user asks for another.
    pub(crate) fn place(&self, default: u64) -> Result<Place> {
        match self.engine {
            Engine::Threads => {
                let world_size = WorldSize::new(self.world_size.unwrap_or(default))?;
                let placement = Placement::new(0, world_size.as_u64())?;
                Ok(Place { placement, devices_here: world_size.as_usize() })
            }
            #[cfg(feature = "mpi")]
            Engine::Mpi => self.place_among_processes("mpirun -n 2 candle-distributed …"),
            #[cfg(feature = "nccl")]
            Engine::Nccl => self.place_among_processes(
                "torchrun --nproc-per-node 2 --no-python candle-distributed …",
            ),
        }
    }

    #[cfg(any(feature = "mpi", feature = "nccl"))]
    fn place_among_processes(&self, how: &str) -> Result<Place> {
        let Some(launched) = Launched::from_env()? else {
            return Err(Error::usage(format!(
                "this engine needs a launcher to start its processes: {how}"
            )));
        };
        let placement = launched.placement();
        let processes = placement.world_size();
        if let Some(asked) = self.world_size.filter(|&asked| asked != processes.as_u64()) {
            return Err(Error::usage(format!(
                "--world-size is {asked}, but the launcher started {processes} processes"
            )));
        }
        // If the launcher does not say how many processes share this machine, all of them may: that
        // gives each too few threads at worst, never too many.
        let devices_here = launched.local_world_size().unwrap_or(processes).as_usize();
        Ok(Place { placement, devices_here })
    }

    /// Runs `job` on the devices of `grid`. Call it while the process has one thread, which is before
    /// any other use of candle: its number of threads can be set only then.
    pub(crate) fn run_on<T>(
        &self,
        place: Place,
        grid: DeviceMeshBuilder,
        job: impl FnOnce(&DeviceMesh) -> Result<T>,
    ) -> Result<T> {
        init_threads(place.devices_here)?;
        let mesh = self.open(grid)?;
        let outcome = place.agrees_with(&mesh).and_then(|()| job(&mesh));
        if outcome.as_ref().is_err_and(|error| !error.is_of_all()) {
            // Dropping the last mesh of a process waits until the others drop theirs, and they may
            // be waiting for this one in a collective. Without the drop, the end of this process
            // ends them all.
            std::mem::forget(mesh);
        }
        outcome
    }

    fn open(&self, grid: DeviceMeshBuilder) -> Result<DeviceMesh> {
        #[cfg(feature = "mpi")]
        if let Engine::Mpi = self.engine {
            let device = match self.device {
                DeviceArg::Cpu => Device::Cpu,
                DeviceArg::Cuda | DeviceArg::Metal => {
                    return Err(Error::usage("--engine mpi needs --device cpu"));
                }
            };
            return Ok(grid.mpi(device)?);
        }
        #[cfg(feature = "nccl")]
        if let Engine::Nccl = self.engine {
            return self.open_nccl(grid);
        }
        Ok(match self.device {
            DeviceArg::Cpu => grid.cpu(),
            DeviceArg::Cuda => grid.cuda(),
            DeviceArg::Metal => grid.metal(),
        }?)
    }

    #[cfg(feature = "nccl")]
    fn open_nccl(&self, grid: DeviceMeshBuilder) -> Result<DeviceMesh> {
        if !matches!(self.device, DeviceArg::Cuda) {
            return Err(Error::usage("--engine nccl needs --device cuda"));
        }
        let launched = Launched::from_env()?.ok_or_else(|| {
            Error::usage("--engine nccl needs a launcher, such as torchrun or srun")
        })?;
        let local =
            launched.local_rank().ok_or_else(|| Error::usage("the launcher sets no local rank"))?;
        let store =
            self.store.clone().ok_or_else(|| Error::usage("--engine nccl needs a --store"))?;
        Ok(grid.nccl(launched.placement(), local.as_usize(), &NcclStore::File(store))?)
    }
}
