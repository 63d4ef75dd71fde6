//! The collectives of units: the parameters of a unit are gathered in one all-gather, and their
//! gradients are reduced in one reduce-scatter.

use std::collections::{BTreeMap, BTreeSet};

use candle_core::{DType, Tensor, Var};
use dist_checkpoint::ParameterError;
use fsdp_plan::{
    ShardingPlan,
    support::{Transfer, UnitSchedule},
};
use pmap_mesh::{
    ALL, Replica,
    support::{Pending, Run, RunLayout},
};

use super::{ShardedVars, runs, unknown};
use crate::{
    error::{Doing, Error, Result},
    precision::{Precision, widened_dtype},
};

/// The collectives of a unit, from the plan's schedule.
#[derive(Clone, Debug)]
pub(super) struct UnitCollectives {
    /// The indices of the unit's parameters in the plan.
    params: Vec<usize>,
    /// The sharded parameters to gather; `None` if there are none.
    gathered: Option<ParameterLayout>,
    /// The sharded parameters with gradients to reduce; `None` if there are none.
    reduced: Option<ParameterLayout>,
    /// The replicated parameters with gradients to all-reduce.
    copies: Vec<usize>,
}

/// Parameters, and the ranges of their items on the ranks of a shard group.
#[derive(Clone, Debug)]
struct ParameterLayout {
    /// The indices of the parameters in the plan, in the order of the layout.
    params: Vec<usize>,
    layout: RunLayout,
}

/// A unit with an all-gather in flight.
#[derive(Debug)]
pub(crate) struct PendingGather {
    unit: String,
    /// The all-gather; `None` if the unit has no sharded parameter.
    pending: Option<Pending<Vec<Var>>>,
}

/// A unit with a reduction of gradients in flight.
#[derive(Debug)]
pub(crate) struct PendingReduce {
    pub(crate) unit: String,
    /// The sums over a shard group for this slot's shards; `None` if the unit has no trained
    /// sharded parameter.
    shard_sums: Option<ReduceState>,
    /// Gradients of replicated parameters, which are all-reduced at the end.
    copies: Vec<Tensor>,
}

/// The state of a reduce-scatter over a shard group.
#[derive(Debug)]
enum ReduceState {
    Done(Vec<Tensor>),
    Started(Pending<Vec<Tensor>>),
}

