//! The transfers of a step, unit by unit: plain data that a runtime executes and a cost adds up.

use core_types::Rank;
use serde::Serialize;

use super::{
    Collectives, CostModel, fit,
    member_bytes::ParameterDtypes,
    tally::{CallBuffer, PlanTally, UnitMembers, UnitTally},
    transfer::{CollectiveKind, Transfer, TransferScope, add_calls},
};
use crate::{
    elem::ElemType,
    error::{Error, Result},
    plan::ShardingPlan,
};

const UNIT_BYTES: &str = "the bytes of a unit";

/// The transfers of every unit of a plan in a training step.
///
/// Before a unit computes, one `all_gather` collects its parameters on every rank of a shard group,
/// for every strategy: ranks that own more contribute more, so a layer that one rank owns whole is
/// part of the same call as cut layers. The parameters are gathered again before the unit's
/// backward pass unless [the unit is kept](ShardingPlan::with_kept_units). Then one
/// `reduce_scatter` sums the gradients, each rank receives the sums of its own parts, and an
/// `all_reduce` adds these over the replicas. Gradients of replicated parameters are added by an
/// `all_reduce` over all ranks.
///
/// The backward pass is assumed to visit every unit. (A runtime gathers frozen units before all
/// trained ones only once, because nothing is differentiated there; a plan does not know which
/// units come first.)
///
/// Units are in order of first occurrence. A runtime visits them in the order of the model's
/// forward pass, which may differ; the totals are equal.
///
/// # Examples
///
/// ```
/// use core_types::{Placement, WorldSize};
/// use fsdp_plan::{
///     ElemType, ParameterInfo,
///     cost::CostModel,
///     strategy::{Full, ShardingStrategy},
/// };
///
/// let parameters = [
///     ParameterInfo::new("h.0.weight", [10, 4], ElemType::F32)?,
///     ParameterInfo::new("h.0.bias", [10], ElemType::F32)?.with_requires_grad(false),
/// ];
/// let plan = Full::default().plan(&parameters, WorldSize::new(4)?)?;
/// let schedule = plan.schedule(&CostModel::default())?;
///
/// let [block] = &schedule.units[..] else { panic!("one unit") };
/// let gathered = block.all_gather.as_ref().unwrap();
/// // The forward and the backward pass gather once each. Rows are padded to 4 x 3.
/// assert_eq!((gathered.count, &gathered.parameters[..]), (2, &[0, 1][..]));
/// assert_eq!((gathered.bytes, gathered.payload_bytes), (4 * 60, 4 * 50));
/// assert_eq!(block.reduce_scatter.as_ref().unwrap().parameters, [0]);
///
/// // The last rank owns one row of weight and bias.
/// let last = schedule.handed_over(Placement::new(3, 4)?.rank())?;
/// assert_eq!((last.all_gather.count, last.all_gather.bytes), (2, 2 * (16 + 4)));
/// # Ok::<(), fsdp_plan::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Schedule<'a> {
    #[serde(skip)]
    plan: &'a ShardingPlan,
    #[serde(skip)]
    model: CostModel,
    /// Units, in order of first occurrence.
    pub units: Vec<UnitSchedule<'a>>,
}

/// The transfers of a unit in a step.
///
/// A transfer exists if it has parameters, even among a single rank, where it sends nothing.
/// Parameters without elements and [tied](crate::Cut::Tied) parameters are in no transfer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct UnitSchedule<'a> {
    /// Name of the unit, empty for the root unit.
    pub unit: &'a str,
    /// Parameters, gathered on every rank of a shard group.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub all_gather: Option<Transfer>,
    /// Gradients of trained parameters, summed over a shard group: each rank receives the sums of
    /// its parts.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reduce_scatter: Option<Transfer>,
    /// Sums of the same parts, added over several replicas. Ranks without parts do not take part.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub all_reduce_parts: Option<Transfer>,
    /// Gradients of replicated parameters, summed over all ranks.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub all_reduce_copies: Option<Transfer>,
}

