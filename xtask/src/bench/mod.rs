//! `cargo xtask bench`: measure, keep the result under a name, or compare with peers.
//!
//! Criterion's own comparison says whether a change is significant; critcmp puts two kept results
//! beside each other.

mod estimates;
mod page;
mod peers;

use std::path::Path;

use crate::{
    cmd::{Call, Result},
    workspace,
};

/// Runs the benches.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Only the benches whose id matches.
    #[arg(long, value_name = "TEXT")]
    filter: Option<String>,
    /// Keeps the results as baseline NAME; `critcmp NAME OTHER` compares two of them.
    #[arg(long, value_name = "NAME", conflicts_with = "peers")]
    save: Option<String>,
    /// Prints the ratios of the peers' times to ours, for what `PEERS_PYTHON` (`python3` if unset)
    /// can import.
    #[arg(long)]
    peers: bool,
    /// Also writes the ratios to `docs/benchmarks.md`, with date and machine.
    #[arg(long, requires = "peers")]
    write: bool,
}

pub(crate) fn run(args: &Args) -> Result {
    let home = workspace::read()?.target_directory.join("criterion");
    if !args.peers {
        return command(args, home.as_std_path()).run();
    }
    let table = peers::compare(args.filter.as_deref(), home.as_std_path())?;
    println!("\n{table}");
    if args.write { page::write(&table) } else { Ok(()) }
}

/// `CRITERION_HOME` is set so that criterion, critcmp and this module look into one folder.
fn command(args: &Args, home: &Path) -> Call {
    let call = Call::cargo("bench -p benches --").env("CRITERION_HOME", home);
    let call = match &args.save {
        Some(name) => call.arg("--save-baseline").arg(name),
        None => call,
    };
    args.filter.iter().fold(call, Call::arg)
}
