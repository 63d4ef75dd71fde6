//! `sample`: prints the indices that one rank reads in one epoch.

mod rows;

use std::{ops::Range, path::PathBuf};

use candle_distributed::{
    sampler::{
        self, DistributedSampler, Indices, MixtureEnd, MixturePart, Order, Partition, Quota,
        SamplerConfig, SamplerState, Tail,
    },
    types::{Epoch, Placement, Rank, Seed},
};
use clap::ValueEnum;
use serde::{Serialize, Serializer};

use self::rows::RowWriter;
use crate::{
    commands,
    error::{Error, Result, WithHint},
    help::{cli_name, examples},
    hint, input, numbers, output,
};

/// Print the indices that one rank reads in one epoch.
///
/// Indices are computed as they are printed, so printing can start anywhere in a data set of any
/// length.
#[derive(Debug, clap::Args)]
#[command(after_help = examples![
    "# Samples of rank 0 of 4 out of 11, with the conventions of SPDL and of PyTorch"
    "candle-distributed sample --len 11 --world-size 4 --rank 0 --preset spdl"
    "candle-distributed sample --len 11 --world-size 4 --rank 0 --preset torch --mark-padding"
    "# Five indices from the middle of a trillion, and the rank of sample 7"
    "candle-distributed sample --len 1000000000000 --world-size 8 --rank 3 --start 70000000000 --count 5"
    "candle-distributed sample --len 1000000000000 --world-size 8 --locate 7"
    "# Ten million indices for numpy.load"
    "candle-distributed sample --len 10000000 --format npy > indices.npy"
])]
pub(crate) struct SampleArgs {
    /// Number of samples in the data set; with --weights, number of draws per epoch
    #[arg(long, required_unless_present_any = ["classes", "mix"])]
    len: Option<u64>,
    /// File with a weight per sample: draw with replacement, in proportion to the weights
    #[arg(long, value_name = "FILE", conflicts_with = "order")]
    weights: Option<PathBuf>,
    /// File with a class number per sample: every rank and every part of an epoch has all classes
    /// in proportion
    #[arg(
        long,
        value_name = "FILE",
        conflicts_with_all = ["len", "weights", "order", "partition", "rank_weights"]
    )]
    classes: Option<PathBuf>,
    /// Maximum number of samples of each class per epoch
    #[arg(long, value_name = "N", requires = "classes")]
    capped: Option<u64>,
    /// Exact number of samples of each class per epoch; samples of small classes are repeated
    #[arg(long, value_name = "N", requires = "classes", conflicts_with = "capped")]
    fixed: Option<u64>,
    /// Number of ranks that share the data set
    #[arg(long, default_value_t = 1)]
    world_size: u64,
    /// Rank to print the indices of
    #[arg(long, default_value_t = 0)]
    rank: u64,
    /// Defaults for --order, --partition and --tail
    #[arg(long, value_enum, default_value_t)]
    preset: Preset,
    /// Order of the samples
    #[arg(long, value_enum)]
    order: Option<OrderArg>,
    /// Positions of the order that a rank reads
    #[arg(long, value_enum)]
    partition: Option<PartitionArg>,
    /// Treatment of the remaining samples if the world size does not divide the data set
    #[arg(long, value_enum)]
    tail: Option<TailArg>,
    /// Contiguous shares in proportion to these weights, one per rank, instead of --partition and
    /// --tail
    #[arg(
        long,
        value_delimiter = ',',
        value_name = "W,W,...",
        conflicts_with_all = ["partition", "tail"]
    )]
    rank_weights: Option<Vec<u64>>,
    /// Several data sets, read in proportion to their weights. Indices count through all data sets,
    /// as in PyTorch's `ConcatDataset`
    #[arg(
        long,
        value_delimiter = ',',
        value_parser = parse_mixture_part,
        value_name = "LEN:WEIGHT,...",
        conflicts_with_all = ["len", "weights", "classes", "partition", "rank_weights"]
    )]
    mix: Option<Vec<MixturePart>>,
    /// Seed of the shuffle; a negative one is cast to 64 bits, as PyTorch does
    #[arg(long, default_value = "0", value_parser = parse_seed, allow_negative_numbers = true)]
    seed: u64,
    /// Epoch, counted from 0
    #[arg(long, default_value_t = 0)]
    epoch: u64,
    /// Resume from a file written by --save-state, with any world size
    #[arg(long, value_name = "FILE", conflicts_with = "epoch")]
    resume: Option<PathBuf>,
    /// Write the state of the sampler after the printed indices to this file
    #[arg(long, value_name = "FILE", conflicts_with = "workers")]
    save_state: Option<PathBuf>,
    /// Number of loader workers that share the indices of the rank
    #[arg(long, default_value_t = 1)]
    workers: u64,
    /// Worker to print the indices of
    #[arg(long, default_value_t = 0)]
    worker: u64,
    /// First index to print, counted from 0
    #[arg(long, default_value_t = 0)]
    start: u64,
    /// Maximum number of indices to print [default: all]
    #[arg(long)]
    count: Option<u64>,
    /// Mark padding: repeated indices that metrics should leave out
    #[arg(long, conflicts_with = "workers")]
    mark_padding: bool,
    /// Print the position and the rank of this sample, instead of indices
    #[arg(
        long,
        value_name = "INDEX",
        conflicts_with_all = ["save_state", "workers", "mark_padding", "start", "count"]
    )]
    locate: Option<u64>,
    /// Output format; in every format, indices are computed while they are written
    #[arg(long, value_enum, default_value_t)]
    format: FormatArg,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
