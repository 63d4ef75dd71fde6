//! The plan's schedule, carried out: the parameters of a unit are put together in one collective, and
//! their gradients are summed in one.

use std::collections::{BTreeMap, BTreeSet, btree_map::Entry};

use candle_core::{DType, Tensor, Var};
use dist_checkpoint::ParameterError;
use fsdp_plan::{
    ShardingPlan,
    cost::{CostModel, Runtime},
    support::{Transfer, UnitSchedule},
};
use pmap_mesh::{
    ALL, Replica,
    support::{Pending, Run, RunLayout},
};

use super::{ShardedVars, runs, unknown};
use crate::{
    error::{Error, Result},
    precision::{Precision, widened_dtype},
};

/// What the plan's schedule says of a unit, ready to be carried out.
#[derive(Clone, Debug)]
pub(super) struct Unit {
    /// The names of the unit's parameters, and which parameter each is: a tied one is that which it
    /// is tied to.
    names: Vec<(String, usize)>,
    /// The parameters that are put together, and their runs on the ranks of a shard group.
    gathered: Option<Lists>,
    /// The gradients that are summed, and the same for them.
    reduced: Option<Lists>,
    /// The replicated parameters whose gradients are summed.
    copies: Vec<usize>,
}

/// Parameters, and a layout of them in the same order.
#[derive(Clone, Debug)]
struct Lists {
    params: Vec<usize>,
    layout: RunLayout,
}

/// A unit that is being gathered.
#[derive(Debug)]
pub(crate) struct UnderWay {
    unit: String,
    /// Nothing where none of its parameters is cut.
    pending: Option<Pending<Vec<Var>>>,
}

/// A unit's gradients that are being summed.
#[derive(Debug)]
pub(crate) struct PendingReduce {
    pub(crate) unit: String,
    /// The sums over a shard group for this slot's runs; nothing where none of the trained
    /// parameters is cut.
    of_runs: Option<ReduceState>,
    /// The gradients of replicated parameters, which are summed at the end.
    copies: Vec<Tensor>,
}

/// Sums over a shard group.
#[derive(Debug)]
enum ReduceState {
    Done(Vec<Tensor>),
    UnderWay(Pending<Vec<Tensor>>),
}

/// A unit's parameters, by all of their names.
type Names<'a> = (&'a str, Vec<(String, usize)>);

/// Units, each with the names of its own parameters.
pub(super) fn of_names<'a, N: Iterator<Item = &'a str>>(
    plan: &ShardingPlan,
    units: impl Iterator<Item = (&'a String, N)>,
    precision: Precision,
) -> Result<BTreeMap<String, Unit>> {
    let unit = |(unit, names): (&'a String, N)| {
        let names = names.map(|name| Ok((name.to_owned(), index_of(plan, name)?)));
        Ok((unit.as_str(), names.collect::<Result<Vec<_>>>()?))
    };
    scheduled(plan, units.map(unit).collect::<Result<_>>()?, precision)
}

/// Each unit by its name, with what its part of the schedule says.
fn scheduled<'a>(
    plan: &'a ShardingPlan,
    units: Vec<Names<'a>>,
    precision: Precision,
) -> Result<BTreeMap<String, Unit>> {
    let params = |(unit, names): &Names<'a>| {
        let params: BTreeSet<usize> = names.iter().map(|(_, param_idx)| *param_idx).collect();
        (*unit, params.into_iter().collect())
    };
    let model = precision.of_cost(CostModel::default().with_runtime(Runtime::Candle));
    let schedule = plan.schedule_of(&model, units.iter().map(params))?;
    let unit = |(schedule, (unit, names)): (&UnitSchedule<'_>, Names<'_>)| {
        Ok((unit.to_owned(), Unit::new(plan, schedule, names, precision)?))
    };
    schedule.units.iter().zip(units).map(unit).collect()
}

/// The position of a parameter, or of the one that it is tied to.
pub(super) fn index_of(plan: &ShardingPlan, name: &str) -> Result<usize> {
    let named = |name: &str| plan.index_of(name).ok_or_else(|| unknown(name));
    let param_idx = named(name)?;
    match plan.parameters()[param_idx].info().tied_to() {
        None => Ok(param_idx),
        Some(other) => named(other),
    }
}

/// The layout of these parameters on the ranks of a shard group, or of something of their shapes
/// and of the type that `dtype` makes of theirs.
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
            let runs = runs::of_rank(plan, param_idx, rank)?;
            own.extend(runs.into_iter().map(|items| Run { tensor, items }));
        }
        by_rank.push(own);
    }
    Ok(RunLayout::new(name, tensors, by_rank)?)
}

