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
use candle_nn::{VarBuilder, VarMap};
use signal_hook::{
    consts::{SIGINT, SIGTERM},
    flag,
};

use crate::{
    devices::{DEFAULT_WORLD_SIZE, DeviceArgs},
    error::{self, Error, Result},
    help::examples,
    hint, output,
    train::{
        corpus::Corpus,
        data::{self, INIT_STREAM, Schedule},
        journal::Journal,
        model::Transformer,
        parameters,
        run_dir::{self, RunDir},
        session::Session,
        settings::{FORMAT_VERSION, Settings},
        sharding::{self, Needs},
        trainer::{self, Job},
    },
};

/// Train a small byte-level transformer on text, on several devices at once.
#[derive(Debug, clap::Args)]
#[command(after_help = examples![
    "# About a minute on this program's own sources; the run is saved in the next free folder under runs"
    "candle-distributed train"
    "# On the text files of a folder"
    "candle-distributed train --data docs --world-size 2 --steps 100 --out docs-run"
    "# On the texts of a .jsonl file: each line is a JSON string, or an object whose `text` is one"
    "candle-distributed train --data texts.jsonl --steps 100"
    "# After a crash: resume from the last checkpoint, here on more devices"
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
    /// Folder for metrics, checkpoints and the model; without --resume it must not hold a run yet
    /// [default: the next free runs/NUMBER]
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Resume the run in --out from its last checkpoint, on any number of devices; start it if
    /// there is none
    #[arg(long, requires = "out")]
    resume: bool,
    /// Write a checkpoint every N steps; the newest two are kept
    #[arg(long, value_name = "N", default_value_t = 50)]
    checkpoint_every: u64,
    /// Before the first step, compare the gradients of its batch with differences of the loss, for
    /// each part of the model; a wrong gradient ends the run
    #[arg(long)]
    check: bool,
}

const DEFAULT_STEPS: u64 = 400;

