//! `cargo xtask msrv`: whether each crate builds with the oldest Rust that its manifest promises.

use crate::{
    ci,
    cmd::{Call, Result},
    steps::{self, Step},
    tools,
};

/// Checks each crate with the oldest Rust that it promises to build with; rustup gets what is
/// missing.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Fails if cargo-hack is missing, instead of skipping the check.
    #[arg(long)]
    strict: bool,
}

pub(crate) fn run(args: &Args) -> Result {
    let step = Step { name: "oldest Rust", work: [each_feature(), tensors()] };
    steps::run_all(&[step], |calls| tools::run_with(&[tools::HACK], args.strict, calls))
}

/// Each crate with each feature, and with the versions of dependencies that everything else is
/// checked with; but for `candle`, which brings candle into a crate that does without it otherwise,
/// and candle asks for a newer Rust.
fn each_feature() -> Call {
    let call = Call::cargo("hack check --locked --rust-version --workspace --ignore-private");
    call.arg("--each-feature")
        .arg("--exclude-features")
        .arg(format!("candle,{}", ci::DEVICE_FEATURES))
}

/// The feature left out above, in the crate that promises candle's own Rust.
fn tensors() -> Call {
    let call = Call::cargo("hack check --locked --rust-version --package candle-distributed");
    call.arg("--features").arg("candle")
}
