//! Arguments of `plan`, and their conversion to types of the planner.

use std::{num::NonZeroUsize, path::PathBuf};

use candle_distributed::{
    finetune::spec::Spec,
    plan::{
        ElemType, Pattern, ShardingPlan,
        cost::{Activations, CostModel, Link, Links, Optimizer, Runtime},
    },
    types::{Placement, Rank, WorldSize},
};
use clap::ValueEnum;

use crate::{
    bytes,
    error::{Error, Result},
    help::examples,
    strategy::StrategyArgs,
};

/// Shard a model over ranks, and print the memory and traffic of each rank.
///
/// Only the names, shapes and types of the tensors are read, never their values.
#[derive(Debug, clap::Args)]
#[command(after_help = examples![
    "# How much memory and traffic does each of 8 ranks need?"
    "candle-distributed plan model.safetensors --world-size 8"
    "# Does it fit in 24 GiB per device, gathered in BF16 and reduced in F32? If not, which plan does?"
    "candle-distributed plan model.safetensors --world-size 8 --mixed-precision BF16,F32 --budget 24GiB"
    "candle-distributed plan model.safetensors --world-size 8 --mixed-precision BF16,F32 --budget 24GiB --search"
    "# How much data moves if two ranks are lost?"
    "candle-distributed plan model.safetensors --world-size 8 --format json > plan.json"
    "candle-distributed plan model.safetensors --world-size 6 --against plan.json"
])]
pub(crate) struct PlanArgs {
    /// A safetensors file, a model.safetensors.index.json, a folder with either or with a config.json,
    /// the folder of a run, or a manifest {name: {"dtype", "shape"}}
    pub(super) model: PathBuf,
    /// Number of ranks that share the model [default: that of a run]
    #[arg(long)]
    world_size: Option<u64>,

    #[command(flatten)]
    pub(super) sharding: StrategyArgs,
    /// Pattern that layers match, such as model.layers.*.mlp.experts.* [default: names up to their
    /// first number]
    #[arg(long, value_name = "PATTERN", help_heading = "Sharding")]
    pub(super) layer_pattern: Option<Pattern>,
    /// Units that stay gathered between the forward and the backward pass; may be repeated
    #[arg(long, value_name = "PATTERN", help_heading = "Sharding")]
    pub(super) stay_gathered: Vec<Pattern>,

    /// Optimizer to count the state of
    #[arg(long, value_enum, default_value_t, help_heading = "Cost model")]
    optimizer: OptimizerArg,
    /// Update each unit as soon as its gradients are reduced, so that only one unit has gradients
    /// at a time
    #[arg(long, help_heading = "Cost model")]
    optimizer_in_backward: bool,
    /// Dtype of trained parameters [default: as in the file]
    #[arg(long, value_name = "DTYPE", value_parser = parse_dtype, help_heading = "Cost model")]
    param_dtype: Option<ElemType>,
    /// Dtype that parameters are gathered in, and dtype that gradients are reduced in, such as BF16,F32
    /// [default: as stored]
    #[arg(
        long,
        value_name = "DTYPE,DTYPE",
        value_parser = parse_dtypes,
        help_heading = "Cost model"
    )]
    mixed_precision: Option<(ElemType, ElemType)>,
    /// Runtime to predict memory and traffic for [default: candle for a run, else torch]
    #[arg(long, value_enum, help_heading = "Cost model")]
    runtime: Option<RuntimeArg>,
    /// Number of units to gather in advance [default: 1 for torch, 0 for candle]
    #[arg(long, value_name = "UNITS", help_heading = "Cost model")]
    prefetch: Option<u64>,
    /// Number of tokens of a batch on each rank, to estimate the memory of activations
    #[arg(long, value_name = "N", requires = "width", help_heading = "Cost model")]
    tokens: Option<u64>,
    /// Hidden size of the model, to estimate the memory of activations
    #[arg(long, value_name = "N", requires = "tokens", help_heading = "Cost model")]
    width: Option<u64>,
    /// Also print the memory of a process with this number of ranks, such as virtual CPU devices, which
    /// share gathered parameters
    #[arg(long, value_name = "RANKS", help_heading = "Cost model")]
    pub(super) slots: Option<NonZeroUsize>,
    /// Link speeds, to estimate communication time: h100, or ranks per node and GB/s within and
    /// between nodes, such as 8:450:50
    #[arg(long, value_parser = parse_links, help_heading = "Cost model")]
    links: Option<Links>,
    /// Memory per device, such as 24GiB
    #[arg(long, value_name = "BYTES", value_parser = bytes::parse, help_heading = "Cost model")]
    pub(super) budget: Option<u64>,

    /// Search the `full` layouts for the plan with the least communication time that fits the
    /// budget
    #[arg(
        long,
        requires = "budget",
        conflicts_with_all = [
            "strategy", "layout", "block_size", "layer_order", "rules", "replicas",
            "stay_gathered"
        ],
        help_heading = "Output"
    )]
    pub(super) search: bool,
    /// Also list the shards of this rank
    #[arg(long, help_heading = "Output")]
    rank: Option<u64>,
    /// Explain the sharding of this parameter, instead of the report
    #[arg(long, value_name = "NAME", help_heading = "Output")]
    pub(super) explain: Option<String>,
    /// Explain the memory of this rank, instead of the report
    #[arg(long, value_name = "RANK", conflicts_with = "explain", help_heading = "Output")]
    explain_rank: Option<u64>,
    /// Compare with a stored JSON plan: differences, and data to move
    #[arg(
        long,
        value_name = "PLAN",
        conflicts_with_all = ["explain", "explain_rank"],
        help_heading = "Output"
    )]
    pub(super) against: Option<PathBuf>,
    /// Output format
    #[arg(long, value_enum, default_value_t, help_heading = "Output")]
    pub(super) format: FormatArg,
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

