//! Options of `batch`, and checks of their combinations.

use std::path::PathBuf;

use candle_distributed::{
    batch::{
        BatchConfig, Buckets, Cost, Cut, DistributedConfig, DynamicBatchStrategy, GridConfig,
        Overlong, Packing, Remainder, StepLayout, StepRemainder,
    },
    sampler::{self, DistributedSampler, SamplerConfig},
    types::{Epoch, Placement, Seed},
};
use clap::ValueEnum;

use super::order::ReadingOrder;
use crate::{
    error::{Error, Result},
    help::{cli_name, examples},
    numbers::{self, Numbers},
};

/// Put sequences of the given lengths into batches, and report the padding.
#[derive(Debug, clap::Args)]
#[command(after_help = examples![
    "# As many consecutive sequences as fit into 160 tokens, padding included"
    "echo 12 80 15 70 9 | candle-distributed batch --lengths - --strategy dynamic --max-tokens 160"
    "# The batches of rank 3: all ranks get the same number, and the batches of a step cost about the same"
    "candle-distributed batch --lengths lengths.txt --strategy sorted --max-tokens 16384 --world-size 8 --rank 3"
    "# How long 8 ranks with 4 micro-batches each wait for one another, if a sequence costs its length squared"
    "candle-distributed batch --lengths lengths.txt --strategy sorted --max-tokens 16384 --world-size 8 --steps grid --global-batch 256 --accumulate 4 --cost attention"
    "# Packed rows of 2048 tokens"
    "candle-distributed batch --lengths lengths.txt --strategy pack --capacity 2048 --format json > packed.json"
    "# Batches in the order of PyTorch's sampler, one per line, each printed as soon as it is full"
    "candle-distributed sample --len 2000 --preset torch --format npy | candle-distributed batch --lengths lengths.txt --order - --strategy dynamic --max-tokens 16384 --format jsonl"
])]
pub(crate) struct BatchArgs {
    /// File of sequence lengths: text separated by white space, an .npy array of integers, or a
    /// JSON list; - for standard input. Several files are read as one data set
    #[arg(long, value_name = "FILE", required = true)]
    lengths: Vec<PathBuf>,
    /// Read each length from this field of a line of .jsonl files: a number, or a list, such as
    /// tokens, to be counted
    #[arg(long, value_name = "NAME")]
    field: Option<String>,
    /// Read the sequences in this order: a file of positions, as printed by `sample` in any
    /// --format; - for standard input. With ranks, give the order of all ranks together
    #[arg(long, value_name = "FILE")]
    order: Option<PathBuf>,
    /// Strategy that selects the sequences of a batch
    #[arg(long, value_enum)]
    strategy: StrategyArg,
    /// Maximum number of sequences per batch. With `dynamic` and without --max-tokens it sets the token
    /// budget instead, B × --max-sequence-length, so batches of short sequences may hold more
    #[arg(long, value_name = "B")]
    max_batch_size: Option<u64>,
    /// Maximum number of tokens per batch, padding included
    #[arg(long, value_name = "T")]
    max_tokens: Option<u64>,
    /// Maximum cost per batch: its number of sequences × the --cost of one at the padded length; with
    /// `pack`, the sum of the costs in a row
    #[arg(long, value_name = "C")]
    max_cost: Option<u64>,
    /// Cost of a sequence, for --max-cost and to balance micro-batches [default: tokens]
    #[arg(long, value_enum)]
    cost: Option<CostArg>,
    /// Maximum length of a sequence
    #[arg(long, value_name = "L")]
    max_sequence_length: Option<u64>,
    /// Treatment of longer sequences
    #[arg(long, value_enum, default_value_t)]
    overlong: OverlongArg,
    /// Number of lengths that share a bucket, for `bucket` [default: 64]
    #[arg(long, value_name = "K", conflicts_with = "buckets")]
    bucket_width: Option<u64>,
    /// Maximum number of buckets, for `bucket`; their boundaries minimize the padding of these
    /// lengths
    #[arg(long, value_name = "K")]
    buckets: Option<u64>,
    /// Pad every batch to the upper bound of its bucket, for `bucket`
    #[arg(long)]
    fixed_shapes: bool,
    /// Sort the sequences of this many batches at a time, for `sorted` [default: all]
    #[arg(long, value_name = "M")]
    window: Option<u64>,
    /// Method that cuts the sorted sequences into batches, for `sorted` [default: optimal]
    #[arg(long, value_enum)]
    cut: Option<CutArg>,
    /// Number of tokens per row, for `pack`
    #[arg(long, value_name = "C", conflicts_with = "max_tokens")]
    capacity: Option<u64>,
    /// Method that fills rows, for `pack` [default: best-fit]
    #[arg(long, value_enum)]
    packing: Option<PackingArg>,
    /// Number of rows open at a time, for `in-order` [default: 64]
    #[arg(long, value_name = "N")]
    open_rows: Option<usize>,
    /// Pad each length to a multiple of this number [default: 1]
    #[arg(long, value_name = "M")]
    length_multiple: Option<u64>,
    /// Give every batch a multiple of this many sequences [default: 1]
    #[arg(long, value_name = "M")]
    batch_size_multiple: Option<u64>,
    /// Treatment of the last sequences if they are too few for --batch-size-multiple, or for a step of
    /// `grid` [default: drop]
    #[arg(long, value_enum)]
    last_batch: Option<LastBatchArg>,
    /// Number of ranks that share the batches
    #[arg(long, value_name = "W")]
    world_size: Option<u64>,
    /// Rank whose batches are printed; with micro-batches it may be left out, to print only the report
    /// of all ranks
    #[arg(long, value_name = "R", requires = "world_size")]
    rank: Option<u64>,
    /// Number of micro-batches per rank in a step [default: 1, or the fewest for --global-batch]
    #[arg(long, value_name = "N", requires = "world_size")]
    accumulate: Option<u64>,
    /// Number of sequences of all ranks in a step, for `grid` [default: as many as fit]
    #[arg(long, value_name = "N", requires = "world_size")]
    global_batch: Option<u64>,
    /// Method that makes the batches of a step [default: grouped]
    #[arg(long, value_enum, requires = "world_size")]
    steps: Option<StepsArg>,
    /// Cost to balance across ranks within a step [default: tokens]
    #[arg(long, value_enum, requires = "world_size")]
    step_cost: Option<StepCostArg>,
    /// Treatment of the last batches if they do not fill a step of all ranks [default: split]
    #[arg(long, value_enum, requires = "world_size")]
    remainder: Option<RemainderArg>,
    /// Read the sequences in random order (unless --order is given), and shuffle batches that complete
    /// together, or the steps of ranks
    #[arg(long)]
    shuffle: bool,
    /// Seed of the shuffle
    #[arg(long, default_value_t = 0, requires = "shuffle")]
    seed: u64,
    /// Epoch of the shuffle, counted from 0
    #[arg(long, default_value_t = 0, requires = "shuffle")]
    epoch: u64,
    /// First batch to print, counted from 0
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(super) start: u64,
    /// Maximum number of batches to print and report [default: all]
    #[arg(long, value_name = "N")]
    pub(super) count: Option<u64>,
    /// Resume from a file written by --save-state, with the same options but the ranks
    #[arg(long, value_name = "FILE", requires = "world_size", conflicts_with = "epoch")]
    pub(super) resume: Option<PathBuf>,
    /// Write the state of the rank after the printed batches to this file
    #[arg(long, value_name = "FILE", requires = "world_size")]
    pub(super) save_state: Option<PathBuf>,
    /// Output format
    #[arg(long, value_enum, default_value_t)]
    pub(super) format: FormatArg,
}

