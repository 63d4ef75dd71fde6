//! `sample`: the indices that one rank reads in one epoch.

mod mixture;
mod rows;

use std::{ops::Range, path::PathBuf};

use candle_distributed::{
    sampler::{
        self, DistributedSampler, Indices, Order, Partition, Quota, SamplerConfig, SamplerState,
        Tail,
    },
    types::{Epoch, Placement, Rank, Seed},
};
use clap::ValueEnum;
use serde::{Serialize, Serializer};

use self::rows::Rows;
use crate::{
    commands,
    error::{Error, Result, WithHint},
    help::{examples, typed},
    hint, input, numbers, output,
};

/// Print the indices that one rank reads in one epoch.
///
/// Indices are computed as they are printed, so printing can start anywhere in a data set of any
/// length.
#[derive(Debug, clap::Args)]
#[command(after_help = examples![
    "# What rank 0 of 4 reads of 11 samples, by the conventions of SPDL and of PyTorch"
    "candle-distributed sample --len 11 --world-size 4 --rank 0 --preset spdl"
    "candle-distributed sample --len 11 --world-size 4 --rank 0 --preset torch --mark-padding"
    "# Five indices from the middle of a trillion, and which rank reads sample 7"
    "candle-distributed sample --len 1000000000000 --world-size 8 --rank 3 --start 70000000000 --count 5"
    "candle-distributed sample --len 1000000000000 --world-size 8 --locate 7"
    "# Ten million indices for numpy.load"
    "candle-distributed sample --len 10000000 --format npy > indices.npy"
])]
pub(crate) struct Args {
    /// Number of samples in the data set; with --weights, number of draws per epoch
    #[arg(long, required_unless_present_any = ["classes", "mix"])]
    len: Option<u64>,
    /// File with a weight per sample: draw with replacement, in proportion to the weights
    #[arg(long, value_name = "FILE", conflicts_with = "order")]
    weights: Option<PathBuf>,
    /// File with a class number per sample: every rank and every stretch of an epoch sees the
    /// classes in proportion
    #[arg(
        long,
        value_name = "FILE",
        conflicts_with_all = ["len", "weights", "order", "partition", "rank_weights"]
    )]
    classes: Option<PathBuf>,
    /// At most this many samples of each class per epoch
    #[arg(long, value_name = "N", requires = "classes")]
    capped: Option<u64>,
    /// Exactly this many samples of each class per epoch, repeating those of small classes
    #[arg(long, value_name = "N", requires = "classes", conflicts_with = "capped")]
    fixed: Option<u64>,
    /// Number of ranks that share the data set
    #[arg(long, default_value_t = 1)]
    world_size: u64,
    /// The rank whose indices are printed
    #[arg(long, default_value_t = 0)]
    rank: u64,
    /// Conventions to follow where no other option says otherwise
    #[arg(long, value_enum, default_value_t)]
    preset: Preset,
    /// Order of the samples
    #[arg(long, value_enum)]
    order: Option<OrderArg>,
    /// Which positions of the order a rank reads
    #[arg(long, value_enum)]
    partition: Option<PartitionArg>,
    /// What to do with the samples left over when the world size does not divide the data set
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
    /// Several data sets, read in proportion to their weights. Their samples are counted as if the
    /// data sets were one after the other, as PyTorch's `ConcatDataset` does
    #[arg(
        long,
        value_delimiter = ',',
        value_parser = mixture::parse_part,
        value_name = "LEN:WEIGHT,...",
        conflicts_with_all = [
            "len", "weights", "classes", "rank_weights", "resume", "save_state", "workers",
            "mark_padding", "locate"
        ]
    )]
    mix: Option<Vec<mixture::Part>>,
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
    /// The worker whose indices are printed
    #[arg(long, default_value_t = 0)]
    worker: u64,
    /// First of the indices to print, counted from 0
    #[arg(long, default_value_t = 0)]
    start: u64,
    /// Maximum number of indices to print [default: all]
    #[arg(long)]
    count: Option<u64>,
    /// Mark the indices that are padding, repetitions that metrics should leave out
    #[arg(long, conflicts_with = "workers")]
    mark_padding: bool,
    /// Print at which position and on which rank this sample is read, instead of indices
    #[arg(
        long,
        value_name = "INDEX",
        conflicts_with_all = ["save_state", "workers", "mark_padding", "start", "count"]
    )]
    locate: Option<u64>,
    /// How the indices are written; whatever the form, they are never all in memory
    #[arg(long, value_enum, default_value_t)]
    format: FormatArg,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
