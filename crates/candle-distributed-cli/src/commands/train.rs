//! `train`: everything together, on real text.

use std::path::PathBuf;

use candle_distributed::{
    mesh::{self, DeviceMesh},
    plan::{CostModel, Full, PlanReport, ShardingStrategy},
    types::{Seed, WorldSize},
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
    /// Number of devices; on one processor, so many virtual ones
    #[arg(long, default_value_t = 2)]
    world_size: u64,
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
    let world_size = WorldSize::new(args.world_size)?;
    if args.steps == 0 {
        return Err(Error::Usage("0 steps are no training, at least 1 is needed".into()));
    }
    threads::share_cores(world_size.as_usize());
    let corpus = args.data.as_deref().map_or_else(|| Ok(Corpus::embedded()), Corpus::read)?;
    let mesh = args.mesh(world_size)?;
    let seed = Seed::new(args.seed);
    let schedule = Schedule::new(&corpus, world_size, seed.derive(ORDER_STREAM))?;
    let build = |vb: VarBuilder<'_>| Transformer::new(trainer::MODEL, &vb);
    let vars = parameters::initialized(seed.derive(INIT_STREAM), &mesh.devices()[0], build)?;
    let run_dir = RunDir::create(args.out.as_deref())?;
    print_plan(&vars, world_size)?;
    output::text(|out| writeln!(out, "each epoch: {}", schedule.first_epoch()))?;
    trainer::train(&mesh, &vars, &corpus, schedule, args.steps, Journal::new(args.steps, run_dir))
}

impl Args {
    fn mesh(&self, world_size: WorldSize) -> Result<DeviceMesh> {
        let Engine::Threads = self.engine;
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
