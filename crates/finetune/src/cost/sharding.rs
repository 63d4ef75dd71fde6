//! The sharding of a run, and the bytes of each rank.

use core_types::WorldSize;
use fsdp_plan::{
    ElemType, ParameterInfo, ShardingPlan,
    cost::{CostModel, PlanCost, RankCost, Runtime},
    strategy::{
        Full, Hsdp, Hybrid, LayerSharing, LayerWise, Layout, Matches, ShardingStrategy, WholeTensor,
    },
};
use serde::{Deserialize, Serialize};

use crate::{error::Result, models::Precision};

/// The sharding of a run, as `run.json` records it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sharding {
    /// Distribution of the parameters over the ranks of a copy.
    pub strategy: Strategy,
    /// Values that units store from their forward to their backward pass.
    pub keep: Keep,
    /// Number of copies of the model, each sharded over a group of devices.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub replicas: u64,
    /// Number of units gathered in advance.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub prefetch: usize,
    /// Whether optimizers run inside the backward pass, so that the gradients of all units never
    /// exist at the same time. A run sets it if it does not clip gradients.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub optimizer_in_backward: bool,
}

impl Default for Sharding {
    /// Shards the rows of every parameter over all ranks, like `--strategy full` of the command
    /// line.
    fn default() -> Self {
        Self {
            strategy: Strategy::Full(Layout::Dim0),
            keep: Keep::Inputs,
            replicas: 1,
            prefetch: 0,
            optimizer_in_backward: false,
        }
    }
}

fn one() -> u64 {
    1
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes references")]
fn is_one(number: &u64) -> bool {
    *number == 1
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes references")]
fn is_zero(number: &usize) -> bool {
    *number == 0
}

/// A distribution of parameters over ranks, as `run.json` records it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Strategy {
    /// Every parameter over all ranks.
    Full(Layout),
    /// Whole layers.
    LayerWise {
        /// Whether the layers of a rank are consecutive.
        contiguous: bool,
    },
    /// Whole tensors, except for the few splits that exact balance needs.
    WholeTensor,
    /// By rules.
    Hybrid(Hybrid),
}

impl Strategy {
    /// Returns the name of the strategy.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Full(_) => "full",
            Self::LayerWise { .. } => "layer-wise",
            Self::WholeTensor => "whole-tensor",
            Self::Hybrid(_) => "hybrid",
        }
    }

    /// Returns the matches of rules and parameters, or `None` without rules.
    pub fn matches<'a>(&self, parameters: &'a [ParameterInfo]) -> Option<Matches<'a>> {
        match self {
            Self::Hybrid(rules) => Some(rules.matches(parameters)),
            Self::Full(_) | Self::LayerWise { .. } | Self::WholeTensor => None,
        }
    }

    /// Returns the planner.
    pub fn planner(&self) -> Box<dyn ShardingStrategy> {
        match self {
            Self::Full(layout) => Box::new(Full::new(*layout)),
            Self::LayerWise { contiguous } => {
                let sharing =
                    if *contiguous { LayerSharing::Contiguous } else { LayerSharing::Any };
                Box::new(LayerWise { sharing })
            }
            Self::WholeTensor => Box::new(WholeTensor),
            Self::Hybrid(rules) => Box::new(rules.clone()),
        }
    }
}

/// The values that a unit stores from its forward to its backward pass.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "clap", derive(clap::ValueEnum))]
#[serde(rename_all = "snake_case")]
#[expect(clippy::exhaustive_enums, reason = "mirrors the enum of dist-train")]
pub enum Keep {
    /// Only the inputs: parameters are gathered twice, and the unit is recomputed
    #[default]
    Inputs,
    /// The computed graph: parameters are gathered twice
    Graph,
    /// The computed graph and the gathered parameters
    Gathered,
}

impl From<Keep> for dist_train::Keep {
    fn from(keep: Keep) -> Self {
        match keep {
            Keep::Inputs => Self::Inputs,
            Keep::Graph => Self::Graph,
            Keep::Gathered => Self::Gathered,
        }
    }
}

impl Sharding {
    /// Returns the sharding as JSON, for comparison between processes.
    #[expect(clippy::expect_used, reason = "its fields are names and numbers")]
    pub fn to_json(&self) -> String {
        serde_json::to_string(self).expect("all fields are JSON values")
    }

