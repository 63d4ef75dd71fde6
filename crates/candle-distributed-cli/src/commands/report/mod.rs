//! `report`: all that is known of a run, on one page.

mod coverage;
mod facts;
mod page;

use std::path::PathBuf;

use self::facts::Facts;
use crate::{error::Result, help::examples, output};

/// Put all that is known of a run of `train` on one HTML page: settings, plan, batches, coverage,
/// curve, memory.
///
/// The page is one file that needs no other. It is computed from the folder of the run, and from
/// the text that it learns from if that is still there.
#[derive(Debug, clap::Args)]
#[command(after_help = examples![
    "# How did the first run go? The page is runs/0001/report.html"
    "candle-distributed report runs/0001"
    "# The same elsewhere"
    "candle-distributed report runs/0001 --out report.html"
])]
pub(crate) struct Args {
    /// Folder of the run, which may still go on
    #[arg(value_name = "RUN_DIR")]
    run: PathBuf,
    /// Where the page is written [default: report.html in that folder]
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let facts = Facts::read(&args.run)?;
    let path = args.out.clone().unwrap_or_else(|| args.run.join("report.html"));
    output::file(&path, page::page(&facts)?.as_bytes())?;
    output::text(|out| writeln!(out, "the page is {}", path.display()))
}
