//! `cargo xtask fuzz`: what readers of files do when the files are damaged, or made to harm.

use std::{fs, num::NonZeroU32};

use crate::{
    cmd::{Call, Result},
    tools::{self, Tool},
    workspace,
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

const TOOLS: [Tool<'static>; 2] = [
    tools::NIGHTLY,
    Tool { name: "cargo-fuzz", probe: "fuzz --version", install: "cargo install cargo-fuzz" },
];

/// Inputs that found new ways through the code, kept for the next run; git ignores them.
const CORPUS: &str = "fuzz/corpus/readers";

pub(crate) fn run(args: &Args) -> Result {
    if tools::all_there("fuzz", &TOOLS, args.strict)? {
        fs::create_dir_all(workspace::root().join(CORPUS))?;
        command(args.seconds).run()?;
    }
    Ok(())
}

/// The call of cargo-fuzz, which writes what it keeps to the first corpus and only reads the second
/// one.
fn command(seconds: NonZeroU32) -> Call {
    let cargo =
        Call::cargo("+nightly fuzz run readers").arg(CORPUS).arg("fuzz/seeds/readers").arg("--");
    // Half of the memory is what the address sanitizer and the corpus take.
    let options =
        "-max_len=4096 -timeout=10 -rss_limit_mb=1024 -dict=fuzz/readers.dict -print_funcs=0";
    let cargo = options.split(' ').fold(cargo, Call::arg);
    cargo.arg("-print_final_stats=1").arg(format!("-max_total_time={seconds}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_ends_and_starts_from_the_seeds() {
        let shown = command(NonZeroU32::MIN).to_string();
        assert!(
            shown.starts_with(
                "cargo +nightly fuzz run readers fuzz/corpus/readers fuzz/seeds/readers -- "
            ),
            "{shown}"
        );
        assert!(shown.ends_with(" -max_total_time=1"), "{shown}");
        assert!(workspace::root().join("fuzz/seeds/readers").is_dir());
    }
}
