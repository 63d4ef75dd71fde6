//! The options of `batch`, and which of them go together.

use std::{io, path::PathBuf};

use candle_distributed::{
    batch::{
        BatchConfig, Buckets, Cost, Cut, DistributedConfig, DynamicBatchStrategy, Overlong,
        Packing, Remainder, StepLayout, StepRemainder,
    },
    sampler::{DistributedSampler, Order, SamplerConfig},
    types::{Epoch, Placement, Seed},
};
use clap::ValueEnum;

use crate::{
    error::{Error, Result, WithHint},
    help::examples,
    hint, input,
    numbers::Lengths,
};

/// Put sequences of the given lengths into batches, and report the padding.
#[derive(Debug, clap::Args)]
#[command(after_help = examples![
    "# As many neighbors as 160 tokens allow, padding included"
    "echo 12 80 15 70 9 | candle-distributed batch --lengths - --strategy dynamic --max-tokens 160"
    "# The batches of rank 3: each rank gets the same number, and those of a step cost about the same"
    "candle-distributed batch --lengths lengths.txt --strategy sorted --max-tokens 16384 --world-size 8 --rank 3"
    "# Packed rows of 2048 tokens, as a picture of lengths and padding"
    "candle-distributed batch --lengths lengths.txt --strategy pack --capacity 2048 --format svg > packed.svg"
])]
pub(crate) struct Args {
    /// File of sequence lengths, separated by white space; - for standard input
    #[arg(long, value_name = "FILE")]
    lengths: PathBuf,
    /// Which sequences share a batch
    #[arg(long, value_enum)]
    strategy: StrategyArg,
    /// Maximum number of sequences per batch; `dynamic` without --max-tokens counts those of
    /// --max-sequence-length tokens, so that batches of shorter ones hold more
    #[arg(long, value_name = "B")]
    max_batch_size: Option<u64>,
    /// Maximum number of tokens per batch, padding included
    #[arg(long, value_name = "T")]
    max_tokens: Option<u64>,
    /// Maximum cost per batch, which is its size times the --cost of a sequence of its padded length
    #[arg(long, value_name = "C")]
    max_cost: Option<u64>,
    /// What a sequence costs [default: tokens]
    #[arg(long, value_enum, requires = "max_cost")]
    cost: Option<CostArg>,
    /// Maximum length of a sequence
    #[arg(long, value_name = "L")]
    max_sequence_length: Option<u64>,
    /// What to do with longer sequences
    #[arg(long, value_enum, default_value_t)]
    overlong: OverlongArg,
    /// Number of lengths that share a bucket, for `bucket` [default: 64]
    #[arg(long, value_name = "K", conflicts_with = "buckets")]
    bucket_width: Option<u64>,
    /// Maximum number of buckets, with the boundaries that pad these lengths least, for `bucket`
    #[arg(long, value_name = "K")]
    buckets: Option<u64>,
    /// Pad every batch to the longest sequence that its bucket may hold, for `bucket`
    #[arg(long)]
    fixed_shapes: bool,
    /// Sort the sequences of this many batches at a time, for `sorted` [default: all]
    #[arg(long, value_name = "M")]
    window: Option<u64>,
    /// How the sorted sequences are cut into batches, for `sorted` [default: optimal]
    #[arg(long, value_enum)]
    cut: Option<CutArg>,
    /// Number of tokens per row, for `pack`
    #[arg(long, value_name = "C", conflicts_with = "max_tokens")]
    capacity: Option<u64>,
    /// How rows are filled, for `pack` [default: best-fit]
    #[arg(long, value_enum)]
    packing: Option<PackingArg>,
    /// Number of rows kept open at a time, for `in-order` [default: 64]
    #[arg(long, value_name = "N")]
    open_rows: Option<usize>,
    /// Pad each length to a multiple of this number [default: 1]
    #[arg(long, value_name = "M")]
    length_multiple: Option<u64>,
    /// Give every batch a multiple of this many sequences [default: 1]
    #[arg(long, value_name = "M")]
    batch_size_multiple: Option<u64>,
    /// What to do with the last sequences when they are too few for this multiple [default: drop]
    #[arg(long, value_enum, requires = "batch_size_multiple")]
    last_batch: Option<LastBatchArg>,
    /// Number of ranks that share the batches
    #[arg(long, value_name = "W", requires = "rank")]
    world_size: Option<u64>,
    /// The rank whose batches are printed
    #[arg(long, value_name = "R", requires = "world_size")]
    rank: Option<u64>,
    /// How the batches of a step are made [default: grouped]
    #[arg(long, value_enum, requires = "world_size")]
    steps: Option<StepsArg>,
    /// What to balance across ranks within a step [default: tokens]
    #[arg(long, value_enum, requires = "world_size")]
    step_cost: Option<StepCostArg>,
    /// What to do with the batches that do not fill a step of all ranks [default: split]
    #[arg(long, value_enum, requires = "world_size")]
    remainder: Option<RemainderArg>,
    /// Read the sequences in random order, and shuffle batches that are ready together
    #[arg(long)]
    shuffle: bool,
    /// Seed of the shuffle
    #[arg(long, default_value_t = 0, requires = "shuffle")]
    seed: u64,
    /// Epoch of the shuffle, counted from 0
    #[arg(long, default_value_t = 0, requires = "shuffle")]
    epoch: u64,
    /// Text with one batch per line, JSON, or a drawing
    #[arg(long, value_enum, default_value_t)]
    pub(super) format: FormatArg,
}

