//! `cargo xtask ci`: every check that a change must pass, the cheapest first.

use crate::{
    cmd::{Call, Result},
    docs,
    steps::{self, Done},
    tidy,
    workspace::{Package, Workspace},
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
const DEVICE_FEATURES: [&str; 7] = ["accelerate", "cuda", "cudnn", "metal", "mkl", "mpi", "nccl"];

type Step = steps::Step<'static, Work>;

#[derive(Debug, PartialEq)]
enum Work {
    Tidy,
    Book,
    Calls(Vec<Call>),
}

pub(crate) fn run(args: &Args) -> Result {
    let nextest = Call::cargo("nextest --version").succeeds();
    let missing = (!nextest && !args.skip_tests).then_some("cargo-nextest is not installed");
    if let (Some(missing), true) = (missing, args.strict) {
        return Err(format!("{missing}, and --strict asks for it").into());
    }
    let steps = steps(&Workspace::read()?, args.skip_tests, nextest);
    let strict = args.strict;
    let outcome = steps::run_all(&steps, |work| match work.run()? {
        Done::Skipped(reason) if strict => {
            Err(format!("{reason}, and --strict asks for it").into())
        }
        done => Ok(done),
    });
    if let Some(missing) = missing {
        println!("  {:<22} skipped: {missing}, so the tests run with cargo test", "nextest");
    }
    outcome
}

fn steps(workspace: &Workspace, skip_tests: bool, nextest: bool) -> Vec<Step> {
    let cargo = |name, args| Step { name, work: Work::Calls(vec![Call::cargo(args)]) };
    let runner =
        if nextest { "nextest run --workspace" } else { "test --workspace --lib --bins --tests" };
    let mut steps = vec![
        cargo("fmt", "fmt --all --check"),
        Step { name: "tidy", work: Work::Tidy },
        cargo("clippy", "clippy --workspace --all-targets -- -D warnings"),
        Step {
            name: "each crate alone",
            work: Work::Calls(workspace.crates().flat_map(alone).collect()),
        },
        cargo("tests", runner),
        cargo("doctests", "test --workspace --doc"),
        Step { name: "docs", work: Work::Calls(vec![docs::command()]) },
        Step { name: "book", work: Work::Book },
        // Criterion runs each bench once under `cargo test`; with `--workspace` the tests' builds
        // are used again.
        cargo("benches run once", "test --workspace --benches"),
    ];
    steps.retain(|step| !(skip_tests && ["tests", "doctests"].contains(&step.name)));
    steps
}

/// Checks a crate with no features, then with each one by itself.
///
/// In the workspace cargo unifies features, so a crate could lean on what only another one has
/// switched on.
fn alone(package: &Package) -> impl Iterator<Item = Call> {
    let sets = [None].into_iter().chain(cpu_features(package).map(|(name, _)| Some(name)));
    sets.map(|feature| {
        let cargo = Call::cargo("clippy --no-default-features --package").arg(&package.name);
        let cargo =
            feature.into_iter().fold(cargo, |cargo, feature| cargo.arg("--features").arg(feature));
        ["--", "-D", "warnings"].into_iter().fold(cargo, Call::arg)
    })
}

/// The features that every machine can build, and what each switches on.
pub(crate) fn cpu_features(package: &Package) -> impl Iterator<Item = (&str, &[String])> {
    let features =
        package.features.iter().map(|(name, enables)| (name.as_str(), enables.as_slice()));
    features.filter(|(name, enables)| !needs_device(name, enables))
}

/// Whether a feature is, or directly switches on, one that needs a device.
fn needs_device(name: &str, enables: &[String]) -> bool {
    let last_part = |enabled: &String| {
        enabled.rsplit('/').next().is_some_and(|part| DEVICE_FEATURES.contains(&part))
    };
    DEVICE_FEATURES.contains(&name) || enables.iter().any(last_part)
}

impl Work {
    fn run(&self) -> Result<Done> {
        match self {
            Work::Tidy => tidy::run(),
            Work::Book => return docs::book(false),
            Work::Calls(calls) => calls.iter().try_for_each(Call::run),
        }?;
        Ok(Done::Passed)
    }
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeMap, path::PathBuf};

    use super::*;

    /// A workspace of one crate with `features`, each given with what it switches on.
    fn workspace(features: &[(&str, &str)]) -> Workspace {
        let features =
            features.iter().map(|&(name, enables)| (name.to_owned(), vec![enables.to_owned()]));
        let package = Package {
            name: "a".into(),
            dir: "crates/a".into(),
            features: features.collect(),
            ..Package::default()
        };
        Workspace { packages: vec![package], graph: BTreeMap::new(), target_dir: PathBuf::new() }
    }

    fn names(steps: &[Step]) -> Vec<&str> {
        steps.iter().map(|step| step.name).collect()
    }

    #[test]
    fn a_crate_is_checked_bare_and_with_each_feature_but_those_of_devices() {
        let workspace = workspace(&[
            ("cuda", "candle-core/cuda"),
            ("gpu", "mesh?/metal"),
            ("nccl", "cuda"),
            ("serde", "dep:serde"),
        ]);
        let calls: Vec<_> = alone(&workspace.packages[0]).collect();
        let bare = Call::cargo("clippy --no-default-features --package a -- -D warnings");
        let serde =
            Call::cargo("clippy --no-default-features --package a --features serde -- -D warnings");
        assert_eq!(calls, [bare, serde]);
    }

    #[test]
    fn skipping_the_tests_leaves_out_nothing_else() {
        let all = steps(&workspace(&[]), false, false);
        let mut expected = names(&all);
        expected.retain(|name| !name.ends_with("tests"));
        assert_eq!(names(&steps(&workspace(&[]), true, true)), expected);
        assert_eq!(expected.len() + 2, all.len());
    }

    #[test]
    fn nextest_runs_the_tests_where_it_is_installed() {
        let runner = |nextest| steps(&workspace(&[]), false, nextest).remove(4).work;
        assert_eq!(runner(true), Work::Calls(vec![Call::cargo("nextest run --workspace")]));
        assert_eq!(
            runner(false),
            Work::Calls(vec![Call::cargo("test --workspace --lib --bins --tests")])
        );
    }
}