enum FormatArg {
    /// An index per line
    #[default]
    Text,
    /// One JSON object with a `format_version`
    Json,
    /// An array of NumPy, of dtype `<i8`
    Npy,
}

fn parse_seed(text: &str) -> Result<u64, std::num::ParseIntError> {
    text.parse().or_else(|_| text.parse::<i64>().map(i64::cast_unsigned))
}

#[derive(Clone, Copy, Debug, Default, ValueEnum)]
enum Preset {
    /// Shuffled, contiguous, the last rank takes the rest
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
    /// A uniform shuffle, held in memory
    Exact,
    /// A pseudorandom permutation that takes no memory
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

impl Args {
    fn config(&self) -> SamplerConfig {
        let preset = match self.preset {
            Preset::Spec => SamplerConfig::default(),
            Preset::Torch => SamplerConfig::torch(),
            Preset::Spdl => SamplerConfig::spdl_deterministic(),
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

    /// The sampler, at its place in the epoch.
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

    /// The sampler at the start of its epoch.
    #[expect(clippy::expect_used, reason = "says why it cannot fail")]
    fn fresh_sampler(&self, placement: Placement) -> Result<DistributedSampler> {
        if let Some(path) = &self.classes {
            let labels = numbers::classes(path)?;
            let quota = self.quota();
            return DistributedSampler::stratified(&labels, quota, placement, self.config())
                .map_err(|error| without_order(error, FEWER_SAMPLES));
        }
        let len = self.len.expect("clap insists on --len unless there is --classes or --mix");
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

    /// Refuses what has no place in an array of indices, and options without the one that they are
    /// about: clap forgives those, as `--len` excludes it.
    fn check(&self) -> Result<()> {
        let are_missing = [
            ("--capped", self.capped.is_some() && self.classes.is_none(), "--classes"),
            ("--fixed", self.fixed.is_some() && self.classes.is_none(), "--classes"),
        ];
        if let Some((option, _, needed)) = are_missing.into_iter().find(|(_, is_so, _)| *is_so) {
            return Err(Error::usage(format!("{option} needs {needed}")));
        }
        let are_no_indices =
            [("--mark-padding", self.mark_padding), ("--locate", self.locate.is_some())];
        match are_no_indices.into_iter().find(|(_, is_given)| *is_given) {
            Some((option, _)) if self.format == FormatArg::Npy => Err(Error::usage(format!(
                "{option} needs --format text or json, not {}",
                typed(self.format)
            ))),
            _ => Ok(()),
        }
    }

    /// The number of indices to print, out of `len`.
    fn count(&self, len: u64) -> Result<u64> {
        commands::count(self.start, self.count, len, "indices")
    }
}

const FEWER_SAMPLES: &str =
    "--capped, or a smaller --fixed, leaves fewer samples in an epoch: each takes 20 bytes";
const FEWER_WEIGHTS: &str = "each weight takes 16 bytes: split the data set, or use --mix";

/// The error of an order that --order does not choose: where the advice would be another --order, it
/// is `advice` instead.
fn without_order(error: sampler::Error, advice: &'static str) -> Error {
    let is_too_large = matches!(
        error,
        sampler::Error::TooLongToShuffle { .. } | sampler::Error::OutOfMemory { .. }
    );
    let error = Error::from(error);
    if is_too_large { error.hinted(advice) } else { error }
}

/// The JSON result. The indices are computed as they are written and never stored.
#[derive(Serialize)]
struct Answer<'a> {
    format_version: u32,
    len: u64,
    world_size: u64,
    rank: u64,
    per_rank_len: u64,
    indices: Printed<'a>,
    #[serde(skip_serializing_if = "Option::is_none")]
    padding: Option<Padding<'a>>,
}

/// Whether each of the indices to print is padding.
struct Padding<'a> {
    sampler: &'a DistributedSampler,
    numbers: Range<u64>,
}

impl Serialize for Padding<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.numbers.clone().map(|n| is_padding(self.sampler, n)))
    }
}

