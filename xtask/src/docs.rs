//! `cargo xtask docs`: the API pages of the workspace.

use crate::cmd::{Call, Result};

/// Builds the API documentation, with warnings denied.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Opens it in a browser.
    #[arg(long)]
    open: bool,
}

pub(crate) fn run(args: &Args) -> Result {
    let cargo = command();
    if args.open { cargo.arg("--open").run() } else { cargo.run() }
}

/// The call that builds the pages; CI makes the same one.
pub(crate) fn command() -> Call {
    Call::cargo("doc --workspace --no-deps").env("RUSTDOCFLAGS", "-D warnings")
}
