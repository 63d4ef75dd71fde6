//! The devices of a command, and its place among the processes of a launcher.

#[cfg(feature = "nccl")]
use std::path::PathBuf;
use std::{
    env,
    io::{self, Write},
    thread,
    time::Duration,
};

#[cfg(feature = "mpi")]
use candle_core::Device;
use candle_distributed::{
    mesh::{DeviceMesh, DeviceMeshBuilder, init_threads, support::THREAD_VARIABLES},
    types::{LaunchEnv, Placement, Rank, WorldSize, human::Printable},
};
use clap::{ValueEnum, value_parser};

use crate::{
    error::{Error, Result},
    help, output,
};

/// The environment variable with the rendezvous file, set by `launch` for its processes.
#[cfg(any(unix, feature = "nccl"))]
pub(crate) const STORE_VARIABLE: &str = "CANDLE_DISTRIBUTED_STORE";

/// The options of commands that run on devices.
#[derive(Debug, clap::Args)]
pub(crate) struct DeviceArgs {
    /// Number of devices, virtual ones on a CPU [default: 2, or the number of processes]
    #[arg(long, value_name = "N")]
    world_size: Option<u64>,
    /// Engine that connects the devices [default: threads]
    #[arg(long, value_enum)]
    engine: Option<Engine>,
    /// Kind of device
    #[arg(long, value_enum, default_value_t)]
    device: DeviceArg,
    /// Rendezvous file of --engine nccl: a new path for every run, in a folder that all processes
    /// share
    #[cfg(feature = "nccl")]
    #[arg(long, value_name = "FILE", env = STORE_VARIABLE)]
    store: Option<PathBuf>,
    /// Seconds that a device waits for the others before the command fails [default: 600 between
    /// processes, unlimited within a process]
    #[arg(long, value_name = "SECONDS", value_parser = value_parser!(u64).range(1..))]
    deadline: Option<u64>,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Engine {
    /// One process, one thread per device
    Threads,
    /// One process per device, all started by `mpirun` or `srun`
    #[cfg(feature = "mpi")]
    Mpi,
    /// One process per CUDA device, all started by `candle-distributed launch`, `torchrun` or `srun`
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

/// The default number of devices.
pub(crate) const DEFAULT_WORLD_SIZE: u64 = 2;

/// The place of this process among the processes of a run.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ProcessPlace {
    pub(crate) placement: Placement,
    /// Number of devices that share this machine's cores.
    devices_here: usize,
    /// Number of devices of this process.
    devices_in_process: usize,
}

impl ProcessPlace {
    /// Checks that the mesh gives this process the same rank as the launcher. They can differ,
    /// since MPI assigns ranks itself.
    fn agrees_with(self, mesh: &DeviceMesh) -> Result<()> {
        let rank = self.placement.rank().as_usize();
        let world_size = self.placement.world_size().as_usize();
        let found_rank = mesh.local_slots().start;
        let found_size = mesh.len();
        if rank == found_rank && world_size == found_size {
            return Ok(());
        }
        Err(Error::usage(format!(
            "the launcher's variables give rank {rank} of {world_size}, but this process is rank \
             {found_rank} of {found_size}"
        )))
    }

