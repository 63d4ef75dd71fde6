//! `train`: everything together, on real text.

mod dry_run;
mod memory;
mod parts;
mod writing;

use std::path::PathBuf;

use candle_distributed::{
    finetune::{
        self, Event, Examples, Overlong, PreparedRun, RunError, RunOptions, Start, Trainer,
        spec::Spec,
    },
    mesh::DeviceMesh,
    plan::report::PlanReport,
    train::{self, CheckpointError},
    types::human::HumanCount,
};

use self::{parts::ShardingArgs, writing::WritingArgs};
use crate::{
    bytes,
    devices::{DEFAULT_WORLD_SIZE, DeviceArgs, Place},
    error::{Error, ErrorKind, Result},
    help::{examples, typed},
    hint, output, strategy,
    train::{agreement, journal::Journal, stop},
};

/// Train a language model on text, on several devices at once.
///
/// Without --model it is a small model of bytes.
#[derive(Debug, clap::Args)]
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
    #[command(flatten)]
    run: RunOptions,
    #[command(flatten)]
    devices: DeviceArgs,
    /// Most memory that this process may take, such as 4GiB: a run that would take more is refused;
    /// for --device cpu alone [default: the limits that the system sets]
    #[arg(long, value_name = "BYTES", value_parser = bytes::parse)]
    memory_limit: Option<u64>,
    /// Before the first step, compare the gradients of its batch with differences of the loss, for
    /// each part of the model; a wrong gradient ends the run
    #[arg(long)]
    check: bool,
    /// Train two steps without writing anything, and print their predicted and measured memory and
    /// traffic
    #[arg(long, conflicts_with_all = ["out", "steps", "check", "checkpoint_every"])]
    dry_run: bool,

    #[command(flatten)]
    writing: WritingArgs,
    #[command(flatten)]
    sharding: ShardingArgs,
}

/// Trains a model, or finds that there is nothing to train.
pub(crate) fn run(args: &Args) -> Result<()> {
    let place = args.devices.place(DEFAULT_WORLD_SIZE)?;
    place.share_cores()?;
    let start = args.prepare(place);
    // A process alone decides alone, without a device; several must hear of each other first, or
    // some would wait for one that has ended.
    if place.is_alone() {
        match &start {
            Ok(Start::Train(_)) => {}
            Ok(Start::Complete(path)) => {
                return place
                    .print(|out| writeln!(out, "the run in {} is complete", path.display()));
            }
            Err(_) => return start.map(drop),
        }
    }
    let grid = args.sharding.grid(place.placement.world_size());
    args.devices.run_on(place, grid, |mesh| args.train(mesh, place, start))
}

/// Prepares a run without starting it.
#[cfg(any(test, fuzzing))]
pub(crate) fn start(args: &Args) -> Result<()> {
    args.prepare(args.devices.place(DEFAULT_WORLD_SIZE)?).map(drop)
}

impl Args {
    /// Reads the run, and checks it before anything changes.
    fn prepare(&self, place: Place) -> Result<Start> {
        self.check_limit()?;
        let world_size = place.placement.world_size();
        let sharding = self.sharding.asked(world_size)?;
        let options = RunOptions { sharding, ..self.run.clone() };
        let start = options.prepare(world_size).map_err(unreadable)?;
        if let Start::Train(run) = &start {
            warn_of_overlong(run);
            warn_of_files(run.examples());
            self.writing.check(run)?;
            self.check_memory(place, run)?;
        }
        Ok(start)
    }

    /// Trains, if all processes do, and reports if this process is the first.
    fn train(&self, mesh: &DeviceMesh, place: Place, start: Result<Start>) -> Result<()> {
        let agreed = agreement::compare(mesh, &self.words(&start));
        // The reason why a process cannot start says more than that it cannot.
        let start = start?;
        agreed?;
        let run = match start {
            Start::Train(run) => run,
            Start::Complete(path) => {
                return place
                    .print(|out| writeln!(out, "the run in {} is complete", path.display()));
            }
        };
        if self.dry_run {
            return self.rehearse(mesh, place, &run);
        }
        let unwritten = self.unwritten(place, &run)?;
        let prompt = self.writing.prompt(&run)?;
        let settings = run.spec.clone();
        let path = self.carry_out(mesh, place, *run)?;
        match (prompt.filter(|_| place.is_first()), unwritten) {
            (Some(_), Some(bytes)) => {
                writing::warn_too_large(bytes);
                Ok(())
            }
            (Some(prompt), None) => self.writing.write(&path, &prompt, &settings),
            (None, _) => Ok(()),
        }
    }

