//! What `batch` prints, in each of its forms.

use std::io::{self, Write};

use candle_distributed::batch::{Batch, BatchState, PaddingReport};
use serde::Serialize;

use super::args::{Args, FormatArg};
use crate::{error::Result, output};

/// The JSON result; text shows parts of it.
#[derive(Serialize)]
struct Answer {
    format_version: u32,
    #[serde(flatten)]
    share: Option<Share>,
    batches: Vec<Entry>,
    report: Report,
}

/// The rank that these batches belong to, if ranks share them.
#[derive(Serialize)]
pub(super) struct Share {
    pub(super) world_size: u64,
    pub(super) rank: u64,
    pub(super) n_steps: u64,
}

/// A batch, with what it takes to weight its loss.
#[derive(Serialize)]
pub(super) struct Entry {
    #[serde(flatten)]
    pub(super) batch: Batch,
    /// The real tokens of all ranks in its step.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) step_real_tokens: Option<u64>,
}

/// A line of `--format jsonl`.
#[derive(Serialize)]
pub(super) struct Line {
    format_version: u32,
    #[serde(flatten)]
    entry: Entry,
}

impl Line {
    pub(super) fn new(entry: Entry) -> Self {
        Self { format_version: 1, entry }
    }
}

#[derive(Serialize)]
struct Report {
    #[serde(flatten)]
    padding: PaddingReport,
    #[serde(flatten)]
    rows: Option<Rows>,
}

/// Packed rows in the words of bin packing.
#[derive(Serialize)]
struct Rows {
    bins: u64,
    /// The fraction of the tokens of full rows that are real: the efficiency, because each batch is
    /// a row of the full length.
    density: f64,
}

/// What is known when the last batch is made.
pub(super) struct Made {
    /// How many sequences are in no batch, or cut.
    pub(super) left_out: PaddingReport,
    pub(super) share: Option<Share>,
    /// Where the rank stands after these batches.
    pub(super) state: Option<BatchState>,
}

/// Says on standard error what the form of the result has no place for.
pub(super) fn warn(left_out: &PaddingReport) {
    let PaddingReport { skipped, truncated, dropped, .. } = left_out;
    if skipped + truncated + dropped > 0 {
        output::warning(format!(
            "of the sequences {skipped} are skipped, {truncated} truncated, {dropped} dropped"
        ));
    }
}

/// Prints batches that are all known.
pub(super) fn print(args: &Args, batches: Vec<Entry>, made: Made) -> Result<()> {
    let mut padding: PaddingReport = batches.iter().map(|entry| &entry.batch).collect();
    // Sequences are left out or cut before the batches are shared, so these counts belong to no
    // rank.
    padding.skipped = made.left_out.skipped;
    padding.truncated = made.left_out.truncated;
    padding.dropped = made.left_out.dropped;
    let is_pack = args.is_pack();
    let rows = is_pack.then(|| Rows { bins: padding.batches, density: padding.efficiency() });
    let report = Report { padding, rows };
    let answer = Answer { format_version: 1, share: made.share, batches, report };
    match args.format {
        FormatArg::Text => output::text(|out| write_text(&answer, out)),
        FormatArg::Json | FormatArg::Jsonl => output::json(&answer),
    }
}

fn write_text(answer: &Answer, out: &mut dyn Write) -> io::Result<()> {
    for Entry { batch, .. } in &answer.batches {
        let indices: Vec<String> = batch.indices.iter().map(u64::to_string).collect();
        writeln!(out, "{} x {}: {}", batch.rows, batch.padded_length, indices.join(" "))?;
    }
    if let Some(Share { world_size, rank, .. }) = answer.share {
        write!(out, "rank {rank} of {world_size}: ")?;
    }
    writeln!(out, "{}", answer.report.padding)
}
