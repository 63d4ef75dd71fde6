//! Reports of a plan and its cost.

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

/// A plan and its cost, as text for people or as JSON for programs.
///
/// [`Display`](std::fmt::Display) writes the text and [`Serialize`] the JSON, from the same numbers. The JSON object is
/// the [`ShardingPlan`] with `ranks`, `max_over_mean` and `collectives` added, so it can be read back as a plan. It
/// also has `layer_balance`, `step_seconds`, `budget` and `process` if known, and for a requested rank `rank` and
/// `shards`.
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
#[non_exhaustive]
pub struct PlanReport<'a> {
    #[serde(flatten)]
    pub(crate) plan: &'a ShardingPlan,
    /// Cost of the plan.
    #[serde(flatten)]
    pub cost: PlanCost,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) layer_balance: Option<LayerBalance>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) budget: Option<BudgetReport>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) process: Option<ProcessReport>,
    #[serde(flatten)]
    pub(crate) rank_report: Option<RankReport<'a>>,
}

/// A comparison of the peak memory with a budget.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct BudgetReport {
    pub(crate) bytes: u64,
    pub(crate) peak_bytes: u128,
    pub(crate) missing_bytes: u128,
}

/// The peak memory of a process with several ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct ProcessReport {
    pub(crate) slots: NonZeroUsize,
    pub(crate) peak_bytes: u128,
}

/// The shards of one rank.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct RankReport<'a> {
    pub(crate) rank: Rank,
    pub(crate) shards: Vec<NamedShard<'a>>,
}

/// A shard with its parameter, serialized by name.
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
    /// Computes the cost of `plan` under `model`, and lists the shards of `rank` if given.
    ///
    /// # Errors
    ///
    /// [`Error::World`](crate::Error::World) for an unknown rank, and the errors of
    /// [`ShardingPlan::cost`].
    pub fn new(plan: &'a ShardingPlan, model: &CostModel, rank: Option<Rank>) -> Result<Self> {
        let rank_report = rank.map(|rank| RankReport::new(plan, rank)).transpose()?;
        Ok(Self {
            plan,
            cost: plan.cost(model)?,
            layer_balance: plan.layer_balance(),
            budget: None,
            process: None,
            rank_report,
        })
    }

    /// Compares the peak memory with a budget of `bytes` per rank: field `budget` with `bytes`,
    /// `peak_bytes` and `missing_bytes`.
    #[doc(hidden)]
    #[must_use]
    pub fn with_budget(mut self, bytes: u64) -> Self {
        let peak_bytes = self.cost.peak_bytes();
        self.budget = Some(BudgetReport {
            bytes,
            peak_bytes,
            missing_bytes: peak_bytes.saturating_sub(bytes.into()),
        });
        self
    }

    /// Reports the peak memory of a process with `slots` ranks that share gathered parameters: field `process` with
    /// `slots` and [`peak_bytes`](PlanCost::process_peak_bytes).
    #[doc(hidden)]
    #[must_use]
    pub fn with_process(mut self, slots: NonZeroUsize) -> Self {
        self.process =
            Some(ProcessReport { slots, peak_bytes: self.cost.process_peak_bytes(slots) });
        self
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
