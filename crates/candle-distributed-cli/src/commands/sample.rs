//! `sample`: the indices that one rank reads in one epoch.

use candle_distributed::{
    sampler::{DistributedSampler, Order, Partition, SamplerConfig, Tail},
    types::{Epoch, Placement, Seed},
};
use clap::ValueEnum;
use serde::{Serialize, Serializer};

use crate::{
    error::{Error, Result},
    output::{self, Format},
};

/// Print the indices that one rank reads in one epoch.
///
/// Example: candle-distributed sample --len 11 --world-size 4 --rank 0 --preset spdl
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Number of samples in the data set
    #[arg(long)]
    len: u64,
    /// Number of ranks that share the data set
    #[arg(long, default_value_t = 1)]
    world_size: u64,
    /// The rank whose indices are printed
    #[arg(long, default_value_t = 0)]
    rank: u64,
    /// Whose conventions hold where no other option says otherwise
    #[arg(long, value_enum, default_value_t)]
    preset: Preset,
    /// Order of the samples
    #[arg(long, value_enum)]
    order: Option<OrderArg>,
    /// Which positions of the order a rank reads
    #[arg(long, value_enum)]
    partition: Option<PartitionArg>,
    /// What happens to the samples that are left when the world does not divide the data set
    #[arg(long, value_enum)]
    tail: Option<TailArg>,
    /// Seed of the shuffle
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Epoch, counted from 0
    #[arg(long, default_value_t = 0)]
    epoch: u64,
    /// First of the rank's indices to print, counted from 0
    #[arg(long, default_value_t = 0)]
    start: u64,
    /// How many indices to print at most [default: all]
    #[arg(long)]
    count: Option<u64>,
    /// Text with one index a line, or JSON
    #[arg(long, value_enum, default_value_t)]
    format: Format,
}

#[derive(Clone, Copy, Debug, Default, ValueEnum)]
enum Preset {
    /// Shuffled, contiguous, the last rank takes the rest
    #[default]
    Spec,
    /// SPDL's deterministic sampler: sequential, strided, the last round dropped
    Spdl,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum OrderArg {
    Sequential,
    Exact,
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
            Preset::Spdl => SamplerConfig::spdl_deterministic(true),
        };
        let order = self.order.map_or(preset.order, |order| match order {
            OrderArg::Sequential => Order::Sequential,
            OrderArg::Exact => Order::Exact,
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
        preset.with_order(order).with_partition(partition).with_tail(tail).with_seed(Seed::new(self.seed))
    }
}

/// The JSON result. The indices are computed as they are written and never held.
#[derive(Serialize)]
struct Answer<'a> {
    format_version: u32,
    len: u64,
    world_size: u64,
    rank: u64,
    per_rank_len: u64,
    indices: Indices<'a>,
}

/// The part of a rank's indices that was asked for.
struct Indices<'a> {
    sampler: &'a DistributedSampler,
    start: u64,
    count: u64,
}

impl Indices<'_> {
    fn iter(&self) -> impl Iterator<Item = u64> {
        (self.start..self.start + self.count).filter_map(|n| self.sampler.get(n))
    }
}

impl Serialize for Indices<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.iter())
    }
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let placement = Placement::new(args.rank, args.world_size)?;
    let mut sampler = DistributedSampler::new(args.len, placement, args.config())?;
    sampler.set_epoch(Epoch::new(args.epoch));
    let Some(left) = sampler.len().checked_sub(args.start) else {
        let (start, len) = (args.start, sampler.len());
        return Err(Error::Usage(format!("start {start} is beyond the {len} indices of {placement}")));
    };
    let count = args.count.map_or(left, |count| count.min(left));
    let indices = Indices { sampler: &sampler, start: args.start, count };
    match args.format {
        Format::Text => output::text(|out| indices.iter().try_for_each(|index| writeln!(out, "{index}"))),
        Format::Json => output::json(&Answer {
            format_version: 1,
            len: args.len,
            world_size: args.world_size,
            rank: args.rank,
            per_rank_len: sampler.len(),
            indices,
        }),
    }
}
