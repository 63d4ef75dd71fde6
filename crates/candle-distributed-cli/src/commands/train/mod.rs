//! `train`: trains a language model on text, on several devices.

mod dry_run;
mod memory;
mod sharding;
mod writing;

use std::{
    io::{self, Write},
    path::{Path, PathBuf},
};

use candle_distributed::{
    finetune::{
        self, Event, Examples, Overlong, PreparedRun, RunError, RunOptions, Start, Trainer,
        spec::{MixtureWeights, Spec},
    },
    mesh::DeviceMesh,
    plan::report::PlanReport,
    train::{self, CheckpointError},
    types::human::HumanCount,
};

use self::{sharding::ShardingArgs, writing::WritingArgs};
use crate::{
    bytes,
    devices::{DEFAULT_WORLD_SIZE, DeviceArgs, ProcessPlace},
    error::{Error, ErrorKind, Result},
    help::{cli_name, examples},
    hint, output, strategy,
    train::{agreement, journal::Journal, stop},
};

/// Train a language model on text, on several devices at once.
///
/// Without --model, trains a small byte-level model from scratch.
#[derive(Debug, clap::Args)]
#[command(after_help = examples![
    "# About a minute on short stories; the run is saved in the next free folder under runs"
    "candle-distributed train"
    "# On the text files of a folder"
    "candle-distributed train --data docs --world-size 2 --steps 100 --out docs-run"
    "# On the texts of a .jsonl file: each line is a JSON string, or an object whose `text` is one"
    "candle-distributed train --data texts.jsonl --steps 100"
    "# On two data sets: seven examples of the first for three of the second"
    "candle-distributed train --data chats.jsonl:7 --data stories.jsonl:3"
    "# A larger model, sharded over 4 devices; first predict its memory and traffic"
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
    /// Refuse a run that would need more than this much memory in this process, such as 4GiB; only
    /// for --device cpu [default: the memory limits of the system]
    #[arg(long, value_name = "BYTES", value_parser = bytes::parse)]
    memory_limit: Option<u64>,
    /// Before the first step, check the gradients of each part of the model against finite
    /// differences of the loss; a wrong gradient ends the run
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

/// Trains a model, or reports that its run is already complete.
pub(crate) fn run(args: &Args) -> Result<()> {
    let process = args.devices.place(DEFAULT_WORLD_SIZE)?;
    process.share_cores()?;
    let start = args.prepare(process);
    // A single process returns before it opens a device. One of several processes must not: the
    // others would wait for it.
    if process.is_alone() {
        match &start {
            Ok(Start::Train(_)) => {}
            Ok(Start::Complete(path)) => return print_complete(process, path),
            Err(_) => return start.map(drop),
        }
    }
    let grid = args.sharding.grid(process.placement.world_size());
    args.devices.run_on(process, grid, |mesh| args.train(mesh, process, start))
}

/// Prepares a run without starting it.
#[cfg(any(test, fuzzing))]
pub(crate) fn prepare(args: &Args) -> Result<()> {
    args.prepare(args.devices.place(DEFAULT_WORLD_SIZE)?).map(drop)
}

impl Args {
    /// Reads the run and its data, and checks them and the options before anything is written.
    fn prepare(&self, process: ProcessPlace) -> Result<Start> {
        self.check_limit()?;
        let world_size = process.placement.world_size();
        let sharding = self.sharding.resolve(world_size)?;
        let max_text_bytes = self.limit(process).map(|limit| limit.share());
        let options = RunOptions { sharding, max_text_bytes, ..self.run.clone() };
        let start = options.prepare(world_size).map_err(hint_if_unreadable)?;
        if let Start::Train(run) = &start {
            warn_of_overlong(run);
            warn_of_files(run.examples());
            self.writing.check(run)?;
            self.check_memory(process, run)?;
        }
        Ok(start)
    }

    /// Trains if all processes start the same run. At the end the first process generates a sample.
    fn train(&self, mesh: &DeviceMesh, process: ProcessPlace, start: Result<Start>) -> Result<()> {
        let agreement = agreement::compare(mesh, &self.describe(&start));
        // The error of `start` comes first: it says why this process cannot start, and the error of
        // `agreement` only that some process cannot.
        let start = start?;
        agreement?;
        let run = match start {
            Start::Train(run) => run,
            Start::Complete(path) => return print_complete(process, &path),
        };
        if self.dry_run {
            return self.rehearse(mesh, process, &run);
        }
        let too_large_bytes = self.too_large_to_generate(process, &run)?;
        let prompt = self.writing.prompt(&run)?;
        let spec = run.spec.clone();
        let path = self.train_steps(mesh, process, *run)?;
        let Some(prompt) = prompt else { return Ok(()) };
        if !process.is_first() {
            return Ok(());
        }
        if let Some(bytes) = too_large_bytes {
            writing::warn_too_large(bytes);
            return Ok(());
        }
        self.writing.write_sample(&path, &prompt, &spec)
    }

