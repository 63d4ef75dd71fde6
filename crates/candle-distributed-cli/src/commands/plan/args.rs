//! The arguments of `plan`, and the planner's types that they stand for.

use std::path::PathBuf;

use candle_distributed::{
    plan::{
        ElemType, Pattern,
        cost::{CostModel, Link, Links, Optimizer},
        strategy::{Full, Hsdp, Hybrid, LayerOrder, LayerWise, Layout, ShardingStrategy, WholeTensor},
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

/// Plan which rank owns which part of a model, and print what each holds and sends.
///
/// Only the names, shapes and types of the tensors are read, never their values.
#[derive(Debug, clap::Args)]
#[command(after_help = examples![
    "# Who owns what on 8 ranks, and what does a step send?"
    "candle-distributed plan model.safetensors --world-size 8"
    "# Does it fit into 24 GiB a device, trained in F32 and sent as BF16? If not, what would?"
    "candle-distributed plan model.safetensors --world-size 8 --mixed-precision BF16,F32 --budget 24GiB"
    "candle-distributed plan model.safetensors --world-size 8 --mixed-precision BF16,F32 --budget 24GiB --search"
    "# What moves if two ranks are lost?"
    "candle-distributed plan model.safetensors --world-size 8 --format json > plan.json"
    "candle-distributed plan model.safetensors --world-size 6 --against plan.json"
])]
pub(crate) struct Args {
    /// A safetensors file, a model.safetensors.index.json, a folder with either, or a manifest {name: {"dtype", "shape"}}
    pub(super) model: PathBuf,
    /// Number of ranks that share the model
    #[arg(long)]
    pub(super) world_size: u64,

    /// How parameters are spread [default: full, or hybrid with --rules]
    #[arg(long, value_enum, help_heading = "What goes where")]
    strategy: Option<StrategyArg>,
    /// How `full` cuts them [default: dim0]
    #[arg(long, value_enum, help_heading = "What goes where")]
    layout: Option<LayoutArg>,
    /// Rows that `row-ragged` never parts [default: 1], or elements that `block-ragged` never parts [default: 128]
    #[arg(long, value_name = "N", help_heading = "What goes where")]
    block_size: Option<u64>,
    /// Which layers may share a rank under `layer-wise` [default: any]
    #[arg(long, value_enum, help_heading = "What goes where")]
    layer_order: Option<OrderArg>,
    /// Rules for `hybrid` in a JSON file: {"rules": [{"pattern", "choice"}], "default"}
    #[arg(long, value_name = "FILE", help_heading = "What goes where")]
    rules: Option<PathBuf>,
    /// Copies of the model, each sharded over its part of the ranks (HSDP)
    #[arg(long, value_name = "G", default_value_t = 1, help_heading = "What goes where")]
    replicas: u64,
    /// Where layers end: a pattern like model.layers.*.mlp.experts.* [default: at the first number in a name]
    #[arg(long, value_name = "PATTERN", help_heading = "What goes where")]
    pub(super) layers: Option<Pattern>,
    /// Units that stay gathered between forward and backward pass; may be given more than once
    #[arg(long, value_name = "PATTERN", help_heading = "What goes where")]
    pub(super) keep: Vec<Pattern>,

    /// Whose state is counted
    #[arg(long, value_enum, default_value_t, help_heading = "What it costs")]
    optimizer: OptimizerArg,
    /// Type in which trained parameters are held [default: that of the file]
    #[arg(long, value_name = "DTYPE", value_parser = dtype, help_heading = "What it costs")]
    param_dtype: Option<ElemType>,
    /// Types in which parameters and gradients travel, such as BF16,F32 [default: that in which they are held]
    #[arg(long, value_name = "DTYPE,DTYPE", value_parser = dtypes, help_heading = "What it costs")]
    mixed_precision: Option<(ElemType, ElemType)>,
    /// Units gathered ahead of the one in use
    #[arg(long, value_name = "UNITS", default_value_t = 1, help_heading = "What it costs")]
    prefetch: u64,
    /// Links for an estimate of time: h100, or ranks in a node with GB/s within and between nodes, such as 8:450:50
    #[arg(long, value_parser = links, help_heading = "What it costs")]
    links: Option<Links>,
    /// Memory of a device for all this, such as 24GiB
    #[arg(long, value_name = "BYTES", value_parser = bytes::parse, help_heading = "What it costs")]
    pub(super) budget: Option<u64>,

