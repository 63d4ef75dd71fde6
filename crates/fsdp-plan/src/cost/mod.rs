//! The cost of a plan: memory on every rank, and transfers of a training step.
//!
//! The formulas match PyTorch's `fully_shard` (FSDP2) and `FullyShardedDataParallel` (FSDP1); tests
//! compare the results with torch to the byte. [`Runtime::Candle`] selects the formulas of
//! dist-train's `FullyShard`. No computation grows with parameters × ranks, as explained in
//! `member_bytes.rs`.

mod links;
mod member_bytes;
mod model;
mod ragged;
pub(crate) mod schedule;
mod step_peak;
mod tally;
pub(crate) mod transfer;

use std::{collections::BTreeMap, num::NonZeroUsize};

use core_types::{Rank, WorldSize};
use serde::Serialize;

pub use self::{
    links::{Link, Links},
    model::{Activations, CostModel, Optimizer, Runtime},
    transfer::{CollectiveTraffic, Collectives},
};
use self::{
    member_bytes::MemberBytes,
    schedule::Schedule,
    step_peak::StepPeak,
    tally::{PlanTally, UnitMembers},
};
use crate::{
    error::{Error, Result},
    plan::ShardingPlan,
};

/// The memory of one rank: between two steps, and temporarily within a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[non_exhaustive]
pub struct RankCost {
    /// Rank.
    pub rank: Rank,
    /// Owned or copied parameters, without padding.
    pub param_bytes: u64,
    /// Storage of these parameters. With padding it has room for the largest share of any rank: of each parameter under
    /// [`Cut::Dim0`](crate::Cut::Dim0), and of each unit under flat and ragged cuts.
    pub storage_bytes: u64,
    /// Gradients in the storage dtype, except for 16-bit floats of [`Runtime::Candle`]. The padding
    /// of [`Cut::Flat`](crate::Cut::Flat) has gradients too. 0 with
    /// [`optimizer_in_backward`](CostModel::optimizer_in_backward).
    pub grad_bytes: u64,
    /// Optimizer state.
    ///
    /// A tensor cut along dim 0 counts on every rank, even if the rank has no row, and a flat unit
    /// counts as one tensor, because PyTorch passes these tensors to its optimizers.
    pub optimizer_bytes: u64,
    /// Largest total of parameters gathered at the same time, in the dtype of transfers: the root
    /// unit, kept units, and the largest run of a unit and its prefetched units. 0 in a shard group
    /// of one, except for [`Runtime::Candle`].
    pub gathered_bytes: u64,
    /// Unreduced gradients of the largest unit, in the dtype of transfers. 0 in a shard group of
    /// one, except for [`Runtime::Candle`]. That runtime reduces one unit while it computes the
    /// next if units are [prefetched](CostModel::prefetch), so two neighboring units count.
    pub unreduced_bytes: u64,
    /// Temporaries of the backward pass: twice the largest gradient for [`Runtime::Candle`], else
    /// 0.
    #[serde(skip_serializing_if = "is_zero")]
    pub backward_bytes: u64,
    /// Kept inputs of units and activations of the largest unit; 0 without
    /// [`activations`](CostModel::activations).
    #[serde(skip_serializing_if = "is_zero")]
    pub activation_bytes: u64,
}

impl RankCost {
    /// Returns the memory between two steps: stored parameters, gradients and optimizer state.
    pub fn total_bytes(&self) -> u128 {
        [self.storage_bytes, self.grad_bytes, self.optimizer_bytes].map(u128::from).iter().sum()
    }

    /// Returns the peak memory: [`total_bytes`](Self::total_bytes), gathered parameters, unreduced
    /// gradients, and the known parts of backward temporaries and activations.
    pub fn peak_bytes(&self) -> u128 {
        self.own_peak_bytes() + u128::from(self.gathered_bytes)
    }

    /// Returns the peak memory without gathered parameters, which ranks of a process may share.
    fn own_peak_bytes(&self) -> u128 {
        let Self { unreduced_bytes, backward_bytes, activation_bytes, .. } = *self;
        let step_peak = [unreduced_bytes, backward_bytes, activation_bytes].map(u128::from);
        self.total_bytes() + step_peak.iter().sum::<u128>()
    }
}

/// The cost of a plan.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct PlanCost {
    /// Costs of the ranks, in order.
    pub ranks: Vec<RankCost>,
    /// Largest `param_bytes` of a rank over the mean; 1 if the plan has no bytes.
    pub max_over_mean: f64,
    /// Collectives of one rank in one step.
    pub collectives: Collectives,
    /// Seconds that the collectives of a step take without overlap; `None` without
    /// [links](CostModel::links).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub step_seconds: Option<f64>,
    #[serde(skip)]
    shard_group: WorldSize,
}

impl PlanCost {
    /// Returns the largest peak memory of a rank.
    pub fn peak_bytes(&self) -> u128 {
        self.ranks.iter().map(RankCost::peak_bytes).fold(0, u128::max)
    }