/// The bytes that one rank contributes to the collectives of a step.
///
/// They equal the counts of pmap-mesh's `DeviceMesh::traffic` for parameters and gradients while
/// dist-train executes a plan: the rank's parts of gathered parameters, and full gradients.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize)]
#[non_exhaustive]
pub struct HandedOver {
    /// Parts of parameters.
    pub all_gather: Calls,
    /// Full gradients.
    pub reduce_scatter: Calls,
    /// Sums of its parts over the replicas, and gradients of replicated parameters.
    pub all_reduce: Calls,
}

/// The calls and bytes that one rank contributes to one kind of collective.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize)]
#[non_exhaustive]
pub struct Calls {
    /// Number of calls.
    pub count: u64,
    /// Contributed bytes of all calls.
    pub bytes: u64,
}

impl ShardingPlan {
    /// Returns the transfers of a step, unit by unit.
    ///
    /// `model` determines the dtypes.
    ///
    /// # Errors
    ///
    /// [`Error::TotalTooLarge`] if the bytes of a unit exceed 64 bits.
    #[doc(hidden)]
    pub fn schedule(&self, model: &CostModel) -> Result<Schedule<'_>> {
        Schedule::new(self, model, PlanTally::new(self, model, &UnitMembers::from_plan(self)).units)
    }

    /// Returns the schedule for custom units, each a name with the indices of its parameters. A
    /// parameter may be in several units, and is sent for each of them.
    ///
    /// The padding of a buffer that spans several units counts in the unit of the buffer's first
    /// parameter.
    ///
    /// # Errors
    ///
    /// [`Error::Unknown`] for an unknown index, and the errors of
    /// [`schedule`](Self::schedule).
    #[doc(hidden)]
    pub fn schedule_of<'a>(
        &'a self,
        model: &CostModel,
        units: impl IntoIterator<Item = (&'a str, Vec<usize>)>,
    ) -> Result<Schedule<'a>> {
        let units = UnitMembers(units.into_iter().collect());
        let len = self.parameters().len();
        let mut positions = units.0.iter().flat_map(|(_, members)| members);
        match positions.find(|&&position| position >= len) {
            Some(&index) => Err(Error::unknown_index(index, len)),
            None => Schedule::new(self, model, PlanTally::new(self, model, &units).units),
        }
    }
}

impl<'a> Schedule<'a> {
    pub(super) fn new(
        plan: &'a ShardingPlan,
        model: &CostModel,
        units: Vec<UnitTally<'a>>,
    ) -> Result<Self> {
        let units = units.into_iter().map(|unit| UnitSchedule::new(plan, model, unit));
        Ok(Self { plan, model: *model, units: units.collect::<Result<_>>()? })
    }

    /// Returns the unit of this name, if any.
    pub fn unit(&self, name: &str) -> Option<&UnitSchedule<'a>> {
        self.units.iter().find(|unit| unit.unit == name)
    }

    /// Returns the transfers among several ranks, in the order of the units.
    pub(super) fn sent_transfers(&self) -> impl Iterator<Item = (CollectiveKind, &Transfer)> {
        let transfers = self.units.iter().flat_map(UnitSchedule::transfers);
        transfers.filter(|(_, transfer)| transfer.is_sent())
    }

    /// Returns the totals per kind of collective.
    ///
    /// # Errors
    ///
    /// [`Error::TotalTooLarge`] if the bytes exceed 64 bits.
    pub fn collectives(&self) -> Result<Collectives> {
        let mut collectives = Collectives::default();
        for (collective, transfer) in self.sent_transfers() {
            let traffic = match collective {
                CollectiveKind::AllGather => &mut collectives.all_gather,
                CollectiveKind::ReduceScatter => &mut collectives.reduce_scatter,
                CollectiveKind::AllReduce => &mut collectives.all_reduce,
            };
            traffic.add(transfer)?;
        }
        Ok(collectives)
    }

    /// Returns the bytes that `rank` contributes in a step.
    ///
    /// # Errors
    ///
    /// [`Error::World`] for an unknown rank, [`Error::TotalTooLarge`] if the bytes exceed 64 bits.
    pub fn handed_over(&self, rank: Rank) -> Result<HandedOver> {
        let is_sent = |transfer: &&Transfer| transfer.is_sent();
        let mut total = HandedOver::default();
        for unit in &self.units {
            if let Some(gather) = unit.all_gather.as_ref().filter(is_sent) {
                let own = self.own_bytes(gather, rank, |dtypes| dtypes.gather)?;
                total.all_gather.add(gather.count, own)?;
            }
            if let Some(reduce) = unit.reduce_scatter.as_ref().filter(is_sent) {
                total.reduce_scatter.add(reduce.count, reduce.payload_bytes.into())?;
            }
            if let Some(parts) = unit.all_reduce_parts.as_ref().filter(is_sent) {
                let own = self.own_bytes(parts, rank, |dtypes| dtypes.reduce)?;
                total.all_reduce.add(if own > 0 { parts.count } else { 0 }, own)?;
            }
            if let Some(copies) = unit.all_reduce_copies.as_ref().filter(is_sent) {
                total.all_reduce.add(copies.count, copies.payload_bytes.into())?;
            }
        }
        Ok(total)
    }

    /// Returns the bytes of a rank's parts of a transfer; `dtype` selects the dtype of each
    /// parameter.
    fn own_bytes(
        &self,
        transfer: &Transfer,
        rank: Rank,
        dtype: impl Fn(&ParameterDtypes) -> ElemType,
    ) -> Result<u128> {
        let mut bytes = 0;
        for &param_idx in &transfer.parameters {
            let info = self.plan.parameters()[param_idx].info();
            let dtype = dtype(&ParameterDtypes::new(&self.model, info));
            if let Some(shard) = self.plan.shard(param_idx, rank)? {
                bytes += dtype.rounded_up_bytes(shard.shard_size.into());
            }
        }
        Ok(bytes)
    }
}

