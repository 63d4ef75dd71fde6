//! `train`: everything together, on real text.

mod dry_run;
mod finetune;
mod parts;
mod start;
mod writing;

use std::path::{Path, PathBuf};

use candle_core::Device;
use candle_distributed::{
    batch::Batch,
    finetune::{
        cost::{ModelBytes, Workload, cost_model, plan},
        data::Model,
        run::{self, RunFolder},
        spec::{Recipe, Session},
    },
    mesh::DeviceMesh,
    plan::{ParameterInfo, report::PlanReport},
    types::Rank,
};

use self::{
    finetune::FinetuneArgs,
    parts::ShardingArgs,
    start::{Beginning, Start},
    writing::WritingArgs,
};
use crate::{
    bytes,
    devices::{DEFAULT_WORLD_SIZE, DeviceArgs, Place},
    error::Result,
    help::examples,
    output, strategy,
    train::{
        agreement,
        built_in::Sizes,
        journal::Journal,
        stop,
        trainer::{self, Job},
    },
};

/// How many steps are lost at most, unless the user wants fewer or more to be.
const CHECKPOINT_EVERY: u64 = 50;

/// Train a language model on text, on several devices at once.
///
/// Without --model it is a small one whose tokens are bytes.
#[derive(Debug, clap::Args)]
#[expect(clippy::struct_excessive_bools, reason = "each is a switch of its own")]
#[command(after_help = examples![
    "# About a minute on short stories; the run is saved in the next free folder under runs"
    "candle-distributed train"
    "# On the text files of a folder"
    "candle-distributed train --data docs --world-size 2 --steps 100 --out docs-run"
    "# On the texts of a .jsonl file: each line is a JSON string, or an object whose `text` is one"
    "candle-distributed train --data texts.jsonl --steps 100"
    "# A larger model, of which every device keeps a part; first, what would it take and send?"
    "candle-distributed train --n-layers 8 --hidden 256 --strategy full --world-size 4 --dry-run"
    "candle-distributed train --n-layers 8 --hidden 256 --strategy full --world-size 4"
    "# After a crash: resume from the last checkpoint, here on more devices"
    "candle-distributed train --out docs-run --resume --world-size 4"
    "# What would its model cost on 8 ranks?"
    "candle-distributed plan docs-run --world-size 8"
])]
pub(crate) struct Args {
    /// Text file, .jsonl file, or folder of such files [default: short stories that the
    /// program makes, but not with --model]
    #[arg(long, value_name = "PATH")]
    data: Option<PathBuf>,
    #[command(flatten)]
    devices: DeviceArgs,
    /// Number of optimizer steps [default: 300, or those of the run that is resumed]
    #[arg(long)]
    steps: Option<u64>,
    /// Most tokens in a step of all devices, padding included [default: 4096, or one longest sequence
    /// per device if that is more]
    #[arg(long, value_name = "N")]
    max_tokens: Option<u64>,
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
    #[arg(long, value_name = "N", default_value_t = CHECKPOINT_EVERY)]
    checkpoint_every: u64,
    /// Most memory that this process may take, such as 4GiB: a run that would take more is refused;
    /// for --device cpu alone [default: the limits that the system sets]
    #[arg(long, value_name = "BYTES", value_parser = bytes::parse)]
    memory_limit: Option<u64>,
    /// Train on when the loss of a step is infinite or not a number, which otherwise ends the run
    #[arg(long)]
    allow_non_finite: bool,
    /// Before the first step, compare the gradients of its batch with differences of the loss, for
    /// each part of the model; a wrong gradient ends the run
    #[arg(long)]
    check: bool,
    /// Train two steps without writing anything, and print what was predicted of their memory and
    /// traffic beside what was measured
    #[arg(long, conflicts_with_all = ["out", "steps", "check", "checkpoint_every"])]
    dry_run: bool,

    #[command(flatten)]
    writing: WritingArgs,
    #[command(flatten)]
    sharding: ShardingArgs,
    #[command(flatten)]
    finetune: FinetuneArgs,
    #[command(flatten)]
    recipe: Recipe,

