//! `cargo xtask bench`: measure, keep the result under a name, compare with a result kept before.
//!
//! Criterion's own comparison says whether a change is significant; the ratios here say for all benches, on one
//! page, how large it is.

use std::{
    fs,
    path::{Path, PathBuf},
    time::SystemTime,
};

use serde_json::Value;

use crate::{
    cmd::{Cargo, Result},
    workspace::{self, Workspace},
};

/// Runs the benches.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Only the benches whose id matches.
    #[arg(long, value_name = "TEXT")]
    filter: Option<String>,
    /// Keeps the results as baseline NAME.
    #[arg(long, value_name = "NAME", conflicts_with = "compare")]
    save: Option<String>,
    /// Prints each result's ratio to baseline NAME.
    #[arg(long, value_name = "NAME")]
    compare: Option<String>,
}

pub(crate) fn run(args: &Args) -> Result {
    let home = Workspace::read()?.target_dir.join("criterion");
    let Some(baseline) = &args.compare else { return command(args, &home).run() };
    if measured(&home, baseline, SystemTime::UNIX_EPOCH)?.is_empty() {
        return Err(format!("no baseline `{baseline}`: make it with `cargo xtask bench --save {baseline}`").into());
    }
    let start = SystemTime::now();
    command(args, &home).run()?;
    println!("\ntime now / time in `{baseline}`");
    let results = measured(&home, "new", start)?;
    results.iter().try_for_each(|path| print_ratio(path, baseline))
}

/// `CRITERION_HOME` is set so that criterion and this module look into one folder.
fn command(args: &Args, home: &Path) -> Cargo {
    let mut cargo = Cargo::new("bench -p benches --").env("CRITERION_HOME", home);
    // Lenient: a bench that is younger than the baseline is no reason to stop.
    for (option, name) in [("--save-baseline", &args.save), ("--baseline-lenient", &args.compare)] {
        if let Some(name) = name {
            cargo = cargo.arg(option).arg(name);
        }
    }
    args.filter.iter().fold(cargo, Cargo::arg)
}

/// The folders of the benches that have results under `name` no older than `since`, which leaves out the benches
/// that were filtered or have been deleted.
fn measured(home: &Path, name: &str, since: SystemTime) -> Result<Vec<PathBuf>> {
    let mut benches = Vec::new();
    for path in workspace::files_below(home)? {
        if path.ends_with(Path::new(name).join("estimates.json")) && since <= fs::metadata(&path)?.modified()? {
            benches.extend(path.ancestors().nth(2).map(Path::to_owned));
        }
    }
    Ok(benches)
}

fn print_ratio(bench: &Path, baseline: &str) -> Result {
    let id = json(&bench.join("new/benchmark.json"))?["full_id"].as_str().unwrap_or_default().to_owned();
    let now = median_ns(&bench.join("new"))?;
    if !bench.join(baseline).exists() {
        println!("  new    {now:>14.1} ns  {id}");
        return Ok(());
    }
    println!("{:>6.3} {now:>14.1} ns  {id}", now / median_ns(&bench.join(baseline))?);
    Ok(())
}

fn median_ns(results: &Path) -> Result<f64> {
    let estimates = results.join("estimates.json");
    let median = json(&estimates)?["median"]["point_estimate"].as_f64();
    median.ok_or_else(|| format!("no median in {}", estimates.display()).into())
}

fn json(path: &Path) -> Result<Value> {
    let text = fs::read_to_string(path).map_err(|error| format!("{}: {error}", path.display()))?;
    Ok(serde_json::from_str(&text)?)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn baselines_and_filter_reach_criterion() {
        let args = Args { filter: Some("plan".into()), save: None, compare: Some("main".into()) };
        let expected = Cargo::new("bench -p benches -- --baseline-lenient main plan").env("CRITERION_HOME", "home");
        assert_eq!(command(&args, Path::new("home")), expected);
    }

    #[test]
    fn results_are_found_by_baseline_and_time() {
        let home = std::env::temp_dir().join(format!("xtask-bench-{}", std::process::id()));
        let dir = home.join("group/bench/main");
        fs::create_dir_all(&dir).unwrap();
        fs::write(dir.join("estimates.json"), r#"{"median":{"point_estimate":1.5}}"#).unwrap();
        assert!((median_ns(&dir).unwrap() - 1.5).abs() < 1e-9);
        let before = SystemTime::now() - Duration::from_secs(3600);
        assert_eq!(measured(&home, "main", before).unwrap(), [home.join("group/bench")]);
        assert!(measured(&home, "other", before).unwrap().is_empty());
        assert!(measured(&home, "main", before + Duration::from_secs(7200)).unwrap().is_empty());
        fs::remove_dir_all(&home).unwrap();
    }
}
