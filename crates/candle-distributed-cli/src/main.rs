//! The command line of candle-distributed.
//!
//! Each subcommand is one file under `commands`, which turns arguments into a call of the library and its answer into
//! text or JSON. Results go to stdout, everything else to stderr. Exit code 2 means that the input was at fault.

mod commands;
mod error;
mod input;
mod output;
mod threads;
mod train;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

use crate::error::Result;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Distributed training for candle: who reads what, in which batches, on which device.
#[derive(Debug, Parser)]
#[command(name = "candle-distributed", version, propagate_version = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Sample(commands::sample::Args),
    Batch(commands::batch::Args),
    Plan(commands::plan::Args),
    Train(commands::train::Args),
}

fn main() -> ExitCode {
    match run(Cli::parse().command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {}", error.chain());
            ExitCode::from(error.exit_code())
        }
    }
}

fn run(command: Command) -> Result<()> {
    match command {
        Command::Sample(args) => commands::sample::run(&args),
        Command::Batch(args) => commands::batch::run(&args),
        Command::Plan(args) => commands::plan::run(&args),
        Command::Train(args) => commands::train::run(&args),
    }
}
