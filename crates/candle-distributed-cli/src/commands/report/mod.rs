//! `report`: everything that is known about a run, on one page.

mod comparison;
mod coverage;
mod facts;
mod markup;
mod page;

use std::path::PathBuf;

use self::facts::Facts;
use crate::{error::Result, help::examples, output, train::curve::MAX_RUNS};

/// Summarize a run of `train` on one HTML page: settings, plan, batches, coverage, curves, memory,
/// and a text by the model; or compare several runs.
///
/// The page is a single file with no dependencies. It is computed from the folder of the run and,
/// if it is still there, from the text that the run learned from.
#[derive(Debug, clap::Args)]
#[command(after_help = examples![
    "# How did the first run go? The page is runs/0001/report.html"
    "candle-distributed report runs/0001"
    "# The same page in another place"
    "candle-distributed report runs/0001 --out report.html"
    "# What differs between two runs? The page is runs/0001/comparison.html"
    "candle-distributed report runs/0001 runs/0002"
])]
pub(crate) struct Args {
    /// Folders of runs, which may still be in progress; several, up to four, are compared
    #[arg(value_name = "RUN_DIR", required = true, num_args = 1..=MAX_RUNS)]
    runs: Vec<PathBuf>,
    /// File to write the page to [default: report.html in the folder of the run, or comparison.html
    /// in that of the first one]
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let facts: Vec<Facts> = args.runs.iter().map(|run| Facts::read(run)).collect::<Result<_>>()?;
    let (page, name) = match &facts[..] {
        [one] => (page::page(one)?, "report.html"),
        several => (comparison::page(several)?, "comparison.html"),
    };
    let path = args.out.clone().unwrap_or_else(|| args.runs[0].join(name));
    output::file(&path, page.as_bytes())?;
    output::text(|out| writeln!(out, "report written to {}", path.display()))
}

/// The page of the run in a folder.
#[cfg(any(test, fuzzing))]
pub(crate) fn page(run: &std::path::Path) -> Result<String> {
    page::page(&Facts::read(run)?)
}