enum FormatArg {
    /// One index per line
    #[default]
    Text,
    /// One JSON object with a `format_version`
    Json,
    /// A NumPy array of dtype `<i8`
    Npy,
}

fn parse_seed(text: &str) -> Result<u64, std::num::ParseIntError> {
    text.parse().or_else(|_| text.parse::<i64>().map(i64::cast_unsigned))
}

fn parse_mixture_part(text: &str) -> Result<MixturePart, String> {
    if let Some((len, weight)) = text.split_once(':')
        && let (Ok(len), Ok(weight)) = (len.parse(), weight.parse())
    {
        return Ok(MixturePart::new(len, weight));
    }
    Err("expected a length, a colon and a weight".into())
}

#[derive(Clone, Copy, Debug, Default, ValueEnum)]
enum Preset {
    /// Shuffled, contiguous, the last rank reads the rest
    #[default]
    Spec,
    /// PyTorch's sampler, bit for bit: its shuffle, strided, padded
    Torch,
    /// SPDL's deterministic sampler: sequential, strided, the last round dropped
    Spdl,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum OrderArg {
    /// 0, 1, 2, ...
    Sequential,
    /// Exact for short data sets, streaming for long ones
    Shuffled,
    /// A uniform shuffle, stored in memory
    Exact,
    /// A pseudorandom permutation, computed without memory
    Streaming,
    /// PyTorch's shuffle
    Torch,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum PartitionArg {
    Contiguous,
    Strided,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum TailArg {
    Drop,
    LastRank,
    Spread,
    Pad,
}

impl SampleArgs {
    fn config(&self) -> SamplerConfig {
        let preset = match self.preset {
            Preset::Spec => SamplerConfig::default(),
            Preset::Torch => SamplerConfig::torch(),
            Preset::Spdl => SamplerConfig::spdl(),
        };
        let order = self.order.map_or(preset.order, |order| match order {
            OrderArg::Sequential => Order::Sequential,
            OrderArg::Shuffled => Order::Shuffled,
            OrderArg::Exact => Order::Exact,
            OrderArg::Streaming => Order::Streaming,
            OrderArg::Torch => Order::Torch,
        });
        let partition = self.partition.map_or(preset.partition, |partition| match partition {
            PartitionArg::Contiguous => Partition::Contiguous,
            PartitionArg::Strided => Partition::Strided,
        });
        let tail = self.tail.map_or(preset.tail, |tail| match tail {
            TailArg::Drop => Tail::Drop,
            TailArg::LastRank => Tail::LastRank,
            TailArg::Spread => Tail::Spread,
            TailArg::Pad => Tail::Pad,
        });
        preset
            .with_order(order)
            .with_partition(partition)
            .with_tail(tail)
            .with_seed(Seed::new(self.seed))
            .with_epoch(Epoch::new(self.epoch))
    }

    /// Makes the sampler, resumed from a state if one is given.
    fn sampler(&self) -> Result<DistributedSampler> {
        let mut sampler = self.fresh_sampler(Placement::new(self.rank, self.world_size)?)?;
        if let Some(weights) = &self.rank_weights {
            sampler = sampler.with_rank_weights(weights)?;
        }
        if let Some(path) = &self.resume {
            let state: SamplerState =
                input::read_json(path, "the state of a sampler").with_hint(hint::STATE)?;
            sampler.resume(&state)?;
        }
        Ok(sampler)
    }

    /// Makes the sampler at the start of its epoch.
    #[expect(clippy::expect_used, reason = "the message says why it cannot fail")]
    fn fresh_sampler(&self, placement: Placement) -> Result<DistributedSampler> {
        if let Some(path) = &self.classes {
            let labels = numbers::classes(path)?;
            let quota = self.quota();
            return DistributedSampler::stratified(&labels, quota, placement, self.config())
                .map_err(|error| without_order(error, FEWER_SAMPLES));
        }
        if let Some(parts) = &self.mix {
            let end = MixtureEnd::FirstExhausted;
            return Ok(DistributedSampler::mixture(parts, end, placement, self.config())?);
        }
        let len = self.len.expect("clap requires --len unless there is --classes or --mix");
        if let Some(path) = &self.weights {
            let weights = numbers::weights(path)?;
            return DistributedSampler::weighted(&weights, len, placement, self.config())
                .map_err(|error| without_order(error, FEWER_WEIGHTS));
        }
        Ok(DistributedSampler::new(len, placement, self.config())?)
    }

    fn quota(&self) -> Quota {
        match (self.capped, self.fixed) {
            (Some(n), _) => Quota::Capped(n),
            (None, Some(n)) => Quota::Fixed(n),
            (None, None) => Quota::All,
        }
    }

    /// Rejects options that need `--classes`, and options that an array cannot represent.
    ///
    /// clap does not report a missing `--classes` if `--len` is given, since the two exclude each
    /// other.
    fn check(&self) -> Result<()> {
        let class_options =
            [("--capped", self.capped.is_some()), ("--fixed", self.fixed.is_some())];
        for (option, is_given) in class_options {
            if is_given && self.classes.is_none() {
                return Err(Error::usage(format!("{option} needs --classes")));
            }
        }
        let other_outputs =
            [("--mark-padding", self.mark_padding), ("--locate", self.locate.is_some())];
        for (option, is_given) in other_outputs {
            if is_given && self.format == FormatArg::Npy {
                return Err(Error::usage(format!(
                    "{option} needs --format text or json, not {}",
                    cli_name(self.format)
                )));
            }
        }
        Ok(())
    }

    /// Returns the number of indices to print, out of `len`.
    fn count(&self, len: u64) -> Result<u64> {
        commands::n_to_print(self.start, self.count, len, "indices")
    }
}

const FEWER_SAMPLES: &str =
    "--capped or a smaller --fixed makes an epoch of fewer samples: each takes 20 bytes of memory";
const FEWER_WEIGHTS: &str = "each weight takes 16 bytes: split the data set, or use --mix";

/// Converts an error of a sampler that has no `--order`: advice to use another order is replaced by
/// `advice`.
fn without_order(error: sampler::Error, advice: &'static str) -> Error {
    let is_too_large = matches!(
        error,
        sampler::Error::TooLongToShuffle { .. } | sampler::Error::OutOfMemory { .. }
    );
    let error = Error::from(error);
    if is_too_large { error.with_hint(advice) } else { error }
}

/// The JSON result. Indices are computed while they are written.
#[derive(Serialize)]
struct SampleOutput<'a> {
    format_version: u32,
    len: u64,
    world_size: u64,
    rank: u64,
    per_rank_len: u64,
    indices: PrintedIndices<'a>,
    #[serde(skip_serializing_if = "Option::is_none")]
    padding: Option<PaddingFlags<'a>>,
}

/// A flag per printed index, true for padding.
struct PaddingFlags<'a> {
    sampler: &'a DistributedSampler,
    numbers: Range<u64>,
}

impl Serialize for PaddingFlags<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.numbers.clone().map(|n| is_padding(self.sampler, n)))
    }
}

