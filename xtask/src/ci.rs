//! `cargo xtask ci`: every check that a change must pass, the cheapest first.

use std::{env, path::PathBuf};

use crate::{
    cmd::{Call, Result},
    docs,
    steps::{self, Done, Step},
    tidy,
    tools::{self, Tool},
};

/// Runs every check that a change must pass, and stops at the first that fails.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Leaves out tests and doctests, for a caller that has just run `cargo test --workspace`.
    #[arg(long)]
    skip_tests: bool,
    /// Fails if an optional tool is missing, instead of doing without it.
    #[arg(long)]
    strict: bool,
}

/// Features that need a device or a toolkit, which CI machines do not have.
pub(crate) const DEVICE_FEATURES: &str = "cuda,metal,mpi,nccl";

enum Work {
    Tidy,
    Book,
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
    let nextest = tools::NEXTEST.is_there();
    let tests =
        if nextest { "nextest run --workspace" } else { "test --workspace --lib --bins --tests" };
    vec![
        cargo("fmt", "fmt --all --check"),
        with("spelling", tools::TYPOS, vec![Call::new("typos", "")]),
        Step { name: "tidy", work: Work::Tidy },
        with("links", tools::LYCHEE, vec![docs::links()]),
        with("dependencies", tools::DENY, dependencies()),
        Step { name: "advisories", work: Work::Advisories },
        cargo("clippy", "clippy --workspace --all-targets -- -D warnings"),
        with("each feature alone", tools::HACK, vec![each_feature()]),
        cargo("tests", tests),
        cargo("doctests", "test --workspace --doc"),
        with("snapshots in use", tools::INSTA, vec![snapshots()]),
        Step { name: "docs", work: Work::Calls(vec![docs::command()]) },
        Step { name: "book", work: Work::Book },
        // Criterion runs each bench once under `cargo test`; with `--workspace` the tests' builds
        // are used again.
        cargo("benches run once", "test --workspace --benches"),
    ]
}

/// Who stands on whom, under which licenses, and where it comes from.
fn dependencies() -> Vec<Call> {
    // Not only for this machine, since the check is about all of them; offline, because it would
    // otherwise look for news of crates that nobody asked for.
    let fetch = Call::cargo("fetch --locked");
    vec![fetch, Call::cargo("deny --offline check bans licenses sources")]
}

/// Checks each crate with no features, then with each one by itself.
///
/// In the workspace cargo unifies features, so a crate could lean on what only another one has
/// switched on.
fn each_feature() -> Call {
    let call = Call::cargo("hack clippy --workspace --ignore-private --each-feature");
    let call = call.arg("--exclude-features").arg(DEVICE_FEATURES);
    ["--", "-D", "warnings"].into_iter().fold(call, Call::arg)
}

/// Fails if a snapshot differs, or if no test reads it.
fn snapshots() -> Call {
    Call::cargo("insta test --check --unreferenced=reject --workspace --test plans --test padding")
}

/// Known faults of dependencies, where their list is here: to get it is another site's work, which
/// may fail.
fn advisories(strict: bool) -> Result<Done> {
    let home = env::var_os("CARGO_HOME").map(PathBuf::from);
    let home = home.or_else(|| Some(env::home_dir()?.join(".cargo")));
    if !home.is_some_and(|home| home.join("advisory-dbs").is_dir()) {
        let reason = "there is no list of advisories; get it with `cargo deny fetch db`";
        return tools::skipped(reason.to_owned(), strict);
    }
    let call = Call::cargo("deny --offline check --disable-fetch advisories");
    tools::run_with(&[tools::DENY], strict, &[call])
}

impl Work {
    fn run(&self, strict: bool) -> Result<Done> {
        match self {
            Work::Tidy => tidy::run().map(|()| Done::Passed),
            Work::Book => docs::book(false, strict),
            Work::Advisories => advisories(strict),
            Work::Calls(calls) => tools::run_with(&[], strict, calls),
            Work::With(tool, calls) => tools::run_with(&[*tool], strict, calls),
        }
    }
}
