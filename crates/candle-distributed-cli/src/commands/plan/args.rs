//! The arguments of `plan`, and the planner's types that they stand for.

use std::path::PathBuf;

use candle_distributed::{
    plan::{
        ElemType, Pattern,
        cost::{CostModel, Link, Links, Optimizer},
        strategy::{
            Full, Hsdp, Hybrid, LayerOrder, LayerWise, Layout, ShardingStrategy, WholeTensor,
        },
    },
    types::{Placement, Rank, WorldSize},
};
use clap::ValueEnum;

use crate::{
    bytes,
    error::{Error, Result, WithHint},
    help::examples,
    hint, input,
};

/// Plan which rank owns which part of a model, and print what each rank holds and sends.
///
/// Only the names, shapes and types of the tensors are read, never their values.
#[derive(Debug, clap::Args)]
#[command(after_help = examples![
    "# Which rank owns what, and what does a step send, on 8 ranks?"
    "candle-distributed plan model.safetensors --world-size 8"
    "# Does it fit in 24 GiB per device, trained in F32 and communicated in BF16? If not, what does?"
    "candle-distributed plan model.safetensors --world-size 8 --mixed-precision BF16,F32 --budget 24GiB"
    "candle-distributed plan model.safetensors --world-size 8 --mixed-precision BF16,F32 --budget 24GiB --search"
    "# What moves if two ranks are lost?"
    "candle-distributed plan model.safetensors --world-size 8 --format json > plan.json"
    "candle-distributed plan model.safetensors --world-size 6 --against plan.json"
])]
pub(crate) struct Args {
    /// A safetensors file, a model.safetensors.index.json, a folder with either, or a manifest
    /// {name: {"dtype", "shape"}}
    pub(super) model: PathBuf,
    /// Number of ranks that share the model
    #[arg(long)]
    pub(super) world_size: u64,

    /// How parameters are distributed over ranks [default: full, or hybrid with --rules]
    #[arg(long, value_enum, help_heading = "What goes where")]
    strategy: Option<StrategyArg>,
    /// How `full` cuts parameters [default: dim0]
    #[arg(long, value_enum, help_heading = "What goes where")]
    layout: Option<LayoutArg>,
    /// Number of rows that `row-ragged` keeps together [default: 1], or of elements that
    /// `block-ragged` does [default: 128]
    #[arg(long, value_name = "N", help_heading = "What goes where")]
    block_size: Option<u64>,
    /// Which layers may share a rank under `layer-wise` [default: any]
    #[arg(long, value_enum, help_heading = "What goes where")]
    layer_order: Option<OrderArg>,
    /// JSON file with the rules of `hybrid`: {"rules": [{"pattern", "choice"}], "default"}
    #[arg(long, value_name = "FILE", help_heading = "What goes where")]
    rules: Option<PathBuf>,
    /// Number of copies of the model, each sharded over its own part of the ranks (HSDP)
    #[arg(long, value_name = "G", default_value_t = 1, help_heading = "What goes where")]
    replicas: u64,
    /// Pattern that layers match, such as model.layers.*.mlp.experts.* [default: names up to their
    /// first number]
    #[arg(long, value_name = "PATTERN", help_heading = "What goes where")]
    pub(super) layers: Option<Pattern>,
    /// Units that stay gathered between forward and backward pass; may be repeated
    #[arg(long, value_name = "PATTERN", help_heading = "What goes where")]
    pub(super) keep: Vec<Pattern>,

    /// Optimizer whose state is counted
    #[arg(long, value_enum, default_value_t, help_heading = "What it costs")]
    optimizer: OptimizerArg,
    /// Dtype of trained parameters [default: that of the file]
    #[arg(long, value_name = "DTYPE", value_parser = dtype, help_heading = "What it costs")]
    param_dtype: Option<ElemType>,
    /// Dtypes in which parameters are gathered and gradients reduced, such as BF16,F32 [default:
    /// those in which they are held]
    #[arg(long, value_name = "DTYPE,DTYPE", value_parser = dtypes, help_heading = "What it costs")]
    mixed_precision: Option<(ElemType, ElemType)>,
    /// Number of units gathered ahead of the one in use
    #[arg(long, value_name = "UNITS", default_value_t = 1, help_heading = "What it costs")]
    prefetch: u64,
    /// Links, to estimate communication time: h100, or ranks per node and GB/s within and between
    /// nodes, such as 8:450:50
    #[arg(long, value_parser = links, help_heading = "What it costs")]
    links: Option<Links>,
    /// Memory per device, such as 24GiB
    #[arg(long, value_name = "BYTES", value_parser = bytes::parse, help_heading = "What it costs")]
    pub(super) budget: Option<u64>,