/// The indices to print.
#[derive(Clone)]
struct PrintedIndices<'a> {
    indices: Indices<'a>,
    start: usize,
    count: usize,
}

impl PrintedIndices<'_> {
    fn iter(&self) -> impl Iterator<Item = u64> {
        self.indices.clone().skip(self.start).take(self.count)
    }
}

impl Serialize for PrintedIndices<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.iter())
    }
}

pub(crate) fn run(args: &SampleArgs) -> Result<()> {
    args.check()?;
    let sampler = args.sampler()?;
    match args.locate {
        Some(index) => print_place(args, &sampler, index),
        None => print_indices(args, &sampler),
    }
}

fn print_indices(args: &SampleArgs, sampler: &DistributedSampler) -> Result<()> {
    let indices = sampler.iter_worker(Placement::new(args.worker, args.workers)?);
    let count = args.count(indices.len() as u64)?;
    let numbers = args.start..args.start + count;
    let printed = PrintedIndices {
        indices,
        start: commands::iterator_count(args.start),
        count: commands::iterator_count(count),
    };
    match args.format {
        FormatArg::Text if args.mark_padding => output::to_stdout(|out| {
            printed.iter().zip(numbers).try_for_each(|(index, n)| {
                let mark = if is_padding(sampler, n) { " padding" } else { "" };
                writeln!(out, "{index}{mark}")
            })
        }),
        FormatArg::Json => output::json(&SampleOutput {
            format_version: 1,
            len: sampler.data_set_len(),
            world_size: args.world_size,
            rank: args.rank,
            per_rank_len: sampler.len(),
            indices: printed,
            padding: args.mark_padding.then_some(PaddingFlags { sampler, numbers }),
        }),
        FormatArg::Text | FormatArg::Npy if args.workers == 1 => {
            let mut start = args.start;
            let fill = |rows: &mut [u64]| start += sampler.fill(start, rows) as u64;
            print_rows(args, RowWriter { n_rows: count, fill })
        }
        FormatArg::Text | FormatArg::Npy => {
            let fill = rows::fill_from(printed.iter());
            print_rows(args, RowWriter { n_rows: count, fill })
        }
    }?;
    match &args.save_state {
        Some(path) => output::json_file(path, &sampler.state(args.start + count)),
        None => Ok(()),
    }
}

