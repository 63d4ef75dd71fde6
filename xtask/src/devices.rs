//! `cargo xtask devices`: what can be checked of the code for devices on a machine that has none of
//! them.

use crate::{
    cmd::{Call, Result},
    steps::{self, Done, Step},
    tools,
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

impl Check {
    fn run(&self, strict: bool) -> Result<Done> {
        if self.probe.read().is_ok_and(|answer| answer.contains(self.answer)) {
            return tools::run_with(&[], strict, &self.calls);
        }
        tools::skipped(format!("its toolkit is missing; get it with `{}`", self.install), strict)
    }
}

pub(crate) fn run(args: &Args) -> Result {
    let steps = [
        Step { name: "metal", work: metal() },
        Step { name: "mpi", work: mpi() },
        Step { name: "cuda and nccl", work: nccl() },
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
        // It stands on the mesh, and forwards the feature.
        calls: vec![
            Call::cargo("check --package dist-train --features metal --target").arg(target),
        ],
    }
}

/// With `--workspace`, so that dependencies are those of a plain `cargo test --workspace`, and are
/// not built again.
fn mpi() -> Check {
    let clippy = "clippy --workspace --all-targets \
        --features candle-distributed-cli/mpi,benches/mpi -- -D warnings";
    let test = "test --workspace \
        --features pmap-mesh/mpi,dist-train/mpi,candle-distributed-cli/mpi --test mpi";
    Check {
        probe: Call::new("mpicc", "-show"),
        answer: "mpi",
        install: "apt-get install libopenmpi-dev openmpi-bin",
        calls: vec![
            Call::cargo(clippy),
            Call::cargo(test),
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
        install: "what docs/devices.md says",
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
    fn a_missing_toolkit_is_told_by_its_probe() {
        assert_eq!(check(Call::cargo("--version"), "cargo").run(true).unwrap(), Done::Passed);
        for missing in
            [check(Call::cargo("--version"), "no such toolkit"), check(Call::new("gone", ""), "")]
        {
            assert!(matches!(missing.run(false), Ok(Done::Skipped(_))));
            assert!(missing.run(true).is_err());
        }
    }
}
