//! `cargo xtask ci`: every check that a change must pass, the cheapest first.

use std::{env, path::PathBuf};

use crate::{
    cmd::{Call, Result},
    steps::{self, Done, Step},
    tidy,
    tools::{self, Tool},
};

/// Runs every check that a change must pass, and stops at the first that fails.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Leave out tests and doctests, for a caller that has just run `cargo test --workspace`
    #[arg(long)]
    skip_tests: bool,
    /// Fail if an optional tool is missing, instead of skipping its check
    #[arg(long)]
    strict: bool,
}

/// Features that need a device or a toolkit, which CI machines do not have.
const DEVICE_FEATURES: &str = "cuda,metal,mpi,nccl";

/// Packages, and what must stay out of each with its default features. `deny.toml` says which
/// package may need which; it sees neither features nor the difference between a library and its tests.
const WITHOUT: [(&str, &str); 2] = [
    // A mesh runs any function on tensors: its tests have layers, its library has none.
    ("pmap-mesh", "candle-nn"),
    // Batches become tensors behind the feature `candle` alone.
    ("dyn-batch", "candle-core"),
];

const NEXTEST: Tool = Tool::of_cargo("cargo-nextest", "nextest --version");
const HACK: Tool = Tool::of_cargo("cargo-hack", "hack --version");
const DENY: Tool = Tool::of_cargo("cargo-deny", "deny --version");
const INSTA: Tool = Tool::of_cargo("cargo-insta", "insta --version");
const TYPOS: Tool = Tool::program("typos");
const LYCHEE: Tool = Tool::program("lychee");

enum Work {
    Tidy,
    Directions,
    Advisories,
    Calls(Vec<Call>),
    /// Calls that need a tool.
    With(Tool, Vec<Call>),
}

pub(crate) fn run(args: &Args) -> Result {
    let mut steps = steps();
    if args.skip_tests {
        steps.retain(|step| !["tests", "doctests"].contains(&step.name));
    }
    steps::run_all(&steps, |work| work.run(args.strict))
}

fn steps() -> Vec<Step<'static, Work>> {
    let cargo = |name, args| Step { name, work: Work::Calls(vec![Call::cargo(args)]) };
    let with = |name, tool, calls| Step { name, work: Work::With(tool, calls) };
    let nextest = NEXTEST.is_installed();
    let tests =
        if nextest { "nextest run --workspace" } else { "test --workspace --lib --bins --tests" };
    let docs = Call::cargo("doc --workspace --no-deps").env("RUSTDOCFLAGS", "-D warnings");
    vec![
        cargo("fmt", "fmt --all --check"),
        with("spelling", TYPOS, vec![Call::new("typos", "")]),
        Step { name: "tidy", work: Work::Tidy },
        with(
            "links",
            LYCHEE,
            vec![Call::new("lychee", "--offline --no-progress --extensions md .")],
        ),
        with("dependencies", DENY, dependencies()),
        Step { name: "directions", work: Work::Directions },
        Step { name: "advisories", work: Work::Advisories },
        cargo("clippy", "clippy --workspace --all-targets -- -D warnings"),
        with("each feature alone", HACK, vec![each_feature()]),
        cargo("tests", tests),
        cargo("doctests", "test --workspace --doc"),
        with("snapshots in use", INSTA, vec![snapshots()]),
        Step { name: "docs", work: Work::Calls(vec![docs]) },
        // Criterion runs each bench once under `cargo test`; with `--workspace` the tests' builds
        // are used again.
        cargo("benches run once", "test --workspace --benches"),
    ]
}

/// Checks dependencies, licenses and sources.
fn dependencies() -> Vec<Call> {
    // The check covers all systems, so cargo must fetch the dependencies of all. Offline, because it
    // would otherwise look for news of crates.
    let fetch = Call::cargo("fetch --locked");
    vec![fetch, Call::cargo("deny --offline check bans licenses sources")]
}

/// Fails if a package needs what must stay out of it.
fn directions() -> Result<Done> {
    for (package, other) in WITHOUT {
        let call = Call::cargo("tree --edges normal --prefix none --package").arg(package);
        if call.run_and_read()?.lines().any(|line| line.split(' ').next() == Some(other)) {
            return Err(format!("{package} must do without {other}").into());
        }
    }
    Ok(Done::Passed)
}

/// Checks each crate with no features, then with each one by itself.
///
/// In the workspace cargo unifies features, so a crate could depend on a feature that only another
/// crate switches on.
fn each_feature() -> Call {
    let call = Call::cargo("hack clippy --workspace --ignore-private --each-feature");
    let call = call.arg("--exclude-features").arg(DEVICE_FEATURES);
    ["--", "-D", "warnings"].into_iter().fold(call, Call::arg)
}

/// Fails if a snapshot differs, or if no test reads it.
fn snapshots() -> Call {
    let call = "insta test --check --unreferenced=reject --workspace --test all";
    Call::cargo(call).arg("--").arg("plans").arg("padding")
}

/// Checks dependencies against the list of advisories, if this machine has one: its download may
/// fail through no fault of the change.
fn advisories(strict: bool) -> Result<Done> {
    let home = env::var_os("CARGO_HOME").map(PathBuf::from);
    let home = home.or_else(|| Some(env::home_dir()?.join(".cargo")));
    if !home.is_some_and(|home| home.join("advisory-dbs").is_dir()) {
        let reason = "there is no list of advisories; get it with `cargo deny fetch db`";
        return tools::skip(reason.to_owned(), strict);
    }
    let call = Call::cargo("deny --offline check --disable-fetch advisories");
    tools::run_with(DENY, strict, &[call])
}

impl Work {
    fn run(&self, strict: bool) -> Result<Done> {
        match self {
            Work::Tidy => tidy::run().map(|()| Done::Passed),
            Work::Directions => directions(),
            Work::Advisories => advisories(strict),
            Work::Calls(calls) => tools::run_calls(calls),
            Work::With(tool, calls) => tools::run_with(*tool, strict, calls),
        }
    }
}
