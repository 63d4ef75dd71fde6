//! What a plan costs: bytes on every rank, and what one training step sends.
//!
//! The formulas are those of PyTorch's `fully_shard` (FSDP2) and `FullyShardedDataParallel`
//! (FSDP1); tests compare them to the byte with what torch answers. [`Runtime::Candle`] gives those
//! of dist-train's `FullyShard` instead. Nothing here grows with parameters × ranks: see `loads.rs`.

mod links;
mod loads;
mod model;
mod ragged;
pub(crate) mod schedule;
mod tally;
pub(crate) mod transfer;
mod within;

use std::{collections::BTreeMap, num::NonZeroUsize};

use core_types::{Rank, WorldSize};
use serde::Serialize;

pub use self::{
    links::{Link, Links},
    model::{Activations, CostModel, Optimizer, Runtime},
    transfer::{Collectives, Traffic},
};
use self::{
    loads::Load,
    schedule::Schedule,
    tally::{Tally, Units},
    within::WithinStep,
};
use crate::{
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
    /// Memory in which it stores them. Where parts are padded: room for the largest share of any rank, of each parameter
    /// under [`Cut::Dim0`](crate::Cut::Dim0) and of each unit under flat and ragged cuts.
    pub storage_bytes: u64,
    /// Gradients, in the dtype in which parameters are held, but for halves of [`Runtime::Candle`].
    /// The padding of [`Cut::Flat`](crate::Cut::Flat) has gradients too. 0 if they are
    /// [used at once](CostModel::with_optimizer_in_backward).
    pub grad_bytes: u64,
    /// What the optimizer remembers.
    ///
    /// It counts a tensor cut along dim 0 on every rank, also where a rank has no row of it, and a
    /// flat unit as one tensor, because that is what PyTorch's optimizers are given.
    pub optimizer_bytes: u64,
    /// Parameters gathered at the same time, at most: the root unit and those that stay gathered,
    /// and the largest run of a unit and those that are gathered ahead of it; all as they travel.
    /// 0 in a shard group of one, but for [`Runtime::Candle`].
    pub gathered_bytes: u64,
    /// Gradients of the largest unit before they are reduced, as they travel. 0 in a shard group of
    /// one, but for [`Runtime::Candle`], which also sums those of one unit while it makes the
    /// next one's if units are [gathered ahead](CostModel::with_prefetch): of two neighbors then.
    pub unreduced_bytes: u64,
    /// What the backward pass makes of the largest gradient beside it: twice as much for
    /// [`Runtime::Candle`], else 0.
    #[serde(skip_serializing_if = "is_zero")]
    pub backward_bytes: u64,
    /// The inputs that units keep, and what the largest of them computes; 0 unless
    /// [told](CostModel::with_activations).
    #[serde(skip_serializing_if = "is_zero")]
    pub activation_bytes: u64,
}

impl RankCost {
    /// What the rank holds between two steps: stored parameters, gradients and optimizer state.
    pub fn total_bytes(&self) -> u128 {
        [self.storage_bytes, self.grad_bytes, self.optimizer_bytes].map(u128::from).iter().sum()
    }

    /// What the rank holds at most: [`total_bytes`](Self::total_bytes), gathered parameters and
    /// unreduced gradients, and what the backward pass and activations take where that is known.
    pub fn peak_bytes(&self) -> u128 {
        self.own_peak_bytes() + u128::from(self.gathered_bytes)
    }

    /// The same without gathered parameters, which others may share.
    fn own_peak_bytes(&self) -> u128 {
        let Self { unreduced_bytes, backward_bytes, activation_bytes, .. } = *self;
        let within = [unreduced_bytes, backward_bytes, activation_bytes].map(u128::from);
        self.total_bytes() + within.iter().sum::<u128>()
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
    #[serde(skip)]
    shard_group: WorldSize,
}

impl PlanCost {
    /// The most that a rank holds at any time.
    pub fn peak_bytes(&self) -> u128 {
        self.ranks.iter().map(RankCost::peak_bytes).fold(0, u128::max)
    }

