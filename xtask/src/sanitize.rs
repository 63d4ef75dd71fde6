//! `cargo xtask sanitize`: what threads that share memory do to it, as an interpreter and a
//! sanitizer see it.

use crate::{
    cmd::{Call, Result},
    steps::{self, Step},
    tools::{self, Tool},
};

/// Looks for undefined behavior and data races where replicas meet; needs nightly Rust with miri
/// and rust-src.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Fails if nightly Rust or one of its components is missing, instead of skipping the run.
    #[arg(long)]
    strict: bool,
}

const TOOLS: [Tool; 3] = [
    tools::NIGHTLY,
    Tool {
        name: "miri",
        probe: ("cargo", "+nightly miri --version"),
        install: "rustup component add miri --toolchain nightly",
    },
    Tool {
        name: "rust-src",
        // The cheapest call that looks for the sources; what it downloads, the build would.
        probe: ("cargo", "+nightly fetch --locked -Zbuild-std --target host-tuple"),
        install: "rustup component add rust-src --toolchain nightly",
    },
];

/// The test targets in which replicas meet.
const TESTS: [&str; 5] = ["collectives", "data_parallel", "deadlines", "faults", "pmap"];

pub(crate) fn run(args: &Args) -> Result {
    let steps = [
        Step { name: "miri: shared buffer", work: [miri("pmap-mesh", "shared_buffer", SEEDS)] },
        Step { name: "miri: workers", work: [miri("pmap-mesh", "workers", SEEDS)] },
        Step { name: "miri: kernels", work: [miri("fused-ops", "of_narrow_rows", "")] },
        Step { name: "thread sanitizer", work: [thread_sanitizer()] },
    ];
    steps::run_all(&steps, |calls| tools::run_with(&TOOLS, args.strict, calls))
}

/// Has Miri try as many orders of the threads.
const SEEDS: &str = "-Zmiri-many-seeds=0..16";

/// The interpreter, over the tests of a module with `unsafe` in it.
fn miri(package: &str, tests: &str, seeds: &str) -> Call {
    // The clock counts as something outside. rayon's queues break the stricter of the two rules of
    // borrowing, for which Miri looks first, and the threads of its global pool never end.
    let flags = format!("-Zmiri-disable-isolation -Zmiri-tree-borrows -Zmiri-ignore-leaks {seeds}");
    let call = format!("+nightly miri test -p {package} --lib {tests}");
    Call::cargo(&call).env("MIRIFLAGS", flags)
}

/// The sanitizer, over everything that replicas do with each other; a report of a race fails the
/// target it is in.
fn thread_sanitizer() -> Call {
    // Through a standard library that is not built for it, the sanitizer could not see one thread
    // wait for another. A target is named so that build scripts are left alone, a folder so that
    // other builds are.
    let cargo = Call::cargo("+nightly test -p pmap-mesh -p dist-train --no-fail-fast -Zbuild-std");
    let cargo = cargo.arg("--target").arg("host-tuple").arg("--target-dir").arg("target/sanitize");
    let cargo = cargo.env("RUSTFLAGS", "-Zsanitizer=thread");
    // Fast, with the checks of debug builds and the lines that a report names.
    let cargo = cargo.env("CARGO_PROFILE_DEV_OPT_LEVEL", "2");
    TESTS.iter().fold(cargo, |cargo, test| cargo.arg("--test").arg(*test))
}