    /// Trains the remaining steps, and returns the folder of the run.
    fn train_steps(
        &self,
        mesh: &DeviceMesh,
        process: ProcessPlace,
        run: PreparedRun,
    ) -> Result<PathBuf> {
        let stop_flag = stop::flag();
        let mut trainer = Trainer::new(mesh, run)
            .map_err(|error| self.explain_error(error, process))?
            .stop_on(stop_flag);
        let mut journal = if process.is_first() {
            announce(trainer.run())?;
            Some(Journal::new(&trainer)?)
        } else {
            None
        };
        if self.check {
            let report = trainer.check()?;
            if let Some(journal) = &journal {
                journal.show_gradients(&report);
            }
        }
        let mut stopped_after = None;
        for event in trainer.by_ref() {
            let event =
                event.map_err(|error| self.end_session(error, journal.as_ref(), process))?;
            if let Event::Stopped { step } = event {
                stopped_after = Some(step);
            }
            if let Some(journal) = &mut journal {
                journal.log(&event)?;
            }
        }
        let path = trainer.path().to_owned();
        if let Some(n_done) = stopped_after {
            return Err(self.stop_error(n_done, &trainer, process));
        }
        if let Some(journal) = &mut journal {
            journal.finish(trainer.session())?;
        }
        Ok(path)
    }

    /// Returns the error for a run that a signal stopped after `done` steps.
    fn stop_error(&self, done: u64, trainer: &Trainer, process: ProcessPlace) -> Error {
        let path = hint::in_shell(trainer.path().display());
        let options = self.option_string();
        let hint = format!("to resume: candle-distributed train --out {path} --resume{options}");
        let kind = ErrorKind::Stopped { done, steps: trainer.run().spec.steps };
        report_on_first(Error::from(kind).with_hint(hint), process)
    }

    /// Explains an error of a step. If every process ends with it, the session is complete, and its
    /// curve is drawn.
    fn end_session(
        &self,
        error: finetune::Error,
        journal: Option<&Journal>,
        process: ProcessPlace,
    ) -> Error {
        let error = self.explain_error(error, process);
        if error.ends_all_processes()
            && let Some(journal) = journal
            && let Err(drawing_error) = journal.draw()
        {
            return drawing_error;
        }
        error
    }

    /// Adds a hint to an error of training. An error that every process has is only reported by the
    /// first process.
    fn explain_error(&self, error: finetune::Error, process: ProcessPlace) -> Error {
        match &error {
            finetune::Error::Run(RunError::Diverged { checkpoint, .. }) => {
                let last = match checkpoint {
                    Some(step) => format!("the last checkpoint was written after step {step}"),
                    None => "there is no checkpoint yet".into(),
                };
                let options = self.option_string();
                let hint = format!(
                    "{last}; repeated steps end the same way: check the gradients with \
                     --resume{options} --check, try another --seed, or continue with \
                     --resume{options} --allow-non-finite"
                );
                report_on_first(Error::from(error).with_hint(hint), process)
            }
            finetune::Error::Run(RunError::WentOn { .. } | RunError::NotShared { .. }) => {
                report_on_first(error.into(), process)
            }
            _ => error.into(),
        }
    }

    /// Returns the options to repeat when the run is resumed, each after a space.
    fn option_string(&self) -> String {
        let limit = self.memory_limit.map(|bytes| format!(" --memory-limit {bytes}"));
        let every = self.run.checkpoint_every.map(|every| format!(" --checkpoint-every {every}"));
        let options = [
            Some(self.devices.option_string()),
            Some(self.sharding.option_string()),
            every,
            limit,
            Some(self.writing.option_string()),
        ];
        options.into_iter().flatten().collect()
    }

    /// Describes the run and the arguments. The descriptions of all processes must be equal.
    fn describe(&self, start: &Result<Start>) -> Vec<String> {
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
            format!("trains {}", finetune.to_json()),
            format!("learns by {}", recipe.to_json()),
            match &run.sharding {
                Some(sharding) => format!("is sharded by {}", sharding.to_json()),
                None => "is not sharded".into(),
            },
            format!("has --dry-run {}", self.dry_run),
            format!("has version {}", env!("CARGO_PKG_VERSION")),
        ]
    }
}

