//! How a run is sharded, and what each rank holds, or would hold if it were.

use candle_distributed::{
    plan::{
        ElemType, ParameterInfo, ShardingPlan,
        cost::{CostModel, PlanCost, RankCost, Runtime},
        strategy::{Full, Hsdp, ShardingStrategy},
    },
    train,
    types::WorldSize,
};
use clap::ValueEnum;
use serde::{Deserialize, Serialize};

use crate::{error::Result, strategy::Strategy, train::precision::Precision};

/// How a run is sharded, as `run.json` records it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Sharding {
    pub(crate) strategy: Strategy,
    pub(crate) keep: Keep,
    /// The number of copies of the model, each sharded over its own part of the devices.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub(crate) replicas: u64,
    /// The number of units gathered ahead.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub(crate) prefetch: usize,
    /// Whether optimizers ran inside the backward pass.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(crate) optimizer_in_backward: bool,
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

/// What units keep between the forward and the backward pass.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Keep {
    /// Its inputs: parameters are gathered twice, and it is computed again
    #[default]
    Inputs,
    /// All that it computes: parameters are gathered twice
    Graph,
    /// Its parameters and all that it computes
    Gathered,
}

impl From<Keep> for train::Keep {
    fn from(keep: Keep) -> Self {
        match keep {
            Keep::Inputs => Self::Inputs,
            Keep::Graph => Self::Graph,
            Keep::Gathered => Self::Gathered,
        }
    }
}

impl Sharding {
    /// What other processes must say alike.
    #[expect(clippy::expect_used, reason = "its fields are names and numbers")]
    pub(crate) fn words(&self) -> String {
        serde_json::to_string(self).expect("it is made of what JSON has")
    }

    /// The plan of parameters that have their units.
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

/// The plan of a run; of one that is not sharded, what each rank would hold if every one owned a
/// part of every parameter.
pub(crate) fn plan(
    sharding: Option<&Sharding>,
    parameters: &[ParameterInfo],
    world_size: WorldSize,
) -> Result<ShardingPlan> {
    match sharding {
        Some(sharding) => sharding.plan(parameters, world_size),
        None => Ok(Full::default().plan(parameters, world_size)?),
    }
}

/// What the plan of a run is priced by: the runtime that carries it out here.
pub(crate) fn cost_model(sharding: Option<&Sharding>, precision: Precision) -> CostModel {
    let model = CostModel::default().with_runtime(Runtime::Candle);
    let model = match precision {
        Precision::F32 => model,
        Precision::Bf16 => model.with_mixed_precision(ElemType::Bf16, ElemType::F32),
    };
    let Some(sharding) = sharding else { return model };
    let model = model.with_prefetch(sharding.prefetch as u64);
    if sharding.optimizer_in_backward { model.with_optimizer_in_backward() } else { model }
}

/// The bytes of parameters, gradients and optimizer state.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Needs {
    /// On a device that holds all of it.
    pub(crate) whole_bytes: u128,
    /// On the rank of a plan that holds the most.
    pub(crate) sharded_bytes: u128,
    /// Whether the run is sharded by that plan.
    pub(crate) is_sharded: bool,
}

impl Needs {
    /// The needs of a model whose plan costs `sharded`.
    pub(crate) fn of(
        parameters: &[ParameterInfo],
        sharded: &PlanCost,
        is_sharded: bool,
    ) -> Result<Self> {
        let whole =
            plan(None, parameters, WorldSize::ONE)?.cost(&cost_model(None, Precision::F32))?;
        Ok(Self { whole_bytes: largest(&whole), sharded_bytes: largest(sharded), is_sharded })
    }
}

/// The bytes on the rank that holds the most.
fn largest(cost: &PlanCost) -> u128 {
    cost.ranks.iter().map(RankCost::total_bytes).fold(0, u128::max)
}

#[cfg(test)]
mod tests {
    use candle_distributed::plan::strategy::Layout;

    use super::*;

    impl Sharding {
        /// As by `--strategy full`.
        pub(crate) fn full() -> Self {
            Self {
                strategy: Strategy::Full(Layout::Dim0),
                keep: Keep::Inputs,
                replicas: 1,
                prefetch: 0,
                optimizer_in_backward: false,
            }
        }
    }

    #[test]
    fn what_is_as_usual_is_not_recorded() {
        let full = Sharding::full();
        assert_eq!(full.words(), r#"{"strategy":{"full":"dim0"},"keep":"inputs"}"#);
        let other =
            Sharding { replicas: 2, prefetch: 1, optimizer_in_backward: true, ..full.clone() };
        for sharding in [full, other] {
            assert_eq!(serde_json::from_str::<Sharding>(&sharding.words()).unwrap(), sharding);
        }
    }
}
