//! A plan with its cost beside it, ready to be printed.

mod diff;
mod render;

use std::num::NonZeroUsize;

use core_types::Rank;
use serde::{Serialize, Serializer};

pub use self::diff::PlanDiff;
use crate::{
    cost::{CostModel, PlanCost},
    cut::ShardAssignment,
    error::Result,
    param::ParameterInfo,
    plan::ShardingPlan,
    strategy::LayerBalance,
};

/// A plan and what it costs, as a text for people or as JSON for programs.
///
/// [`Display`](std::fmt::Display) gives the text, [`Serialize`] the JSON, both from the same
/// numbers. The JSON object is that of the [`ShardingPlan`] with `ranks`, `max_over_mean` and
/// `collectives` added, so it can be read back as a plan; `layer_balance`, `step_seconds`, `budget`
/// and `process` where they are known; with one rank asked for also `rank` and `shards`, the parts it
/// holds.
///
/// # Examples
///
/// ```
/// use core_types::{Placement, WorldSize};
/// use fsdp_plan::{
///     ElemType, ParameterInfo, ShardingPlan,
///     cost::CostModel,
///     report::PlanReport,
///     strategy::{Full, ShardingStrategy},
/// };
///
/// let parameters = [ParameterInfo::new("fc.weight", [10, 4], ElemType::F32)?];
/// let plan = Full::default().plan(&parameters, WorldSize::new(4)?)?;
/// let last = Placement::new(3, 4)?.rank();
/// let report = PlanReport::new(&plan, &CostModel::default(), Some(last))?;
///
/// let json = serde_json::to_value(&report).unwrap();
/// assert_eq!(json["ranks"][3]["param_bytes"], 16);
/// assert_eq!(json["shards"][0]["dim0_start"], 9);
/// assert_eq!(serde_json::from_value::<ShardingPlan>(json).unwrap(), plan);
///
/// println!("{report}");
/// # Ok::<(), fsdp_plan::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PlanReport<'a> {
    #[serde(flatten)]
    pub(crate) plan: &'a ShardingPlan,
    #[serde(flatten)]
    pub(crate) cost: PlanCost,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) layer_balance: Option<LayerBalance>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) budget: Option<Budget>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) process: Option<Process>,
    #[serde(flatten)]
    pub(crate) of_rank: Option<RankReport<'a>>,
}

/// Whether the plan fits the memory of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Budget {
    pub(crate) bytes: u64,
    pub(crate) peak_bytes: u128,
    pub(crate) missing_bytes: u128,
}

/// What a process of several ranks holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Process {
    pub(crate) slots: NonZeroUsize,
    pub(crate) peak_bytes: u128,
}

/// What one rank holds.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct RankReport<'a> {
    pub(crate) rank: Rank,
    pub(crate) shards: Vec<NamedShard<'a>>,
}

/// A shard and its parameter, which is written to JSON by its name.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct NamedShard<'a> {
    #[serde(rename = "name", serialize_with = "serialize_name")]
    pub(crate) info: &'a ParameterInfo,
    #[serde(flatten)]
    pub(crate) shard: ShardAssignment,
}

fn serialize_name<S: Serializer>(info: &ParameterInfo, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(info.name())
}

impl<'a> PlanReport<'a> {
    /// Costs `plan` under `model`, and lists the shards of `rank` if one is given.
    ///
    /// # Errors
    ///
    /// [`Error::World`](crate::Error::World) if the plan's world has no such rank, and what
    /// [`ShardingPlan::cost`] returns.
    pub fn new(plan: &'a ShardingPlan, model: &CostModel, rank: Option<Rank>) -> Result<Self> {
        let of_rank = rank.map(|rank| RankReport::new(plan, rank)).transpose()?;
        Ok(Self {
            plan,
            cost: plan.cost(model)?,
            layer_balance: plan.layer_balance(),
            budget: None,
            process: None,
            of_rank,
        })
    }

    /// Also tells whether each rank gets along with `bytes` of memory: field `budget` with `bytes`,
    /// `peak_bytes` and `missing_bytes`.
    #[must_use]
    pub fn with_budget(mut self, bytes: u64) -> Self {
        let peak_bytes = self.cost.peak_bytes();
        self.budget = Some(Budget {
            bytes,
            peak_bytes,
            missing_bytes: peak_bytes.saturating_sub(bytes.into()),
        });
        self
    }

    /// Also tells what a process of so many ranks needs that share what is gathered: field `process`
    /// with `slots` and [`peak_bytes`](PlanCost::process_peak_bytes).
    #[must_use]
    pub fn with_process(mut self, slots: NonZeroUsize) -> Self {
        self.process = Some(Process { slots, peak_bytes: self.cost.process_peak_bytes(slots) });
        self
    }

    /// The cost, rank by rank.
    pub fn cost(&self) -> &PlanCost {
        &self.cost
    }
}

impl<'a> RankReport<'a> {
    fn new(plan: &'a ShardingPlan, rank: Rank) -> Result<Self> {
        let shards = plan
            .shards_of_rank(rank)?
            .map(|(parameter, shard)| NamedShard { info: parameter.info(), shard });
        Ok(Self { rank, shards: shards.collect() })
    }
}