/// Prints that a run has no steps left.
fn print_complete(process: ProcessPlace, path: &Path) -> Result<()> {
    process.print(|out| writeln!(out, "the run in {} is complete", path.display()))
}

/// Returns the error in the first process. The other processes get an error with the same exit code
/// that is not printed.
fn report_on_first(error: Error, process: ProcessPlace) -> Error {
    if process.is_first() {
        return error;
    }
    let exit_code = error.exit_code();
    let ends_all_processes = error.ends_all_processes();
    ErrorKind::ReportedByFirst { exit_code, ends_all_processes }.into()
}

/// Adds a hint if the system cannot read the latest checkpoint. A damaged checkpoint is no error,
/// since an older one replaces it.
fn hint_if_unreadable(error: finetune::Error) -> Error {
    let error = Error::from(error);
    match &*error.kind {
        ErrorKind::Training(train::Error::Checkpoint(
            CheckpointError::Io { .. } | CheckpointError::Header { .. },
        )) => error.with_hint(hint::UNREADABLE),
        _ => error,
    }
}

/// Warns if texts longer than the context are truncated or skipped.
fn warn_of_overlong(run: &PreparedRun) {
    let n_overlong = run.examples().n_overlong();
    let inputs = &run.spec.finetune;
    // Splitting loses no tokens.
    if n_overlong > 0 && inputs.overlong != Overlong::Split {
        output::warning(format_args!(
            "{} longer than the context of {} tokens: --overlong {}",
            HumanCount(n_overlong.into()).with_noun("text"),
            inputs.context,
            cli_name(inputs.overlong)
        ));
    }
}

/// Warns of skipped files, and of text files beside `.jsonl` files, which may not be training data.
fn warn_of_files(examples: &Examples) {
    let counts = examples.files();
    if counts.skipped > 0 {
        let files = HumanCount(counts.skipped.into()).with_noun("file");
        output::warning(format_args!("{files} of --data skipped: not UTF-8"));
    }
    if counts.n_with_line_examples > 0 && counts.n_with_paragraph_examples > 0 {
        let files = HumanCount(counts.n_with_paragraph_examples.into()).with_noun("file");
        output::warning(format_args!(
            "{files} of --data not .jsonl: each paragraph of a text file is an example"
        ));
    }
}

/// Writes the texts of a mixture with their weights, and where these begin.
fn write_mixture(spec: &Spec, out: &mut dyn Write) -> io::Result<()> {
    for &MixtureWeights { from_epoch, from_step, .. } in &spec.finetune.mixture {
        let texts = spec.texts(from_epoch, from_step).into_iter().map(|text| text.to_string());
        let texts: Vec<String> = texts.collect();
        let step = if from_step == 0 { String::new() } else { format!(", step {from_step}") };
        writeln!(out, "texts from epoch {from_epoch}{step} on: {}", texts.join(", "))?;
    }
    Ok(())
}

/// Prints the first step of a resumed run, the plan of a sharded run, and the batches of an epoch.
fn announce(run: &PreparedRun) -> Result<()> {
    let plan = run.plan()?;
    let first_epoch = run.first_epoch()?;
    let n_done = run.first_step();
    let (report, rules) = match &run.sharding {
        Some(sharding) => (
            Some(PlanReport::new(&plan.plan, &plan.cost_model, None)?),
            sharding.strategy.matches(&plan.parameters),
        ),
        None => (None, None),
    };
    output::text(|out| {
        if n_done > 0 {
            writeln!(out, "resuming after step {n_done} of {}", run.spec.steps)?;
        }
        write_mixture(&run.spec, out)?;
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
        let prepare = |args: &Args, process| match args.prepare(process).unwrap() {
            Start::Train(run) => run,
            Start::Complete(path) => panic!("{} is complete", path.display()),
        };
        let too_large_to_generate = |more: &[&str]| {
            let args = train(more);
            let process = args.devices.place(DEFAULT_WORLD_SIZE).unwrap();
            args.too_large_to_generate(process, &prepare(&args, process)).unwrap()
        };
        assert_eq!(too_large_to_generate(&[]), None);
        assert!(too_large_to_generate(&["--lora", "1", "--strategy", "full"]).is_some());

        // Held-out examples take memory as well.
        let args = train(&["--batch-size", "1", "--validation", "0.5"]);
        let process = args.devices.place(DEFAULT_WORLD_SIZE).unwrap();
        assert_eq!(prepare(&args, process).steps().unwrap().len(), 2);
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
