//! What a plan costs: bytes on every rank, and what one training step sends.
//!
//! The formulas are those of PyTorch's `fully_shard` (FSDP2) and `FullyShardedDataParallel`
//! (FSDP1); tests compare them to the byte with what torch answers. Nothing here grows with
//! parameters × ranks: see `loads.rs`.

mod collectives;
mod links;
mod loads;
mod model;
mod optimizer;
mod pricing;
mod ragged;
mod schedule;
mod tally;

use std::collections::BTreeMap;

use core_types::{Placement, Rank, WorldSize};
use serde::Serialize;

pub use self::{
    collectives::{Collectives, Traffic},
    links::{Link, Links},
    model::CostModel,
    optimizer::Optimizer,
};
use self::{
    loads::Load,
    schedule::{Kind, Message},
    tally::Tally,
};
use crate::{
    arithmetic::index,
    error::{Error, Result},
    plan::ShardingPlan,
};

/// The bytes that one rank holds: between two steps, and for a while within a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[non_exhaustive]
pub struct RankCost {
    /// The rank.
    pub rank: Rank,
    /// Parameters it owns or keeps a copy of, without padding.
    pub param_bytes: u64,
    /// Memory in which it stores them: room for the largest share of any rank, of each parameter
    /// under [`Cut::Dim0`](crate::Cut::Dim0) and of each unit under flat and ragged cuts.
    pub storage_bytes: u64,
    /// Gradients, in the dtype in which parameters are held. The padding of
    /// [`Cut::Flat`](crate::Cut::Flat) has gradients too.
    pub grad_bytes: u64,
    /// What the optimizer remembers.
    ///
    /// It counts a tensor cut along dim 0 on every rank, also where a rank has no row of it, and a
    /// flat unit as one tensor, because that is what PyTorch's optimizers are given.
    pub optimizer_bytes: u64,
    /// Parameters gathered at the same time, at most: the root unit and those that stay gathered,
    /// and the largest run of a unit and those that are gathered ahead of it; all as they travel,
    /// with padding. 0 in a shard group of one.
    pub gathered_bytes: u64,
    /// Gradients of the largest unit before they are reduced, as they travel, with padding. 0 in a
    /// shard group of one.
    pub unreduced_bytes: u64,
}

impl RankCost {
    /// What the rank holds between two steps: stored parameters, gradients and optimizer state.
    pub fn total_bytes(&self) -> u128 {
        [self.storage_bytes, self.grad_bytes, self.optimizer_bytes].map(u128::from).iter().sum()
    }

    /// What the rank holds at most, but for activations: [`total_bytes`](Self::total_bytes),
    /// gathered parameters and unreduced gradients.
    pub fn peak_bytes(&self) -> u128 {
        self.total_bytes() + u128::from(self.gathered_bytes) + u128::from(self.unreduced_bytes)
    }
}

/// What a plan costs.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct PlanCost {
    /// Every rank in order.
    pub ranks: Vec<RankCost>,
    /// The largest `param_bytes` of a rank over the mean of all ranks; 1 if nobody owns a byte.
    pub max_over_mean: f64,
    /// What a rank takes part in within one step.
    pub collectives: Collectives,
    /// How long the collectives of one step take if nothing hides them, in seconds; `None` without
    /// [links](CostModel::with_links).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub step_seconds: Option<f64>,
}

impl PlanCost {
    /// The most that a rank holds at any time, but for activations.
    pub fn peak_bytes(&self) -> u128 {
        self.ranks.iter().map(RankCost::peak_bytes).fold(0, u128::max)
    }
}

impl ShardingPlan {
    /// Computes what this plan costs every rank.
    ///
    /// # Complexity
    ///
    /// Linear in parameters + ranks in memory, and in time as well but for ragged cuts, which take
    /// up to units × ranks steps.
    ///
    /// # Errors
    ///
    /// [`Error::TotalTooLarge`] if a sum does not fit into 64 bits.
    ///
    /// # Examples
    ///
    /// ```
    /// use core_types::WorldSize;
    /// use fsdp_plan::{
    ///     ElemType, ParameterInfo,
    ///     cost::CostModel,
    ///     strategy::{Full, ShardingStrategy},
    /// };
    ///
    /// let parameters = [ParameterInfo::new("fc.weight", [10, 4], ElemType::F32)?];
    /// let cost =
    ///     Full::default().plan(&parameters, WorldSize::new(4)?)?.cost(&CostModel::default())?;
    ///
    /// // Rows are cut 3, 3, 3, 1, and the last rank stores two rows of padding.
    /// assert_eq!(
    ///     cost.ranks.iter().map(|rank| rank.param_bytes).collect::<Vec<_>>(),
    ///     [48, 48, 48, 16]
    /// );
    /// assert_eq!(cost.ranks.iter().map(|rank| rank.storage_bytes).collect::<Vec<_>>(), [48; 4]);
    /// assert_eq!(cost.ranks[3].optimizer_bytes, 2 * 16 + 4);
    /// assert_eq!(cost.max_over_mean, 1.2);
    /// # Ok::<(), fsdp_plan::Error>(())
    /// ```
    pub fn cost(&self, model: &CostModel) -> Result<PlanCost> {
        let Tally { loads, messages, .. } = Tally::of(self, model);
        let gathered = gathered_bytes(self, model, &messages, |unit| self.keeps_gathered(unit));
        let gathered = fit(gathered, "the bytes gathered at the same time")?;
        let unreduced = fit(unreduced_bytes(self, &messages), "the bytes of a unit's gradients")?;
        let members = loads.into_members();
        let ranks = self.world_size().placements().map(Placement::rank).zip(members.iter().cycle());
        let ranks = ranks.map(|(rank, &load)| RankCost::new(rank, load, gathered, unreduced));
        let ranks = ranks.collect::<Result<Vec<_>>>()?;
        let mut collectives = Collectives::default();
        let mut step_seconds = model.links().map(|_| 0.0);
        for calls in messages.iter().flat_map(|message| message.collectives(self)) {
            collectives.add(calls)?;
            if let (Some(seconds), Some(links)) = (&mut step_seconds, model.links()) {
                *seconds += links.seconds(self, calls);
            }
        }
        let max_over_mean = max_over_mean(&ranks);
        Ok(PlanCost { ranks, max_over_mean, collectives, step_seconds })
    }
}

