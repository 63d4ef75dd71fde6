//! `cargo xtask fuzz`: what readers of files do when the files are damaged, or made to harm.

use std::{fs, num::NonZeroU32};

use crate::{
    cmd::{self, Call, Result},
    steps::{self, Step},
    tools::{self, Tool},
};

/// Feeds damaged headers, manifests, indices, patterns, rules, states, checkpoints and runs to what
/// reads them; needs nightly Rust and cargo-fuzz.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The target to run [default: one after the other]
    #[arg(long, value_parser = TARGETS)]
    target: Option<String>,
    /// Stops a target after so many seconds without a finding. The build before them does not count.
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

/// The targets, in `fuzz/fuzz_targets`. Each has its seeds and a dictionary of its words.
const TARGETS: [&str; 7] =
    ["checkpoint_header", "checkpoint_index", "patterns", "readers", "rules", "run", "states"];

pub(crate) fn run(args: &Args) -> Result {
    for target in TARGETS {
        if args.target.as_deref().is_none_or(|only| only == target) {
            fuzz(target, args)?;
        }
    }
    Ok(())
}

fn fuzz(target: &str, args: &Args) -> Result {
    fs::create_dir_all(cmd::root().join(corpus(target)))?;
    steps::run_all(&[Step { name: "fuzz", work: [command(target, args.seconds)] }], |calls| {
        tools::run_with(&[tools::NIGHTLY, CARGO_FUZZ], args.strict, calls)
    })
}

/// Inputs that found new ways through the code, kept for the next run; git ignores them.
fn corpus(target: &str) -> String {
    format!("fuzz/corpus/{target}")
}

/// The call of cargo-fuzz, which writes what it keeps to the first corpus and only reads the second
/// one.
fn command(target: &str, seconds: NonZeroU32) -> Call {
    let cargo = Call::cargo("+nightly fuzz run")
        .arg(target)
        .arg(corpus(target))
        .arg(format!("fuzz/seeds/{target}"));
    // Half of the memory is what the address sanitizer and the corpus take.
    let options = "-- -max_len=8192 -timeout=10 -rss_limit_mb=1024 -print_funcs=0 \
                   -print_final_stats=1";
    let cargo = options.split_whitespace().fold(cargo, Call::arg);
    // What this program says of damaged runs would hide what the fuzzer says, which it writes to the
    // terminal all the same.
    let cargo = if target == "run" { cargo.arg("-close_fd_mask=2") } else { cargo };
    cargo.arg(format!("-dict=fuzz/{target}.dict")).arg(format!("-max_total_time={seconds}"))
}