    /// Find the plan of `full` that sends for the shortest time, among those that fit the budget
    #[arg(long, requires = "budget", conflicts_with_all = ["strategy", "layout", "block_size", "layer_order", "rules", "replicas", "keep"], help_heading = "What to print")]
    pub(super) search: bool,
    /// Also list the shards of this rank
    #[arg(long, help_heading = "What to print")]
    rank: Option<u64>,
    /// Explain instead what becomes of this parameter
    #[arg(long, value_name = "NAME", help_heading = "What to print")]
    pub(super) explain: Option<String>,
    /// Explain instead what this rank holds
    #[arg(long, value_name = "RANK", conflicts_with = "explain", help_heading = "What to print")]
    explain_rank: Option<u64>,
    /// Tell instead what differs from a plan in JSON, and what has to move
    #[arg(long, value_name = "PLAN", conflicts_with_all = ["explain", "explain_rank"], help_heading = "What to print")]
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
    /// Whole tensors, of which as few are cut as exact balance allows
    WholeTensor,
    /// By rules; without a file of them: classifier and head whole, the rest over all ranks
    Hybrid,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum LayoutArg {
    /// Rows of each parameter, as FSDP2 does
    Dim0,
    /// Elements of each unit end to end, as FSDP1 does
    Flat,
    /// The same aligned, as FSDP1 does when it keeps original parameters
    FlatAligned,
    /// Each unit between rows
    RowRagged,
    /// Each unit between blocks of elements
    BlockRagged,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum OrderArg {
    /// Any
    Any,
    /// Neighbors only, as stages of a pipeline
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
    pub(super) fn hybrid(&self) -> Result<Option<Hybrid>> {
        match (self.strategy, &self.rules) {
            (None | Some(StrategyArg::Hybrid), Some(path)) => {
                input::read_json(path, "rules").map(Some).with_hint(hint::RULES)
            }
            (Some(StrategyArg::Hybrid), None) => Ok(Some(Hybrid::default())),
            (_, None) => Ok(None),
            (_, Some(_)) => Err(Error::Usage("--rules needs --strategy hybrid".into())),
        }
    }

    /// The strategy, given the rules if it goes by them.
    pub(super) fn strategy(&self, hybrid: Option<Hybrid>) -> Result<Hsdp<Box<dyn ShardingStrategy>>> {
        let strategy = self.strategy.unwrap_or(if hybrid.is_some() { StrategyArg::Hybrid } else { StrategyArg::Full });
        let only_for = |given: bool, option: &str, needed: StrategyArg, name: &str| {
            if given && strategy != needed {
                Err(Error::Usage(format!("{option} needs --strategy {name}")))
            } else {
                Ok(())
            }
        };
        only_for(self.layout.is_some(), "--layout", StrategyArg::Full, "full")?;
        only_for(self.layer_order.is_some(), "--layer-order", StrategyArg::LayerWise, "layer-wise")?;
        let layout = self.layout()?;
        let inner: Box<dyn ShardingStrategy> = match strategy {
            StrategyArg::Full => Box::new(Full::new(layout)),
            StrategyArg::LayerWise => Box::new(LayerWise::default().with_order(match self.layer_order {
                None | Some(OrderArg::Any) => LayerOrder::Any,
                Some(OrderArg::Contiguous) => LayerOrder::Contiguous,
            })),
            StrategyArg::WholeTensor => Box::new(WholeTensor),
            StrategyArg::Hybrid => Box::new(hybrid.unwrap_or_default()),
        };
        Ok(Hsdp::new(inner, self.replicas))
    }

    fn layout(&self) -> Result<Layout> {
        let layout = match (self.layout, self.block_size) {
            (Some(LayoutArg::RowRagged), rows) => Layout::RowRagged { rows: rows.unwrap_or(1) },
            (Some(LayoutArg::BlockRagged), None) => Layout::BLOCKS,
            (Some(LayoutArg::BlockRagged), Some(block)) => Layout::BlockRagged { block },
            (_, Some(_)) => return Err(Error::Usage("--block-size needs a ragged --layout".into())),
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
        self.mixed_precision.into_iter().fold(model, |model, (param, reduce)| model.with_mixed_precision(param, reduce))
    }
}

fn dtype(text: &str) -> Result<ElemType, String> {
    ElemType::from_name(&text.to_uppercase()).ok_or_else(|| String::from("no such dtype; examples are F32 and BF16"))
}

fn dtypes(text: &str) -> Result<(ElemType, ElemType), String> {
    let (param, reduce) = text.split_once(',').ok_or("two dtypes with a comma between them are needed")?;
    Ok((dtype(param)?, dtype(reduce)?))
}

fn links(text: &str) -> Result<Links, String> {
    if text.eq_ignore_ascii_case("h100") {
        return Ok(Links::H100);
    }
    let numbers: Vec<u64> = text.split(':').map_while(|number| number.parse().ok()).collect();
    let [ranks_per_node, intra, inter] = numbers[..] else {
        return Err(String::from("three whole numbers are needed: ranks in a node, GB/s within and between nodes"));
    };
    let link = |latency_ns, gb: u64| Link { latency_ns, bytes_per_s: gb.saturating_mul(1_000_000_000) };
    let [intra, inter] = [link(Links::H100.intra.latency_ns, intra), link(Links::H100.inter.latency_ns, inter)];
    Links::new(ranks_per_node, intra, inter).map_err(|error| error.to_string())
}