/// The slots that share the memory of what `slot` gathers: those of its shard group on the
/// processor. On another device each has a copy of its own.
fn sharing(
    slot: usize,
    group_size: usize,
    on_processor: impl Iterator<Item = usize>,
) -> Vec<usize> {
    let of_group = |other: &usize| other / group_size == slot / group_size;
    let sharing: Vec<usize> = on_processor.filter(of_group).collect();
    if sharing.contains(&slot) { sharing } else { vec![slot] }
}

impl Unit {
    fn new(
        plan: &ShardingPlan,
        schedule: &UnitSchedule<'_>,
        names: Vec<(String, usize)>,
        precision: Precision,
    ) -> Result<Self> {
        let lists = |transfer: &Transfer, dtype: &dyn Fn(DType) -> DType| {
            let params = transfer.parameters.clone();
            let layout = layout(plan, schedule.unit, &params, dtype)?;
            Ok::<_, Error>(Lists { params, layout })
        };
        let gathered = schedule.all_gather.as_ref();
        let reduced = schedule.reduce_scatter.as_ref();
        let copies = schedule.all_reduce_copies.as_ref();
        Ok(Self {
            names,
            gathered: gathered
                .map(|gathered| lists(gathered, &|held| precision.computed(held)))
                .transpose()?,
            reduced: reduced
                .map(|reduced| lists(reduced, &|held| precision.reduced(held)))
                .transpose()?,
            copies: copies.map_or_else(Vec::new, |copies| copies.parameters.clone()),
        })
    }
}

impl ShardedVars {
    /// Every parameter of a unit by its name, put together by all slots of a shard group in one
    /// collective; to be called in replicas, by all of them.
    ///
    /// Each is a variable, under which `backward` leaves the gradient of the whole, for
    /// [`reduce_parts`](Self::reduce_parts). On a processor the slots share these variables: do not
    /// set them.
    ///
    /// # Errors
    ///
    /// [`ParameterError::Unknown`] if there is no such unit,
    /// [`ShardingError::OtherMesh`](crate::ShardingError::OtherMesh) in a replica of a mesh of
    /// another size, and those of [`Replica::gather_runs`].
    #[track_caller]
    pub(crate) fn gather_unit(
        &self,
        ctx: &Replica,
        unit: &str,
    ) -> candle_core::Result<BTreeMap<String, Var>> {
        let gathered = match &self.unit(unit)?.gathered {
            Some(Lists { params, layout }) => {
                ctx.gather_runs(self.own_runs(ctx, params)?, layout, &self.axes.shard)?
            }
            None => Vec::new(),
        };
        self.named(ctx, unit, gathered)
    }

    /// Starts [`gather_unit`](Self::gather_unit), and does not wait for the others.
    #[track_caller]
    pub(crate) fn start_gather_unit(
        &self,
        ctx: &Replica,
        name: &str,
    ) -> candle_core::Result<UnderWay> {
        let pending = match &self.unit(name)?.gathered {
            Some(Lists { params, layout }) => {
                let own = self.own_runs(ctx, params)?;
                Some(ctx.start_gather_runs(own, layout, &self.axes.shard)?)
            }
            None => None,
        };
        Ok(UnderWay { unit: name.to_owned(), pending })
    }

    /// Every parameter of a unit by its name, when all have come.
    pub(crate) fn finish_gather_unit(
        &self,
        ctx: &Replica,
        under_way: UnderWay,
    ) -> candle_core::Result<BTreeMap<String, Var>> {
        let UnderWay { unit, pending } = under_way;
        let gathered = pending.map_or_else(|| Ok(Vec::new()), Pending::wait)?;
        self.named(ctx, &unit, gathered)
    }

    /// The variables of a unit by their names, given those that were gathered.
    fn named(
        &self,
        ctx: &Replica,
        unit: &str,
        gathered: Vec<Var>,
    ) -> candle_core::Result<BTreeMap<String, Var>> {
        let unit = self.unit(unit)?;
        let params = unit.gathered.as_ref().map_or(&[][..], |lists| &lists.params);
        let mut wholes: BTreeMap<usize, Var> = params.iter().copied().zip(gathered).collect();
        let mut named = BTreeMap::new();
        for (name, param_idx) in &unit.names {
            let whole = match wholes.entry(*param_idx) {
                Entry::Occupied(whole) => whole.get().clone(),
                Entry::Vacant(place) => place.insert(self.copy(ctx, *param_idx)?).clone(),
            };
            named.insert(name.clone(), whole);
        }
        Ok(named)
    }

