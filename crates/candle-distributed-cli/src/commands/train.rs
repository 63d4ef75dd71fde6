//! `train`: everything together, on real text.

use std::path::PathBuf;

#[cfg(feature = "mpi")]
use candle_core::Device;
#[cfg(feature = "mpi")]
use candle_distributed::types::Launched;
use candle_distributed::{
    mesh::{self, DeviceMesh},
    plan::{CostModel, Full, PlanReport, ShardingStrategy},
    types::{Placement, Rank, Seed, WorldSize},
};
use candle_nn::{VarBuilder, VarMap};
use clap::ValueEnum;

use crate::{
    error::{Error, Result},
    output, threads,
    train::{
        corpus::Corpus, data::Schedule, journal::Journal, model::Transformer, parameters, run_dir::RunDir, trainer,
    },
};

/// Train a small byte-level transformer on text, on several devices at once.
///
/// Example: candle-distributed train --data docs --world-size 2 --steps 100
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Text file, or folder of text files [default: this program's own sources]
    #[arg(long, value_name = "PATH")]
    data: Option<PathBuf>,
    /// Number of devices; on one processor, so many virtual ones [default: 2, or the number of processes of MPI]
    #[arg(long)]
    world_size: Option<u64>,
    /// How the devices work together
    #[arg(long, value_enum, default_value_t)]
    engine: Engine,
    /// Kind of device
    #[arg(long, value_enum, default_value_t)]
    device: DeviceArg,
    /// Number of optimizer steps
    #[arg(long, default_value_t = 400)]
    steps: u64,
    /// Seed of the parameters and the shuffles
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Folder for metrics.jsonl and model.safetensors; must not hold a run yet [default: the next free runs/NUMBER]
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
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

/// What the run's randomness is for; each purpose has a stream of its own.
const INIT_STREAM: u64 = 0;
const ORDER_STREAM: u64 = 1;

pub(crate) fn run(args: &Args) -> Result<()> {
    if args.steps == 0 {
        return Err(Error::Usage("0 steps are no training, at least 1 is needed".into()));
    }
    let place = args.place()?;
    threads::share_cores(place.devices_here);
    let corpus = args.data.as_deref().map_or_else(|| Ok(Corpus::embedded()), Corpus::read)?;
    let mesh = args.mesh(place.placement.world_size())?;
    let outcome = args.train(&mesh, place.placement, &corpus);
    if outcome.is_err() {
        // The last mesh of a process takes leave of the others, who may wait for this one; a process that goes without
        // leave ends all of them.
        std::mem::forget(mesh);
    }
    outcome
}

/// This process among those of a run.
struct Place {
    placement: Placement,
    /// How many devices share this machine's cores.
    devices_here: usize,
}

impl Args {
    /// Trains, and reports if this process is the first.
    fn train(&self, mesh: &DeviceMesh, placement: Placement, corpus: &Corpus) -> Result<()> {
        let seed = Seed::new(self.seed);
        let schedule = Schedule::new(corpus, placement.world_size(), seed.derive(ORDER_STREAM))?;
        let build = |vb: VarBuilder<'_>| Transformer::new(trainer::MODEL, &vb);
        let vars = parameters::initialized(seed.derive(INIT_STREAM), &mesh.devices()[0], build)?;
        let mut journal = None;
        if placement.rank() == Rank::ZERO {
            journal = Some(Journal::new(self.steps, RunDir::create(self.out.as_deref())?));
            print_plan(&vars, placement.world_size())?;
            output::text(|out| writeln!(out, "each epoch: {}", schedule.first_epoch()))?;
        }
        trainer::train(mesh, &vars, corpus, schedule, self.steps, journal)
    }

    fn place(&self) -> Result<Place> {
        match self.engine {
            Engine::Threads => {
                let world_size = WorldSize::new(self.world_size.unwrap_or(2))?;
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

    fn mesh(&self, world_size: WorldSize) -> Result<DeviceMesh> {
        #[cfg(feature = "mpi")]
        if let Engine::Mpi = self.engine {
            let device = match self.device {
                DeviceArg::Cpu => Device::Cpu,
                DeviceArg::Cuda | DeviceArg::Metal => {
                    return Err(Error::Usage("--engine mpi trains on processors, --device cpu".into()));
                }
            };
            return Ok(DeviceMesh::builder().mpi(device)?);
        }
        let count = world_size.as_usize();
        Ok(match self.device {
            DeviceArg::Cpu => DeviceMesh::cpu(count),
            DeviceArg::Cuda => DeviceMesh::cuda(count),
            DeviceArg::Metal => DeviceMesh::metal(count),
        }?)
    }
}

/// Prints what each rank would hold of the model if its parameters were sharded.
fn print_plan(vars: &VarMap, world_size: WorldSize) -> Result<()> {
    let vars = parameters::by_name(vars)?;
    let infos = mesh::parameter_infos(vars.iter().map(|(name, var)| (name, var.as_tensor())))?;
    let plan = Full::default().plan(&infos, world_size)?;
    let report = PlanReport::new(&plan, &CostModel::default(), None)?;
    output::text(|out| writeln!(out, "{report}"))
}