    /// Trains the steps that are left, and returns the folder of the run.
    fn carry_out(&self, mesh: &DeviceMesh, place: Place, run: PreparedRun) -> Result<PathBuf> {
        let stop = stop::flag();
        let trainer = Trainer::new(mesh, run).map_err(|error| self.explained(error, place))?;
        let mut trainer = trainer.stop_on(stop);
        let mut journal = if place.is_first() {
            announce(trainer.run())?;
            Some(Journal::new(&trainer)?)
        } else {
            None
        };
        if self.check {
            let report = trainer.check()?;
            if let Some(journal) = &journal {
                journal.show(&report);
            }
        }
        let mut stopped = None;
        for event in trainer.by_ref() {
            let event = match event {
                Ok(event) => event,
                Err(error) => {
                    let error = self.explained(error, place);
                    // Its session has ended too, and has a curve.
                    if error.is_of_all()
                        && let Some(journal) = &journal
                    {
                        journal.draw()?;
                    }
                    return Err(error);
                }
            };
            if let Event::Stopped { step } = event {
                stopped = Some(step);
            }
            if let Some(journal) = &mut journal {
                journal.log(&event)?;
            }
        }
        let path = trainer.path().to_owned();
        if let Some(step) = stopped {
            return Err(self.stopped(step, &trainer, place));
        }
        if let Some(journal) = &mut journal {
            journal.finish(trainer.session())?;
        }
        Ok(path)
    }

    /// Returns the error of a run that was stopped from outside.
    fn stopped(&self, done: u64, trainer: &Trainer, place: Place) -> Error {
        let path = hint::in_shell(trainer.path().display());
        let hint =
            format!("to resume: candle-distributed train --out {path} --resume{}", self.typed());
        let stopped = ErrorKind::Stopped { done, steps: trainer.run().spec.steps };
        first_only(Error::from(stopped).hinted(hint), place)
    }

    /// Adds advice to an error of training; one that all processes have is reported by the first.
    fn explained(&self, error: finetune::Error, place: Place) -> Error {
        match &error {
            finetune::Error::Run(RunError::Diverged { checkpoint, .. }) => {
                let last = match checkpoint {
                    Some(step) => format!("the last checkpoint was written after step {step}"),
                    None => "there is no checkpoint yet".into(),
                };
                let typed = self.typed();
                let hint = format!(
                    "{last}; the same steps end alike, so look at the gradients with \
                     --resume{typed} --check, try another --seed, or train on with \
                     --resume{typed} --allow-non-finite"
                );
                first_only(Error::from(error).hinted(hint), place)
            }
            finetune::Error::Run(RunError::WentOn { .. } | RunError::NotShared { .. }) => {
                first_only(error.into(), place)
            }
            _ => error.into(),
        }
    }

    /// Returns the options to type again when the run is resumed, each with a space before it.
    fn typed(&self) -> String {
        let limit = self.memory_limit.map(|bytes| format!(" --memory-limit {bytes}"));
        let every = self.run.checkpoint_every.map(|every| format!(" --checkpoint-every {every}"));
        let parts = [
            Some(self.devices.typed()),
            Some(self.sharding.typed()),
            every,
            limit,
            Some(self.writing.typed()),
        ];
        parts.into_iter().flatten().collect()
    }

    /// Describes the run and the arguments, which must be equal in all processes.
    fn words(&self, start: &Result<Start>) -> Vec<String> {
        let run = match start {
            Err(_) => return vec!["cannot start".into()],
            Ok(Start::Complete(_)) => return vec!["finds the run complete".into()],
            Ok(Start::Train(run)) => run,
        };
        let Spec { seed, steps, text, max_tokens, allow_non_finite, finetune, recipe, .. } =
            &run.spec;
        let out = self.run.out.as_ref().map_or("a new folder".into(), |out| out.to_string_lossy());
        vec![
            format!("starts after step {}", run.first_step()),
            format!("has --steps {steps}"),
            format!("has --seed {seed}"),
            format!("has the text {text}"),
            format!("has batches of {max_tokens} tokens"),
            format!("has --out {out}"),
            format!("has --checkpoint-every {}", run.checkpoint_every),
            format!("has --check {}", self.check),
            format!("has --allow-non-finite {allow_non_finite}"),
            format!("trains {}", finetune.words()),
            format!("learns by {}", recipe.words()),
            match &run.sharding {
                Some(sharding) => format!("is sharded by {}", sharding.words()),
                None => "is not sharded".into(),
            },
            format!("has --dry-run {}", self.dry_run),
            format!("has version {}", env!("CARGO_PKG_VERSION")),
        ]
    }
}

