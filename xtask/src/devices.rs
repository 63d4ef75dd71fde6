//! `cargo xtask devices`: what can be checked of the code for devices on a machine that has none of
//! them.

use crate::{
    cmd::{Call, Result},
    steps::{self, Done, Step},
};

/// Builds what is behind the features of devices and of several processes, where its toolkit is
/// installed; runs what needs no device.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Fails if a toolkit is missing, instead of skipping what needs it.
    #[arg(long)]
    strict: bool,
}

/// What is checked, and what it takes.
struct Check {
    /// A command that says so if the toolkit is there.
    probe: Call,
    /// A word of its answer.
    answer: &'static str,
    /// What to type to get it.
    install: &'static str,
    calls: Vec<Call>,
}

/// Rust's name of the systems that have Metal.
const METAL_TARGET: &str = "aarch64-apple-darwin";

pub(crate) fn run(args: &Args) -> Result {
    steps::run_all(&checks(), |check| {
        let is_there = check.probe.read().is_ok_and(|answer| answer.contains(check.answer));
        match (is_there, args.strict) {
            (true, _) => check.calls.iter().try_for_each(Call::run).map(|()| Done::Passed),
            (false, true) => {
                Err(format!("its toolkit is missing, and --strict asks for it: {}", check.install)
                    .into())
            }
            (false, false) => Ok(Done::Skipped(format!("to get its toolkit: {}", check.install))),
        }
    })
}

fn checks() -> [Step<'static, Check>; 3] {
    let metal =
        Call::cargo("check --package pmap-mesh --features metal,plan --target").arg(METAL_TARGET);
    // With `--workspace`, so that dependencies are those of a plain `cargo test --workspace`, and
    // are not built again.
    let processes = "clippy --workspace --all-targets --features candle-distributed-cli/mpi,benches/mpi -- -D warnings";
    let nccl = "clippy --release --package pmap-mesh --package candle-distributed-cli --all-targets \
                --features pmap-mesh/nccl,pmap-mesh/plan,candle-distributed-cli/nccl -- -D warnings";
    [
        Step {
            name: "metal",
            work: Check {
                probe: Call::new("rustup", "target list --installed"),
                answer: METAL_TARGET,
                install: "rustup target add aarch64-apple-darwin",
                calls: vec![metal],
            },
        },
        Step {
            name: "mpi",
            work: Check {
                probe: Call::new("mpicc", "-show"),
                answer: "mpi",
                install: "apt-get install libopenmpi-dev openmpi-bin",
                calls: vec![
                    Call::cargo(processes),
                    Call::cargo("test --workspace --features pmap-mesh/mpi --test mpi"),
                    Call::cargo("xtask soak --ranks 2 --kills 2 --steps 12 --profile dev"),
                ],
            },
        },
        Step {
            name: "cuda and nccl",
            work: Check {
                probe: Call::new("nvcc", "--version"),
                answer: "release",
                install: "docs/devices.md says how",
                calls: vec![Call::cargo(nccl)],
            },
        },
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_toolkit_is_told_by_its_probe() {
        let there =
            |probe: Call, answer: &str| probe.read().is_ok_and(|said| said.contains(answer));
        assert!(there(Call::cargo("--version"), "cargo"));
        assert!(!there(Call::cargo("--version"), "no such toolkit"));
        assert!(!there(Call::new("no-such-program", "--version"), ""));
    }
}
