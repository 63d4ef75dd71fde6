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
    mesh::{DeviceMesh, DeviceMeshBuilder},
    types::{Placement, Rank, WorldSize},
};
use clap::ValueEnum;

use crate::{
    error::{Error, Result},
    output, threads,
};

/// The options of commands that run on devices.
#[derive(Debug, clap::Args)]
pub(crate) struct DeviceArgs {
    /// Number of devices; on one processor, so many virtual ones [default: 2, or the number of
    /// processes]
    #[arg(long, value_name = "N")]
    world_size: Option<u64>,
    /// How the devices work together
    #[arg(long, value_enum, default_value_t)]
    engine: Engine,
    /// Kind of device
    #[arg(long, value_enum, default_value_t)]
    device: DeviceArg,
    /// File by which the processes of --engine nccl meet: a new one for every run, where all of
    /// them can reach it
    #[cfg(feature = "nccl")]
    #[arg(long, value_name = "FILE")]
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

/// The number of devices if nobody says another.
pub(crate) const DEFAULT_WORLD_SIZE: u64 = 2;

/// This process among those of a run.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place {
    pub(crate) placement: Placement,
    /// How many devices share this machine's cores.
    devices_here: usize,
}

impl Place {
    /// Checks that the mesh, to which MPI itself may have told its ranks, puts this process where
    /// its launcher does.
    fn agrees_with(self, mesh: &DeviceMesh) -> Result<()> {
        let (rank, world_size) =
            (self.placement.rank().as_usize(), self.placement.world_size().as_usize());
        let (found_rank, found_size) = (mesh.local_slots().start, mesh.len());
        if (rank, world_size) == (found_rank, found_size) {
            return Ok(());
        }
        Err(Error::usage(format!(
            "the launcher's variables say rank {rank} of {world_size}, but this process is rank {found_rank} of {found_size}"
        )))
    }

    /// Prints a result, in the process that prints.
    pub(crate) fn tell(self, write: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> Result<()> {
        if self.is_first() { output::text(write) } else { Ok(()) }
    }

    /// Whether this is the process that prints.
    pub(crate) fn is_first(self) -> bool {
        self.placement.rank() == Rank::ZERO
    }
}

impl DeviceArgs {
    /// Who this process is, in a world of `default` devices if no other was asked for.
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
        let nobody =
            || Error::usage(format!("this engine's processes are started by a launcher: {how}"));
        let launched = Launched::from_env()?.ok_or_else(nobody)?;
        let placement = launched.placement();
        let processes = placement.world_size();
        if let Some(asked) = self.world_size.filter(|&asked| asked != processes.as_u64()) {
            return Err(Error::usage(format!(
                "--world-size {asked} does not fit the {processes} processes"
            )));
        }
        let devices_here = launched.local_world_size().unwrap_or(processes).as_usize();
        Ok(Place { placement, devices_here })
    }

    /// Does `job` on the devices of `grid`. Nothing of candle may have been used before.
    pub(crate) fn run_on<T>(
        &self,
        place: Place,
        grid: DeviceMeshBuilder,
        job: impl FnOnce(&DeviceMesh) -> Result<T>,
    ) -> Result<T> {
        threads::share_cores(place.devices_here);
        let mesh = self.open(grid)?;
        let outcome = place.agrees_with(&mesh).and_then(|()| job(&mesh));
        if outcome.as_ref().is_err_and(|error| !error.is_of_all()) {
            // The last mesh of a process takes leave of the others, who may wait for this one; a
            // process that goes without leave ends all of them.
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
                    return Err(Error::usage("--engine mpi runs on processors, --device cpu"));
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
            return Err(usage("--engine nccl runs on CUDA devices, --device cuda"));
        }
        let launched = Launched::from_env()?
            .ok_or_else(|| Error::usage("no launcher has started this process"))?;
        let local =
            launched.local_rank().ok_or_else(|| Error::usage("the launcher says no local rank"))?;
        let store =
            self.store.clone().ok_or_else(|| Error::usage("--engine nccl needs a --store"))?;
        Ok(grid.nccl(launched.placement(), local.as_usize(), &NcclStore::File(store))?)
    }
}
