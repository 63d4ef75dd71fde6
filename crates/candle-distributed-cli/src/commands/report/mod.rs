//! `report`: everything that is known about a run, on one page.

mod coverage;
mod facts;
mod page;

use std::path::{Path, PathBuf};

use self::facts::Facts;
use crate::{error::Result, help::examples, output};

/// Summarize a run of `train` on one HTML page: settings, plan, batches, coverage, loss curve,
/// memory.
///
/// The page is a single file with no dependencies. It is computed from the folder of the run and,
/// if it is still there, from the text that the run learned from.
#[derive(Debug, clap::Args)]
#[command(after_help = examples![
    "# How did the first run go? The page is runs/0001/report.html"
    "candle-distributed report runs/0001"
    "# The same page in another place"
    "candle-distributed report runs/0001 --out report.html"
])]
pub(crate) struct Args {
    /// Folder of the run, which may still be in progress
    #[arg(value_name = "RUN_DIR")]
    run: PathBuf,
    /// File to write the page to [default: report.html in that folder]
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let page = page(&args.run)?;
    let path = args.out.clone().unwrap_or_else(|| args.run.join("report.html"));
    output::file(&path, page.as_bytes())?;
    output::text(|out| writeln!(out, "report written to {}", path.display()))
}

/// The page of the run in a folder.
pub(crate) fn page(run: &Path) -> Result<String> {
    page::page(&Facts::read(run)?)
}
