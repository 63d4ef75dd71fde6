//! `cargo xtask devices`: checks the code for devices, as far as a machine without them can.

use crate::{
    cmd::{Call, Result},
    steps::{self, NamedStep, StepDone},
    tools,
};

/// Builds the code behind the features of devices and of several processes, if their toolkits are
/// installed, and runs the tests that need no device.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Fail if a toolkit is missing, instead of skipping its check
    #[arg(long)]
    strict: bool,
}

/// A check, and the toolkit that it needs.
struct Check {
    /// A command that shows whether the toolkit is there.
    probe: Call,
    /// A word of its output if it is.
    answer: &'static str,
    /// The command that installs it.
    install: &'static str,
    calls: Vec<Call>,
}

impl Check {
    fn run(&self, strict: bool) -> Result<StepDone> {
        if self.probe.read().is_ok_and(|answer| answer.contains(self.answer)) {
            return tools::run_calls(&self.calls);
        }
        tools::skip(format!("its toolkit is missing; get it with `{}`", self.install), strict)
    }
}

pub(crate) fn run(args: &Args) -> Result {
    let steps = [
        NamedStep { name: "metal", work: metal() },
        NamedStep { name: "mpi", work: mpi() },
        NamedStep { name: "cuda and nccl", work: nccl() },
    ];
    steps::run_all(&steps, |check| check.run(args.strict))
}

fn metal() -> Check {
    // Rust's name of the systems that have Metal.
    let target = "aarch64-apple-darwin";
    Check {
        probe: Call::new("rustup", "target list --installed"),
        answer: target,
        install: "rustup target add aarch64-apple-darwin",
        // It needs the mesh, and forwards the feature.
        calls: vec![
            Call::cargo("check --package dist-train --features metal --target").arg(target),
        ],
    }
}

/// Runs the tests over MPI. With `--workspace` it uses what `cargo test --workspace` has built; a
/// plain `cargo build` would build the dependencies again, without the features that tests add.
pub(crate) const MPI_TESTS: &str = "test --workspace \
    --features pmap-mesh/mpi,dist-train/mpi,candle-distributed-cli/mpi --test mpi";

fn mpi() -> Check {
    let clippy = "clippy --workspace --all-targets \
        --features candle-distributed-cli/mpi,benches/mpi -- -D warnings";
    Check {
        probe: Call::new("mpicc", "-show"),
        answer: "mpi",
        install: "apt-get install libopenmpi-dev openmpi-bin",
        calls: vec![
            Call::cargo(clippy),
            Call::cargo(MPI_TESTS),
            Call::cargo("xtask soak --ranks 2 --kills 2 --steps 12 --profile dev"),
        ],
    }
}

fn nccl() -> Check {
    let packages = ["pmap-mesh", "dist-train", "candle-distributed-cli"];
    let clippy = Call::cargo("clippy --release --all-targets");
    let clippy = packages.iter().fold(clippy, |call, package| {
        call.arg("--package").arg(*package).arg("--features").arg(format!("{package}/nccl"))
    });
    Check {
        probe: Call::new("nvcc", "--version"),
        answer: "release",
        install: "the commands of docs/devices.md",
        calls: vec![["--", "-D", "warnings"].into_iter().fold(clippy, Call::arg)],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(probe: Call, answer: &'static str) -> Check {
        Check { probe, answer, install: "it", calls: Vec::new() }
    }

    #[test]
    fn missing_toolkit_skips_its_check() {
        assert_eq!(check(Call::cargo("--version"), "cargo").run(true).unwrap(), StepDone::Passed);
        for missing in
            [check(Call::cargo("--version"), "no such toolkit"), check(Call::new("gone", ""), "")]
        {
            assert!(matches!(missing.run(false), Ok(StepDone::Skipped(_))));
            assert!(missing.run(true).is_err());
        }
    }
}