    /// Returns the largest peak memory of a process with `slots` neighboring ranks, if the ranks of
    /// a shard group share gathered parameters. The slots of a [`Runtime::Candle`] mesh on the CPU
    /// do.
    ///
    /// The first process has the first `slots` ranks, and so on; the last process may have fewer.
    ///
    /// # Examples
    ///
    /// ```
    /// use std::num::NonZeroUsize;
    ///
    /// use core_types::WorldSize;
    /// use fsdp_plan::{
    ///     ElemType, ParameterInfo,
    ///     cost::{CostModel, Runtime},
    ///     strategy::{Full, ShardingStrategy},
    /// };
    ///
    /// let parameters = [ParameterInfo::new("h.0.weight", [8, 4], ElemType::F32)?];
    /// let plan = Full::default().plan(&parameters, WorldSize::new(4)?)?;
    /// let model = CostModel { runtime: Runtime::Candle, ..CostModel::default() };
    /// let cost = plan.cost(&model)?;
    ///
    /// let all_in_one = cost.process_peak_bytes(NonZeroUsize::new(4).unwrap());
    /// let separate: u128 = cost.ranks.iter().map(|rank| rank.peak_bytes()).sum();
    /// assert_eq!(all_in_one, separate - 3 * 128); // the weight is gathered once, not four times
    /// assert_eq!(cost.process_peak_bytes(NonZeroUsize::MIN), cost.peak_bytes());
    /// # Ok::<(), fsdp_plan::Error>(())
    /// ```
    #[doc(hidden)]
    pub fn process_peak_bytes(&self, slots: NonZeroUsize) -> u128 {
        let processes = self.ranks.chunks(slots.get());
        processes.map(|ranks| self.shared_peak_bytes(ranks)).fold(0, u128::max)
    }

    /// Returns the peak memory of a process with `ranks`: gathered parameters count once per group.
    fn shared_peak_bytes(&self, ranks: &[RankCost]) -> u128 {
        let group = |rank: &RankCost| rank.rank.as_usize() / self.shard_group.as_usize();
        let mut bytes = ranks.iter().map(RankCost::own_peak_bytes).sum();
        for members in ranks.chunk_by(|left, right| group(left) == group(right)) {
            bytes += u128::from(members[0].gathered_bytes);
        }
        bytes
    }
}

impl ShardingPlan {
    /// Computes the cost of this plan on every rank.
    ///
    /// # Complexity
    ///
    /// Linear in parameters + ranks in memory and time. Ragged cuts take up to units × ranks steps,
    /// divided by the number of similar units.
    ///
    /// # Errors
    ///
    /// [`Error::TotalTooLarge`] if a sum exceeds 64 bits.
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
        let tally = PlanTally::new(self, model, &UnitMembers::from_plan(self));
        let peak = StepPeak::new(self, model, &tally, |unit| self.keeps_gathered(unit)).fit()?;
        let mut ranks = Vec::with_capacity(self.world_size().as_usize());
        // A shard group is a run of neighboring ranks, so the members repeat from group to group.
        for (place, member) in self.world_size().placements().zip(tally.members().cycle()) {
            ranks.push(RankCost::new(place.rank(), member, peak)?);
        }
        let schedule = Schedule::new(self, model, tally.units)?;
        Ok(PlanCost {
            max_over_mean: max_over_mean(&ranks),
            ranks,
            collectives: schedule.collectives()?,
            step_seconds: model.links.map(|links| step_seconds(self, &schedule, links)),
            shard_group: self.shard_group(),
        })
    }
}

fn step_seconds(plan: &ShardingPlan, schedule: &Schedule<'_>, links: Links) -> f64 {
    let mut seconds = 0.0;
    for (collective, transfer) in schedule.sent_transfers() {
        seconds += links.seconds(plan, collective, transfer);
    }
    seconds
}

/// Returns how many of the last units of `plan` can stay gathered within `budget_bytes` per rank; 0
/// if the plan exceeds the budget anyway.
pub(crate) fn max_kept_units(plan: &ShardingPlan, model: &CostModel, budget_bytes: u64) -> usize {
    let tally = PlanTally::new(plan, model, &UnitMembers::from_plan(plan));
    let units = plan.units();
    let positions: BTreeMap<&str, usize> =
        units.iter().zip(0..).map(|(&unit, position)| (unit, position)).collect();
    #[expect(clippy::expect_used, reason = "a shard group has at least one member")]
    let total = tally.members().map(|member| member.total()).max().expect("a member");
    let remaining = i128::from(budget_bytes) - total;
    let mut fitting = 0;
    let mut too_many = units.len() + 1;
    while fitting + 1 < too_many {
        let n_kept = fitting.midpoint(too_many);
        let peak = StepPeak::new(plan, model, &tally, |unit: &str| {
            let position = positions.get(unit);
            unit.is_empty() || position.is_some_and(|position| position + n_kept >= units.len())
        });
        if i128::try_from(peak.sum()).is_ok_and(|peak| peak <= remaining) {
            fitting = n_kept;
        } else {
            too_many = n_kept;
        }
    }
    fitting
}

impl RankCost {
    fn new(rank: Rank, member: MemberBytes, peak: StepPeak<u64>) -> Result<Self> {
        Ok(Self {
            rank,
            param_bytes: fit(member.param, "the bytes of a rank's parameters")?,
            storage_bytes: fit(member.storage, "the bytes that a rank stores")?,
            grad_bytes: fit(member.grad, "the bytes of a rank's gradients")?,
            optimizer_bytes: fit(member.optimizer, "the bytes of a rank's optimizer state")?,
            gathered_bytes: peak.gathered,
            unreduced_bytes: peak.unreduced,
            backward_bytes: peak.backward,
            activation_bytes: peak.activations,
        })
    }
}

/// Converts a sum to 64 bits; `what` names it in the error.
fn fit<T: TryInto<u64>>(bytes: T, what: &'static str) -> Result<u64> {
    bytes.try_into().map_err(|_| Error::TotalTooLarge { what })
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_zero(bytes: &u64) -> bool {
    *bytes == 0
}

#[expect(clippy::cast_precision_loss, reason = "53 bits are enough for an estimate")]
fn max_over_mean(ranks: &[RankCost]) -> f64 {
    let bytes = || ranks.iter().map(|rank| u128::from(rank.param_bytes));
    match (bytes().max(), bytes().sum::<u128>()) {
        (None, _) | (_, 0) => 1.0,
        (Some(max), total) => (max * ranks.len() as u128) as f64 / total as f64,
    }
}
