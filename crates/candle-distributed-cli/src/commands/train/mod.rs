//! `train`: trains a language model on text, on several devices.

mod announce;
mod dry_run;
mod memory;
mod outcome;
mod sharding;
mod writing;

use std::path::PathBuf;

use candle_distributed::{
    finetune::{Event, PreparedRun, RunOptions, Start, Trainer, spec::Spec},
    mesh::DeviceMesh,
};

use self::{
    announce::{announce, print_complete, warn_of_files, warn_of_overlong},
    outcome::hint_if_unreadable,
    sharding::ShardingArgs,
    writing::WritingArgs,
};
use crate::{
    bytes,
    devices::{DEFAULT_WORLD_SIZE, DeviceArgs, ProcessPlace},
    error::Result,
    help::examples,
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
        let path = self.train_run(mesh, process, *run)?;
        match (prompt, too_large_bytes) {
            (Some(_), Some(bytes)) if process.is_first() => {
                writing::warn_too_large(bytes);
                Ok(())
            }
            (Some(prompt), None) if process.is_first() => {
                self.writing.write_sample(&path, &prompt, &spec)
            }
            _ => Ok(()),
        }
    }

    /// Trains the run to its end, and returns its folder. The first process writes the journal.
    fn train_run(
        &self,
        mesh: &DeviceMesh,
        process: ProcessPlace,
        run: PreparedRun,
    ) -> Result<PathBuf> {
        // A signal that arrives while the model is built stops the run after its first step.
        let stop_flag = stop::flag();
        let trainer = Trainer::new(mesh, run).map_err(|error| self.explain(error, process))?;
        let mut trainer = trainer.stop_on(stop_flag);
        let mut journal = None;
        if process.is_first() {
            announce(trainer.run())?;
            journal = Some(Journal::new(&trainer)?);
        }
        if self.check {
            let report = trainer.check()?;
            if let Some(journal) = &journal {
                journal.show_gradients(&report);
            }
        }
        if let Some(n_done) = self.train_steps(&mut trainer, journal.as_mut(), process)? {
            return Err(self.stop_error(n_done, &trainer, process));
        }
        if let Some(journal) = &mut journal {
            journal.finish(trainer.session())?;
        }
        Ok(trainer.path().to_owned())
    }

    /// Trains the remaining steps. Returns the number of steps done if a signal stopped the run.
    fn train_steps(
        &self,
        trainer: &mut Trainer,
        mut journal: Option<&mut Journal>,
        process: ProcessPlace,
    ) -> Result<Option<u64>> {
        let mut stopped_after = None;
        for event in trainer {
            let event = event.map_err(|error| {
                let error = self.explain(error, process);
                if let Some(journal) = journal.as_deref().filter(|_| error.ends_all_processes()) {
                    journal.draw_or_warn();
                }
                error
            })?;
            if let Event::Stopped { step } = event {
                stopped_after = Some(step);
            }
            if let Some(journal) = journal.as_deref_mut() {
                journal.log(&event);
            }
        }
        Ok(stopped_after)
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
    use crate::error::Error;

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
        assert_eq!(prepare(&args, process).micro_batches().unwrap().len(), 2);
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