    /// A variable of what every slot keeps whole.
    fn copy(&self, ctx: &Replica, param_idx: usize) -> candle_core::Result<Var> {
        let parts = self.parts(ctx.slot()).map_err(Error::from)?;
        let own = parts.iter().filter(|part| part.param_idx == param_idx);
        let own: Vec<Tensor> = own.map(|part| part.var.as_detached_tensor()).collect();
        let whole = self.joined(param_idx, &own, ctx.device())?;
        let dtype = self.precision.computed(whole.dtype());
        Var::from_tensor(&whole.to_dtype(dtype)?)
    }

    /// Which of a unit's parameters, given by their names, the slots of a process share when they are
    /// gathered, and of which each has its own.
    pub(crate) fn split_shared<'a, T>(
        &self,
        unit: &str,
        named: &'a BTreeMap<String, T>,
    ) -> Result<(Vec<&'a str>, Vec<&'a str>)> {
        let unit = self.unit(unit)?;
        let params = unit.gathered.as_ref().map_or(&[][..], |lists| &lists.params);
        let is_shared = |name: &&str| {
            unit.names.iter().any(|(other, param)| other == name && params.contains(param))
        };
        Ok(named.keys().map(String::as_str).partition(is_shared))
    }

    /// The slots of this process that share the memory of what a replica gathers, itself among them,
    /// in their order.
    pub(crate) fn sharing(&self, ctx: &Replica) -> Vec<usize> {
        let mesh = &self.mesh;
        let slots = mesh.local_slots().zip(mesh.devices());
        let on_processor = slots.filter(|(_, device)| device.is_cpu()).map(|(slot, _)| slot);
        let group_size = self.plan.shard_group().as_usize();
        sharing(ctx.slot(), group_size, on_processor)
    }

    /// Sums the gradients of a unit's whole parameters over all slots; returns the parts of the sums
    /// with the positions of this slot's variables. Those of halves are summed in single precision.
    ///
    /// They are summed over a shard group in one collective, and where a plan has replicas, each
    /// slot's parts over these in another: in the order of ranks within a group, and then in the
    /// order of groups.
    ///
    /// `grad` is asked for the gradient of each parameter that the unit keeps or is tied to, and that
    /// the plan [trains](fsdp_plan::ParameterInfo::requires_grad), by each of its names in this unit until there
    /// is one.
    ///
    /// # Errors
    ///
    /// As [`gather_unit`](Self::gather_unit), [`ParameterError::Missing`] if a parameter has no
    /// gradient, [`ParameterError::Shape`] if one is not of its shape, and those of
    /// [`Replica::reduce_runs`].
    #[track_caller]
    pub(crate) fn reduce_parts(
        &self,
        ctx: &Replica,
        unit: &str,
        grad: impl FnMut(&str) -> Option<Tensor>,
    ) -> candle_core::Result<Vec<(usize, Tensor)>> {
        let sums = self.begin_sums(unit, grad, |grads, layout| {
            Ok(ReduceState::Done(ctx.reduce_runs(grads, layout, &self.axes.shard)?))
        })?;
        self.finish_reduce_parts(ctx, sums)
    }

    /// Starts [`reduce_parts`](Self::reduce_parts), and does not wait for the others.
    #[track_caller]
    pub(crate) fn start_reduce_parts(
        &self,
        ctx: &Replica,
        unit: &str,
        grad: impl FnMut(&str) -> Option<Tensor>,
    ) -> candle_core::Result<PendingReduce> {
        self.begin_sums(unit, grad, |grads, layout| {
            Ok(ReduceState::UnderWay(ctx.start_reduce_runs(grads, layout, &self.axes.shard)?))
        })
    }

    /// Hands in the gradients of a unit's parameters: those that are cut, for a shard group to sum.
    fn begin_sums(
        &self,
        name: &str,
        mut grad: impl FnMut(&str) -> Option<Tensor>,
        sum: impl FnOnce(Vec<Tensor>, &RunLayout) -> candle_core::Result<ReduceState>,
    ) -> candle_core::Result<PendingReduce> {
        let unit = self.unit(name)?;
        let of_runs = match &unit.reduced {
            Some(Lists { params, layout }) => {
                Some(sum(self.grads(&unit.names, params, &mut grad)?, layout)?)
            }
            None => None,
        };
        let copies = self.grads(&unit.names, &unit.copies, &mut grad)?;
        Ok(PendingReduce { unit: name.to_owned(), of_runs, copies })
    }

    /// The sums of a unit's gradients, when all have come; with the positions of this slot's
    /// variables.
    #[track_caller]
    pub(crate) fn finish_reduce_parts(
        &self,
        ctx: &Replica,
        sums: PendingReduce,
    ) -> candle_core::Result<Vec<(usize, Tensor)>> {
        let PendingReduce { unit: name, of_runs, copies } = sums;
        let unit = self.unit(&name)?;
        let mut sums = Vec::new();
        if let (Some(Lists { params, layout }), Some(of_runs)) = (&unit.reduced, of_runs) {
            let of_group = match of_runs {
                ReduceState::Done(sums) => sums,
                ReduceState::UnderWay(pending) => pending.wait()?,
            };
            let reduced = self.over_replicas(ctx, of_group, layout)?;
            for (position, sum) in self.own_positions(ctx, params)?.into_iter().zip(reduced) {
                sums.push((position, self.held(ctx, position, &sum)?));
            }
        }
        if !copies.is_empty() {
            let all: Vec<usize> = (0..copies.len()).collect();
            let positions = self.own_positions(ctx, &unit.copies)?;
            // The name: nothing of a unit that is not cut is gathered, so nothing before has told a
            // replica that others have entered another one.
            let copies = ctx.psum_named(&name, copies, &all, ALL)?;
            for (position, sum) in positions.into_iter().zip(copies) {
                sums.push((position, self.held(ctx, position, &sum.flatten_all()?)?));
            }
        }
        Ok(sums)
    }

    /// A sum in the type in which the gradient of a part is held.
    fn held(&self, ctx: &Replica, position: usize, sum: &Tensor) -> candle_core::Result<Tensor> {
        let parts = self.parts(ctx.slot()).map_err(Error::from)?;
        sum.to_dtype(widened_dtype(parts[position].var.dtype()))
    }

    /// The sums of all shard groups, given those of this replica's, for its runs of a layout.
    #[track_caller]
    fn over_replicas(
        &self,
        ctx: &Replica,
        sums: Vec<Tensor>,
        layout: &RunLayout,
    ) -> candle_core::Result<Vec<Tensor>> {
        match &self.axes.replica {
            // Whoever has nothing is not waited for: the same slots of other groups have nothing.
            Some(axes) if !sums.is_empty() => {
                let all: Vec<usize> = (0..sums.len()).collect();
                ctx.psum_named(layout.name(), sums, &all, axes)
            }
            Some(_) | None => Ok(sums),
        }
    }

    fn unit(&self, unit: &str) -> Result<&Unit> {
        self.units.get(unit).ok_or_else(|| unknown(unit))
    }

    /// The positions of this slot's parts of some parameters, in the order of their layout.
    fn own_positions(&self, ctx: &Replica, params: &[usize]) -> Result<Vec<usize>> {
        self.check_mesh(ctx)?;
        let parts = self.parts(ctx.slot())?;
        let of_param = |&param_idx: &usize| {
            (0..parts.len()).filter(move |&position| parts[position].param_idx == param_idx)
        };
        Ok(params.iter().flat_map(of_param).collect())
    }

    /// This slot's parts of some parameters, in the type in which they are gathered.
    fn own_runs(&self, ctx: &Replica, params: &[usize]) -> candle_core::Result<Vec<Tensor>> {
        let positions = self.own_positions(ctx, params)?;
        let parts = self.parts(ctx.slot()).map_err(Error::from)?;
        let run = |position: usize| {
            let part = parts[position].var.as_detached_tensor();
            part.to_dtype(self.precision.computed(part.dtype()))
        };
        positions.into_iter().map(run).collect()
    }

    /// The gradients of some parameters, each under one of these names.
    fn grads(
        &self,
        names: &[(String, usize)],
        params: &[usize],
        grad: &mut impl FnMut(&str) -> Option<Tensor>,
    ) -> candle_core::Result<Vec<Tensor>> {
        let mut of_param = |&param_idx: &usize| {
            let mut names = names.iter().filter(|(_, named)| *named == param_idx);
            let found = names.find_map(|(name, _)| grad(name)).ok_or_else(|| {
                Error::Parameter(ParameterError::Missing {
                    name: self.info(param_idx).name().to_owned(),
                })
            })?;
            let (name, expected) = (self.info(param_idx).name(), runs::shape(self.info(param_idx)));
            ParameterError::check_shape(name, found.dims(), &expected).map_err(Error::from)?;
            found.to_dtype(self.precision.reduced(self.dtype(param_idx)?))
        };
        params.iter().map(&mut of_param).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_on_the_processor_share_within_their_group_and_others_do_not() {
        let shared = |on_processor: &[usize]| -> Vec<Vec<usize>> {
            (0..4).map(|slot| sharing(slot, 2, on_processor.iter().copied())).collect()
        };
        assert_eq!(shared(&[0, 1, 2, 3]), [[0, 1], [0, 1], [2, 3], [2, 3]]);
        assert_eq!(shared(&[]), [[0], [1], [2], [3]]);
        assert_eq!(shared(&[1, 2, 3]), [&[0][..], &[1], &[2, 3], &[2, 3]]);
    }
}