    /// Prints a result if this is the first process.
    pub(crate) fn print(self, write: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> Result<()> {
        if self.is_first() { output::to_stdout(write) } else { Ok(()) }
    }

    /// Returns true if the run has no other process.
    pub(crate) fn is_alone(self) -> bool {
        self.devices_in_process == self.placement.world_size().as_usize()
    }

    /// Returns the range of this process's ranks: the first one, and one past the last.
    pub(crate) fn ranks(self) -> (u64, u64) {
        let first = self.placement.rank().as_u64();
        (first, first + self.devices_in_process as u64)
    }

    /// Returns the number of processes of the run on this machine.
    pub(crate) fn processes_here(self) -> u64 {
        self.devices_here.div_ceil(self.devices_in_process) as u64
    }

    /// Limits candle's thread pools to this process's share of the cores.
    ///
    /// Call it before any other use of candle, while the process has a single thread: the size of
    /// the pools cannot change later.
    pub(crate) fn share_cores(self) -> Result<()> {
        if self.is_first() {
            for name in THREAD_VARIABLES {
                warn_of_threads(name);
            }
        }
        Ok(init_threads(self.devices_here)?)
    }

    /// Returns true if this is the first process, which prints results and warnings.
    pub(crate) fn is_first(self) -> bool {
        self.placement.rank() == Rank::ZERO
    }
}

impl DeviceArgs {
    /// Returns `--world-size` and `--device` as the user types them, each after a space, without
    /// unset options.
    pub(crate) fn option_string(&self) -> String {
        let world_size = self.world_size.map(|world_size| format!(" --world-size {world_size}"));
        let device = match self.device {
            DeviceArg::Cpu => None,
            other => Some(format!(" --device {}", help::cli_name(other))),
        };
        world_size.into_iter().chain(device).collect()
    }

    /// Returns the place of this process. The run has `default` devices unless `--world-size` or
    /// the launcher sets the number.
    pub(crate) fn place(&self, default: u64) -> Result<ProcessPlace> {
        if self.engine.is_none() {
            refuse_launcher()?;
        }
        let engine = self.engine.unwrap_or(Engine::Threads);
        match engine {
            Engine::Threads => {
                let world_size = WorldSize::new(self.world_size.unwrap_or(default))?;
                let placement = Placement::new(0, world_size.as_u64())?;
                let devices = world_size.as_usize();
                Ok(ProcessPlace { placement, devices_here: devices, devices_in_process: devices })
            }
            #[cfg(feature = "mpi")]
            Engine::Mpi => self.place_among_processes("mpirun -n 2 candle-distributed …"),
            #[cfg(feature = "nccl")]
            Engine::Nccl => self.place_among_processes(
                "candle-distributed launch --processes 2 -- candle-distributed …",
            ),
        }
    }

    #[cfg(any(feature = "mpi", feature = "nccl"))]
    fn place_among_processes(&self, example: &str) -> Result<ProcessPlace> {
        let Some(launched) = LaunchEnv::from_env()? else {
            return Err(Error::usage(format!(
                "this engine needs a launcher to start its processes: {example}"
            )));
        };
        let placement = launched.placement();
        let processes = placement.world_size();
        if let Some(given) = self.world_size.filter(|&given| given != processes.as_u64()) {
            return Err(Error::usage(format!(
                "--world-size is {given}, but the launcher started {processes} processes"
            )));
        }
        // If the launcher sets no local world size, assume that all processes share this machine.
        // At worst a process then gets too few threads, never too many.
        let devices_here = launched.local_world_size().unwrap_or(processes).as_usize();
        Ok(ProcessPlace { placement, devices_here, devices_in_process: 1 })
    }

    /// Returns true if the devices are virtual CPU devices, which use the memory of the process.
    pub(crate) fn is_cpu(&self) -> bool {
        matches!(self.device, DeviceArg::Cpu)
    }

    /// Runs `job` on the devices of `builder`, after [`ProcessPlace::share_cores`].
    pub(crate) fn run_on<T>(
        &self,
        process: ProcessPlace,
        builder: DeviceMeshBuilder,
        job: impl FnOnce(&DeviceMesh) -> Result<T>,
    ) -> Result<T> {
        let builder = match self.deadline {
            Some(seconds) => builder.deadline(Duration::from_secs(seconds)),
            None => builder,
        };
        if self.is_cpu() && process.is_first() {
            warn_of_devices(process.devices_here);
        }
        let mesh = self.open(builder)?;
        let outcome = process.agrees_with(&mesh).and_then(|()| job(&mesh));
        if outcome.as_ref().is_err_and(|error| !error.ends_all_processes()) {
            // Only this process may have failed. Dropping the last mesh of a process waits until
            // the other processes drop theirs, and they may be waiting for this process in a
            // collective, which would be a deadlock. Without the drop, this process exits and the
            // others fail.
            std::mem::forget(mesh);
        }
        outcome
    }