/// Returns an error that all processes have, for the first process to report.
fn first_only(error: Error, place: Place) -> Error {
    if place.is_first() {
        return error;
    }
    let (exit_code, is_of_all) = (error.exit_code(), error.is_of_all());
    ErrorKind::SaidByFirst { exit_code, is_of_all }.into()
}

/// Adds advice if the latest checkpoint cannot be read at all: one that is damaged is skipped.
fn unreadable(error: finetune::Error) -> Error {
    let error = Error::from(error);
    match &*error.kind {
        ErrorKind::Training(train::Error::Checkpoint(
            CheckpointError::Io { .. } | CheckpointError::Header { .. },
        )) => error.hinted(hint::UNREADABLE),
        _ => error,
    }
}

/// Warns of texts that are cut off or left out.
fn warn_of_overlong(run: &PreparedRun) {
    let n_overlong = run.examples().n_overlong();
    let inputs = &run.spec.finetune;
    // Texts that are split lose nothing.
    if n_overlong > 0 && inputs.overlong != Overlong::Split {
        output::warning(format_args!(
            "{} longer than the context of {} tokens: --overlong {}",
            HumanCount(n_overlong.into()).with_noun("text"),
            inputs.context,
            typed(inputs.overlong)
        ));
    }
}

/// Warns of files in a folder that may not be meant as examples, or cannot be.
fn warn_of_files(examples: &Examples) {
    let files = examples.files();
    if files.skipped > 0 {
        let skipped = HumanCount(files.skipped.into()).with_noun("file");
        output::warning(format_args!("{skipped} of --data skipped, as not UTF-8"));
    }
    if files.of_lines > 0 && files.of_texts > 0 {
        let texts = HumanCount(files.of_texts.into()).with_noun("file");
        output::warning(format_args!(
            "{texts} of --data not .jsonl: every paragraph there is an example"
        ));
    }
}

/// Prints the plan of a sharded run, and how an epoch is batched.
fn announce(run: &PreparedRun) -> Result<()> {
    let plan = run.plan()?;
    let first_epoch = run.first_epoch()?;
    let first = run.first_step();
    let sharding = run.sharding.as_ref();
    let report =
        sharding.map(|_| PlanReport::new(&plan.plan, &plan.cost_model, None)).transpose()?;
    let rules = sharding.and_then(|sharding| sharding.strategy.matches(&plan.parameters));
    output::text(|out| {
        if first > 0 {
            writeln!(out, "resuming after step {first} of {}", run.spec.steps)?;
        }
        if let Some(report) = &report {
            writeln!(out, "{report}")?;
        }
        if let Some(rules) = &rules {
            strategy::write_matches(rules, out)?;
        }
        writeln!(out, "each epoch: {first_epoch}")
    })
}

#[cfg(test)]
mod tests {
    use std::fs;

    use candle_core::{DType, Device, Tensor};
    use candle_distributed::{
        mesh::Replica,
        train::{AdamW, DataParallel, Group, Loss},
    };
    use candle_nn::{Linear, Module, linear_no_bias};
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
        let prepare = |args: &Args, place| match args.prepare(place).unwrap() {
            Start::Train(run) => run,
            Start::Complete(path) => panic!("{} is complete", path.display()),
        };
        let unwritten = |more: &[&str]| {
            let args = train(more);
            let place = args.devices.place(DEFAULT_WORLD_SIZE).unwrap();
            args.unwritten(place, &prepare(&args, place)).unwrap()
        };
        assert_eq!(unwritten(&[]), None);
        assert!(unwritten(&["--lora", "1", "--strategy", "full"]).is_some());

        // Held-out examples take memory as well.
        let args = train(&["--batch-size", "1", "--validation", "0.5"]);
        let place = args.devices.place(DEFAULT_WORLD_SIZE).unwrap();
        assert_eq!(prepare(&args, place).steps().unwrap().len(), 2);
    }
    #[test]
    fn a_wrong_gradient_has_a_hint() {
        let mesh = DeviceMesh::cpu(1).unwrap();
        let mut model = DataParallel::builder(&mesh, |vb| linear_no_bias(2, 1, vb))
            .build(|group: Group| AdamW::new_lr(group.vars, 0.1))
            .unwrap();
        let half_without_backward = |_: &Replica, layer: &Linear, x: Tensor| {
            let sum = layer.forward(&x)?.sum_all()?;
            Ok(Loss::sum((&sum + sum.detach())?, x.ones_like()?.sum_all()?))
        };
        let x = Tensor::ones((1, 2), DType::F32, &Device::Cpu).unwrap();
        let error = Error::from(model.check_gradients(x, half_without_backward).unwrap_err());
        assert_eq!(error.exit_code(), 1);
        assert!(error.hint().unwrap().contains("--device cpu"), "{error}");
    }
}
