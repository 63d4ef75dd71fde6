//! `plan`: which rank owns which part of every parameter of a model, and what that costs.

use std::{
    io::Read,
    path::{Path, PathBuf},
};

use candle_distributed::{
    plan::{
        CostModel, Full, Hybrid, LayerWise, Layout, Optimizer, ParameterInfo, PlanReport, ShardingStrategy, source,
    },
    types::{Placement, WorldSize},
};
use clap::ValueEnum;

use crate::{
    error::{Error, Result},
    input,
    output::{self, Format},
};

/// Plan which rank owns which part of a model, and print what each holds and sends.
///
/// Only the names, shapes and types of the tensors are read, never their values.
///
/// Example: candle-distributed plan model.safetensors --world-size 8
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// A safetensors file, a model.safetensors.index.json, a folder with either, or a manifest {name: {"dtype", "shape"}}
    model: PathBuf,
    /// Number of ranks that share the model
    #[arg(long)]
    world_size: u64,
    /// How parameters are spread
    #[arg(long, value_enum, default_value_t)]
    strategy: StrategyArg,
    /// How `full` cuts them [default: dim0]
    #[arg(long, value_enum)]
    layout: Option<LayoutArg>,
    /// Whose state is counted
    #[arg(long, value_enum, default_value_t)]
    optimizer: OptimizerArg,
    /// Also list the shards of this rank
    #[arg(long)]
    rank: Option<u64>,
    /// A table, or JSON
    #[arg(long, value_enum, default_value_t)]
    format: Format,
}

#[derive(Clone, Copy, Debug, Default, ValueEnum)]
enum StrategyArg {
    /// Every parameter over all ranks
    #[default]
    Full,
    /// Whole layers
    LayerWise,
    /// Classifier and head whole, the rest over all ranks
    Hybrid,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum LayoutArg {
    /// Rows of each parameter, as FSDP2 does
    Dim0,
    /// Elements of each layer end to end, as FSDP1 does
    Flat,
}

#[derive(Clone, Copy, Debug, Default, ValueEnum)]
enum OptimizerArg {
    /// Two moments and a step count (Adam, AdamW)
    #[default]
    Adam,
    /// One momentum buffer
    Sgd,
    /// Nothing
    None,
}

impl Args {
    fn strategy(&self) -> Result<Box<dyn ShardingStrategy>> {
        Ok(match (self.strategy, self.layout) {
            (StrategyArg::Full, None | Some(LayoutArg::Dim0)) => Box::new(Full::new(Layout::Dim0)),
            (StrategyArg::Full, Some(LayoutArg::Flat)) => Box::new(Full::new(Layout::Flat)),
            (StrategyArg::LayerWise, None) => Box::new(LayerWise::default()),
            (StrategyArg::Hybrid, None) => Box::new(Hybrid::default()),
            (_, Some(_)) => return Err(Error::Usage("--layout needs --strategy full".into())),
        })
    }

    fn cost_model(&self) -> CostModel {
        CostModel::default().with_optimizer(match self.optimizer {
            OptimizerArg::Adam => Optimizer::Adam,
            OptimizerArg::Sgd => Optimizer::Sgd,
            OptimizerArg::None => Optimizer::None,
        })
    }
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let world_size = WorldSize::new(args.world_size)?;
    let rank = args.rank.map(|rank| Placement::new(rank, args.world_size)).transpose()?.map(Placement::rank);
    let strategy = args.strategy()?;
    let plan = in_file(&args.model, strategy.plan(&read_model(&args.model)?, world_size))?;
    let report = PlanReport::new(&plan, &args.cost_model(), rank)?;
    match args.format {
        Format::Text => output::text(|out| writeln!(out, "{report}")),
        Format::Json => output::json(&report),
    }
}

const SINGLE_FILE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// The parameters of whatever kind of model lies at `path`.
fn read_model(path: &Path) -> Result<Vec<ParameterInfo>> {
    if path.is_dir() {
        let index = path.join(INDEX);
        return if index.exists() { read_index(&index) } else { read_safetensors(&path.join(SINGLE_FILE)) };
    }
    match path.to_string_lossy() {
        name if name.ends_with(".safetensors") => read_safetensors(path),
        name if name.ends_with(".safetensors.index.json") => read_index(path),
        _ => in_file(path, source::from_manifest(&input::read_file(path)?)),
    }
}

fn read_index(path: &Path) -> Result<Vec<ParameterInfo>> {
    let text = input::read_file(path)?;
    // The index itself is at fault for what no other file is.
    source::from_index(&text, |file| read_safetensors(&path.with_file_name(file))).map_err(|error| match error {
        Error::Plan(source) => Error::Model { path: path.into(), source },
        error => error,
    })
}

fn read_safetensors(path: &Path) -> Result<Vec<ParameterInfo>> {
    let mut file = input::open(path)?;
    let mut bytes = Vec::new();
    let failed = |source| Error::Read { path: path.into(), source };
    file.by_ref().take(source::PREFIX_LEN).read_to_end(&mut bytes).map_err(failed)?;
    if let Ok(prefix) = <[u8; 8]>::try_from(&bytes[..]) {
        let header_len = in_file(path, source::header_len(prefix))?;
        file.take(header_len).read_to_end(&mut bytes).map_err(failed)?;
    }
    in_file(path, source::from_safetensors(&bytes))
}

/// Names the file in which a model's description was found wanting.
fn in_file<T>(path: &Path, result: Result<T, candle_distributed::plan::Error>) -> Result<T> {
    result.map_err(|source| Error::Model { path: path.into(), source })
}