    /// The most that a process of so many neighboring ranks holds at any time, if those of a shard
    /// group share what is gathered: as the slots of a [`Runtime::Candle`] mesh do whose device is
    /// the processor.
    ///
    /// The first process has the first `slots` ranks, and so on; the last one may have fewer.
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
    /// let cost = plan.cost(&CostModel::default().with_runtime(Runtime::Candle))?;
    ///
    /// let all_in_one = cost.process_peak_bytes(NonZeroUsize::new(4).unwrap());
    /// let apart: u128 = cost.ranks.iter().map(|rank| rank.peak_bytes()).sum();
    /// assert_eq!(all_in_one, apart - 3 * 128); // the weight is gathered once instead of four times
    /// assert_eq!(cost.process_peak_bytes(NonZeroUsize::MIN), cost.peak_bytes());
    /// # Ok::<(), fsdp_plan::Error>(())
    /// ```
    #[doc(hidden)]
    pub fn process_peak_bytes(&self, slots: NonZeroUsize) -> u128 {
        let group = self.shard_group.as_usize();
        let of_process = |ranks: &[RankCost]| {
            let own: u128 = ranks.iter().map(RankCost::own_peak_bytes).sum();
            let groups = ranks.chunk_by(|left, right| {
                left.rank.as_usize() / group == right.rank.as_usize() / group
            });
            own + groups.map(|ranks| u128::from(ranks[0].gathered_bytes)).sum::<u128>()
        };
        self.ranks.chunks(slots.get()).map(of_process).fold(0, u128::max)
    }
}

impl ShardingPlan {
    /// Computes what this plan costs every rank.
    ///
    /// # Complexity
    ///
    /// Linear in parameters + ranks in memory, and in time as well but for ragged cuts, which take
    /// up to units × ranks steps, or as many fewer as units are alike.
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
        let tally = Tally::of(self, model, &Units::of(self));
        let within = WithinStep::of(self, model, &tally, |unit| self.keeps_gathered(unit)).fit()?;
        let mut ranks = Vec::with_capacity(self.world_size().as_usize());
        // Shard groups are neighboring ranks.
        for (place, load) in self.world_size().placements().zip(tally.members().cycle()) {
            ranks.push(RankCost::new(place.rank(), load, within)?);
        }
        let schedule = Schedule::new(self, model, tally.units)?;
        let seconds = |links: Links| {
            let sent = schedule.sent();
            sent.map(|(collective, transfer)| links.seconds(self, collective, transfer))
                .fold(0.0, |sum, seconds| sum + seconds)
        };
        Ok(PlanCost {
            max_over_mean: max_over_mean(&ranks),
            ranks,
            collectives: schedule.collectives()?,
            step_seconds: model.links().map(seconds),
            shard_group: self.shard_group(),
        })
    }
}

/// How many of the last units of `plan` can stay gathered so that no rank ever holds more than
/// `budget_bytes`; 0 if not even none can.
pub(crate) fn max_kept_units(plan: &ShardingPlan, model: &CostModel, budget_bytes: u64) -> usize {
    let tally = Tally::of(plan, model, &Units::of(plan));
    let units = plan.units();
    let positions: BTreeMap<&str, usize> =
        units.iter().zip(0..).map(|(&unit, position)| (unit, position)).collect();
    #[expect(clippy::expect_used, reason = "a shard group has at least one member")]
    let total = tally.members().map(|load| load.total()).max().expect("a member");
    let rest = i128::from(budget_bytes) - total;
    let fits = |n_kept: usize| {
        let stays = |unit: &str| {
            unit.is_empty() || positions.get(unit).is_some_and(|at| at + n_kept >= units.len())
        };
        let peak = WithinStep::of(plan, model, &tally, stays).sum();
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
    fn new(rank: Rank, load: Load, within: WithinStep<u64>) -> Result<Self> {
        Ok(Self {
            rank,
            param_bytes: fit(load.owned, "the bytes of a rank's parameters")?,
            storage_bytes: fit(load.stored, "the bytes that a rank stores")?,
            grad_bytes: fit(load.grad, "the bytes of a rank's gradients")?,
            optimizer_bytes: fit(load.optimizer, "the bytes of a rank's optimizer state")?,
            gathered_bytes: within.gathered,
            unreduced_bytes: within.unreduced,
            backward_bytes: within.backward,
            activation_bytes: within.activations,
        })
    }
}

fn fit<T: TryInto<u64>>(bytes: T, what: &'static str) -> Result<u64> {
    bytes.try_into().map_err(|_| Error::TotalTooLarge { what })
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde hands out a reference")]
fn is_zero(bytes: &u64) -> bool {
    *bytes == 0
}

#[expect(clippy::cast_precision_loss, reason = "a ratio is for people; 53 bits are enough of it")]
fn max_over_mean(ranks: &[RankCost]) -> f64 {
    let bytes = || ranks.iter().map(|rank| u128::from(rank.param_bytes));
    match (bytes().max(), bytes().sum::<u128>()) {
        (None, _) | (_, 0) => 1.0,
        (Some(max), total) => (max * ranks.len() as u128) as f64 / total as f64,
    }
}
