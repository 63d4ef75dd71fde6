//! `train`: everything together, on real text.

use std::{
    path::{Path, PathBuf},
    sync::{Arc, atomic::AtomicBool},
};

use candle_core::Device;
use candle_distributed::{
    mesh::DeviceMesh,
    plan::{ShardingPlan, cost::CostModel, report::PlanReport},
    train::{Checkpoint, Checkpoints},
    types::{Placement, Rank, Seed, WorldSize},
};
use candle_nn::VarBuilder;
use signal_hook::{
    consts::{SIGINT, SIGTERM},
    flag,
};

use crate::{
    devices::{DEFAULT_WORLD_SIZE, DeviceArgs},
    error::{self, Error, Result},
    help::examples,
    output,
    train::{
        corpus::Corpus,
        data::{self, INIT_STREAM, Schedule},
        journal::Journal,
        model::Transformer,
        parameters,
        run_dir::{self, FORMAT_VERSION, RunDir, Session, Settings},
        sharding::{self, Needs},
        trainer::{self, Job},
    },
};

/// Train a small byte-level transformer on text, on several devices at once.
#[derive(Debug, clap::Args)]
#[command(after_help = examples![
    "# A minute on this program's own text; the run lies in the next free folder under runs"
    "candle-distributed train"
    "# On the text files of a folder"
    "candle-distributed train --data docs --world-size 2 --steps 100 --out docs-run"
    "# On the texts of a .jsonl file: each line is a JSON string, or an object whose `text` is one"
    "candle-distributed train --data texts.jsonl --steps 100"
    "# After a crash: from the last checkpoint on, here on more devices"
    "candle-distributed train --out docs-run --resume --world-size 4"
    "# What would its model cost on 8 ranks?"
    "candle-distributed plan docs-run --world-size 8"
])]
pub(crate) struct Args {
    /// Text file, .jsonl file, or folder of such files [default: this program's own sources]
    #[arg(long, value_name = "PATH")]
    data: Option<PathBuf>,
    #[command(flatten)]
    devices: DeviceArgs,
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

const DEFAULT_STEPS: u64 = 400;

pub(crate) fn run(args: &Args) -> Result<()> {
    let place = args.devices.place(DEFAULT_WORLD_SIZE)?;
    if args.checkpoint_every == 0 {
        return Err(Error::Usage(
            "checkpoints every 0 steps are none, at least 1 is needed".into(),
        ));
    }
    let known = args.resumed().map_or(Ok(None), Settings::read)?;
    known.iter().try_for_each(|known| args.agrees_with(known))?;
    if let Some(path) = args.resumed()
        && run_dir::is_complete(path)?
    {
        return place.tell(|out| writeln!(out, "the run in {} is complete", path.display()));
    }
    let data = args.data.clone().or_else(|| known.as_ref()?.data.clone());
    let corpus = data.as_deref().map_or_else(|| Ok(Corpus::embedded()), Corpus::read)?;
    let settings = args.settings(known, data, &corpus, place.placement.world_size())?;
    let grid =
        DeviceMesh::builder().axis(DeviceMesh::AXIS, place.placement.world_size().as_usize());
    args.devices.run_on(place, grid, |mesh| args.train(mesh, place.placement, settings, &corpus))
}

impl Args {
    /// Trains, and reports if this process is the first.
    fn train(
        &self,
        mesh: &DeviceMesh,
        placement: Placement,
        settings: Settings,
        corpus: &Corpus,
    ) -> Result<()> {
        let (seed, steps) = (Seed::new(settings.seed), settings.steps);
        let schedule = Schedule::of(&settings, corpus)?;
        let build = |vb: VarBuilder<'_>| Transformer::new(trainer::MODEL, &vb);
        let vars = parameters::initialized(seed.derive(INIT_STREAM), &mesh.devices()[0], build)?;
        let checkpoint = match self.resumed() {
            Some(path) => Checkpoints::new(run_dir::checkpoints(path)).latest()?,
            None => None,
        };
        let first = checkpoint.as_ref().map_or(0, Checkpoint::step);
        if !trainer::agree(mesh, settings.fingerprint(first))? {
            let differ = "the processes do not begin the same run: folder, text and arguments must be the same for all";
            return Err(Error::Usage(differ.into()));
        }
        let (mut number, mut journal) = (0, None);
        if placement.rank() == Rank::ZERO {
            let parameters = sharding::parameters_in(&vars)?;
            let plan = sharding::plan(&parameters, placement.world_size())?;
            let needs = Needs::of(&parameters, &plan.cost(&CostModel::default())?)?;
            let run_dir;
            (number, run_dir) =
                self.run_dir(&settings.with_session(session(mesh, placement, first)), first)?;
            journal = Some(Journal::new(first, steps, run_dir, needs));
            announce(&plan, &schedule, first, steps)?;
        }
        let path = match &self.out {
            Some(out) => out.clone(),
            None => run_dir::numbered(trainer::largest(mesh, number)?),
        };
        let (schedule, checkpoint_every, stop) = (&schedule, self.checkpoint_every, stop_flag());
        Job { mesh, corpus, schedule, steps, checkpoint_every, path: &path, checkpoint, stop }
            .run(&vars, journal)
    }