    fn open(&self, builder: DeviceMeshBuilder) -> Result<DeviceMesh> {
        #[cfg(feature = "mpi")]
        if let Some(Engine::Mpi) = self.engine {
            let device = match self.device {
                DeviceArg::Cpu => Device::Cpu,
                DeviceArg::Cuda | DeviceArg::Metal => {
                    return Err(Error::usage("--engine mpi needs --device cpu"));
                }
            };
            return Ok(builder.mpi(device)?);
        }
        #[cfg(feature = "nccl")]
        if let Some(Engine::Nccl) = self.engine {
            return self.open_nccl(builder);
        }
        Ok(match self.device {
            DeviceArg::Cpu => builder.cpu(),
            DeviceArg::Cuda => builder.cuda(),
            DeviceArg::Metal => builder.metal(),
        }?)
    }

    #[cfg(feature = "nccl")]
    fn open_nccl(&self, builder: DeviceMeshBuilder) -> Result<DeviceMesh> {
        if !matches!(self.device, DeviceArg::Cuda) {
            return Err(Error::usage("--engine nccl needs --device cuda"));
        }
        let launched = LaunchEnv::from_env()?.ok_or_else(|| {
            Error::usage(
                "--engine nccl needs a launcher: candle-distributed launch, torchrun or srun",
            )
        })?;
        let local =
            launched.local_rank().ok_or_else(|| Error::usage("the launcher sets no local rank"))?;
        let store =
            self.store.clone().ok_or_else(|| Error::usage("--engine nccl needs a --store"))?;
        Ok(builder.nccl(launched.placement(), local.as_usize(), store)?)
    }
}

/// Refuses a launcher that started several processes: each of them would do the whole work.
fn refuse_launcher() -> Result<()> {
    match LaunchEnv::from_env() {
        Ok(Some(launched)) if launched.placement().world_size() > WorldSize::ONE => {
            let processes = launched.placement().world_size();
            let fault = format!(
                "a launcher started {processes} processes, but without --engine each of them works \
                 alone"
            );
            Err(Error::usage(fault).with_hint(
                "connect them with --engine mpi or --engine nccl of a build with these features, or \
                 type --engine threads",
            ))
        }
        // The variables of another program may be no launcher's.
        _ => Ok(()),
    }
}

/// Number of threads per core beyond which kernels mostly wait for each other.
const MOST_PER_CORE: usize = 8;

/// Warns if there are too many virtual devices for this machine: each needs a thread, and in
/// training a copy of the model.
fn warn_of_devices(n_devices: usize) {
    let Ok(cores) = thread::available_parallelism().map(usize::from) else { return };
    if n_devices > MOST_PER_CORE * cores {
        output::warning(format_args!(
            "{n_devices} devices share {cores} cores and the memory of this machine"
        ));
    }
}

/// Warns if an environment variable sets an invalid or a very large number of threads.
///
/// candle replaces an invalid number by the number of cores, and does not limit a valid one.
fn warn_of_threads(variable: &str) {
    let Some(value) = env::var_os(variable) else { return };
    let Ok(cores) = thread::available_parallelism().map(usize::from) else { return };
    match value.to_str().and_then(|value| value.parse::<usize>().ok()) {
        None | Some(0) => output::warning(format_args!(
            "{variable} is \"{}\", which is not a number of threads: every device uses all {cores} \
             cores",
            Printable(value.display())
        )),
        Some(threads) if threads > MOST_PER_CORE * cores => output::warning(format_args!(
            "{variable} is {threads}, too many threads for {cores} cores"
        )),
        Some(_) => {}
    }
}