/// Returns the collectives of each unit, given the names of its parameters.
pub(super) fn from_names<'a, N: Iterator<Item = &'a str>>(
    plan: &ShardingPlan,
    units: impl Iterator<Item = (&'a String, N)>,
    precision: Precision,
) -> Result<BTreeMap<String, UnitCollectives>> {
    let mut indexed = Vec::new();
    for (unit, names) in units {
        let params = names.map(|name| index_of(plan, name)).collect::<Result<BTreeSet<usize>>>()?;
        indexed.push((unit.as_str(), params.into_iter().collect::<Vec<_>>()));
    }
    let schedule = plan.schedule_of(&precision.cost_model(), indexed.clone())?;
    let mut collectives = BTreeMap::new();
    for (schedule, (unit, params)) in schedule.units.iter().zip(indexed) {
        let unit_collectives = UnitCollectives::new(plan, schedule, params, precision)?;
        collectives.insert(unit.to_owned(), unit_collectives);
    }
    Ok(collectives)
}

/// Returns the index of a parameter.
pub(super) fn index_of(plan: &ShardingPlan, name: &str) -> Result<usize> {
    plan.index_of(name).ok_or_else(|| unknown(name))
}

/// Returns the layout of parameters on the ranks of a shard group; `dtype` maps each parameter's
/// dtype to the dtype of the transferred tensor.
fn layout(
    plan: &ShardingPlan,
    name: &str,
    params: &[usize],
    dtype: impl Fn(DType) -> DType,
) -> Result<RunLayout> {
    let tensor = |&param_idx: &usize| {
        let info = plan.parameters()[param_idx].info();
        Ok((runs::shape(info), dtype(runs::dtype(info)?)))
    };
    let tensors = params.iter().map(tensor).collect::<Result<Vec<_>>>()?;
    let mut by_rank = Vec::new();
    for rank in runs::ranks(plan.shard_group()) {
        let mut own = Vec::new();
        for (tensor, &param_idx) in params.iter().enumerate() {
            let runs = runs::rank_runs(plan, param_idx, rank)?;
            own.extend(runs.into_iter().map(|items| Run { tensor, items }));
        }
        by_rank.push(own);
    }
    Ok(RunLayout::new(name, tensors, by_rank)?)
}

/// Returns the slots that share memory with `slot` for gathered parameters: the CPU slots of its
/// shard group if `slot` is on the CPU, and otherwise only `slot`.
fn slots_sharing_with(
    slot: usize,
    group_size: usize,
    cpu_slots: impl Iterator<Item = usize>,
) -> Vec<usize> {
    let group_slots: Vec<usize> =
        cpu_slots.filter(|other| other / group_size == slot / group_size).collect();
    if group_slots.contains(&slot) { group_slots } else { vec![slot] }
}

impl UnitCollectives {
    fn new(
        plan: &ShardingPlan,
        schedule: &UnitSchedule<'_>,
        params: Vec<usize>,
        precision: Precision,
    ) -> Result<Self> {
        let layout_of = |transfer: &Transfer, dtype: &dyn Fn(DType) -> DType| {
            let params = transfer.parameters.clone();
            let layout = layout(plan, schedule.unit, &params, dtype)?;
            Ok::<_, Error>(ParameterLayout { params, layout })
        };
        let all_gather = schedule.all_gather.as_ref();
        let reduce_scatter = schedule.reduce_scatter.as_ref();
        let all_reduce = schedule.all_reduce_copies.as_ref();
        Ok(Self {
            params,
            gathered: all_gather
                .map(|transfer| layout_of(transfer, &|stored| precision.compute_dtype(stored)))
                .transpose()?,
            reduced: reduce_scatter
                .map(|transfer| layout_of(transfer, &|stored| precision.reduce_dtype(stored)))
                .transpose()?,
            copies: all_reduce.map_or_else(Vec::new, |transfer| transfer.parameters.clone()),
        })
    }
}

impl ShardedVars {
    /// Gathers every parameter of a unit, by name, in one all-gather over the shard group. All
    /// replicas must call this.
    ///
    /// Each parameter becomes a variable. The `backward` of a loss returns the full gradient for
    /// this variable, which must be passed to [`reduce_parts`](Self::reduce_parts). CPU slots share
    /// these variables, so the variables must not be set.
    ///
    /// # Errors
    ///
    /// Returns [`ParameterError::Unknown`] if there is no such unit, and the errors of
    /// [`Replica::gather_runs`].
    #[track_caller]
    pub(crate) fn gather_unit(
        &self,
        ctx: &Replica,
        unit: &str,
    ) -> candle_core::Result<BTreeMap<String, Var>> {
        let gathered = match &self.unit(unit)?.gathered {
            Some(ParameterLayout { params, layout }) => {
                ctx.gather_runs(self.own_runs(ctx, params)?, layout, &self.axes.shard)?
            }
            None => Vec::new(),
        };
        self.vars_by_name(ctx, unit, gathered)
    }

    /// Starts [`gather_unit`](Self::gather_unit) without waiting for other replicas.
    #[track_caller]
    pub(crate) fn start_gather_unit(
        &self,
        ctx: &Replica,
        name: &str,
    ) -> candle_core::Result<PendingGather> {
        let pending = match &self.unit(name)?.gathered {
            Some(ParameterLayout { params, layout }) => {
                let own = self.own_runs(ctx, params)?;
                Some(ctx.start_gather_runs(own, layout, &self.axes.shard)?)
            }
            None => None,
        };
        Ok(PendingGather { unit: name.to_owned(), pending })
    }

    /// Waits for an all-gather, and returns every parameter of the unit by name.
    pub(crate) fn finish_gather_unit(
        &self,
        ctx: &Replica,
        gather: PendingGather,
    ) -> candle_core::Result<BTreeMap<String, Var>> {
        let PendingGather { unit, pending } = gather;
        let gathered = pending.map_or_else(|| Ok(Vec::new()), Pending::wait)?;
        self.vars_by_name(ctx, &unit, gathered)
    }

    /// Returns the variables of a unit by name: the gathered parameters, and copies of the
    /// replicated parameters.
    fn vars_by_name(
        &self,
        ctx: &Replica,
        unit: &str,
        gathered: Vec<Var>,
    ) -> candle_core::Result<BTreeMap<String, Var>> {
        let unit = self.unit(unit)?;
        let params = unit.gathered.as_ref().map_or(&[][..], |gathered| &gathered.params);
        let mut by_index: BTreeMap<usize, Var> = params.iter().copied().zip(gathered).collect();
        let mut by_name = BTreeMap::new();
        for &param_idx in &unit.params {
            let var = match by_index.remove(&param_idx) {
                Some(var) => var,
                None => self.copy(ctx, param_idx)?,
            };
            by_name.insert(self.info(param_idx).name().to_owned(), var);
        }
        Ok(by_name)
    }

    /// Returns a new variable with the value of a parameter that every slot stores in full.
    fn copy(&self, ctx: &Replica, param_idx: usize) -> candle_core::Result<Var> {
        let own_shards = self.shards(ctx.slot()).iter();
        let values: Vec<Tensor> = own_shards
            .filter(|shard| shard.param_idx == param_idx)
            .map(|shard| shard.var.as_detached_tensor())
            .collect();
        let whole = self.join(param_idx, &values, ctx.device())?;
        let dtype = self.precision.compute_dtype(whole.dtype());
        Var::from_tensor(&whole.to_dtype(dtype)?)
    }

    /// Splits a unit's parameters, after gathering, into parameters that this process's slots
    /// share, and parameters with a separate copy on each slot.
    pub(crate) fn split_shared<'a, T>(
        &self,
        unit: &str,
        named: &'a BTreeMap<String, T>,
    ) -> Result<(Vec<&'a str>, Vec<&'a str>)> {
        let unit = self.unit(unit)?;
        let params = unit.gathered.as_ref().map_or(&[][..], |gathered| &gathered.params);
        Ok(named.keys().map(String::as_str).partition(|name| {
            self.plan.index_of(name).is_some_and(|param| params.contains(&param))
        }))
    }

    /// Returns the slots of this process that share memory for gathered parameters with a replica,
    /// including itself, in order.
    pub(crate) fn sharing_slots(&self, ctx: &Replica) -> Vec<usize> {
        let mesh = &self.mesh;
        let slots = mesh.local_slots().zip(mesh.devices());
        let cpu_slots = slots.filter(|(_, device)| device.is_cpu()).map(|(slot, _)| slot);
        let group_size = self.plan.shard_group().as_usize();
        slots_sharing_with(ctx.slot(), group_size, cpu_slots)
    }

    /// Reduces the gradients of a unit's full parameters over all slots, and returns this slot's
    /// shards of the sums with the indices of its variables. Half-precision gradients are summed in
    /// single precision.
    ///
    /// One reduce-scatter sums over a shard group. If the plan has replicas, an all-reduce then
    /// sums each slot's shards over the replicas. Sums are formed in rank order within a group,
    /// then in group order.
    ///
    /// `grads` has the gradient of each [trained](fsdp_plan::ParameterInfo::requires_grad)
    /// parameter of the unit, by name.
    ///
    /// # Errors
    ///
    /// Returns the errors of [`gather_unit`](Self::gather_unit) and [`Replica::reduce_runs`],
    /// [`ParameterError::Missing`] if a parameter has no gradient, and [`ParameterError::Shape`] if
    /// a gradient has the wrong shape.
    #[track_caller]
    pub(crate) fn reduce_parts(
        &self,
        ctx: &Replica,
        unit: &str,
        grads: BTreeMap<String, Tensor>,
    ) -> candle_core::Result<Vec<(usize, Tensor)>> {
        let pending = self.begin_reduce(unit, grads, |grads, layout| {
            Ok(ReduceState::Done(ctx.reduce_runs(grads, layout, &self.axes.shard)?))
        })?;
        self.finish_reduce_parts(ctx, pending)
    }

    /// Starts [`reduce_parts`](Self::reduce_parts) without waiting for other replicas.
    #[track_caller]
    pub(crate) fn start_reduce_parts(
        &self,
        ctx: &Replica,
        unit: &str,
        grads: BTreeMap<String, Tensor>,
    ) -> candle_core::Result<PendingReduce> {
        self.begin_reduce(unit, grads, |grads, layout| {
            Ok(ReduceState::Started(ctx.start_reduce_runs(grads, layout, &self.axes.shard)?))
        })
    }

    /// Collects a unit's gradients, and calls `reduce` with the gradients of sharded parameters.
    fn begin_reduce(
        &self,
        name: &str,
        mut grads: BTreeMap<String, Tensor>,
        reduce: impl FnOnce(Vec<Tensor>, &RunLayout) -> candle_core::Result<ReduceState>,
    ) -> candle_core::Result<PendingReduce> {
        let unit = self.unit(name)?;
        let shard_sums = match &unit.reduced {
            Some(ParameterLayout { params, layout }) => {
                Some(reduce(self.take_grads(params, &mut grads)?, layout)?)
            }
            None => None,
        };
        let copies = self.take_grads(&unit.copies, &mut grads)?;
        Ok(PendingReduce { unit: name.to_owned(), shard_sums, copies })
    }

    /// Waits for a reduction, and returns the sums with the indices of this slot's variables.
    #[track_caller]
    pub(crate) fn finish_reduce_parts(
        &self,
        ctx: &Replica,
        reduce: PendingReduce,
    ) -> candle_core::Result<Vec<(usize, Tensor)>> {
        let PendingReduce { unit: name, shard_sums, copies } = reduce;
        let unit = self.unit(&name)?;
        let mut sums = Vec::new();
        if let Some(ParameterLayout { params, layout }) = &unit.reduced
            && let Some(shard_sums) = shard_sums
        {
            let group_sums = match shard_sums {
                ReduceState::Done(sums) => sums,
                ReduceState::Started(pending) => pending.wait()?,
            };
            let total_sums = self.sum_over_replicas(ctx, group_sums, layout)?;
            for (position, sum) in self.own_positions(ctx, params).into_iter().zip(total_sums) {
                sums.push((position, self.to_sum_dtype(ctx, position, &sum)?));
            }
        }
        if !copies.is_empty() {
            let positions = self.own_positions(ctx, &unit.copies);
            // All-reduced under the unit's name: a unit without sharded parameters has no
            // all-gather, so nothing has checked yet that all replicas entered the same unit.
            let copy_sums = ctx.psum_list(&name, &copies, ALL)?;
            for (position, sum) in positions.into_iter().zip(copy_sums) {
                sums.push((position, self.to_sum_dtype(ctx, position, &sum.flatten_all()?)?));
            }
        }
        Ok(sums)
    }

    /// Converts a sum to the dtype in which the gradient of this slot's shard `position` is stored.
    fn to_sum_dtype(
        &self,
        ctx: &Replica,
        position: usize,
        sum: &Tensor,
    ) -> candle_core::Result<Tensor> {
        sum.to_dtype(widened_dtype(self.shards(ctx.slot())[position].var.dtype()))
    }

    /// Sums the sums of this slot's shard group over all shard groups.
    #[track_caller]
    fn sum_over_replicas(
        &self,
        ctx: &Replica,
        sums: Vec<Tensor>,
        layout: &RunLayout,
    ) -> candle_core::Result<Vec<Tensor>> {
        match &self.axes.replica {
            // A slot without items need not take part: its peers in other groups have no items
            // either.
            Some(axes) if !sums.is_empty() => ctx.psum_list(layout.name(), &sums, axes),
            Some(_) | None => Ok(sums),
        }
    }

    fn unit(&self, unit: &str) -> Result<&UnitCollectives> {
        self.units.get(unit).ok_or_else(|| unknown(unit))
    }

    /// Returns the indices of this slot's shards of some parameters, in the order of their layout.
    fn own_positions(&self, ctx: &Replica, params: &[usize]) -> Vec<usize> {
        let shards = self.shards(ctx.slot());
        let mut positions = Vec::new();
        for &param_idx in params {
            let indices = 0..shards.len();
            positions.extend(indices.filter(|&index| shards[index].param_idx == param_idx));
        }
        positions
    }

    /// Returns this slot's shards of some parameters, in their gather dtype.
    fn own_runs(&self, ctx: &Replica, params: &[usize]) -> candle_core::Result<Vec<Tensor>> {
        let positions = self.own_positions(ctx, params);
        let shards = self.shards(ctx.slot());
        let mut runs = Vec::with_capacity(positions.len());
        for position in positions {
            let shard = shards[position].var.as_detached_tensor();
            runs.push(shard.to_dtype(self.precision.compute_dtype(shard.dtype()))?);
        }
        Ok(runs)
    }

    /// Takes the gradients of some parameters, in their reduce dtype.
    fn take_grads(
        &self,
        params: &[usize],
        grads: &mut BTreeMap<String, Tensor>,
    ) -> Result<Vec<Tensor>> {
        let mut taken = Vec::with_capacity(params.len());
        for &param_idx in params {
            let info = self.info(param_idx);
            let name = || info.name().to_owned();
            let grad = grads
                .remove(info.name())
                .ok_or_else(|| ParameterError::Missing { name: name() })?;
            let expected = runs::shape(info);
            if grad.dims() != expected {
                let found = grad.dims().to_vec();
                return Err(ParameterError::Shape { name: name(), found, expected }.into());
            }
            let dtype = self.precision.reduce_dtype(self.dtype(param_idx)?);
            taken.push(grad.to_dtype(dtype).doing("converting a gradient")?);
        }
        Ok(taken)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpu_slots_share_within_their_group() {
        let shared = |on_processor: &[usize]| -> Vec<Vec<usize>> {
            (0..4).map(|slot| slots_sharing_with(slot, 2, on_processor.iter().copied())).collect()
        };
        assert_eq!(shared(&[0, 1, 2, 3]), [[0, 1], [0, 1], [2, 3], [2, 3]]);
        assert_eq!(shared(&[]), [[0], [1], [2], [3]]);
        assert_eq!(shared(&[1, 2, 3]), [&[0][..], &[1], &[2, 3], &[2, 3]]);
    }
}