/// How many of the last units of `plan` can stay gathered so that no rank ever holds more than
/// `budget_bytes`; 0 if not even none can.
pub(crate) fn max_kept_units(plan: &ShardingPlan, model: &CostModel, budget_bytes: u64) -> usize {
    let Tally { loads, messages, .. } = Tally::of(plan, model);
    let units = plan.units();
    let positions: BTreeMap<&str, usize> =
        units.iter().zip(0..).map(|(&unit, position)| (unit, position)).collect();
    #[expect(clippy::expect_used, reason = "a shard group has at least one member")]
    let total = loads.into_members().iter().map(Load::total).max().expect("a member");
    let rest = i128::from(budget_bytes) - total;
    let fits = |n_kept: usize| {
        let stays = |unit: &str| {
            unit.is_empty() || positions.get(unit).is_some_and(|at| at + n_kept >= units.len())
        };
        let peak = gathered_bytes(plan, model, &messages, stays) + unreduced_bytes(plan, &messages);
        i128::try_from(peak).is_ok_and(|peak| peak <= rest)
    };
    let mut fitting = 0;
    let mut too_many = units.len() + 1;
    while fitting + 1 < too_many {
        let n_kept = fitting.midpoint(too_many);
        if fits(n_kept) {
            fitting = n_kept;
        } else {
            too_many = n_kept;
        }
    }
    fitting
}

impl RankCost {
    fn new(rank: Rank, load: Load, gathered_bytes: u64, unreduced_bytes: u64) -> Result<Self> {
        Ok(Self {
            rank,
            param_bytes: fit(load.owned, "the bytes of a rank's parameters")?,
            storage_bytes: fit(load.stored, "the bytes that a rank stores")?,
            grad_bytes: fit(load.grad, "the bytes of a rank's gradients")?,
            optimizer_bytes: fit(load.optimizer, "the bytes of a rank's optimizer state")?,
            gathered_bytes,
            unreduced_bytes,
        })
    }
}

fn fit<T: TryInto<u64>>(bytes: T, what: &'static str) -> Result<u64> {
    bytes.try_into().map_err(|_| Error::TotalTooLarge { what })
}

/// The most parameters gathered at the same time: those that stay, and the largest run of others.
fn gathered_bytes(
    plan: &ShardingPlan,
    model: &CostModel,
    messages: &[Message<'_>],
    stays: impl Fn(&str) -> bool,
) -> u128 {
    if plan.shard_group() == WorldSize::ONE {
        return 0;
    }
    let travelling = messages.iter().filter(|message| message.kind != Kind::Replicated);
    let (kept, passing): (Vec<_>, Vec<_>) = travelling.partition(|message| stays(message.unit));
    let run = index(model.prefetch.saturating_add(1).min(passing.len() as u64)).max(1);
    let sum = |messages: &[&Message<'_>]| {
        messages.iter().map(|message| message.gather_bytes).sum::<u128>()
    };
    sum(&kept) + passing.windows(run).map(sum).fold(0, u128::max)
}

/// The largest buffer of gradients that are to be reduced to their owners.
fn unreduced_bytes(plan: &ShardingPlan, messages: &[Message<'_>]) -> u128 {
    if plan.shard_group() == WorldSize::ONE {
        return 0;
    }
    let reduced = messages.iter().filter(|message| message.kind != Kind::Replicated);
    reduced.map(|message| message.reduce_bytes).fold(0, u128::max)
}

#[expect(clippy::cast_precision_loss, reason = "a ratio is for people; 53 bits are enough of it")]
fn max_over_mean(ranks: &[RankCost]) -> f64 {
    let bytes = || ranks.iter().map(|rank| u128::from(rank.param_bytes));
    match (bytes().max(), bytes().sum::<u128>()) {
        (None, _) | (_, 0) => 1.0,
        (Some(max), total) => (max * ranks.len() as u128) as f64 / total as f64,
    }
}
