//! `train`: everything together, on real text.

use std::{
    path::{Path, PathBuf},
    sync::atomic::Ordering,
};

#[cfg(feature = "mpi")]
use candle_core::Device;
#[cfg(feature = "mpi")]
use candle_distributed::types::Launched;
use candle_distributed::{
    mesh::{self, Checkpoint, Checkpoints, DeviceMesh},
    plan::{CostModel, Full, PlanReport, ShardingStrategy},
    types::{Placement, Rank, Seed, WorldSize},
};
use candle_nn::{VarBuilder, VarMap};
use clap::ValueEnum;

use crate::{
    error::{Error, Result},
    output, threads,
    train::{
        corpus::Corpus,
        data::{self, Schedule},
        journal::Journal,
        model::Transformer,
        parameters,
        run_dir::{self, RunDir, Settings},
        trainer::{self, Job, STOP},
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
    /// Number of optimizer steps [default: 400, or those of the run that is resumed]
    #[arg(long)]
    steps: Option<u64>,
    /// Seed of the parameters and the shuffles [default: 0, or that of the run that is resumed]
    #[arg(long)]
    seed: Option<u64>,
    /// Folder for metrics, checkpoints and the model; must not hold a run yet [default: the next free runs/NUMBER]
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Go on with the run in --out after its last checkpoint, on any number of devices; begin it if there is none
    #[arg(long, requires = "out")]
    resume: bool,
    /// After how many steps a checkpoint is written, again and again; the newest two are kept
    #[arg(long, value_name = "STEPS", default_value_t = 50)]
    checkpoint_every: u64,
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

const DEFAULT_STEPS: u64 = 400;

pub(crate) fn run(args: &Args) -> Result<()> {
    let place = args.place()?;
    if args.checkpoint_every == 0 {
        return Err(Error::Usage("checkpoints every 0 steps are none, at least 1 is needed".into()));
    }
    if let Some(path) = args.resumed().filter(|path| run_dir::is_complete(path)) {
        return output::text(|out| writeln!(out, "the run in {} is complete", path.display()));
    }
    threads::share_cores(place.devices_here);
    // Whoever cannot be told when to stop is ended at once, as any program.
    drop(ctrlc::set_handler(|| STOP.store(true, Ordering::Relaxed)));
    let known = args.resumed().map_or(Ok(None), Settings::read)?;
    let data = args.data.clone().or_else(|| known.as_ref()?.data.clone());
    let corpus = data.as_deref().map_or_else(|| Ok(Corpus::embedded()), Corpus::read)?;
    let begun = Settings {
        format_version: 1,
        seed: args.seed.unwrap_or(0),
        steps: args.steps.unwrap_or(DEFAULT_STEPS),
        data,
        text: corpus.fingerprint(),
        max_tokens: data::max_tokens(place.placement.world_size()),
    };
    let settings = known.map_or(Ok(begun.clone()), |known| args.agreed(begun, known))?;
    if settings.steps == 0 {
        return Err(Error::Usage("0 steps are no training, at least 1 is needed".into()));
    }
    let mesh = args.mesh(place.placement.world_size())?;
    let outcome = args.train(&mesh, place.placement, &settings, &corpus);
    if !matches!(outcome, Ok(()) | Err(Error::Stopped { .. })) {
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
    fn train(&self, mesh: &DeviceMesh, placement: Placement, settings: &Settings, corpus: &Corpus) -> Result<()> {
        let (seed, steps) = (Seed::new(settings.seed), settings.steps);
        let schedule = Schedule::new(corpus, seed.derive(ORDER_STREAM), settings.max_tokens)?;
        let build = |vb: VarBuilder<'_>| Transformer::new(trainer::MODEL, &vb);
        let vars = parameters::initialized(seed.derive(INIT_STREAM), &mesh.devices()[0], build)?;
        let checkpoint = match self.resumed() {
            Some(path) => Checkpoints::new(run_dir::checkpoints(path)).latest()?,
            None => None,
        };
        let first = checkpoint.as_ref().map_or(0, Checkpoint::step);
        let (number, run_dir) = if placement.rank() == Rank::ZERO {
            let run_dir = self.run_dir(settings, first)?;
            print_plan(&vars, placement.world_size())?;
            let first_epoch = schedule.first_epoch()?;
            output::text(|out| writeln!(out, "each epoch: {first_epoch}"))?;
            run_dir
        } else {
            (0, None)
        };
        let path = match &self.out {
            Some(out) => out.clone(),
            None => run_dir::numbered(trainer::largest(mesh, number)?),
        };
        let journal = run_dir.map(|run_dir| Journal::new(first, steps, run_dir));
        let (schedule, checkpoint_every) = (&schedule, self.checkpoint_every);
        Job { mesh, corpus, schedule, steps, checkpoint_every, path: &path, checkpoint }.run(&vars, journal)
    }

    /// The folder of the run, and its number if it has one.
    fn run_dir(&self, settings: &Settings, first: u64) -> Result<(u32, Option<RunDir>)> {
        Ok(match &self.out {
            None => RunDir::create_numbered(settings).map(|(number, run_dir)| (number, Some(run_dir)))?,
            Some(out) if self.resume => (0, Some(RunDir::resume(out, settings, first)?)),
            Some(out) => (0, Some(RunDir::create(out, settings)?)),
        })
    }

    /// The folder of the run that is to be gone on with.
    fn resumed(&self) -> Option<&Path> {
        self.out.as_deref().filter(|_| self.resume)
    }

    /// What a run is that is gone on with: as it was begun, which the arguments must not contradict.
    fn agreed(&self, asked: Settings, known: Settings) -> Result<Settings> {
        let contradicts = [
            ("steps", self.steps.is_some_and(|steps| steps != known.steps), known.steps),
            ("seed", self.seed.is_some_and(|seed| seed != known.seed), known.seed),
        ];
        if let Some((name, _, known)) = contradicts.into_iter().find(|(_, contradicts, _)| *contradicts) {
            return Err(Error::Usage(format!("the run was begun with --{name} {known}, and goes on with that alone")));
        }
        if asked.text != known.text {
            return Err(Error::Usage("the text is not the one that the run was begun with".into()));
        }
        Ok(Settings { data: asked.data, ..known })
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