    /// Search the `full` layouts for the plan with the least communication time that fits the
    /// budget
    #[arg(
        long,
        requires = "budget",
        conflicts_with_all = [
            "strategy", "layout", "block_size", "layer_order", "rules", "replicas", "keep"
        ],
        help_heading = "What to print"
    )]
    pub(super) search: bool,
    /// Also list the shards of this rank
    #[arg(long, help_heading = "What to print")]
    rank: Option<u64>,
    /// Explain how this parameter is sharded, instead of the report
    #[arg(long, value_name = "NAME", help_heading = "What to print")]
    pub(super) explain: Option<String>,
    /// Explain what this rank holds, instead of the report
    #[arg(long, value_name = "RANK", conflicts_with = "explain", help_heading = "What to print")]
    explain_rank: Option<u64>,
    /// Compare with a stored JSON plan: what differs and what must move
    #[arg(
        long,
        value_name = "PLAN",
        conflicts_with_all = ["explain", "explain_rank"],
        help_heading = "What to print"
    )]
    pub(super) against: Option<PathBuf>,
    /// A table, JSON, or a drawing
    #[arg(long, value_enum, default_value_t, help_heading = "What to print")]
    pub(super) format: FormatArg,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum StrategyArg {
    /// Every parameter over all ranks
    Full,
    /// Whole layers
    LayerWise,
    /// Whole tensors, as few of them cut as exact balance allows
    WholeTensor,
    /// By rules; without --rules, classifier and head whole, the rest over all ranks
    Hybrid,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum LayoutArg {
    /// Rows of each parameter, as FSDP2 does
    Dim0,
    /// Elements of each unit end to end, as FSDP1 does
    Flat,
    /// The same with aligned parameters, as FSDP1 does with `use_orig_params`
    FlatAligned,
    /// Each unit in equal parts, cut between rows
    RowRagged,
    /// Each unit in equal parts, cut between blocks of elements
    BlockRagged,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum OrderArg {
    /// Any
    Any,
    /// Neighbors only, like the stages of a pipeline
    Contiguous,
}

#[derive(Clone, Copy, Debug, Default, ValueEnum)]
enum OptimizerArg {
    /// Two moments and a step count (Adam, AdamW)
    #[default]
    Adam,
    /// Two moments and a copy of the parameters in F32
    AdamMixed,
    /// Two moments in 8 bits, as in bitsandbytes
    #[value(name = "adam-8bit")]
    Adam8bit,
    /// One momentum buffer
    Sgd,
    /// Nothing
    None,
}

/// The form of the result.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(super) enum FormatArg {
    /// Text for people
    #[default]
    Text,
    /// One JSON object with a `format_version`
    Json,
    /// A drawing: ranks as columns, units as blocks
    Svg,
}

impl Args {
    pub(super) fn world_size(&self) -> Result<WorldSize> {
        Ok(WorldSize::new(self.world_size)?)
    }

    /// The rank whose shards are listed.
    pub(super) fn rank(&self) -> Result<Option<Rank>> {
        self.checked(self.rank)
    }

    /// The rank that is explained.
    pub(super) fn explain_rank(&self) -> Result<Option<Rank>> {
        self.checked(self.explain_rank)
    }

    fn checked(&self, rank: Option<u64>) -> Result<Option<Rank>> {
        Ok(rank.map(|rank| Placement::new(rank, self.world_size)).transpose()?.map(Placement::rank))
    }

    /// The rules of the file, or the default ones, if the strategy goes by rules.
    pub(super) fn rules(&self) -> Result<Option<Hybrid>> {
        match (self.strategy, &self.rules) {
            (_, Some(path)) => input::read_json(path, "rules").map(Some).with_hint(hint::RULES),
            (Some(StrategyArg::Hybrid), None) => Ok(Some(Hybrid::default())),
            (_, None) => Ok(None),
        }
    }

    /// The strategy: that of the `rules` where there are any.
    pub(super) fn strategy(
        &self,
        rules: Option<Hybrid>,
    ) -> Result<Hsdp<Box<dyn ShardingStrategy>>> {
        let inner: Box<dyn ShardingStrategy> = match (self.strategy, rules) {
            (_, Some(rules)) => Box::new(rules),
            (None | Some(StrategyArg::Full), None) => Box::new(Full::new(self.layout()?)),
            (Some(StrategyArg::LayerWise), None) => {
                Box::new(LayerWise::default().with_order(self.layer_order()))
            }
            (Some(StrategyArg::WholeTensor), None) => Box::new(WholeTensor),
            (Some(StrategyArg::Hybrid), None) => Box::new(Hybrid::default()),
        };
        Ok(Hsdp::new(inner, self.replicas))
    }

    /// Refuses the options that the strategy would leave without effect.
    pub(super) fn check(&self) -> Result<()> {
        let default = if self.rules.is_some() { StrategyArg::Hybrid } else { StrategyArg::Full };
        let strategy = self.strategy.unwrap_or(default);
        let of_one_strategy = [
            ("--layout", self.layout.is_some(), StrategyArg::Full),
            ("--block-size", self.block_size.is_some(), StrategyArg::Full),
            ("--layer-order", self.layer_order.is_some(), StrategyArg::LayerWise),
            ("--rules", self.rules.is_some(), StrategyArg::Hybrid),
        ];
        for (option, is_given, needed) in of_one_strategy {
            if is_given && strategy != needed {
                return Err(Error::usage(format!("{option} needs --strategy {}", name(needed))));
            }
        }
        Ok(())
    }

    fn layer_order(&self) -> LayerOrder {
        match self.layer_order {
            None | Some(OrderArg::Any) => LayerOrder::Any,
            Some(OrderArg::Contiguous) => LayerOrder::Contiguous,
        }
    }

    fn layout(&self) -> Result<Layout> {
        let layout = match (self.layout, self.block_size) {
            (Some(LayoutArg::RowRagged), rows) => Layout::RowRagged { rows: rows.unwrap_or(1) },
            (Some(LayoutArg::BlockRagged), None) => Layout::BLOCKS,
            (Some(LayoutArg::BlockRagged), Some(block)) => Layout::BlockRagged { block },
            (_, Some(_)) => {
                return Err(Error::usage("--block-size needs a ragged --layout"));
            }
            (None | Some(LayoutArg::Dim0), None) => Layout::Dim0,
            (Some(LayoutArg::Flat), None) => Layout::Flat,
            (Some(LayoutArg::FlatAligned), None) => Layout::FlatAligned,
        };
        Ok(layout)
    }

    pub(super) fn cost_model(&self) -> CostModel {
        let optimizer = match self.optimizer {
            OptimizerArg::Adam => Optimizer::Adam,
            OptimizerArg::AdamMixed => Optimizer::AdamMixed,
            OptimizerArg::Adam8bit => Optimizer::Adam8bit,
            OptimizerArg::Sgd => Optimizer::Sgd,
            OptimizerArg::None => Optimizer::None,
        };
        let model = CostModel::default().with_optimizer(optimizer).with_prefetch(self.prefetch);
        let model = self.param_dtype.into_iter().fold(model, CostModel::with_param_dtype);
        let model = self.links.into_iter().fold(model, CostModel::with_links);
        self.mixed_precision
            .into_iter()
            .fold(model, |model, (param, reduce)| model.with_mixed_precision(param, reduce))
    }
}

/// The name of the strategy on the command line.
#[expect(clippy::expect_used, reason = "says why it cannot fail")]
fn name(strategy: StrategyArg) -> String {
    let value = strategy.to_possible_value().expect("no strategy is hidden from the command line");
    value.get_name().to_owned()
}

fn dtype(text: &str) -> Result<ElemType, String> {
    ElemType::from_name(&text.to_uppercase())
        .ok_or_else(|| String::from("unknown dtype; examples are F32 and BF16"))
}

fn dtypes(text: &str) -> Result<(ElemType, ElemType), String> {
    let (param, reduce) =
        text.split_once(',').ok_or("expected two dtypes with a comma between them")?;
    Ok((dtype(param)?, dtype(reduce)?))
}

fn links(text: &str) -> Result<Links, String> {
    if text.eq_ignore_ascii_case("h100") {
        return Ok(Links::H100);
    }
    let numbers: Result<Vec<u64>, _> = text.split(':').map(str::parse).collect();
    let Ok(&[ranks_per_node, intra, inter]) = numbers.as_deref() else {
        return Err(String::from(
            "expected three whole numbers: ranks per node, GB/s within and between nodes",
        ));
    };
    let link =
        |latency_ns, gb: u64| Link { latency_ns, bytes_per_s: gb.saturating_mul(1_000_000_000) };
    let [intra, inter] =
        [link(Links::H100.intra.latency_ns, intra), link(Links::H100.inter.latency_ns, inter)];
    Links::new(ranks_per_node, intra, inter).map_err(|error| error.to_string())
}