    #[command(flatten)]
    sizes: Sizes,
    /// The longest sequence, in tokens, which are bytes without --model [default: the longest text,
    /// with packed rows 2048 if that is more and the model has as many positions, or that of the run
    /// that is resumed]
    #[arg(long, value_name = "N", help_heading = "The model")]
    context: Option<usize>,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let place = args.devices.place(DEFAULT_WORLD_SIZE)?;
    place.share_cores()?;
    let start = args.start(place);
    // A process alone decides alone, without a device; several must hear of each other first, or
    // some would wait for one that has ended.
    if place.is_alone() {
        match &start {
            Ok(Start::Train(_)) => {}
            Ok(Start::Complete(path)) => return say_complete(place, path),
            Err(_) => return start.map(drop),
        }
    }
    let grid = args.sharding.grid(place.placement.world_size());
    args.devices.run_on(place, grid, |mesh| args.train(mesh, place, start))
}

/// Finds out what a run starts with, and does not start it.
#[cfg(any(test, fuzzing))]
pub(crate) fn start(args: &Args) -> Result<()> {
    args.start(args.devices.place(DEFAULT_WORLD_SIZE)?).map(drop)
}

impl Args {
    /// Trains, if all processes are to, and reports if this process is the first.
    fn train(&self, mesh: &DeviceMesh, place: Place, start: Result<Start>) -> Result<()> {
        let agreed = agreement::compare(mesh, &self.words(&start));
        // What a process cannot start for says more than that it cannot.
        let start = start?;
        agreed?;
        let beginning = match start {
            Start::Train(beginning) => *beginning,
            Start::Complete(path) => return say_complete(place, &path),
        };
        if self.dry_run {
            return self.rehearse(mesh, place, &beginning);
        }
        let path = self.path(mesh)?;
        agreement::check_shared(mesh, &path)?;
        let unwritten = self.unwritten(place, &beginning)?;
        let Beginning { settings, sharding, data, schedule, .. } = beginning;
        let Beginning { held_out, folder, from, seen, base_bytes, .. } = beginning;
        let job = Job {
            mesh,
            data: &data,
            schedule: &schedule,
            held_out: held_out.as_ref(),
            folder: &folder,
            settings: &settings,
            sharding: sharding.as_ref(),
            typed: &self.typed(),
            checkpoint_every: self.checkpoint_every,
            check: self.check,
            path: &path,
            checkpoints: &run::checkpoints(&path, &settings),
            from: from.as_ref(),
            stop: stop::flag(),
        };
        // Whatever can be refused has been when the folder changes for the first time.
        let model = job.start()?;
        job.checkpoints.lock(mesh)?;
        // The lock needs the mesh, which comes after the run is read: only now nobody else changes
        // it any more.
        if let Some(seen) = &seen {
            agreement::check_unchanged(mesh, &path, seen)?;
        }
        let journal = match place.placement.rank() {
            Rank::ZERO => Some(self.journal(&job, place, base_bytes)?),
            _ => None,
        };
        let prompt = self.writing.prompt(&data, &folder)?;
        job.run(model, journal)?;
        match (prompt.filter(|_| place.placement.rank() == Rank::ZERO), unwritten) {
            (Some(_), Some(bytes)) => {
                writing::say_too_large(bytes);
                Ok(())
            }
            (Some(prompt), None) => self.writing.write(&path, &prompt, &settings),
            (None, _) => Ok(()),
        }
    }

    /// What the model of this run would take to write, if that is too much for this process.
    fn unwritten(&self, place: Place, beginning: &Beginning) -> Result<Option<u64>> {
        let steps = beginning.steps()?;
        let model = beginning.settings.trained_model()?;
        let parameters = model.parameters()?;
        let work = work_of(beginning, &model, &parameters, &steps, place, self.check);
        Ok(work.too_large_to_generate(self.limit(place).as_ref())?)
    }

    /// Says what the run starts with, and opens its folder.
    fn journal(&self, job: &Job<'_>, place: Place, base_bytes: Option<u64>) -> Result<Journal> {
        let needs = announce(job, place)?;
        let first = job.first_step();
        let session = session(job, place, base_bytes);
        let settings = job.settings.clone().with_session(session);
        let folder = if self.resume {
            RunFolder::resume(job.path, &settings, first)?
        } else {
            RunFolder::create(job.path, &settings)?
        };
        Ok(Journal::new(first, job.settings.steps, folder, needs))
    }

