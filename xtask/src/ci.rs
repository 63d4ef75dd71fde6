//! `cargo xtask ci`: every check that a change must pass, the cheapest first.

use std::{
    fmt,
    time::{Duration, Instant},
};

use crate::{
    cmd::{Cargo, Result},
    docs, tidy,
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

/// One line of the summary.
struct Step {
    name: &'static str,
    work: Work,
}

#[derive(Debug, PartialEq)]
enum Work {
    Tidy,
    Cargo(Vec<Cargo>),
}

pub(crate) fn run(args: &Args) -> Result {
    let nextest = Cargo::new("nextest --version").succeeds();
    let missing = (!nextest && !args.skip_tests).then_some("cargo-nextest is not installed");
    if let (Some(missing), true) = (missing, args.strict) {
        return Err(format!("{missing}, and --strict asks for it").into());
    }
    let steps = steps(&Workspace::read()?, args.skip_tests, nextest);
    let outcome = run_all(&steps, Step::run);
    if let Some(missing) = missing {
        println!("  {:<18} skipped: {missing}, so the tests run with cargo test", "nextest");
    }
    outcome
}

fn steps(workspace: &Workspace, skip_tests: bool, nextest: bool) -> Vec<Step> {
    let cargo = |name, args| Step { name, work: Work::Cargo(vec![Cargo::new(args)]) };
    let runner = if nextest { "nextest run --workspace" } else { "test --workspace --lib --bins --tests" };
    let mut steps = vec![
        cargo("fmt", "fmt --all --check"),
        Step { name: "tidy", work: Work::Tidy },
        cargo("clippy", "clippy --workspace --all-targets -- -D warnings"),
        Step { name: "each crate alone", work: Work::Cargo(workspace.crates().flat_map(alone).collect()) },
        cargo("tests", runner),
        cargo("doctests", "test --workspace --doc"),
        Step { name: "docs", work: Work::Cargo(vec![docs::command()]) },
        // Criterion runs each bench once under `cargo test`; with `--workspace` the tests' builds are used again.
        cargo("benches run once", "test --workspace --benches"),
    ];
    steps.retain(|step| !(skip_tests && ["tests", "doctests"].contains(&step.name)));
    steps
}

/// Checks a crate with no features, then with each one by itself.
///
/// In the workspace cargo unifies features, so a crate could lean on what only another one has switched on.
fn alone(package: &Package) -> impl Iterator<Item = Cargo> {
    let on_cpu = package.features.iter().filter(|(name, enables)| !needs_device(name, enables));
    let sets = [None].into_iter().chain(on_cpu.map(|(name, _)| Some(name.as_str())));
    sets.map(|feature| {
        let cargo = Cargo::new("clippy --no-default-features --package").arg(&package.name);
        let cargo = feature.into_iter().fold(cargo, |cargo, feature| cargo.arg("--features").arg(feature));
        ["--", "-D", "warnings"].into_iter().fold(cargo, Cargo::arg)
    })
}

/// Whether a feature is, or directly switches on, one that needs a device.
fn needs_device(name: &str, enables: &[String]) -> bool {
    let last_part = |enabled: &String| enabled.rsplit('/').next().is_some_and(|part| DEVICE_FEATURES.contains(&part));
    DEVICE_FEATURES.contains(&name) || enables.iter().any(last_part)
}

/// Runs the steps up to the first that fails, then tells how each went.
fn run_all(steps: &[Step], run: impl Fn(&Step) -> Result) -> Result {
    let mut outcomes = Vec::new();
    let mut result = Ok(());
    for step in steps {
        println!("\n== {}", step.name);
        let start = Instant::now();
        result = run(step);
        let outcome = if result.is_ok() { Outcome::Passed } else { Outcome::Failed }(start.elapsed());
        println!("== {}: {outcome}", step.name);
        outcomes.push(outcome);
        if result.is_err() {
            break;
        }
    }
    outcomes.resize(steps.len(), Outcome::NotRun);
    println!("\n== summary");
    steps.iter().zip(&outcomes).for_each(|(step, outcome)| println!("  {:<18} {outcome}", step.name));
    result
}

impl Step {
    fn run(&self) -> Result {
        match &self.work {
            Work::Tidy => tidy::run(),
            Work::Cargo(calls) => calls.iter().try_for_each(Cargo::run),
        }
    }
}

#[derive(Clone, Copy)]
enum Outcome {
    Passed(Duration),
    Failed(Duration),
    NotRun,
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Outcome::Passed(time) => write!(f, "passed  {:>6.1} s", time.as_secs_f64()),
            Outcome::Failed(time) => write!(f, "FAILED  {:>6.1} s", time.as_secs_f64()),
            Outcome::NotRun => write!(f, "not run"),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{cell::Cell, collections::BTreeMap, path::PathBuf};

    use super::*;

    /// A workspace of one crate with `features`, each given with what it switches on.
    fn workspace(features: &[(&str, &str)]) -> Workspace {
        let features = features.iter().map(|&(name, enables)| (name.to_owned(), vec![enables.to_owned()]));
        let package =
            Package { name: "a".into(), dir: "crates/a".into(), features: features.collect(), ..Package::default() };
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
        let bare = Cargo::new("clippy --no-default-features --package a -- -D warnings");
        let serde = Cargo::new("clippy --no-default-features --package a --features serde -- -D warnings");
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
        assert_eq!(runner(true), Work::Cargo(vec![Cargo::new("nextest run --workspace")]));
        assert_eq!(runner(false), Work::Cargo(vec![Cargo::new("test --workspace --lib --bins --tests")]));
    }

    #[test]
    fn the_first_failure_ends_the_run() {
        let steps = steps(&workspace(&[]), false, false);
        let ran = Cell::new(0);
        let fails_at = |last| {
            ran.set(0);
            let step = |_: &Step| if ran.replace(ran.get() + 1) == last { Err("reason".into()) } else { Ok(()) };
            run_all(&steps, step).is_err()
        };
        assert!(fails_at(2));
        assert_eq!(ran.get(), 3);
        assert!(!fails_at(steps.len()));
        assert_eq!(ran.get(), steps.len());
    }
}
