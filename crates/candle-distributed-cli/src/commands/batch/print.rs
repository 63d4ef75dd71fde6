//! The output of `batch` in each format.

use std::io::{self, Write};

use candle_distributed::batch::{Batch, BatchState, GridReport, PaddingReport};
use serde::Serialize;

use super::args::{BatchArgs, FormatArg};
use crate::{error::Result, output};

/// The JSON result. Text shows parts of it.
#[derive(Serialize)]
struct BatchOutput {
    format_version: u32,
    #[serde(flatten)]
    share: Option<RankShare>,
    batches: Vec<BatchEntry>,
    report: BatchReport,
    #[serde(skip_serializing_if = "Option::is_none")]
    grid: Option<GridReport>,
}

/// The rank of these batches.
#[derive(Serialize)]
pub(super) struct RankShare {
    pub(super) world_size: u64,
    pub(super) rank: u64,
    pub(super) n_steps: u64,
}

/// A batch, with the number of tokens needed to weight its loss.
#[derive(Serialize)]
pub(super) struct BatchEntry {
    #[serde(flatten)]
    pub(super) batch: Batch,
    /// Real tokens of all ranks in the step of this batch.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) step_real_tokens: Option<u64>,
}

/// A line of `--format jsonl`.
#[derive(Serialize)]
pub(super) struct JsonLine {
    format_version: u32,
    #[serde(flatten)]
    entry: BatchEntry,
}

impl JsonLine {
    pub(super) fn new(entry: BatchEntry) -> Self {
        Self { format_version: 1, entry }
    }
}

#[derive(Serialize)]
struct BatchReport {
    #[serde(flatten)]
    padding: PaddingReport,
    #[serde(flatten)]
    rows: Option<PackedRows>,
}

/// Packed rows in terms of bin packing.
#[derive(Serialize)]
struct PackedRows {
    bins: u64,
    /// Fraction of real tokens in the rows. It equals the efficiency, since each batch is a row of
    /// the full length.
    density: f64,
}

/// Totals that are known after the last batch.
pub(super) struct BatchTotals {
    /// Counts of skipped, truncated and dropped sequences.
    pub(super) left_out: PaddingReport,
    pub(super) share: Option<RankShare>,
    /// State of the rank after these batches.
    pub(super) state: Option<BatchState>,
    /// Report of the steps of all ranks, with micro-batches.
    pub(super) grid: Option<GridReport>,
}

/// Warns about left-out sequences, which `--format jsonl` does not include.
pub(super) fn warn_left_out(left_out: &PaddingReport) {
    let PaddingReport { skipped, truncated, dropped, .. } = left_out;
    if skipped + truncated + dropped > 0 {
        output::warning(format!(
            "{skipped} sequences are skipped, {truncated} truncated, {dropped} dropped"
        ));
    }
}

/// Prints all batches in text or JSON format.
pub(super) fn print(args: &BatchArgs, batches: Vec<BatchEntry>, totals: BatchTotals) -> Result<()> {
    let mut padding: PaddingReport = batches.iter().map(|entry| &entry.batch).collect();
    // Sequences are left out or cut before ranks share the batches, so these counts are the same
    // for all ranks.
    padding.skipped = totals.left_out.skipped;
    padding.truncated = totals.left_out.truncated;
    padding.dropped = totals.left_out.dropped;
    if !args.prints_batches() {
        // The report of all ranks.
        padding = totals.left_out;
    }
    let rows =
        args.is_pack().then(|| PackedRows { bins: padding.batches, density: padding.efficiency() });
    let report = BatchReport { padding, rows };
    let grid = totals.grid;
    let answer = BatchOutput { format_version: 1, share: totals.share, batches, report, grid };
    match args.format {
        FormatArg::Text => output::to_stdout(|out| write_text(&answer, out)),
        FormatArg::Json | FormatArg::Jsonl => output::json(&answer),
    }
}

fn write_text(answer: &BatchOutput, out: &mut dyn Write) -> io::Result<()> {
    for BatchEntry { batch, .. } in &answer.batches {
        let indices: Vec<String> = batch.indices.iter().map(u64::to_string).collect();
        writeln!(out, "{} x {}: {}", batch.rows, batch.padded_length, indices.join(" "))?;
    }
    if let Some(RankShare { world_size, rank, .. }) = answer.share {
        write!(out, "rank {rank} of {world_size}: ")?;
    }
    writeln!(out, "{}", answer.report.padding)?;
    if let Some(grid) = &answer.grid {
        writeln!(out, "{grid}")?;
    }
    Ok(())
}