    /// The folder of the run, and its number, 0 if it has none.
    fn run_dir(&self, settings: &Settings, first: u64) -> Result<(u32, RunDir)> {
        match &self.out {
            None => RunDir::create_numbered(settings),
            Some(out) if self.resume => Ok((0, RunDir::resume(out, settings, first)?)),
            Some(out) => Ok((0, RunDir::create(out, settings)?)),
        }
    }

    /// The folder of the run that is to be gone on with.
    fn resumed(&self) -> Option<&Path> {
        self.out.as_deref().filter(|_| self.resume)
    }

    /// Checks that the arguments do not contradict what the run began with.
    fn agrees_with(&self, known: &Settings) -> Result<()> {
        for (name, asked, known) in
            [("steps", self.steps, known.steps), ("seed", self.seed, known.seed)]
        {
            if asked.is_some_and(|asked| asked != known) {
                let other = Error::Usage(format!(
                    "the run was begun with --{name} {known}, and goes on with that alone"
                ));
                return Err(other.hinted("another number is another run, in another folder"));
            }
        }
        Ok(())
    }

    /// What the run is: as it was begun, if it is gone on with.
    fn settings(
        &self,
        known: Option<Settings>,
        data: Option<PathBuf>,
        corpus: &Corpus,
        world_size: WorldSize,
    ) -> Result<Settings> {
        let (text, model) = (corpus.fingerprint(), Some(trainer::MODEL));
        if let Some(known) = known {
            if text != known.text {
                return Err(Error::Usage(
                    "the text is not the one that the run was begun with".into(),
                ));
            }
            // Checkpoints of another model would be refused.
            return Ok(Settings { data, model, ..known });
        }
        let (seed, steps) = (self.seed.unwrap_or(0), self.steps.unwrap_or(DEFAULT_STEPS));
        if steps == 0 {
            return Err(Error::Usage("0 steps are no training, at least 1 is needed".into()));
        }
        let max_tokens = data::max_tokens(world_size);
        Ok(Settings {
            format_version: FORMAT_VERSION,
            seed,
            steps,
            data,
            text,
            max_tokens,
            model,
            sessions: vec![],
        })
    }
}

/// Set when the program is told to end, by Ctrl-C or a scheduler. Told again, it ends at once.
fn stop_flag() -> Arc<AtomicBool> {
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM] {
        // Whoever cannot be told when to stop is ended at once, as any program.
        drop(flag::register_conditional_shutdown(
            signal,
            error::INTERRUPTED.into(),
            Arc::clone(&stop),
        ));
        drop(flag::register(signal, Arc::clone(&stop)));
    }
    stop
}

/// Where this process runs after `first_step` steps.
fn session(mesh: &DeviceMesh, placement: Placement, first_step: u64) -> Session {
    Session {
        first_step,
        world_size: placement.world_size().as_u64(),
        devices_here: mesh.devices().len() as u64,
        on_processors: mesh.devices().iter().all(Device::is_cpu),
        peak_bytes: None,
    }
}

/// Prints what is about to happen, and what each rank would hold of the model if its parameters were sharded.
fn announce(plan: &ShardingPlan, schedule: &Schedule, first: u64, steps: u64) -> Result<()> {
    let report = PlanReport::new(plan, &CostModel::default(), None)?;
    let (first_epoch, _) = schedule.first_epoch()?;
    output::text(|out| {
        if first > 0 {
            writeln!(out, "going on after step {first} of {steps}")?;
        }
        writeln!(out, "{report}\neach epoch: {first_epoch}")
    })
}