    /// Plans the sharding of parameters with units.
    ///
    /// # Errors
    ///
    /// [`Error::Plan`](crate::Error::Plan) if they cannot be sharded over `world_size` ranks.
    pub(crate) fn plan(
        &self,
        parameters: &[ParameterInfo],
        world_size: WorldSize,
    ) -> Result<ShardingPlan> {
        let strategy = Hsdp::new(self.strategy.planner(), self.replicas);
        let plan = strategy.plan(parameters, world_size)?;
        Ok(match self.keep {
            Keep::Gathered => {
                let all: Vec<String> = plan.units().into_iter().map(str::to_owned).collect();
                plan.with_kept_units(all)?
            }
            Keep::Inputs | Keep::Graph => plan,
        })
    }
}

/// The plan of a run, and its cost. If the run is not sharded, this is the plan of the default strategy.
#[derive(Debug)]
#[non_exhaustive]
pub struct RunPlan {
    /// Parameters in the order of their names.
    pub parameters: Vec<ParameterInfo>,
    /// The plan.
    pub plan: ShardingPlan,
    /// Cost model of the runtime that carries out the plan.
    pub cost_model: CostModel,
    /// Cost of the plan.
    pub cost: PlanCost,
    /// Bytes of parameters, gradients and optimizer state.
    pub bytes: ModelBytes,
}

impl RunPlan {
    /// Plans a run over `world_size` devices.
    pub(crate) fn new(
        parameters: Vec<ParameterInfo>,
        sharding: Option<&Sharding>,
        precision: Precision,
        world_size: WorldSize,
    ) -> Result<Self> {
        let plan = plan(sharding, &parameters, world_size)?;
        let cost_model = cost_model(sharding, precision);
        let cost = plan.cost(&cost_model)?;
        let bytes = ModelBytes::new(&parameters, &cost, sharding.is_some())?;
        Ok(Self { parameters, plan, cost_model, cost, bytes })
    }
}

/// Returns the plan of a run. If the run is not sharded, this is the plan of the default strategy.
fn plan(
    sharding: Option<&Sharding>,
    parameters: &[ParameterInfo],
    world_size: WorldSize,
) -> Result<ShardingPlan> {
    match sharding {
        Some(sharding) => sharding.plan(parameters, world_size),
        None => Ok(Full::default().plan(parameters, world_size)?),
    }
}

/// Returns the cost model of a run's runtime.
pub(crate) fn cost_model(sharding: Option<&Sharding>, precision: Precision) -> CostModel {
    let mixed_precision = match precision {
        Precision::F32 => None,
        Precision::Bf16 => Some((ElemType::Bf16, ElemType::F32)),
    };
    CostModel {
        runtime: Runtime::Candle,
        mixed_precision,
        prefetch: sharding.map(|sharding| sharding.prefetch as u64),
        optimizer_in_backward: sharding.is_some_and(|sharding| sharding.optimizer_in_backward),
        ..CostModel::default()
    }
}

/// The bytes of parameters, gradients and optimizer state, with and without sharding.
#[derive(Clone, Copy, Debug)]
pub struct ModelBytes {
    /// Bytes of a device that has the whole model.
    pub whole_bytes: u128,
    /// Bytes of the largest rank of a plan.
    pub sharded_bytes: u128,
    /// Whether the run is sharded by this plan.
    pub is_sharded: bool,
}

impl ModelBytes {
    /// Computes the bytes of a model from the cost of its plan.
    fn new(parameters: &[ParameterInfo], sharded: &PlanCost, is_sharded: bool) -> Result<Self> {
        let unsharded =
            plan(None, parameters, WorldSize::ONE)?.cost(&cost_model(None, Precision::F32))?;
        Ok(Self { whole_bytes: largest(&unsharded), sharded_bytes: largest(sharded), is_sharded })
    }
}

/// Returns the bytes of the rank with the most bytes.
fn largest(cost: &PlanCost) -> u128 {
    cost.ranks.iter().map(RankCost::total_bytes).fold(0, u128::max)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn defaults_are_not_recorded() {
        let full = Sharding::default();
        assert_eq!(full.to_json(), r#"{"strategy":{"full":"dim0"},"keep":"inputs"}"#);
        let other =
            Sharding { replicas: 2, prefetch: 1, optimizer_in_backward: true, ..full.clone() };
        for sharding in [full, other] {
            assert_eq!(serde_json::from_str::<Sharding>(&sharding.to_json()).unwrap(), sharding);
        }
    }

    #[test]
    fn strategies_round_trip() {
        for strategy in [
            Strategy::Full(Layout::RowRagged { rows: 3 }),
            Strategy::LayerWise { contiguous: true },
            Strategy::WholeTensor,
            Strategy::Hybrid(Hybrid::default()),
        ] {
            let json = serde_json::to_string(&strategy).unwrap();
            assert_eq!(serde_json::from_str::<Strategy>(&json).unwrap(), strategy, "{json}");
            assert!(strategy.planner().name().starts_with(&strategy.name()[..4]), "{json}");
        }
    }
}