pub(crate) fn run(args: &Args) -> Result<()> {
    let place = args.devices.place(DEFAULT_WORLD_SIZE)?;
    if args.checkpoint_every == 0 {
        return Err(Error::usage(
            "--checkpoint-every 0 would write no checkpoint, it must be at least 1",
        ));
    }
    let known = match args.resumed() {
        Some(path) => Settings::read(path)?,
        None => None,
    };
    if let Some(known) = &known {
        args.agrees_with(known)?;
    }
    // Before the text is read: a complete run needs none.
    if let Some(path) = args.resumed()
        && run_dir::is_complete(path)?
    {
        return place.print(|out| writeln!(out, "the run in {} is complete", path.display()));
    }
    let data = args.data.clone().or_else(|| known.as_ref()?.data.clone());
    let corpus = match &data {
        Some(path) => Corpus::read(path)?,
        None => Corpus::embedded(),
    };
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
        let steps = settings.steps;
        let schedule = Schedule::of(&settings, corpus)?;
        let vars = initial_parameters(mesh, Seed::new(settings.seed))?;
        let checkpoint = self.checkpoint()?;
        let first = checkpoint.as_ref().map_or(0, Checkpoint::step);
        if !trainer::agree(mesh, settings.fingerprint(first))?
            || !trainer::agree(mesh, self.check.into())?
        {
            return Err(Error::usage(
                "the processes do not start the same run: folder, text and arguments must be the \
                 same for all",
            ));
        }
        let mut number = 0;
        let mut journal = None;
        if placement.rank() == Rank::ZERO {
            let parameters = sharding::parameters_in(&vars)?;
            let plan = sharding::plan(&parameters, placement.world_size())?;
            let needs = Needs::of(&parameters, &plan.cost(&CostModel::default())?)?;
            let settings = settings.with_session(session(mesh, placement, first));
            let (claimed, run_dir) = self.run_dir(&settings, first)?;
            number = claimed;
            journal = Some(Journal::new(first, steps, run_dir, needs));
            announce(&plan, &schedule, first, steps)?;
        }
        let path = self.path(mesh, number)?;
        let job = Job {
            mesh,
            corpus,
            schedule: &schedule,
            steps,
            checkpoint_every: self.checkpoint_every,
            check: self.check,
            path: &path,
            checkpoint,
            stop: stop_flag(),
        };
        job.run(&vars, journal)
    }

    /// The folder of the run, the same in every process. Where `--out` names none, only the first
    /// process has claimed one: `number` is 0 in the others.
    fn path(&self, mesh: &DeviceMesh, number: u32) -> Result<PathBuf> {
        match &self.out {
            Some(out) => Ok(out.clone()),
            None => Ok(run_dir::numbered(trainer::largest(mesh, number)?)),
        }
    }

    /// The checkpoint to resume from, if there is one.
    fn checkpoint(&self) -> Result<Option<Checkpoint>> {
        match self.resumed() {
            Some(path) => Ok(Checkpoints::new(run_dir::checkpoints(path)).latest()?),
            None => Ok(None),
        }
    }

    /// The folder of the run, and its number, 0 if it has none.
    fn run_dir(&self, settings: &Settings, first: u64) -> Result<(u32, RunDir)> {
        match &self.out {
            None => RunDir::create_numbered(settings),
            Some(out) if self.resume => Ok((0, RunDir::resume(out, settings, first)?)),
            Some(out) => Ok((0, RunDir::create(out, settings)?)),
        }
    }

    /// The folder of the run to resume.
    fn resumed(&self) -> Option<&Path> {
        self.out.as_deref().filter(|_| self.resume)
    }

    /// Checks that the arguments do not contradict those that the run started with.
    fn agrees_with(&self, known: &Settings) -> Result<()> {
        for (name, asked, known) in
            [("steps", self.steps, known.steps), ("seed", self.seed, known.seed)]
        {
            if asked.is_some_and(|asked| asked != known) {
                let other = Error::usage(format!(
                    "the run started with --{name} {known}, and can only be resumed with that"
                ));
                return Err(other.hinted("another number needs a new run, in another folder"));
            }
        }
        Ok(())
    }

    /// The settings of the run: those that it started with, if it is resumed.
    fn settings(
        &self,
        known: Option<Settings>,
        data: Option<PathBuf>,
        corpus: &Corpus,
        world_size: WorldSize,
    ) -> Result<Settings> {
        let text = corpus.fingerprint();
        let model = Some(trainer::MODEL);
        if let Some(known) = known {
            if text != known.text {
                let changed = Error::usage("the text is not the one that the run started with");
                return Err(changed.hinted(hint::TEXT));
            }
            // Checkpoints of another model would be refused.
            return Ok(Settings { data, model, ..known });
        }
        let steps = self.steps.unwrap_or(DEFAULT_STEPS);
        if steps == 0 {
            return Err(Error::usage("--steps 0 trains nothing, it must be at least 1"));
        }
        Ok(Settings {
            format_version: FORMAT_VERSION,
            seed: self.seed.unwrap_or(0),
            steps,
            data,
            text,
            max_tokens: data::max_tokens(world_size),
            model,
            sessions: vec![],
        })
    }
}

/// The parameters before the first step, the same in every process.
fn initial_parameters(mesh: &DeviceMesh, seed: Seed) -> Result<VarMap> {
    let build = |vb: VarBuilder<'_>| Transformer::new(trainer::MODEL, &vb);
    Ok(parameters::initialized(seed.derive(INIT_STREAM), &mesh.devices()[0], build)?)
}

/// A flag that Ctrl-C or a scheduler sets. A second signal ends the program at once.
fn stop_flag() -> Arc<AtomicBool> {
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM] {
        // Without its handler the signal ends the program at once, as it would any other.
        drop(flag::register_conditional_shutdown(
            signal,
            error::INTERRUPTED.into(),
            Arc::clone(&stop),
        ));
        drop(flag::register(signal, Arc::clone(&stop)));
    }
    stop
}

/// The session of this process, which starts after `first_step` steps.
fn session(mesh: &DeviceMesh, placement: Placement, first_step: u64) -> Session {
    Session {
        first_step,
        world_size: placement.world_size().as_u64(),
        devices_here: mesh.devices().len() as u64,
        on_processors: mesh.devices().iter().all(Device::is_cpu),
        peak_bytes: None,
    }
}

/// Prints what each rank would hold if the parameters were sharded, and how an epoch is batched.
fn announce(plan: &ShardingPlan, schedule: &Schedule, first: u64, steps: u64) -> Result<()> {
    let report = PlanReport::new(plan, &CostModel::default(), None)?;
    let (first_epoch, _) = schedule.first_epoch()?;
    output::text(|out| {
        if first > 0 {
            writeln!(out, "resuming after step {first} of {steps}")?;
        }
        writeln!(out, "{report}\neach epoch: {first_epoch}")
    })
}
