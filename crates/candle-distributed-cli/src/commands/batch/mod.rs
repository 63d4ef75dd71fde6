//! `batch`: sequences of given lengths, put into batches.

mod args;
pub(crate) mod chart;

use std::io::{self, Write};

use candle_distributed::{
    batch::{Batch, DistributedBatchSampler, DynamicBatchSampler, PaddingReport, SequenceLengths},
    types::Placement,
};
use serde::Serialize;

pub(crate) use self::args::Args;
use self::args::FormatArg;
use crate::{error::Result, numbers::Lengths, output};

/// The JSON result; text and drawing show parts of it.
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
struct Share {
    world_size: u64,
    rank: u64,
    n_steps: u64,
}

/// A batch, with what it takes to weight its loss.
#[derive(Serialize)]
struct Entry {
    #[serde(flatten)]
    batch: Batch,
    /// The real tokens of all ranks in its step.
    #[serde(skip_serializing_if = "Option::is_none")]
    step_real_tokens: Option<u64>,
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

pub(crate) fn run(args: &Args) -> Result<()> {
    args.check()?;
    let lengths = args.read_lengths()?;
    let sampler = DynamicBatchSampler::new(&lengths, args.config(&lengths)?)?;
    let answer = match args.placement()? {
        Some(placement) => of_rank(args, sampler, placement)?,
        None => of_all(args, &sampler)?,
    };
    match args.format {
        FormatArg::Text => output::text(|out| write_text(&answer, out)),
        FormatArg::Json => output::json(&answer),
        FormatArg::Svg => {
            let batches: Vec<&Batch> = answer.batches.iter().map(|entry| &entry.batch).collect();
            let title = chart::title(&args.config(&lengths)?);
            let drawing = chart::svg(lengths.iter(), &batches, &answer.report.padding, &title)?;
            output::text(|out| out.write_all(drawing.as_bytes()))
        }
    }
}

/// All batches.
fn of_all(args: &Args, sampler: &DynamicBatchSampler<&Lengths>) -> Result<Answer> {
    let order = args.order(sampler.lengths().count())?;
    let mut made = sampler.iter_in(&order);
    if let Some(seed) = args.shuffle_seed() {
        made = made.shuffled(seed.derive(args.epoch().as_u64()));
    }
    let entry =
        |batch: Result<Batch, _>| batch.map(|batch| Entry { batch, step_real_tokens: None });
    let batches = made.by_ref().map(entry).collect::<Result<_, _>>()?;
    Ok(answer(args, batches, *made.report(), None))
}

/// The batches of one rank.
fn of_rank(
    args: &Args,
    sampler: DynamicBatchSampler<&Lengths>,
    placement: Placement,
) -> Result<Answer> {
    let order = args.order(sampler.lengths().count())?;
    let sampler = DistributedBatchSampler::new(sampler, placement, args.distributed())?;
    let steps = sampler.epoch(args.epoch(), &order)?;
    let of_world = steps.report();
    let batches: Vec<Entry> = steps
        .map(|step| Entry { batch: step.batch, step_real_tokens: Some(step.real_tokens) })
        .collect();
    let mut report: PaddingReport = batches.iter().map(|entry| &entry.batch).collect();
    // Sequences are left out or cut before the batches are shared, so these counts belong to no
    // rank.
    report.skipped = of_world.skipped;
    report.truncated = of_world.truncated;
    report.dropped = of_world.dropped;
    let share = Share {
        world_size: placement.world_size().as_u64(),
        rank: placement.rank().as_u64(),
        n_steps: batches.len() as u64,
    };
    Ok(answer(args, batches, report, Some(share)))
}

fn answer(
    args: &Args,
    batches: Vec<Entry>,
    padding: PaddingReport,
    share: Option<Share>,
) -> Answer {
    let rows =
        args.is_pack().then(|| Rows { bins: padding.batches, density: padding.efficiency() });
    Answer { format_version: 1, share, batches, report: Report { padding, rows } }
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
