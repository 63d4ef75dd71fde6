//! What travels in a step, and when: plain data that a runtime carries out and that a cost is
//! added up from.

use core_types::Rank;
use serde::Serialize;

use super::{
    Collectives, CostModel, fit,
    loads::Pricing,
    tally::{Buffer, Tally, UnitTally, Units},
    transfer::{Collective, IN_A_STEP, Scope, Transfer},
};
use crate::{
    elem::ElemType,
    error::{Error, Result},
    plan::ShardingPlan,
};

const OF_A_UNIT: &str = "the bytes of a unit";

/// What every unit of a plan sends in a training step, and how.
///
/// Before a unit computes, its parameters are put together on every rank of a shard group, in one
/// `all_gather` whatever the strategy: ranks that own more of it contribute more, so a layer that
/// one rank owns whole travels in the same call as one that is cut. They are put together again
/// before the unit's backward pass unless [it is kept](ShardingPlan::with_kept_units). Then
/// gradients are summed in one `reduce_scatter`, after which each rank has the sums of its own
/// parts; replicas add these up among themselves, and replicated parameters are added up by all.
///
/// The backward pass is taken to go through every unit. (A runtime gathers frozen units that it
/// enters before all trained ones once: nothing is differentiated there, and a plan does not know
/// which come first.)
///
/// The order of units is that in which their parameters first occur. A runtime enters them in the
/// order of the model's forward pass, which may be another one: the totals are the same.
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
/// // Once for the forward pass and once for the backward pass. Rows are padded to 4 x 3.
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
    /// The units, in the order in which their parameters first occur.
    pub units: Vec<UnitSchedule<'a>>,
}

/// What a unit sends in a step.
///
/// A transfer is there if it has parameters, also among a single rank, where it sends nothing.
/// Parameters without elements, and those [tied](crate::Cut::Tied) to others, are in none.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct UnitSchedule<'a> {
    /// The unit's name; empty for the root unit.
    pub unit: &'a str,
    /// Parameters, to every rank of a shard group.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub all_gather: Option<Transfer>,
    /// Gradients of those that are trained, summed over a shard group: to each rank those of its
    /// parts.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reduce_scatter: Option<Transfer>,
    /// These sums, added up over the replicas, if there are several: over the ranks that have the
    /// same parts. A rank without any is left out.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub all_reduce_parts: Option<Transfer>,
    /// Gradients of replicated parameters, over all ranks.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub all_reduce_copies: Option<Transfer>,
}

/// What one rank hands over to the others in a step.
///
/// It is what pmap-mesh's `DeviceMesh::traffic` counts of parameters and gradients while dist-train
/// carries out a plan: of gathered parameters the rank's own parts, of summed gradients the whole.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize)]
#[non_exhaustive]
pub struct HandedOver {
    /// Its parts of parameters.
    pub all_gather: Calls,
    /// Whole gradients.
    pub reduce_scatter: Calls,
    /// Sums of its parts, over the replicas, and gradients of replicated parameters.
    pub all_reduce: Calls,
}

/// How often one kind of collective is called, and with how much.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize)]
#[non_exhaustive]
pub struct Calls {
    /// The number of calls.
    pub count: u64,
    /// The bytes that the rank hands over in all of them.
    pub bytes: u64,
}