/// The indices to print.
#[derive(Clone)]
struct Printed<'a> {
    indices: Indices<'a>,
    start: usize,
    count: usize,
}

impl Printed<'_> {
    fn iter(&self) -> impl Iterator<Item = u64> {
        self.indices.clone().skip(self.start).take(self.count)
    }
}

impl Serialize for Printed<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.iter())
    }
}

pub(crate) fn run(args: &Args) -> Result<()> {
    args.check()?;
    if let Some(parts) = &args.mix {
        return mixture::print(args, parts);
    }
    let sampler = args.sampler()?;
    match args.locate {
        Some(index) => print_place(args, &sampler, index),
        None => print_indices(args, &sampler),
    }
}

fn print_indices(args: &Args, sampler: &DistributedSampler) -> Result<()> {
    let indices = sampler.iter_worker(Placement::new(args.worker, args.workers)?);
    let count = args.count(indices.len() as u64)?;
    let numbers = args.start..args.start + count;
    let printed = Printed {
        indices,
        start: commands::of_iterator(args.start),
        count: commands::of_iterator(count),
    };
    match args.format {
        FormatArg::Text if args.mark_padding => output::text(|out| {
            printed.iter().zip(numbers).try_for_each(|(index, n)| {
                let mark = if is_padding(sampler, n) { " padding" } else { "" };
                writeln!(out, "{index}{mark}")
            })
        }),
        FormatArg::Json => output::json(&Answer {
            format_version: 1,
            len: sampler.data_set_len(),
            world_size: args.world_size,
            rank: args.rank,
            per_rank_len: sampler.len(),
            indices: printed,
            padding: args.mark_padding.then_some(Padding { sampler, numbers }),
        }),
        FormatArg::Text | FormatArg::Npy if args.workers == 1 => {
            let mut start = args.start;
            let fill = |rows: &mut [[u64; 1]]| {
                start += sampler.fill(start, rows.as_flattened_mut()) as u64;
            };
            print_rows(args, sampler.data_set_len(), Rows { n_rows: count, fill })
        }
        FormatArg::Text | FormatArg::Npy => {
            let fill = rows::from(printed.iter().map(|index| [index]));
            print_rows(args, sampler.data_set_len(), Rows { n_rows: count, fill })
        }
    }?;
    match &args.save_state {
        Some(path) => output::json_file(path, &sampler.state(args.start + count)),
        None => Ok(()),
    }
}

/// Prints rows of indices below `n_samples` in a form that is nothing but them.
fn print_rows<const WIDTH: usize>(
    args: &Args,
    n_samples: u64,
    rows: Rows<WIDTH, impl FnMut(&mut [[u64; WIDTH]])>,
) -> Result<()> {
    match args.format {
        // JSON has more than rows, and is printed elsewhere.
        FormatArg::Text | FormatArg::Json => output::text(|out| rows.write_text(out)),
        FormatArg::Npy => {
            rows::check_npy(n_samples)?;
            output::bytes(|out| rows.write_npy(out))
        }
    }
}

/// Whether the index that the rank reads as its `n`th is padding.
#[expect(clippy::expect_used, reason = "says why it cannot fail")]
fn is_padding(sampler: &DistributedSampler, n: u64) -> bool {
    let (_, is_padding) = sampler.entry(n).expect("`Args::count` ends the numbers at the length");
    is_padding
}

/// The JSON result of `--locate`.
#[derive(Serialize)]
struct Place {
    format_version: u32,
    index: u64,
    position: Option<u64>,
    rank: Option<u64>,
}

fn print_place(args: &Args, sampler: &DistributedSampler, index: u64) -> Result<()> {
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
        FormatArg::Json => output::json(&Place { format_version: 1, index, position, rank }),
        FormatArg::Text | FormatArg::Npy => output::text(|out| writeln!(out, "{text}")),
    }
}
