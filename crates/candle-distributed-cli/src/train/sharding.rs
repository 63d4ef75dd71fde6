//! What each rank would hold of the model if it were sharded.

use candle_core::{DType, Device};
use candle_distributed::{
    plan::{
        ParameterInfo, ShardingPlan,
        cost::{CostModel, PlanCost, RankCost},
        strategy::{Full, ShardingStrategy},
    },
    train,
    types::WorldSize,
};
use candle_nn::{VarBuilder, VarMap};

use crate::{
    error::Result,
    train::{
        model::{Config, Transformer},
        parameters,
    },
};

/// The bytes that parameters, gradients and optimizer state take.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Needs {
    /// On one device that holds all of it, as every device of a run does.
    pub(crate) whole_bytes: u128,
    /// On the rank of a plan that holds the most.
    pub(crate) sharded_bytes: u128,
}

impl Needs {
    /// Those of a model whose [`plan`] costs so much.
    pub(crate) fn of(parameters: &[ParameterInfo], sharded: &PlanCost) -> Result<Self> {
        let largest =
            |cost: &PlanCost| cost.ranks.iter().map(RankCost::total_bytes).max().unwrap_or(0);
        let whole = plan(parameters, WorldSize::ONE)?.cost(&CostModel::default())?;
        Ok(Self { whole_bytes: largest(&whole), sharded_bytes: largest(sharded) })
    }
}

/// The plan of a run: every rank a part of everything.
pub(crate) fn plan(parameters: &[ParameterInfo], world_size: WorldSize) -> Result<ShardingPlan> {
    Ok(Full::default().plan(parameters, world_size)?)
}

/// The parameters of a model, as a planner sees them.
pub(crate) fn parameters_in(vars: &VarMap) -> Result<Vec<ParameterInfo>> {
    let vars = parameters::by_name(vars)?;
    Ok(train::parameter_infos(vars.iter().map(|(name, var)| (name, var.as_tensor())))?)
}

/// Those of a model of these sizes.
pub(crate) fn parameters_of(config: Config) -> Result<Vec<ParameterInfo>> {
    let vars = VarMap::new();
    Transformer::new(config, &VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu))?;
    parameters_in(&vars)
}
