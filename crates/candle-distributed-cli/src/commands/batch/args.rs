//! The options of `batch`, and which of them go together.

use std::path::PathBuf;

use candle_distributed::{
    batch::{
        BatchConfig, Buckets, Cost, Cut, DistributedConfig, DynamicBatchStrategy, Overlong,
        Packing, Remainder, StepLayout, StepRemainder,
    },
    sampler::{self, DistributedSampler, SamplerConfig},
    types::{Epoch, Placement, Seed},
};
use clap::ValueEnum;

use super::order::Order;
use crate::{
    error::{Error, Result},
    help::{examples, typed},
    numbers::{self, Lengths, Numbers},
};

/// Put sequences of the given lengths into batches, and report the padding.
#[derive(Debug, clap::Args)]
#[command(after_help = examples![
    "# As many neighbors as 160 tokens allow, padding included"
    "echo 12 80 15 70 9 | candle-distributed batch --lengths - --strategy dynamic --max-tokens 160"
    "# The batches of rank 3: each rank gets the same number, and those of a step cost about the same"
    "candle-distributed batch --lengths lengths.txt --strategy sorted --max-tokens 16384 --world-size 8 --rank 3"
    "# Packed rows of 2048 tokens"
    "candle-distributed batch --lengths lengths.txt --strategy pack --capacity 2048 --format json > packed.json"
    "# The order of PyTorch's sampler, batched; a batch per line, each as soon as it is full"
    "candle-distributed sample --len 2000 --preset torch --format npy | candle-distributed batch --lengths lengths.txt --order - --strategy dynamic --max-tokens 16384 --format jsonl"
])]
pub(crate) struct Args {
    /// File of sequence lengths: text with white space between them, an .npy array of integers, or a
    /// JSON list; - for standard input. Given several times, one data set comes after the other
    #[arg(long, value_name = "FILE", required = true)]
    lengths: Vec<PathBuf>,
    /// The lengths are in this field of each line of the files, which are .jsonl: as a number, or as
    /// a list, such as one of tokens, whose length counts
    #[arg(long, value_name = "NAME")]
    field: Option<String>,
    /// Read the sequences in this order: a file of positions, which `sample` prints in any --format;
    /// - for standard input. With ranks it must be the order of all of them
    #[arg(long, value_name = "FILE")]
    order: Option<PathBuf>,
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
    /// Read the sequences in random order, if there is no --order, and shuffle batches that are ready
    /// together
    #[arg(long)]
    shuffle: bool,
    /// Seed of the shuffle
    #[arg(long, default_value_t = 0, requires = "shuffle")]
    seed: u64,
    /// Epoch of the shuffle, counted from 0
    #[arg(long, default_value_t = 0, requires = "shuffle")]
    epoch: u64,
    /// First of the batches to print, counted from 0
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(super) start: u64,
    /// Maximum number of batches to print, which the report is then about [default: all]
    #[arg(long, value_name = "N")]
    pub(super) count: Option<u64>,
    /// Resume from a file written by --save-state, with the same options but --rank
    #[arg(long, value_name = "FILE", requires = "world_size", conflicts_with = "epoch")]
    pub(super) resume: Option<PathBuf>,
    /// Write how far the rank is after the printed batches to this file
    #[arg(long, value_name = "FILE", requires = "world_size")]
    pub(super) save_state: Option<PathBuf>,
    /// How the batches are written
    #[arg(long, value_enum, default_value_t)]
    pub(super) format: FormatArg,
}

/// The form of the result.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(super) enum FormatArg {
    /// Text with a batch per line
    #[default]
    Text,
    /// One JSON object with a `format_version`
    Json,
    /// A JSON object per batch, each as soon as its batch is full: without --order, --shuffle,
    /// --buckets and ranks, only the sequences of unfinished batches are in memory
    Jsonl,
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
    /// The lengths, read as they are asked for.
    pub(super) fn lengths(&self) -> Numbers<u64> {
        numbers::lengths(&self.lengths, self.field.as_deref())
    }

    pub(super) fn hold_lengths(&self) -> Result<Lengths> {
        let names: Vec<String> =
            self.lengths.iter().map(|path| path.display().to_string()).collect();
        Lengths::hold(self.lengths(), names.join(", "))
    }

    /// Whether batches can be made while lengths are still read, and printed before the last is.
    pub(super) fn is_stream(&self) -> bool {
        let is_own_order = self.order.is_none() && !self.shuffle;
        let knows_all = match self.strategy {
            StrategyArg::PadToMax | StrategyArg::Dynamic => false,
            StrategyArg::Bucket => self.buckets.is_some(),
            StrategyArg::Sorted => self.window.is_none(),
            StrategyArg::Pack => self.packing != Some(PackingArg::InOrder),
        };
        self.format == FormatArg::Jsonl && is_own_order && !knows_all
    }

    /// Whether the batches may depend on what another program has still to write.
    pub(super) fn is_live(&self) -> bool {
        let lengths = self.lengths.iter().filter(|_| self.is_stream());
        lengths.chain(&self.order).any(|path| numbers::is_live(path))
    }

    /// Refuses the options that the others would leave without effect.
    pub(super) fn check(&self) -> Result<()> {
        use StrategyArg::{Bucket, Pack, Sorted};

        let inputs = self.lengths.iter().chain(&self.order);
        if inputs.filter(|path| numbers::is_stdin(path)).count() > 1 {
            return Err(Error::usage("standard input, -, cannot be read twice"));
        }
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
                    typed(needed),
                    typed(self.strategy)
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
                typed(self.strategy)
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

    /// The configuration; `lengths` are those of all sequences, if they are held.
    pub(super) fn config(&self, lengths: Option<&Lengths>) -> Result<BatchConfig> {
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

    fn strategy(&self, lengths: Option<&Lengths>) -> Result<DynamicBatchStrategy> {
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

    #[expect(clippy::expect_used, reason = "says why it cannot fail")]
    fn buckets(&self, lengths: Option<&Lengths>) -> Result<Buckets> {
        let Some(n_buckets) = self.buckets else {
            return Ok(Buckets::Width(self.bucket_width.unwrap_or(Buckets::DEFAULT_WIDTH)));
        };
        let lengths =
            lengths.expect("with --buckets nothing is printed before all lengths are read");
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

    /// The order in which `len` sequences are read in an epoch.
    pub(super) fn order(&self, len: u64, epoch: Epoch) -> Result<Order> {
        if let Some(path) = &self.order {
            return Ok(Order::Listed { positions: numbers::positions(path), path: path.clone() });
        }
        let order =
            if self.shuffle { sampler::Order::Shuffled } else { sampler::Order::Sequential };
        let config = SamplerConfig::default().with_order(order);
        let config = config.with_seed(Seed::new(self.seed)).with_epoch(epoch);
        let sampler = DistributedSampler::new(len, Placement::SINGLE, config)?;
        Ok(Order::Drawn(Box::new(sampler)))
    }

    pub(super) fn epoch(&self) -> Epoch {
        Epoch::new(self.epoch)
    }

    /// What shuffles batches, the same in every epoch.
    pub(super) fn shuffle_seed(&self) -> Option<Seed> {
        self.shuffle.then(|| Seed::new(self.seed))
    }
}
