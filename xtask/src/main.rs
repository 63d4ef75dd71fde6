//! `cargo xtask`: the commands that developers and CI run, one module each.

#![allow(clippy::print_stdout, reason = "these commands report to a person, on standard output")]

mod bench;
mod changelog;
mod ci;
mod cmd;
mod devices;
mod docs;
mod fuzz;
mod msrv;
mod release;
mod sanitize;
mod soak;
mod steps;
mod test;
mod tidy;
mod tools;
mod workspace;

use std::process::ExitCode;

use clap::Parser;

/// What developers and CI run in this workspace.
#[derive(Parser)]
#[command(bin_name = "cargo xtask")]
enum Command {
    Ci(ci::Args),
    Test(test::Args),
    Bench(bench::Args),
    Fuzz(fuzz::Args),
    Sanitize(sanitize::Args),
    Soak(soak::Args),
    Devices(devices::Args),
    Docs(docs::Args),
    Msrv(msrv::Args),
    Release(release::Args),
    Tools(tools::Args),
    /// Checks the house rules: module docs, imports, manifests, what something new needs.
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
        Command::Test(args) => test::run(args),
        Command::Bench(args) => bench::run(args),
        Command::Fuzz(args) => fuzz::run(args),
        Command::Sanitize(args) => sanitize::run(args),
        Command::Soak(args) => soak::run(args),
        Command::Devices(args) => devices::run(args),
        Command::Docs(args) => docs::run(args),
        Command::Msrv(args) => msrv::run(args),
        Command::Release(args) => release::run(args),
        Command::Tools(args) => tools::run(args),
        Command::Tidy => tidy::run(),
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Command::command().debug_assert();
    }
}
