//! `report`: an HTML page about a run, or a comparison of several runs.

mod comparison;
mod coverage;
mod facts;
mod markup;
mod page;

use std::path::PathBuf;

use self::facts::RunFacts;
use crate::{error::Result, help::examples, output, train::curve::MAX_RUNS};

/// Summarize a run of `train` on one HTML page: settings, plan, batches, coverage, curves, memory,
/// and a generated text; or compare several runs.
///
/// The page is a single file without dependencies. It is computed from the folder of the run and,
/// if it still exists, from the training text.
#[derive(Debug, clap::Args)]
#[command(after_help = examples![
    "# How did the first run go? The page is runs/0001/report.html"
    "candle-distributed report runs/0001"
    "# The same page in another place"
    "candle-distributed report runs/0001 --out report.html"
    "# What differs between two runs? The page is runs/0001/comparison.html"
    "candle-distributed report runs/0001 runs/0002"
])]
pub(crate) struct ReportArgs {
    /// Folders of runs, finished or in progress; two to four runs are compared
    #[arg(value_name = "RUN_DIR", required = true, num_args = 1..=MAX_RUNS)]
    runs: Vec<PathBuf>,
    /// File to write the page to [default: report.html in the folder of the run, or comparison.html
    /// in the folder of the first run]
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
}

pub(crate) fn run(args: &ReportArgs) -> Result<()> {
    let facts: Vec<RunFacts> =
        args.runs.iter().map(|run| RunFacts::read(run)).collect::<Result<_>>()?;
    let (page, name) = match &facts[..] {
        [facts] => (page::page(facts)?, "report.html"),
        facts => (comparison::page(facts)?, "comparison.html"),
    };
    let path = args.out.clone().unwrap_or_else(|| args.runs[0].join(name));
    output::file(&path, page.as_bytes())?;
    output::to_stdout(|out| writeln!(out, "report written to {}", path.display()))
}

/// Returns the page about the run in a folder.
#[cfg(any(test, fuzzing))]
pub(crate) fn page(run: &std::path::Path) -> Result<String> {
    page::page(&RunFacts::read(run)?)
}
