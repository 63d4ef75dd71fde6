//! `cargo xtask ci`: every check that a change must pass, the cheapest first.

use std::{collections::BTreeSet, env, fs, path::PathBuf};

use cargo_metadata::Package;

use crate::{
    cmd::{self, Call, Result},
    steps::{self, NamedStep, StepDone},
    tidy,
    tools::{self, Tool},
    workspace,
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
const DEVICE_FEATURES: [&str; 4] = ["cuda", "metal", "mpi", "nccl"];

/// Features that another crate checks alone: the command line builds `finetune` with this one.
const CHECKED_ELSEWHERE: [(&str, &str); 1] = [("finetune", "clap")];

/// Pairs of a package and a dependency that it must not have with its default features. `deny.toml`
/// lists allowed dependencies, but it ignores features and does not separate a library from its
/// tests.
const WITHOUT: [(&str, &str); 3] = [
    // A mesh runs any function on tensors: only its tests need layers.
    ("pmap-mesh", "candle-nn"),
    // Batches become tensors behind the feature `candle` alone.
    ("dyn-batch", "candle-core"),
    ("data-loader", "candle-core"),
];

const NEXTEST: Tool = Tool::cargo_subcommand("cargo-nextest", "nextest --version");
const DENY: Tool = Tool::cargo_subcommand("cargo-deny", "deny --version");
const TYPOS: Tool = Tool::program("typos");
const LYCHEE: Tool = Tool::program("lychee");

enum CiStep {
    Tidy,
    Directions,
    Advisories,
    EachFeature,
    Snapshots,
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

fn steps() -> Vec<NamedStep<'static, CiStep>> {
    let cargo = |name, args| NamedStep { name, work: CiStep::Calls(vec![Call::cargo(args)]) };
    let with_tool = |name, tool, calls| NamedStep { name, work: CiStep::With(tool, calls) };
    let nextest = NEXTEST.is_installed();
    let tests =
        if nextest { "nextest run --workspace" } else { "test --workspace --lib --bins --tests" };
    let docs = Call::cargo("doc --workspace --no-deps").env("RUSTDOCFLAGS", "-D warnings");
    vec![
        cargo("fmt", "fmt --all --check"),
        with_tool("spelling", TYPOS, vec![Call::new("typos", "")]),
        NamedStep { name: "tidy", work: CiStep::Tidy },
        with_tool(
            "links",
            LYCHEE,
            vec![Call::new("lychee", "--offline --no-progress --extensions md .")],
        ),
        with_tool("dependencies", DENY, dependencies()),
        NamedStep { name: "directions", work: CiStep::Directions },
        NamedStep { name: "advisories", work: CiStep::Advisories },
        cargo("clippy", "clippy --workspace --all-targets -- -D warnings"),
        NamedStep { name: "each feature alone", work: CiStep::EachFeature },
        cargo("tests", tests),
        cargo("doctests", "test --workspace --doc"),
        NamedStep { name: "snapshots in use", work: CiStep::Snapshots },
        NamedStep { name: "docs", work: CiStep::Calls(vec![docs]) },
        // Benches run once and on small inputs unless `cargo bench` starts them; with `--workspace`
        // the tests' builds are used again.
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

/// Fails if a package has a forbidden dependency.
fn directions() -> Result<StepDone> {
    for (package, other) in WITHOUT {
        let call = Call::cargo("tree --edges normal --prefix none --package").arg(package);
        if call.run_and_read()?.lines().any(|line| line.split(' ').next() == Some(other)) {
            return Err(format!("{package} must do without {other}").into());
        }
    }
    Ok(StepDone::Passed)
}

/// Checks each crate without features, then with each feature alone.
///
/// In the workspace cargo unifies features, so a crate could use a feature that only another crate
/// enables.
fn each_feature() -> Result<StepDone> {
    for package in workspace::crates(&workspace::read()?) {
        for features in lone_features(package) {
            let call = Call::cargo("clippy --quiet --package").arg(package.name.as_str());
            let call = features.into_iter().fold(call, Call::arg);
            ["--", "-D", "warnings"].into_iter().fold(call, Call::arg).run()?;
        }
    }
    Ok(StepDone::Passed)
}

/// Returns the arguments of cargo that select no features, and each feature of a package alone.
fn lone_features(package: &Package) -> Vec<Vec<String>> {
    let none = || vec!["--no-default-features".to_owned()];
    let is_checked = |feature: &&String| {
        let elsewhere = CHECKED_ELSEWHERE.contains(&(package.name.as_str(), feature));
        !elsewhere && !DEVICE_FEATURES.contains(&feature.as_str())
    };
    let features = package.features.keys().filter(is_checked);
    let alone =
        features.map(|feature| [none(), vec!["--features".into(), feature.clone()]].concat());
    [none()].into_iter().chain(alone).collect()
}

/// Fails if a snapshot differs, or if no test reads it.
fn snapshots() -> Result<StepDone> {
    let read = workspace::read()?.target_directory.join("snapshots");
    fs::write(&read, "")?;
    let call = Call::cargo("test --quiet --workspace --test all -- plans padding");
    call.env("INSTA_UPDATE", "no").env("INSTA_SNAPSHOT_REFERENCES_FILE", &read).run()?;
    let read = fs::read_to_string(read)?;
    // insta's paths may go through `..`.
    let read: BTreeSet<_> = read.lines().map(fs::canonicalize).collect::<Result<_, _>>()?;
    let mut files = workspace::files_below(&cmd::root().join("crates"))?;
    files.extend(workspace::files_below(&cmd::root().join("tests"))?);
    files.retain(|file| file.extension().is_some_and(|end| end == "snap") && !read.contains(file));
    match files.first() {
        None => Ok(StepDone::Passed),
        Some(file) => Err(format!("no test reads {}", file.display()).into()),
    }
}

/// Checks dependencies against the list of advisories, if this machine has one: its download may
/// fail through no fault of the change.
fn advisories(strict: bool) -> Result<StepDone> {
    let home = env::var_os("CARGO_HOME").map(PathBuf::from);
    let home = home.or_else(|| Some(env::home_dir()?.join(".cargo")));
    if !home.is_some_and(|home| home.join("advisory-dbs").is_dir()) {
        let reason = "there is no list of advisories; get it with `cargo deny fetch db`";
        return tools::skip(reason.to_owned(), strict);
    }
    let call = Call::cargo("deny --offline check --disable-fetch advisories");
    tools::run_with(DENY, strict, &[call])
}

impl CiStep {
    fn run(&self, strict: bool) -> Result<StepDone> {
        match self {
            CiStep::Tidy => tidy::run().map(|()| StepDone::Passed),
            CiStep::Directions => directions(),
            CiStep::Advisories => advisories(strict),
            CiStep::EachFeature => each_feature(),
            CiStep::Snapshots => snapshots(),
            CiStep::Calls(calls) => tools::run_calls(calls),
            CiStep::With(tool, calls) => tools::run_with(*tool, strict, calls),
        }
    }
}
