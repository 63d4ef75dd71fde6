//! `batch`: sequences of given lengths, put into batches.

use std::{io, path::PathBuf};

use candle_distributed::{
    batch::{Batch, BatchConfig, Buckets, DynamicBatchSampler, DynamicBatchStrategy, Overlong, PaddingReport},
    sampler::{DistributedSampler, Order, SamplerConfig},
    types::{Epoch, Placement, Seed},
};
use clap::ValueEnum;
use serde::Serialize;

use crate::{
    error::{Error, Result},
    input,
    output::{self, Format},
};

/// Put sequences of given lengths into batches and report the padding.
///
/// Example: echo 12 80 15 70 9 | candle-distributed batch --lengths - --strategy dynamic --max-tokens 160
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// File of sequence lengths, separated by white space; - for standard input
    #[arg(long, value_name = "FILE")]
    lengths: PathBuf,
    /// Which sequences share a batch
    #[arg(long, value_enum)]
    strategy: StrategyArg,
    /// Most sequences in a batch
    #[arg(long, value_name = "B")]
    max_batch_size: Option<u64>,
    /// Most tokens in a batch, padding included
    #[arg(long, value_name = "T")]
    max_tokens: Option<u64>,
    /// Longest sequence allowed
    #[arg(long, value_name = "L")]
    max_sequence_length: Option<u64>,
    /// What happens to longer ones
    #[arg(long, value_enum, default_value_t)]
    overlong: OverlongArg,
    /// How many lengths share a bucket, with `bucket` [default: 64]
    #[arg(long, value_name = "K")]
    bucket_width: Option<u64>,
    /// Read the sequences in random order
    #[arg(long)]
    shuffle: bool,
    /// Seed of the shuffle
    #[arg(long, default_value_t = 0, requires = "shuffle")]
    seed: u64,
    /// Epoch of the shuffle, counted from 0
    #[arg(long, default_value_t = 0, requires = "shuffle")]
    epoch: u64,
    /// Text with one batch a line, or JSON
    #[arg(long, value_enum, default_value_t)]
    format: Format,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum StrategyArg {
    /// Neighbors, padded to the longest of each batch
    PadToMax,
    /// Sequences of similar length
    Bucket,
    /// Neighbors, as many as the token budget allows
    Dynamic,
}

#[derive(Clone, Copy, Debug, Default, ValueEnum)]
enum OverlongArg {
    /// They are refused
    #[default]
    Error,
    /// They count as cut to the limit
    Truncate,
    /// They are left out
    Skip,
}

impl Args {
    fn config(&self) -> Result<BatchConfig> {
        let strategy = match (self.strategy, self.bucket_width) {
            (StrategyArg::PadToMax, None) => DynamicBatchStrategy::PadToMax,
            (StrategyArg::Dynamic, None) => DynamicBatchStrategy::Dynamic,
            (StrategyArg::Bucket, width) => {
                DynamicBatchStrategy::Bucket(Buckets::Width(width.unwrap_or(Buckets::DEFAULT_WIDTH)))
            }
            (_, Some(_)) => return Err(Error::Usage("--bucket-width needs --strategy bucket".into())),
        };
        let overlong = match self.overlong {
            OverlongArg::Error => Overlong::Error,
            OverlongArg::Truncate => Overlong::Truncate,
            OverlongArg::Skip => Overlong::Skip,
        };
        let mut config = BatchConfig::default().with_strategy(strategy).with_overlong(overlong);
        config.max_batch_size = self.max_batch_size;
        config.max_tokens = self.max_tokens;
        config.max_sequence_length = self.max_sequence_length;
        Ok(config)
    }

    /// The order in which `len` sequences are read.
    fn order(&self, len: u64) -> Result<DistributedSampler> {
        let order = if self.shuffle { Order::Shuffled } else { Order::Sequential };
        let config = SamplerConfig::default().with_order(order);
        let config = config.with_seed(Seed::new(self.seed)).with_epoch(Epoch::new(self.epoch));
        Ok(DistributedSampler::new(len, Placement::SINGLE, config)?)
    }

    fn read_lengths(&self) -> Result<Vec<u64>> {
        let path = &self.lengths;
        let is_stdin = path.as_os_str() == "-";
        let text = if is_stdin { input::read_text(io::stdin(), path) } else { input::read_file(path) }?;
        input::numbers(&text, "length", path)
    }
}

/// The JSON result.
#[derive(Serialize)]
struct Answer<'a> {
    format_version: u32,
    batches: &'a [Batch],
    report: &'a PaddingReport,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let lengths = args.read_lengths()?;
    let order = args.order(lengths.len() as u64)?;
    let sampler = DynamicBatchSampler::new(&lengths, args.config()?)?;
    let mut made = sampler.iter_in(&order);
    let batches = made.by_ref().collect::<Result<Vec<Batch>, _>>()?;
    let report = made.report();
    match args.format {
        Format::Json => output::json(&Answer { format_version: 1, batches: &batches, report }),
        Format::Text => output::text(|out| {
            for batch in &batches {
                let indices: Vec<String> = batch.indices.iter().map(u64::to_string).collect();
                writeln!(out, "{} x {}: {}", batch.len(), batch.padded_length, indices.join(" "))?;
            }
            writeln!(out, "{report}")
        }),
    }
}
