//! `cargo xtask`: the commands that developers and CI run, one module each.

#![allow(clippy::print_stdout, reason = "these commands report to a person, on standard output")]

mod bench;
mod ci;
mod cmd;
mod devices;
mod release;
mod soak;
mod steps;
mod tidy;
mod tools;
mod workspace;

use std::process::ExitCode;

use clap::Parser;

/// Commands for developers and CI in this workspace.
#[derive(Parser)]
#[command(bin_name = "cargo xtask")]
enum Command {
    Ci(ci::Args),
    Bench(bench::Args),
    Soak(soak::Args),
    Devices(devices::Args),
    Release(release::Args),
    /// Checks the house rules: module docs, imports, folders, sizes, public names.
    Tidy,
}

fn main() -> ExitCode {
    match run(&Command::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(command: &Command) -> cmd::Result {
    match command {
        Command::Ci(args) => ci::run(args),
        Command::Bench(args) => bench::run(args),
        Command::Soak(args) => soak::run(args),
        Command::Devices(args) => devices::run(args),
        Command::Release(args) => release::run(args),
        Command::Tidy => tidy::run(),
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn command_line_is_consistent() {
        Command::command().debug_assert();
    }
}