/// The form of the result: that of the other commands, and a drawing.
#[derive(Clone, Copy, Debug, Default, ValueEnum)]
pub(super) enum FormatArg {
    /// Text for people
    #[default]
    Text,
    /// One JSON object with a `format_version`
    Json,
    /// Lengths, tokens and padding as an SVG document
    Svg,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum StrategyArg {
    /// Neighbors, each batch padded to its longest sequence
    PadToMax,
    /// Sequences of similar length
    Bucket,
    /// Neighbors, as many as the token budget allows
    Dynamic,
    /// Neighbors by length: the least padding
    Sorted,
    /// Several sequences per row; each row is a batch
    Pack,
}

#[derive(Clone, Copy, Debug, Default, ValueEnum)]
enum OverlongArg {
    /// Refuse them
    #[default]
    Error,
    /// Count them as cut to the limit
    Truncate,
    /// Leave them out
    Skip,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum CutArg {
    /// Each batch takes as many of the longest sequences as it can
    Greedy,
    /// As few batches as possible, with the least padding
    Optimal,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum PackingArg {
    /// The longest first, each into the fullest row that has room
    BestFit,
    /// Row by row, each as full as a bounded search can make it
    MinimumSlack,
    /// In order, each into the fullest of a few open rows
    InOrder,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum CostArg {
    /// Its tokens, padding included
    Tokens,
    /// The pairs of its tokens, as attention computes them
    Quadratic,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum LastBatchArg {
    /// Leave them out
    Drop,
    /// Put them into a last, smaller batch
    Keep,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum RemainderArg {
    /// Split the batches with the most padding in two: each sequence comes exactly once
    Split,
    /// Leave the last batches out
    Drop,
    /// Take the first batches once more
    Repeat,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum StepsArg {
    /// One batch per rank, of similar cost
    Grouped,
    /// One batch for all ranks, dealt out to them
    Dealt,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum StepCostArg {
    /// Padded tokens
    Tokens,
    /// Pairs of tokens
    Attention,
}

impl Args {
    pub(super) fn read_lengths(&self) -> Result<Lengths> {
        let path = &self.lengths;
        let lengths = if path.as_os_str() == "-" {
            Lengths::read(io::stdin(), path)
        } else {
            input::open(path).and_then(|file| Lengths::read(file, path))
        };
        lengths.with_hint(hint::LENGTHS)
    }

    /// Refuses the options that the others would leave without effect.
    pub(super) fn check(&self) -> Result<()> {
        use StrategyArg::{Bucket, Pack, Sorted};

        let of_one_strategy = [
            ("--bucket-width", self.bucket_width.is_some(), Bucket),
            ("--buckets", self.buckets.is_some(), Bucket),
            ("--fixed-shapes", self.fixed_shapes, Bucket),
            ("--window", self.window.is_some(), Sorted),
            ("--cut", self.cut.is_some(), Sorted),
            ("--capacity", self.capacity.is_some(), Pack),
            ("--packing", self.packing.is_some(), Pack),
            ("--open-rows", self.open_rows.is_some(), Pack),
        ];
        for (option, is_given, needed) in of_one_strategy {
            if is_given && self.strategy != needed {
                return Err(Error::usage(format!(
                    "{option} needs --strategy {}, not {}",
                    name(needed),
                    name(self.strategy)
                )));
            }
        }
        if self.open_rows.is_some() && self.packing != Some(PackingArg::InOrder) {
            return Err(Error::usage("--open-rows needs --packing in-order"));
        }
        self.check_rows_and_steps()
    }

    /// Refuses what packed rows do not have, and strategies whose batches cannot be dealt out.
    fn check_rows_and_steps(&self) -> Result<()> {
        let is_pack = self.strategy == StrategyArg::Pack;
        let is_dealt = self.steps == Some(StepsArg::Dealt);
        let refused = [
            ("--length-multiple", is_pack && self.length_multiple.is_some()),
            ("--batch-size-multiple", is_pack && self.batch_size_multiple.is_some()),
            ("--steps dealt", is_dealt && (is_pack || self.strategy == StrategyArg::Bucket)),
        ];
        if let Some((option, _)) = refused.into_iter().find(|(_, is_refused)| *is_refused) {
            return Err(Error::usage(format!(
                "{option} does not work with --strategy {}",
                name(self.strategy)
            )));
        }
        if is_pack && self.capacity.or(self.max_tokens).is_none() {
            return Err(Error::usage("--strategy pack needs --capacity"));
        }
        Ok(())
    }

    pub(super) fn is_pack(&self) -> bool {
        self.strategy == StrategyArg::Pack
    }

    pub(super) fn config(&self, lengths: &Lengths) -> Result<BatchConfig> {
        let overlong = match self.overlong {
            OverlongArg::Error => Overlong::Error,
            OverlongArg::Truncate => Overlong::Truncate,
            OverlongArg::Skip => Overlong::Skip,
        };
        let remainder = match self.last_batch {
            None | Some(LastBatchArg::Drop) => Remainder::Drop,
            Some(LastBatchArg::Keep) => Remainder::Keep,
        };
        let mut config = BatchConfig::default()
            .with_strategy(self.strategy(lengths)?)
            .with_overlong(overlong)
            .with_remainder(remainder)
            .with_batch_size_multiple(self.batch_size_multiple.unwrap_or(1))
            .with_length_multiple(self.length_multiple.unwrap_or(1))
            .with_fixed_shapes(self.fixed_shapes);
        config.max_batch_size = self.max_batch_size;
        config.max_tokens = self.capacity.or(self.max_tokens);
        config.max_cost = self.max_cost;
        config.cost = match self.cost {
            None | Some(CostArg::Tokens) => Cost::TOKENS,
            Some(CostArg::Quadratic) => Cost::ATTENTION,
        };
        config.max_sequence_length = self.max_sequence_length;
        Ok(config)
    }

    fn strategy(&self, lengths: &Lengths) -> Result<DynamicBatchStrategy> {
        Ok(match self.strategy {
            StrategyArg::PadToMax => DynamicBatchStrategy::PadToMax,
            StrategyArg::Bucket => DynamicBatchStrategy::Bucket(self.buckets(lengths)?),
            StrategyArg::Dynamic => DynamicBatchStrategy::Dynamic,
            StrategyArg::Sorted => {
                DynamicBatchStrategy::Sorted { window: self.window, cut: self.cut() }
            }
            StrategyArg::Pack => DynamicBatchStrategy::Pack(self.packing()),
        })
    }

    fn buckets(&self, lengths: &Lengths) -> Result<Buckets> {
        let Some(n_buckets) = self.buckets else {
            return Ok(Buckets::Width(self.bucket_width.unwrap_or(Buckets::DEFAULT_WIDTH)));
        };
        // The lengths that end up in batches: boundaries for sequences that are in none would only
        // pad the others more.
        let max = self.max_sequence_length.unwrap_or(u64::MAX);
        let skips = matches!(self.overlong, OverlongArg::Skip);
        let kept = lengths.iter().filter(|&length| !skips || length <= max);
        let counted: Vec<u64> = kept.map(|length| length.min(max)).collect();
        Ok(Buckets::optimal(&counted, n_buckets)?)
    }

    fn cut(&self) -> Cut {
        match self.cut {
            Some(CutArg::Greedy) => Cut::Greedy,
            None | Some(CutArg::Optimal) => Cut::Optimal,
        }
    }

    fn packing(&self) -> Packing {
        match self.packing {
            None | Some(PackingArg::BestFit) => Packing::BestFit,
            Some(PackingArg::MinimumSlack) => Packing::MinimumSlack,
            Some(PackingArg::InOrder) => {
                Packing::InOrder { open_rows: self.open_rows.unwrap_or(64) }
            }
        }
    }

    /// The rank whose batches are printed; `None` if no ranks share them.
    pub(super) fn placement(&self) -> Result<Option<Placement>> {
        Ok(self
            .world_size
            .zip(self.rank)
            .map(|(world_size, rank)| Placement::new(rank, world_size))
            .transpose()?)
    }

    /// How the ranks share the batches.
    pub(super) fn distributed(&self) -> DistributedConfig {
        let layout = match self.steps {
            None | Some(StepsArg::Grouped) => StepLayout::Grouped,
            Some(StepsArg::Dealt) => StepLayout::Dealt,
        };
        let cost = match self.step_cost {
            None | Some(StepCostArg::Tokens) => Cost::TOKENS,
            Some(StepCostArg::Attention) => Cost::ATTENTION,
        };
        let remainder = match self.remainder {
            None | Some(RemainderArg::Split) => StepRemainder::Split,
            Some(RemainderArg::Drop) => StepRemainder::Drop,
            Some(RemainderArg::Repeat) => StepRemainder::Repeat,
        };
        let config = DistributedConfig::default()
            .with_layout(layout)
            .with_cost(cost)
            .with_remainder(remainder);
        self.shuffle_seed().map_or(config, |seed| config.with_shuffle(seed))
    }

    /// The order in which `len` sequences are read.
    pub(super) fn order(&self, len: u64) -> Result<DistributedSampler> {
        let order = if self.shuffle { Order::Shuffled } else { Order::Sequential };
        let config = SamplerConfig::default().with_order(order);
        let config = config.with_seed(Seed::new(self.seed)).with_epoch(self.epoch());
        Ok(DistributedSampler::new(len, Placement::SINGLE, config)?)
    }

    pub(super) fn epoch(&self) -> Epoch {
        Epoch::new(self.epoch)
    }

    /// What shuffles batches, the same in every epoch.
    pub(super) fn shuffle_seed(&self) -> Option<Seed> {
        self.shuffle.then(|| Seed::new(self.seed))
    }
}

/// What the strategy is called on the command line.
fn name(strategy: StrategyArg) -> String {
    strategy.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
}