    /// The options to type again when the run is resumed, so that it does what it would have done,
    /// each with a space before it.
    fn typed(&self) -> String {
        let limit = self.memory_limit.map(|bytes| format!(" --memory-limit {bytes}"));
        let every = (self.checkpoint_every != CHECKPOINT_EVERY)
            .then(|| format!(" --checkpoint-every {}", self.checkpoint_every));
        let parts = [
            Some(self.devices.typed()),
            Some(self.sharding.typed()),
            every,
            limit,
            Some(self.writing.typed()),
        ];
        parts.into_iter().flatten().collect()
    }

    /// The folder of the run, the same in every process. Where `--out` names none, the first process
    /// makes one.
    fn path(&self, mesh: &DeviceMesh) -> Result<PathBuf> {
        if let Some(out) = &self.out {
            return Ok(out.clone());
        }
        let is_first = mesh.is_first_process();
        let number = if is_first { run::claim_number()? } else { 0 };
        Ok(run::numbered(trainer::largest(mesh, number)?))
    }

    /// The folder of the run to resume.
    fn resumed(&self) -> Option<&Path> {
        self.out.as_deref().filter(|_| self.resume)
    }
}

/// What decides how much memory this process takes for a run.
fn work_of<'a>(
    beginning: &'a Beginning,
    model: &Model,
    parameters: &'a [ParameterInfo],
    steps: &'a [Vec<Batch>],
    place: Place,
    check: bool,
) -> Workload<'a> {
    Workload {
        sizes: model.sizes(),
        precision: beginning.settings.recipe.precision(),
        parameters,
        sharding: beginning.sharding.as_ref(),
        steps,
        is_packed: beginning.settings.is_packed(),
        check,
        world_size: place.placement.world_size().as_u64(),
        ranks: place.ranks(),
        // Some systems do not say.
        base_bytes: beginning.base_bytes.unwrap_or(0),
    }
}

/// Says that there is nothing to do for the run in `path`.
fn say_complete(place: Place, path: &Path) -> Result<()> {
    place.print(|out| writeln!(out, "the run in {} is complete", path.display()))
}

/// The session of this process, which took so much before training.
fn session(job: &Job<'_>, place: Place, base_bytes: Option<u64>) -> Session {
    let devices = job.mesh.devices();
    Session {
        first_step: job.first_step(),
        world_size: place.placement.world_size().as_u64(),
        devices_here: devices.len() as u64,
        on_processors: devices.iter().all(Device::is_cpu),
        sharding: job.sharding.cloned(),
        base_bytes,
        step_traffic: None,
        peak_bytes: None,
    }
}

