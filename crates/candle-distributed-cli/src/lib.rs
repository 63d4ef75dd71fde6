//! The command line of candle-distributed.
//!
//! Each subcommand is one module under `commands`, which turns arguments into library calls and
//! prints the result as text or JSON. Results go to stdout, everything else to stderr. Exit code 2
//! means bad input.
//!
//! The program is [`main`]. It lives in a library so that fuzz targets can call the readers of run
//! folders.

mod bytes;
mod commands;
mod devices;
mod error;
#[cfg(any(test, fuzzing))]
pub mod fuzzing;
mod help;
mod hint;
mod input;
mod log;
mod numbers;
mod output;
mod picture;
mod sampling;
mod strategy;
mod train;

use std::{panic, process::ExitCode};

use clap::{Parser, Subcommand};

use crate::{
    error::{ErrorKind, Result},
    help::examples,
    log::LogArgs,
};

/// Distributed training for candle: samples, batches, sharding plans and training runs.
#[derive(Debug, Parser)]
#[command(name = "candle-distributed", version, propagate_version = true)]
#[command(after_help = examples![
    "# Which samples does rank 3 of 8 read?"
    "candle-distributed sample --len 1000000 --world-size 8 --rank 3 --count 5"
    "# How much of these batches is padding?"
    "echo 12 80 15 70 9 | candle-distributed batch --lengths - --strategy bucket --max-tokens 160"
    "# What do the options of a subcommand mean? Each help page ends with examples"
    "candle-distributed plan --help"
])]
struct Cli {
    #[command(subcommand)]
    command: Command,
    #[command(flatten)]
    log: LogArgs,
}

#[derive(Debug, Subcommand)]
enum Command {
    Sample(commands::sample::SampleArgs),
    Batch(commands::batch::BatchArgs),
    Plan(commands::plan::PlanArgs),
    Train(Box<commands::train::Args>),
    Generate(commands::generate::GenerateArgs),
    Report(commands::report::ReportArgs),
    Mesh(commands::mesh::MeshArgs),
    #[cfg(unix)]
    Launch(commands::launch::LaunchArgs),
    Completions(commands::completions::CompletionsArgs),
    Man(commands::man::ManArgs),
}

/// Runs the subcommand given on the command line, and returns the exit code.
pub fn main() -> ExitCode {
    // With a handler, a write beyond `ulimit -f` is an error that names the file. If it cannot be
    // installed, the signal ends the program, as by default.
    #[cfg(unix)]
    drop(signal_hook::flag::register(signal_hook::consts::SIGXFSZ, std::sync::Arc::default()));
    hide_panics_of_tokenizers();
    let outcome = match Cli::try_parse() {
        Ok(cli) => {
            cli.log.start();
            run(cli.command)
        }
        Err(fault) if fault.use_stderr() => {
            output::message(|_| fault.print());
            hint::for_arguments(&fault).into_iter().for_each(output::hint);
            return ExitCode::from(error::BAD_INPUT);
        }
        // Requested help or version output is a result.
        Err(page) => output::check_printed(page.print()),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            if !matches!(*error.kind, ErrorKind::ReportedByFirst { .. }) {
                output::error(&error);
            }
            ExitCode::from(error.exit_code())
        }
    }
}

/// Hides the messages of panics in the `tokenizers` crate. It panics for an inconsistent file, which
/// is reported as an error that names the file.
fn hide_panics_of_tokenizers() {
    let report = panic::take_hook();
    panic::set_hook(Box::new(move |info| {
        let is_hidden = info.location().is_some_and(|place| place.file().contains("tokenizers-"));
        if !is_hidden {
            report(info);
        }
    }));
}

fn run(command: Command) -> Result<()> {
    match command {
        Command::Sample(args) => commands::sample::run(&args),
        Command::Batch(args) => commands::batch::run(&args),
        Command::Plan(args) => commands::plan::run(&args),
        Command::Train(args) => commands::train::run(&args),
        Command::Generate(args) => commands::generate::run(&args),
        Command::Report(args) => commands::report::run(&args),
        Command::Mesh(args) => commands::mesh::run(&args),
        #[cfg(unix)]
        Command::Launch(args) => commands::launch::run(&args),
        Command::Completions(args) => commands::completions::run(&args),
        Command::Man(args) => commands::man::run(&args),
    }
}
