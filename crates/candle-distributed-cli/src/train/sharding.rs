//! What each rank would hold if the model were sharded.

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

/// The bytes of parameters, gradients and optimizer state.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Needs {
    /// On a device that holds all of it, as every device of a run does.
    pub(crate) whole_bytes: u128,
    /// On the rank of a plan that holds the most.
    pub(crate) sharded_bytes: u128,
}

impl Needs {
    /// The needs of a model whose [`plan`] costs `sharded`.
    pub(crate) fn of(parameters: &[ParameterInfo], sharded: &PlanCost) -> Result<Self> {
        Ok(Self { whole_bytes: whole_bytes(parameters)?, sharded_bytes: largest(sharded) })
    }
}

/// The bytes of parameters, gradients and optimizer state on a device that holds all of it.
pub(crate) fn whole_bytes(parameters: &[ParameterInfo]) -> Result<u128> {
    Ok(largest(&plan(parameters, WorldSize::ONE)?.cost(&CostModel::default())?))
}

/// The bytes on the rank that holds the most.
fn largest(cost: &PlanCost) -> u128 {
    cost.ranks.iter().map(RankCost::total_bytes).fold(0, u128::max)
}

/// The plan of a run: every rank owns a part of every parameter.
pub(crate) fn plan(parameters: &[ParameterInfo], world_size: WorldSize) -> Result<ShardingPlan> {
    Ok(Full::default().plan(parameters, world_size)?)
}

/// The parameters in `vars`, as a planner sees them.
pub(crate) fn parameters_in(vars: &VarMap) -> Result<Vec<ParameterInfo>> {
    let vars = parameters::by_name(vars)?;
    Ok(train::parameter_infos(vars.iter().map(|(name, var)| (name, var.as_tensor())))?)
}

/// The parameters of a model of these sizes.
pub(crate) fn parameters_of(config: Config) -> Result<Vec<ParameterInfo>> {
    let vars = VarMap::new();
    Transformer::new(config, &VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu))?;
    parameters_in(&vars)
}