#[derive(Clone, Copy, Debug, ValueEnum)]
enum RuntimeArg {
    /// PyTorch's FSDP
    Torch,
    /// This project's `FullyShard` on candle, which does not pad and recomputes units
    Candle,
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

impl PlanArgs {
    /// Returns the number of ranks: that of the option, or that of `run`.
    pub(super) fn world_size(&self, run: Option<&Spec>) -> Result<WorldSize> {
        let n_ranks = self.world_size.or_else(|| Some(run?.session().world_size));
        let missing =
            || Error::usage("--world-size is missing: the number of ranks that share the model");
        Ok(WorldSize::new(n_ranks.ok_or_else(missing)?)?)
    }

    /// Returns the rank to list the shards of.
    pub(super) fn rank(&self, plan: &ShardingPlan) -> Result<Option<Rank>> {
        placed_rank(self.rank, plan)
    }

    /// Returns the rank to explain.
    pub(super) fn explain_rank(&self, plan: &ShardingPlan) -> Result<Option<Rank>> {
        placed_rank(self.explain_rank, plan)
    }

    /// Returns true if an option asks for another sharding than that of a run.
    pub(super) fn changes_sharding(&self) -> bool {
        let is_patterned = self.layer_pattern.is_some() || !self.stay_gathered.is_empty();
        self.sharding.is_given() || self.search || is_patterned
    }

    /// Returns the cost model of a run, or the default one, with the given options.
    pub(super) fn cost_model(&self, of_run: Option<CostModel>) -> Result<CostModel> {
        let optimizer = match self.optimizer {
            OptimizerArg::Adam => Optimizer::Adam,
            OptimizerArg::AdamMixed => Optimizer::AdamMixed,
            OptimizerArg::Adam8bit => Optimizer::Adam8bit,
            OptimizerArg::Sgd => Optimizer::Sgd,
            OptimizerArg::None => Optimizer::None,
        };
        let default_runtime = if of_run.is_some() { Runtime::Candle } else { Runtime::Torch };
        let model = of_run.unwrap_or_default();
        Ok(CostModel {
            optimizer,
            optimizer_in_backward: self.optimizer_in_backward || model.optimizer_in_backward,
            runtime: self.runtime.map_or(model.runtime, Into::into),
            prefetch: self.prefetch.or(model.prefetch),
            activations: self.activations(default_runtime)?.or(model.activations),
            links: self.links.or(model.links),
            param_dtype: self.param_dtype.or(model.param_dtype),
            mixed_precision: self.mixed_precision.or(model.mixed_precision),
            ..model
        })
    }

    fn activations(&self, default_runtime: Runtime) -> Result<Option<Activations>> {
        let Some((tokens, width)) = self.tokens.zip(self.width) else { return Ok(None) };
        let gathered_dtype = self.mixed_precision.map(|(param, _)| param);
        let dtype = gathered_dtype.or(self.param_dtype).unwrap_or(ElemType::F32);
        let runtime = self.runtime.map_or(default_runtime, Runtime::from);
        Ok(Some(Activations::for_transformer(tokens, width, dtype, runtime)?))
    }
}

/// Checks that a rank is below the number of ranks.
fn placed_rank(rank: Option<u64>, plan: &ShardingPlan) -> Result<Option<Rank>> {
    let place = |rank| Placement::new(rank, plan.world_size().as_u64());
    Ok(rank.map(place).transpose()?.map(Placement::rank))
}

impl From<RuntimeArg> for Runtime {
    fn from(runtime: RuntimeArg) -> Self {
        match runtime {
            RuntimeArg::Torch => Self::Torch,
            RuntimeArg::Candle => Self::Candle,
        }
    }
}

fn parse_dtype(text: &str) -> Result<ElemType, String> {
    ElemType::from_name(&text.to_uppercase())
        .ok_or_else(|| String::from("unknown dtype; examples are F32 and BF16"))
}

fn parse_dtypes(text: &str) -> Result<(ElemType, ElemType), String> {
    let (param, reduce) =
        text.split_once(',').ok_or("expected two dtypes with a comma between them")?;
    Ok((parse_dtype(param)?, parse_dtype(reduce)?))
}

fn parse_links(text: &str) -> Result<Links, String> {
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
