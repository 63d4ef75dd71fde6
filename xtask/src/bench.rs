//! `cargo xtask bench`: runs the benches, and stores their results under a name.
//!
//! critcmp compares two stored results, and `benches/peers/run.py` our times with other packages.

use crate::{
    cmd::{Call, Result},
    workspace,
};

/// Runs the benches.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Run only the benches with matching ids
    #[arg(long, value_name = "TEXT")]
    filter: Option<String>,
    /// Store the results as baseline NAME; `critcmp NAME OTHER` compares two baselines
    #[arg(long, value_name = "NAME")]
    save: Option<String>,
}

pub(crate) fn run(args: &Args) -> Result {
    // Criterion and critcmp must look into one folder.
    let home = workspace::read()?.target_directory.join("criterion");
    let call = Call::cargo("bench -p benches --").env("CRITERION_HOME", home.as_std_path());
    let call = match &args.save {
        Some(name) => call.arg("--save-baseline").arg(name),
        None => call,
    };
    args.filter.iter().fold(call, Call::arg).run()
}