/// Prints what each rank of a sharded run holds, and how an epoch is batched; returns what the model
/// needs.
fn announce(job: &Job<'_>, place: Place) -> Result<ModelBytes> {
    let parameters = job.settings.trained_model()?.parameters()?;
    let plan = plan(job.sharding, &parameters, place.placement.world_size())?;
    let report =
        PlanReport::new(&plan, &cost_model(job.sharding, job.settings.recipe.precision()), None)?;
    let (first_epoch, _) = job.schedule.first_epoch()?;
    let first = job.first_step();
    let steps = job.settings.steps;
    output::text(|out| {
        if first > 0 {
            writeln!(out, "resuming after step {first} of {steps}")?;
        }
        if job.sharding.is_some() {
            writeln!(out, "{report}")?;
        }
        let rules = job.sharding.and_then(|sharding| sharding.strategy.matches(&parameters));
        rules.map_or(Ok(()), |rules| strategy::write_matches(&rules, out))?;
        writeln!(out, "each epoch: {first_epoch}")
    })?;
    Ok(ModelBytes::new(&parameters, report.cost(), job.sharding.is_some())?)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        train: Args,
    }

    #[test]
    fn a_model_that_takes_more_whole_than_its_adapters_do_writes_nothing() {
        let home = tempfile::tempdir().unwrap();
        let config = serde_json::json!({
            "architectures": ["LlamaForCausalLM"], "vocab_size": 260, "hidden_size": 1024,
            "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 8,
            "num_key_value_heads": 8, "max_position_embeddings": 32, "rms_norm_eps": 1e-6,
            "hidden_act": "silu", "rope_theta": 1e4, "torch_dtype": "float32", "eos_token_id": 256,
        });
        fs::write(home.path().join("config.json"), config.to_string()).unwrap();
        let data = home.path().join("texts.txt");
        fs::write(&data, "to be or\n\nnot to be\n\n").unwrap();
        let out = home.path().join("run");
        let train = |more: &[&str]| {
            let line = ["train", "--init", "1"].into_iter().chain(more.iter().copied());
            let line = line.map(std::ffi::OsStr::new);
            let line = line.chain(["--model".as_ref(), home.path().as_os_str()]);
            let line = line.chain(["--data".as_ref(), data.as_os_str()]);
            Line::parse_from(line.chain(["--out".as_ref(), out.as_os_str()])).train
        };
        let begin = |args: &Args, place| match args.start(place).unwrap() {
            Start::Train(beginning) => beginning,
            Start::Complete(path) => panic!("{} is complete", path.display()),
        };
        let unwritten = |more: &[&str]| {
            let args = train(more);
            let place = args.devices.place(DEFAULT_WORLD_SIZE).unwrap();
            args.unwritten(place, &begin(&args, place)).unwrap()
        };
        assert_eq!(unwritten(&[]), None);
        assert!(unwritten(&["--lora", "1", "--strategy", "full"]).is_some());

        // What is held out takes memory as well.
        let args = train(&["--batch-size", "1", "--validation", "0.5"]);
        let place = args.devices.place(DEFAULT_WORLD_SIZE).unwrap();
        let beginning = begin(&args, place);
        let n_steps = beginning.schedule.first_epoch().unwrap().1.len();
        assert_eq!((n_steps, beginning.steps().unwrap().len()), (1, 2));
    }

    #[test]
    fn a_run_that_went_on_while_it_was_read_is_refused() {
        let home = tempfile::tempdir().unwrap();
        let out = home.path().join("run");
        let data = home.path().join("text.txt");
        fs::write(&data, "to be or\n\nnot to be\n\n".repeat(9)).unwrap();
        let line = ["train", "--steps", "3", "--checkpoint-every", "1", "--resume"];
        let line = line.map(std::ffi::OsStr::new).into_iter();
        let line = line.chain(["--out".as_ref(), out.as_os_str()]);
        let args = Line::parse_from(line.chain(["--data".as_ref(), data.as_os_str()])).train;
        let place = args.devices.place(DEFAULT_WORLD_SIZE).unwrap();
        let mesh = DeviceMesh::cpu(2).unwrap();
        args.train(&mesh, place, args.start(place)).unwrap();
        let model = out.join("model");
        let killed = || fs::remove_dir_all(&model).unwrap();
        let metrics = || fs::read(out.join("metrics.jsonl")).unwrap();

        let second = out.join("checkpoints/step-0000000002");
        let aside = home.path().join("aside");
        let run_json = out.join("run.json");
        let settings = fs::read_to_string(&run_json).unwrap();
        let before = metrics();
        let is_refused = |start, what| {
            let error = args.train(&mesh, place, start).unwrap_err();
            assert!(error.to_string().contains("went on while it was read"), "{what}: {error}");
            assert_eq!(metrics(), before, "{what}");
        };
        // Another process saves a checkpoint, ends its session, and completes the run.
        killed();
        fs::rename(&second, &aside).unwrap();
        let start = args.start(place);
        fs::rename(&aside, &second).unwrap();
        is_refused(start, "a checkpoint");
        let start = args.start(place);
        fs::write(&run_json, format!("{settings}\n")).unwrap();
        is_refused(start, "the settings");
        let start = args.start(place);
        fs::create_dir(&model).unwrap();
        is_refused(start, "a model");

        killed();
        args.train(&mesh, place, args.start(place)).unwrap();
        assert!(model.exists());
    }
}
