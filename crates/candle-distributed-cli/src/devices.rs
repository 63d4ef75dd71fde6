//! Which devices a command runs on, and whether other processes run with it.

#[cfg(feature = "mpi")]
use candle_core::Device;
#[cfg(feature = "mpi")]
use candle_distributed::types::Launched;
use candle_distributed::{
    mesh::{DeviceMesh, DeviceMeshBuilder},
    types::{Placement, Rank, WorldSize},
};
use clap::ValueEnum;

#[cfg(feature = "mpi")]
use crate::error::Error;
use crate::{error::Result, threads};

/// The options of commands that run on devices.
#[derive(Debug, clap::Args)]
pub(crate) struct DeviceArgs {
    /// Number of devices; on one processor, so many virtual ones [default: 2, or the number of processes of MPI]
    #[arg(long, value_name = "N")]
    world_size: Option<u64>,
    /// How the devices work together
    #[arg(long, value_enum, default_value_t)]
    engine: Engine,
    /// Kind of device
    #[arg(long, value_enum, default_value_t)]
    device: DeviceArg,
}

#[derive(Clone, Copy, Debug, Default, ValueEnum)]
enum Engine {
    /// One process, one thread per device
    #[default]
    Threads,
    /// One process per device, all started by `mpirun` or `srun`
    #[cfg(feature = "mpi")]
    Mpi,
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
            Engine::Mpi => self.place_among_processes(),
        }
    }

    #[cfg(feature = "mpi")]
    fn place_among_processes(&self) -> Result<Place> {
        let nobody = || Error::Usage("--engine mpi runs under mpirun or srun: mpirun -n 2 candle-distributed …".into());
        let launched = Launched::from_env()?.ok_or_else(nobody)?;
        let placement = launched.placement();
        let processes = placement.world_size();
        if let Some(asked) = self.world_size.filter(|&asked| asked != processes.as_u64()) {
            return Err(Error::Usage(format!("--world-size {asked} does not fit the {processes} processes of MPI")));
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
        let outcome = job(&mesh);
        if outcome.as_ref().is_err_and(|error| !error.is_of_all()) {
            // The last mesh of a process takes leave of the others, who may wait for this one; a process that goes
            // without leave ends all of them.
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
                    return Err(Error::Usage("--engine mpi runs on processors, --device cpu".into()));
                }
            };
            return Ok(grid.mpi(device)?);
        }
        Ok(match self.device {
            DeviceArg::Cpu => grid.cpu(),
            DeviceArg::Cuda => grid.cuda(),
            DeviceArg::Metal => grid.metal(),
        }?)
    }
}