impl ShardingPlan {
    /// What travels in a step, unit by unit.
    ///
    /// `model` says in which dtypes.
    ///
    /// # Errors
    ///
    /// [`Error::TotalTooLarge`] if the bytes of a unit do not fit into 64 bits.
    #[doc(hidden)]
    pub fn schedule(&self, model: &CostModel) -> Result<Schedule<'_>> {
        Schedule::new(self, model, Tally::of(self, model, &Units::of(self)).units)
    }

    /// The schedule for other units than those of the plan, each a name with the positions of its
    /// parameters: one may be in several units, and is sent for each of them.
    ///
    /// The padding of a buffer that spans a unit counts where the buffer's first parameter is.
    ///
    /// # Errors
    ///
    /// [`Error::ParameterOutOfRange`] if there is no such parameter, and those of
    /// [`schedule`](Self::schedule).
    #[doc(hidden)]
    pub fn schedule_of<'a>(
        &'a self,
        model: &CostModel,
        units: impl IntoIterator<Item = (&'a str, Vec<usize>)>,
    ) -> Result<Schedule<'a>> {
        let units = Units(units.into_iter().collect());
        let len = self.parameters().len();
        let mut positions = units.0.iter().flat_map(|(_, members)| members);
        match positions.find(|&&position| position >= len) {
            Some(&index) => Err(Error::ParameterOutOfRange { index, len }),
            None => Schedule::new(self, model, Tally::of(self, model, &units).units),
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

    /// The unit of this name, if there is one.
    pub fn unit(&self, name: &str) -> Option<&UnitSchedule<'a>> {
        self.units.iter().find(|unit| unit.unit == name)
    }

    /// Everything that is sent, in the order of the units.
    pub(super) fn sent(&self) -> impl Iterator<Item = (Collective, &Transfer)> {
        let transfers = self.units.iter().flat_map(UnitSchedule::transfers);
        transfers.filter(|(_, transfer)| transfer.is_sent())
    }

    /// The collectives of a step, by kind.
    ///
    /// # Errors
    ///
    /// [`Error::TotalTooLarge`] if their bytes do not fit into 64 bits.
    pub fn collectives(&self) -> Result<Collectives> {
        let mut collectives = Collectives::default();
        for (collective, transfer) in self.sent() {
            let traffic = match collective {
                Collective::AllGather => &mut collectives.all_gather,
                Collective::ReduceScatter => &mut collectives.reduce_scatter,
                Collective::AllReduce => &mut collectives.all_reduce,
            };
            traffic.add(transfer)?;
        }
        Ok(collectives)
    }

    /// What `rank` hands over in a step.
    ///
    /// # Errors
    ///
    /// [`Error::World`] if there is no such rank, [`Error::TotalTooLarge`] if the bytes do not fit
    /// into 64 bits.
    pub fn handed_over(&self, rank: Rank) -> Result<HandedOver> {
        let sent = |transfer: &&Transfer| transfer.is_sent();
        let mut all = HandedOver::default();
        for unit in &self.units {
            if let Some(gather) = unit.all_gather.as_ref().filter(sent) {
                let own = self.own_bytes(gather, rank, |pricing| pricing.gather)?;
                all.all_gather.add(gather.count, own)?;
            }
            if let Some(reduce) = unit.reduce_scatter.as_ref().filter(sent) {
                all.reduce_scatter.add(reduce.count, reduce.payload_bytes.into())?;
            }
            if let Some(parts) = unit.all_reduce_parts.as_ref().filter(sent) {
                let own = self.own_bytes(parts, rank, |pricing| pricing.reduce)?;
                all.all_reduce.add(if own > 0 { parts.count } else { 0 }, own)?;
            }
            if let Some(copies) = unit.all_reduce_copies.as_ref().filter(sent) {
                all.all_reduce.add(copies.count, copies.payload_bytes.into())?;
            }
        }
        Ok(all)
    }

    /// The bytes of a rank's parts of the parameters of a transfer, each of the dtype that
    /// `dtype_of` picks.
    fn own_bytes(
        &self,
        transfer: &Transfer,
        rank: Rank,
        dtype_of: impl Fn(&Pricing) -> ElemType,
    ) -> Result<u128> {
        let mut bytes = 0;
        for &param_idx in &transfer.parameters {
            let dtype =
                dtype_of(&Pricing::of(&self.model, self.plan.parameters()[param_idx].info()));
            let shards = self.plan.shards(param_idx, rank)?;
            bytes += shards.map(|shard| dtype.bytes(shard.shard_size.into())).sum::<u128>();
        }
        Ok(bytes)
    }
}

impl<'a> UnitSchedule<'a> {
    fn new(plan: &ShardingPlan, model: &CostModel, unit: UnitTally<'a>) -> Result<Self> {
        let of = |scope, count, buffer: &Buffer| transfer(plan, scope, count, buffer, model.pads());
        let UnitTally { name, gathered, reduced, copies, .. } = unit;
        let passes = if plan.keeps_gathered(name) { 1 } else { 2 };
        let all_reduce_parts = match plan.replicas() {
            1 => None,
            _ => of(Scope::Replicas, 1, &reduced.largest_part(plan))?,
        };
        Ok(Self {
            unit: name,
            all_gather: of(Scope::ShardGroup, passes, &gathered)?,
            reduce_scatter: of(Scope::ShardGroup, 1, &reduced)?,
            all_reduce_parts,
            all_reduce_copies: of(Scope::World, 1, &copies)?,
        })
    }

    /// Everything that is there, each with its kind.
    pub fn transfers(&self) -> impl Iterator<Item = (Collective, &Transfer)> {
        let Self { unit: _, all_gather, reduce_scatter, all_reduce_parts, all_reduce_copies } =
            self;
        let kinds = [
            (Collective::AllGather, all_gather),
            (Collective::ReduceScatter, reduce_scatter),
            (Collective::AllReduce, all_reduce_parts),
            (Collective::AllReduce, all_reduce_copies),
        ];
        kinds.into_iter().filter_map(|(kind, transfer)| Some((kind, transfer.as_ref()?)))
    }
}

/// The transfer of a buffer, if there is anything in it.
fn transfer(
    plan: &ShardingPlan,
    scope: Scope,
    count: u64,
    buffer: &Buffer,
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
        bytes: fit(bytes, OF_A_UNIT)?,
        payload_bytes: fit(buffer.payload_bytes, OF_A_UNIT)?,
        smallest_part_bytes: fit(buffer.smallest_part_bytes(plan, is_padded), OF_A_UNIT)?,
    }))
}

impl Calls {
    fn add(&mut self, count: u64, bytes_of_each: u128) -> Result<()> {
        let bytes = u128::from(self.bytes) + u128::from(count) * bytes_of_each;
        *self = Self { count: self.count + count, bytes: fit(bytes, IN_A_STEP)? };
        Ok(())
    }
}
