//! `cargo xtask bench`: measure, keep the result under a name, compare with a result kept before or
//! with peers.
//!
//! Criterion's own comparison says whether a change is significant; the ratios here say for all
//! benches, on one page, how large it is.

mod estimates;
mod page;
mod peers;

use std::{path::Path, time::SystemTime};

use estimates::measured;
use page::Table;

use crate::{
    cmd::{Call, Result},
    workspace::Workspace,
};

/// Runs the benches.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Only the benches whose id matches.
    #[arg(long, value_name = "TEXT")]
    filter: Option<String>,
    /// Keeps the results as baseline NAME.
    #[arg(long, value_name = "NAME", conflicts_with = "ratios")]
    save: Option<String>,
    /// Prints each result's ratio to baseline NAME.
    #[arg(long, value_name = "NAME", group = "ratios")]
    compare: Option<String>,
    /// Prints the ratios of the peers' times to ours, for what `PEERS_PYTHON` (`python3` if unset)
    /// can import.
    #[arg(long, group = "ratios")]
    peers: bool,
    /// Also writes the ratios to `docs/benchmarks.md`, with date and machine.
    #[arg(long, requires = "ratios")]
    write: bool,
}

pub(crate) fn run(args: &Args) -> Result {
    let home = Workspace::read()?.target_dir.join("criterion");
    let (section, table) = match &args.compare {
        Some(baseline) => ("baseline", compare(args, &home, baseline)?),
        None if args.peers => ("peers", peers::compare(args.filter.as_deref(), &home)?),
        None => return command(args, &home).run(),
    };
    println!("\n{table}");
    if args.write { page::write(section, &table) } else { Ok(()) }
}

/// `CRITERION_HOME` is set so that criterion and this module look into one folder.
fn command(args: &Args, home: &Path) -> Call {
    let mut call = Call::cargo("bench -p benches --").env("CRITERION_HOME", home);
    // Lenient: a bench that is younger than the baseline is no reason to stop.
    for (option, name) in [("--save-baseline", &args.save), ("--baseline-lenient", &args.compare)] {
        if let Some(name) = name {
            call = call.arg(option).arg(name);
        }
    }
    args.filter.iter().fold(call, Call::arg)
}

fn compare(args: &Args, home: &Path, baseline: &str) -> Result<Table> {
    if measured(home, baseline, SystemTime::UNIX_EPOCH)?.is_empty() {
        return Err(format!(
            "no baseline `{baseline}`: make it with `cargo xtask bench --save {baseline}`"
        )
        .into());
    }
    let start = SystemTime::now();
    command(args, home).run()?;
    let mut table =
        Table::new(format!("Time now over time in `{baseline}`."), &["bench", "now", "ratio"]);
    for bench in measured(home, "new", start)? {
        let now = bench.median("new")?;
        let ratio = if bench.has(baseline) {
            ratio(now / bench.median(baseline)?)
        } else {
            "new".to_owned()
        };
        table.add([format!("`{}`", bench.id()?), time(now), ratio]);
    }
    Ok(table)
}

/// A time in the unit that suits it.
fn time(seconds: f64) -> String {
    format!("{:.2?}", std::time::Duration::from_secs_f64(seconds))
}

/// A ratio with as many digits as can be trusted.
fn ratio(ratio: f64) -> String {
    if ratio < 10.0 { format!("{ratio:.2}") } else { format!("{ratio:.0}") }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Command {
        #[command(flatten)]
        args: Args,
    }

    fn parse(args: &str) -> Result<Args, clap::Error> {
        Ok(Command::try_parse_from(format!("bench {args}").split_whitespace())?.args)
    }

    #[test]
    fn baselines_and_filter_reach_criterion() {
        let args = parse("--filter plan --compare main").unwrap();
        let expected = Call::cargo("bench -p benches -- --baseline-lenient main plan")
            .env("CRITERION_HOME", "home");
        assert_eq!(command(&args, Path::new("home")), expected);
    }

    #[test]
    fn only_ratios_are_written_and_of_one_kind() {
        for good in ["--write --peers", "--compare main --write", "--save main", ""] {
            assert!(parse(good).is_ok(), "{good}");
        }
        for bad in
            ["--write", "--write --save main", "--peers --compare main", "--peers --save main"]
        {
            assert!(parse(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn times_and_ratios_are_short() {
        assert_eq!(time(1.234_567e-5), "12.35µs");
        assert_eq!((ratio(0.987_6), ratio(123.4)), ("0.99".to_owned(), "123".to_owned()));
    }
}
