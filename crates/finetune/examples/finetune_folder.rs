//! Fine-tunes a model: `finetune_folder MODEL DATA OUT`. A run that was killed resumes where it was.
//! Its weights are those of `candle-distributed train` with the same options.

#![allow(clippy::print_stdout, reason = "an example prints its progress")]

use std::{
    error::Error,
    path::{Path, PathBuf},
    process::ExitCode,
};

use core_types::WorldSize;
use finetune::{
    Event, Generation, Prompt, RunOptions, Start, TextSource, Trainer, cost::Sharding,
    run::open_generator, spec::Recipe,
};
use pmap_mesh::{DeviceMesh, init_threads};

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<(), Box<dyn Error>> {
    init_threads(2)?; // before anything starts a thread
    let mut args = std::env::args_os().skip(1).map(PathBuf::from);
    let (Some(model), Some(data), Some(out)) = (args.next(), args.next(), args.next()) else {
        return Err("usage: finetune_folder MODEL DATA OUT".into());
    };
    finetune_folder(&model, &data, &out)
}

pub(crate) fn finetune_folder(model: &Path, data: &Path, out: &Path) -> Result<(), Box<dyn Error>> {
    let options = RunOptions {
        model: Some(model.into()),
        data: vec![TextSource::new(data)],
        out: Some(out.into()),
        resume: true, // or starts a new run
        steps: Some(40),
        batch_size: Some(2),
        validation: Some(0.2),
        validate_every: Some(10),
        recipe: Recipe { lr: Some(1e-3), ..Recipe::default() },
        sharding: Some(Sharding::default()), // `None`: every device has the whole model
        ..RunOptions::default()
    };
    let mesh = DeviceMesh::cpu(2)?;
    if let Start::Train(run) = options.prepare(WorldSize::new(2)?)? {
        for event in Trainer::new(&mesh, *run)? {
            match event? {
                Event::Step { metrics, .. } => {
                    println!("step {}: loss {:.3}", metrics.step + 1, metrics.loss);
                }
                Event::Validated { point, is_best: true } => {
                    println!("loss {:.3} on held-out examples: the best so far", point.loss);
                }
                _ => {}
            }
        }
    }
    let generator = open_generator(out, None)?;
    let options = Generation::default().with_max_tokens(16);
    println!("{}", generator.generate(Prompt::Text("1"), &options)?.text);
    Ok(())
}