/// The form of the result.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(super) enum FormatArg {
    /// Text with one batch per line
    #[default]
    Text,
    /// One JSON object with a `format_version`
    Json,
    /// One JSON object per batch, as soon as it is full. In input order, without ranks, strategies that
    /// need no look-ahead (`pad-to-max`, `dynamic`, `bucket` without --buckets, `sorted` with --window,
    /// `pack` with in-order) do not load all lengths
    Jsonl,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum StrategyArg {
    /// Consecutive sequences, each batch padded to its longest
    PadToMax,
    /// Sequences of similar length
    Bucket,
    /// Consecutive sequences, as many as the token budget allows
    Dynamic,
    /// Sequences sorted by length: the least padding
    Sorted,
    /// Several sequences per row; each row is a batch
    Pack,
}

#[derive(Clone, Copy, Debug, Default, ValueEnum)]
enum OverlongArg {
    /// Reject them
    #[default]
    Error,
    /// Cut them to the limit
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
    /// The longest first, each into the fullest row with enough room
    BestFit,
    /// Row by row, each as full as a bounded search can make it
    MinimumSlack,
    /// In order, each into the fullest of a few open rows
    InOrder,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum CostArg {
    /// Number of tokens, padding included
    Tokens,
    /// Number of token pairs, as in attention
    #[value(alias = "attention")]
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
    /// Split the batches with the most padding in two: each sequence is read exactly once
    Split,
    /// Leave the last batches out
    Drop,
    /// Read the first batches again
    Repeat,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum StepsArg {
    /// One batch per rank, of similar cost
    Grouped,
    /// One batch for all ranks, dealt out among them
    Dealt,
    /// The next sequences as a grid of micro-batches that keeps all ranks equally busy
    Grid,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum StepCostArg {
    /// Padded tokens
    Tokens,
    /// Pairs of tokens
    Attention,
}

impl BatchArgs {
    /// Returns the lengths, read lazily.
    pub(super) fn lengths(&self) -> Numbers<u64> {
        numbers::lengths(&self.lengths, self.field.as_deref())
    }

    /// Reads all lengths into memory.
    pub(super) fn load_lengths(&self) -> Result<Vec<u64>> {
        let names: Vec<String> =
            self.lengths.iter().map(|path| path.display().to_string()).collect();
        numbers::load_lengths(self.lengths(), names.join(", "))
    }

    /// Returns true if batches can be printed before all lengths are read.
    pub(super) fn is_stream(&self) -> bool {
        let is_input_order = self.order.is_none() && !self.shuffle;
        let needs_all_lengths = match self.strategy {
            StrategyArg::PadToMax | StrategyArg::Dynamic => false,
            StrategyArg::Bucket => self.buckets.is_some(),
            StrategyArg::Sorted => self.window.is_none(),
            StrategyArg::Pack => self.packing != Some(PackingArg::InOrder),
        };
        self.format == FormatArg::Jsonl && is_input_order && !needs_all_lengths
    }

    /// Returns true if another program may still be writing the input of the batches.
    pub(super) fn is_live(&self) -> bool {
        let lengths: &[PathBuf] = if self.is_stream() { &self.lengths } else { &[] };
        lengths.iter().chain(&self.order).any(|path| numbers::is_live(path))
    }

    /// Rejects options that have no effect in combination with the others.
    pub(super) fn check(&self) -> Result<()> {
        use StrategyArg::{Bucket, Pack, Sorted};

        let inputs = self.lengths.iter().chain(&self.order);
        if inputs.filter(|path| numbers::is_stdin(path)).count() > 1 {
            return Err(Error::usage("standard input, -, cannot be read twice"));
        }
        let strategy_options = [
            ("--bucket-width", self.bucket_width.is_some(), Bucket),
            ("--buckets", self.buckets.is_some(), Bucket),
            ("--fixed-shapes", self.fixed_shapes, Bucket),
            ("--window", self.window.is_some(), Sorted),
            ("--cut", self.cut.is_some(), Sorted),
            ("--capacity", self.capacity.is_some(), Pack),
            ("--packing", self.packing.is_some(), Pack),
            ("--open-rows", self.open_rows.is_some(), Pack),
        ];
        for (option, is_given, needed) in strategy_options {
            if is_given && self.strategy != needed {
                return Err(Error::usage(format!(
                    "{option} needs --strategy {}, not {}",
                    cli_name(needed),
                    cli_name(self.strategy)
                )));
            }
        }
        if self.open_rows.is_some() && self.packing != Some(PackingArg::InOrder) {
            return Err(Error::usage("--open-rows needs --packing in-order"));
        }
        self.check_grid()?;
        self.check_rows_and_steps()
    }

    /// Returns true if steps have micro-batches.
    fn has_micro_batches(&self) -> bool {
        self.accumulate.is_some() || self.steps == Some(StepsArg::Grid)
    }

    /// Rejects options without the steps, micro-batches or rank that they need, and two costs for one
    /// purpose.
    fn check_grid(&self) -> Result<()> {
        let has_micro_batches = self.has_micro_batches();
        let is_grid = self.steps == Some(StepsArg::Grid);
        if self.global_batch.is_some() && !is_grid {
            return Err(Error::usage("--global-batch needs --steps grid"));
        }
        if self.last_batch.is_some() && self.batch_size_multiple.is_none() && !is_grid {
            return Err(Error::usage("--last-batch needs --batch-size-multiple or --steps grid"));
        }
        if self.cost.is_some() && self.max_cost.is_none() && !has_micro_batches {
            return Err(Error::usage("--cost needs --max-cost, --accumulate or --steps grid"));
        }
        if self.cost.is_some() && self.step_cost.is_some() && has_micro_batches {
            return Err(Error::usage(
                "--cost and --step-cost cannot be used together for micro-batches",
            ));
        }
        if self.world_size.is_some() && self.rank.is_none() && !has_micro_batches {
            return Err(Error::usage("--world-size needs --rank, --accumulate or --steps grid"));
        }
        Ok(())
    }

    /// Returns true if batches are printed, and false if only the report of all ranks is.
    pub(super) fn prints_batches(&self) -> bool {
        self.world_size.is_none() || self.rank.is_some()
    }

    /// Rejects options that do not apply to packed rows, and `--steps dealt` for strategies that do
    /// not support it.
    fn check_rows_and_steps(&self) -> Result<()> {
        let is_pack = self.strategy == StrategyArg::Pack;
        let is_dealt = self.steps == Some(StepsArg::Dealt);
        let unsupported = [
            ("--length-multiple", is_pack && self.length_multiple.is_some()),
            ("--batch-size-multiple", is_pack && self.batch_size_multiple.is_some()),
            ("--steps dealt", is_dealt && (is_pack || self.strategy == StrategyArg::Bucket)),
        ];
        if let Some((option, _)) = unsupported.into_iter().find(|(_, is_given)| *is_given) {
            return Err(Error::usage(format!(
                "{option} does not work with --strategy {}",
                cli_name(self.strategy)
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

    /// Returns the configuration. `lengths` are the lengths of all sequences, if they are in
    /// memory.
    pub(super) fn config(&self, lengths: Option<&[u64]>) -> Result<BatchConfig> {
        let overlong = match self.overlong {
            OverlongArg::Error => Overlong::Error,
            OverlongArg::Truncate => Overlong::Truncate,
            OverlongArg::Skip => Overlong::Skip,
        };
        let last_sequences = match self.last_batch {
            None | Some(LastBatchArg::Drop) => Remainder::Drop,
            Some(LastBatchArg::Keep) => Remainder::Keep,
        };
        let mut config = BatchConfig::default()
            .with_strategy(self.strategy(lengths)?)
            .with_overlong(overlong)
            .with_remainder(last_sequences)
            .with_batch_size_multiple(self.batch_size_multiple.unwrap_or(1))
            .with_length_multiple(self.length_multiple.unwrap_or(1))
            .with_fixed_shapes(self.fixed_shapes);
        config.max_batch_size = self.max_batch_size;
        config.max_tokens = self.capacity.or(self.max_tokens);
        config.max_cost = self.max_cost;
        config.cost = self.sequence_cost();
        config.max_sequence_length = self.max_sequence_length;
        Ok(config)
    }

    fn sequence_cost(&self) -> Cost {
        match self.cost {
            None | Some(CostArg::Tokens) => Cost::TOKENS,
            Some(CostArg::Quadratic) => Cost::ATTENTION,
        }
    }

    fn strategy(&self, lengths: Option<&[u64]>) -> Result<DynamicBatchStrategy> {
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

    #[expect(clippy::expect_used, reason = "the message says why it cannot fail")]
    fn buckets(&self, lengths: Option<&[u64]>) -> Result<Buckets> {
        let Some(n_buckets) = self.buckets else {
            return Ok(Buckets::Width(self.bucket_width.unwrap_or(Buckets::DEFAULT_WIDTH)));
        };
        let lengths =
            lengths.expect("with --buckets nothing is printed before all lengths are read");
        // Only lengths that end up in batches count: boundaries for skipped sequences would pad the
        // other sequences more.
        let max = self.max_sequence_length.unwrap_or(u64::MAX);
        let skips = matches!(self.overlong, OverlongArg::Skip);
        let kept = lengths.iter().copied().filter(|&length| !skips || length <= max);
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

    /// Returns the place of --rank, or of rank 0 if only the report of all ranks is printed; `None`
    /// without --world-size.
    pub(super) fn placement(&self) -> Result<Option<Placement>> {
        let rank = self.rank.unwrap_or(0);
        Ok(self.world_size.map(|world_size| Placement::new(rank, world_size)).transpose()?)
    }

    /// Returns the configuration that shares the batches among ranks.
    pub(super) fn distributed_config(&self) -> DistributedConfig {
        let layout = match self.steps {
            None | Some(StepsArg::Grouped) => StepLayout::Grouped,
            Some(StepsArg::Dealt) => StepLayout::Dealt,
            Some(StepsArg::Grid) => {
                let global_batch_size = self.global_batch;
                StepLayout::Grid(GridConfig { global_batch_size, ..GridConfig::default() })
            }
        };
        // With micro-batches, --cost is accepted in place of --step-cost; `check_grid` rejects both
        // together.
        let cost = match self.step_cost {
            None if self.has_micro_batches() => self.sequence_cost(),
            None | Some(StepCostArg::Tokens) => Cost::TOKENS,
            Some(StepCostArg::Attention) => Cost::ATTENTION,
        };
        let remainder = match self.remainder {
            None | Some(RemainderArg::Split) => StepRemainder::Split,
            Some(RemainderArg::Drop) => StepRemainder::Drop,
            Some(RemainderArg::Repeat) => StepRemainder::Repeat,
        };
        DistributedConfig {
            shuffle: self.shuffle_seed(),
            layout,
            remainder,
            cost,
            accumulation: self.accumulate,
        }
    }

    /// Returns the reading order of `len` sequences in an epoch.
    pub(super) fn reading_order(&self, len: u64, epoch: Epoch) -> Result<ReadingOrder> {
        if let Some(path) = &self.order {
            let positions = numbers::positions(path);
            return Ok(ReadingOrder::Listed { positions, path: path.clone() });
        }
        let order =
            if self.shuffle { sampler::Order::Shuffled } else { sampler::Order::Sequential };
        let config = SamplerConfig::default().with_order(order);
        let config = config.with_seed(Seed::new(self.seed)).with_epoch(epoch);
        let sampler = DistributedSampler::new(len, Placement::SINGLE, config)?;
        Ok(ReadingOrder::Sampled(Box::new(sampler)))
    }

    pub(super) fn epoch(&self) -> Epoch {
        Epoch::new(self.epoch)
    }

    /// Returns the seed that shuffles batches, the same in every epoch.
    pub(super) fn shuffle_seed(&self) -> Option<Seed> {
        self.shuffle.then(|| Seed::new(self.seed))
    }
}