impl<'a> UnitSchedule<'a> {
    fn new(plan: &ShardingPlan, model: &CostModel, unit: UnitTally<'a>) -> Result<Self> {
        let transfer = |scope, count, buffer: &CallBuffer| {
            new_transfer(plan, scope, count, buffer, model.pads())
        };
        let UnitTally { name, gathered, reduced, copies, .. } = unit;
        let n_gathers = if plan.keeps_gathered(name) { 1 } else { 2 };
        let all_reduce_parts = match plan.replicas() {
            1 => None,
            _ => transfer(TransferScope::Replicas, 1, &reduced.sum_of_largest_parts(plan))?,
        };
        Ok(Self {
            unit: name,
            all_gather: transfer(TransferScope::ShardGroup, n_gathers, &gathered)?,
            reduce_scatter: transfer(TransferScope::ShardGroup, 1, &reduced)?,
            all_reduce_parts,
            all_reduce_copies: transfer(TransferScope::World, 1, &copies)?,
        })
    }

    /// Returns the existing transfers, each with its kind.
    fn transfers(&self) -> impl Iterator<Item = (CollectiveKind, &Transfer)> {
        let Self { unit: _, all_gather, reduce_scatter, all_reduce_parts, all_reduce_copies } =
            self;
        let kinds = [
            (CollectiveKind::AllGather, all_gather),
            (CollectiveKind::ReduceScatter, reduce_scatter),
            (CollectiveKind::AllReduce, all_reduce_parts),
            (CollectiveKind::AllReduce, all_reduce_copies),
        ];
        kinds.into_iter().filter_map(|(kind, transfer)| Some((kind, transfer.as_ref()?)))
    }
}

/// Creates the transfer of a buffer, or returns `None` for an empty buffer.
fn new_transfer(
    plan: &ShardingPlan,
    scope: TransferScope,
    count: u64,
    buffer: &CallBuffer,
    is_padded: bool,
) -> Result<Option<Transfer>> {
    if buffer.parameters.is_empty() {
        return Ok(None);
    }
    let bytes = if is_padded { buffer.bytes() } else { buffer.payload_bytes };
    Ok(Some(Transfer {
        scope,
        ranks: scope.ranks(plan),
        count,
        parameters: buffer.parameters.clone(),
        bytes: fit(bytes, UNIT_BYTES)?,
        payload_bytes: fit(buffer.payload_bytes, UNIT_BYTES)?,
        smallest_part_bytes: fit(buffer.smallest_part_bytes(plan, is_padded), UNIT_BYTES)?,
    }))
}

impl Calls {
    fn add(&mut self, count: u64, bytes_per_call: u128) -> Result<()> {
        self.count += count;
        self.bytes = add_calls(self.bytes, count, bytes_per_call)?;
        Ok(())
    }
}