/// Prints indices as text or as an array.
fn print_rows(args: &SampleArgs, rows: RowWriter<impl FnMut(&mut [u64])>) -> Result<()> {
    match args.format {
        // JSON has other fields too, so callers print it themselves.
        FormatArg::Text | FormatArg::Json => output::to_stdout(|out| rows.write_text(out)),
        FormatArg::Npy => output::bytes(|out| rows.write_npy(out)),
    }
}

/// Returns true if entry `n` of the rank is padding.
#[expect(clippy::expect_used, reason = "the message says why it cannot fail")]
fn is_padding(sampler: &DistributedSampler, n: u64) -> bool {
    let (_, is_padding) =
        sampler.entry(n).expect("`SampleArgs::count` limits the numbers to the length");
    is_padding
}

/// The JSON result of `--locate`.
#[derive(Serialize)]
struct SamplePlace {
    format_version: u32,
    index: u64,
    position: Option<u64>,
    rank: Option<u64>,
}

fn print_place(args: &SampleArgs, sampler: &DistributedSampler, index: u64) -> Result<()> {
    let position = sampler.position_of(index);
    let rank = sampler.rank_of(index).map(Rank::as_u64);
    let text = match (position, rank) {
        (Some(position), Some(rank)) => {
            format!("sample {index} is at position {position}, on rank {rank}")
        }
        (Some(position), None) => {
            format!("sample {index} is at position {position}, which no rank reads")
        }
        (None, _) => return Err(Error::usage(format!("sample {index} is not in the order"))),
    };
    match args.format {
        FormatArg::Json => output::json(&SamplePlace { format_version: 1, index, position, rank }),
        FormatArg::Text | FormatArg::Npy => output::to_stdout(|out| writeln!(out, "{text}")),
    }
}
