//! `cargo xtask fuzz`: what readers of files do when the files are damaged, or made to harm.

use std::{fs, num::NonZeroU32};

use crate::{
    cmd::{self, Call, Result},
    steps::{self, Step},
    tools::{self, Tool},
};

/// Feeds damaged headers, manifests and indices to the planner's readers; needs nightly Rust and
/// cargo-fuzz.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Stops after so many seconds without a finding. The build before them does not count.
    #[arg(long, value_name = "N", default_value = "60")]
    seconds: NonZeroU32,
    /// Fails if nightly Rust or cargo-fuzz is missing, instead of skipping the run.
    #[arg(long)]
    strict: bool,
}

const CARGO_FUZZ: Tool = Tool {
    name: "cargo-fuzz",
    probe: ("cargo", "fuzz --version"),
    install: "cargo install --locked cargo-fuzz",
};

/// Inputs that found new ways through the code, kept for the next run; git ignores them.
const CORPUS: &str = "fuzz/corpus/readers";

pub(crate) fn run(args: &Args) -> Result {
    fs::create_dir_all(cmd::root().join(CORPUS))?;
    steps::run_all(&[Step { name: "fuzz", work: [command(args.seconds)] }], |calls| {
        tools::run_with(&[tools::NIGHTLY, CARGO_FUZZ], args.strict, calls)
    })
}

/// The call of cargo-fuzz, which writes what it keeps to the first corpus and only reads the second
/// one.
fn command(seconds: NonZeroU32) -> Call {
    let cargo = Call::cargo("+nightly fuzz run readers").arg(CORPUS).arg("fuzz/seeds/readers");
    // Half of the memory is what the address sanitizer and the corpus take.
    let options = "-- -max_len=4096 -timeout=10 -rss_limit_mb=1024 -dict=fuzz/readers.dict \
                   -print_funcs=0 -print_final_stats=1";
    let cargo = options.split_whitespace().fold(cargo, Call::arg);
    cargo.arg(format!("-max_total_time={seconds}"))
}
