//! The parameters of a unit, which are gathered and reduced in one collective.

use std::collections::BTreeMap;

use candle_core::{DType, Tensor, Var};
use fsdp_plan::{Cut, ShardingPlan};
use pmap_mesh::{ALL, Replica, Run, RunLayout};

use super::{ShardedVars, check_shape, runs, unknown};
use crate::{
    error::{Error, Result, parameter::ParameterError},
    grad::{widened, widened_dtype},
};

/// How the parameters of a unit lie on the ranks.
#[derive(Clone, Debug)]
pub(super) struct Unit {
    /// The names of the unit's parameters, and which parameter each is: a tied one is that which it
    /// is tied to.
    names: Vec<(String, usize)>,
    /// The parameters that are cut, in the order of the layouts.
    cut: Vec<usize>,
    /// Those of which every rank keeps the whole.
    whole: Vec<usize>,
    /// Of a shard group.
    gathered: RunLayout,
    /// Those that are cut and trained, in the order of the layout.
    trained_cut: Vec<usize>,
    /// Those that are kept whole and trained.
    trained_whole: Vec<usize>,
    /// The gradients, of all ranks: in every shard group, somebody wants each run.
    reduced: RunLayout,
}

/// The units of a plan, by name.
pub(super) fn of_plan(plan: &ShardingPlan) -> Result<BTreeMap<String, Unit>> {
    let mut names: BTreeMap<&str, Vec<(String, usize)>> = BTreeMap::new();
    for parameter in plan.parameters() {
        let info = parameter.info();
        let param_idx = index_of(plan, info.name())?;
        names.entry(info.unit()).or_default().push((info.name().to_owned(), param_idx));
    }
    names
        .into_iter()
        .map(|(unit, names)| Ok((unit.to_owned(), Unit::new(plan, unit, names)?)))
        .collect()
}

/// Units of other parameters than the plan says, each with the names of its own.
pub(super) fn of_names<'a, N: Iterator<Item = &'a str>>(
    plan: &ShardingPlan,
    units: impl Iterator<Item = (&'a String, N)>,
) -> Result<BTreeMap<String, Unit>> {
    let unit = |(unit, names): (&String, N)| {
        let names = names.map(|name| Ok((name.to_owned(), index_of(plan, name)?)));
        Ok((unit.clone(), Unit::new(plan, unit, names.collect::<Result<_>>()?)?))
    };
    units.map(unit).collect()
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
pub(super) fn layout(
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

impl Unit {
    fn new(plan: &ShardingPlan, unit: &str, names: Vec<(String, usize)>) -> Result<Self> {
        let mut params: Vec<usize> = names.iter().map(|(_, param_idx)| *param_idx).collect();
        params.sort_unstable();
        params.dedup();
        let is_whole = |param_idx: &usize| plan.parameters()[*param_idx].cut() == Cut::Replicated;
        let (whole, cut): (Vec<usize>, Vec<usize>) = params.into_iter().partition(is_whole);
        let is_trained = |param_idx: &usize| plan.parameters()[*param_idx].info().requires_grad();
        let trained = |params: &[usize]| params.iter().copied().filter(is_trained).collect();
        let trained_cut: Vec<usize> = trained(&cut);
        let trained_whole = trained(&whole);
        let gathered = layout(plan, unit, &cut, |dtype| dtype)?;
        let reduced = layout(plan, unit, &trained_cut, widened_dtype)?;
        let reduced = reduced.repeated(runs::index(plan.replicas()));
        Ok(Self { names, cut, whole, gathered, trained_cut, trained_whole, reduced })
    }
}

impl ShardedVars {
    /// Every parameter of a unit by its name, put together by all slots of a shard group in one
    /// collective; to be called in replicas, by all of them.
    ///
    /// Each is a variable, under which `backward` leaves the gradient of the whole: hand it to
    /// [`reduce_unit`](Self::reduce_unit), or call [`all_gather_unit`](Self::all_gather_unit)
    /// instead, through whose results gradients flow to the slots' variables at the price of a copy
    /// for each slot. On a processor the slots share these variables: do not set them.
    ///
    /// # Errors
    ///
    /// [`ParameterError::Unknown`] if the plan has no such unit,
    /// [`ShardingError::OtherMesh`](crate::ShardingError::OtherMesh) in a replica of a mesh of
    /// another size, and those of [`Replica::gather_runs`].
    ///
    /// # Examples
    ///
    /// ```
    /// use candle_core::{DType, Device, Tensor};
    /// use core_types::WorldSize;
    /// use dist_train::{ShardedVars, parameter_infos};
    /// use fsdp_plan::strategy::{Full, ShardingStrategy};
    /// use pmap_mesh::DeviceMesh;
    ///
    /// let mesh = DeviceMesh::cpu(2)?;
    /// let w = Tensor::ones((4, 2), DType::F32, &Device::Cpu)?;
    /// let plan = Full::default().plan(&parameter_infos([("h.0.w", &w)])?, WorldSize::new(2)?)?;
    /// let vars = ShardedVars::shard(&mesh, &plan, [("h.0.w", &w)])?;
    /// let step = mesh.pmap(move |ctx, x: Tensor| {
    ///     let unit = vars.gather_unit(ctx, "h.0")?;
    ///     let grads = x.matmul(&unit["h.0.w"])?.sum_all()?.backward()?;
    ///     let grad = |name: &str| grads.get(&unit[name]).cloned();
    ///     let sums = vars.reduce_unit(ctx, "h.0", grad)?;
    ///     sums[0].1.to_vec1::<f32>()
    ///         .map(|sum| assert_eq!(sum, [6.; 4]))
    /// });
    /// step.call(Tensor::ones((6, 4), DType::F32, &Device::Cpu)?)?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[track_caller]
    pub fn gather_unit(
        &self,
        ctx: &Replica,
        unit: &str,
    ) -> candle_core::Result<BTreeMap<String, Var>> {
        let runs = self.unit(unit)?;
        let mut wholes: BTreeMap<usize, Var> = BTreeMap::new();
        if !runs.cut.is_empty() {
            let own = self.own_runs(ctx, &runs.cut)?;
            let gathered = ctx.gather_runs(own, &runs.gathered, &self.0.axes.shard)?;
            wholes.extend(runs.cut.iter().copied().zip(gathered));
        }
        for &param_idx in &runs.whole {
            let mine = self.mine(ctx, param_idx)?.reshape(runs::shape(self.info(param_idx)))?;
            wholes.insert(param_idx, Var::from_tensor(&mine.detach())?);
        }
        let named = runs.names.iter();
        Ok(named.map(|(name, param_idx)| (name.clone(), wholes[param_idx].clone())).collect())
    }

    /// Sums the gradients of a unit's whole parameters over all slots, in one collective; returns
    /// this slot's variables with their parts of the sums. Those of halves are summed in single
    /// precision.
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
    pub fn reduce_unit(
        &self,
        ctx: &Replica,
        unit: &str,
        grad: impl FnMut(&str) -> Option<Tensor>,
    ) -> candle_core::Result<Vec<(Var, Tensor)>> {
        let sums = self.reduce_parts(ctx, unit, grad)?;
        let parts = self.parts(ctx.slot()).map_err(Error::from)?;
        Ok(sums.into_iter().map(|(part, sum)| (parts[part].var.clone(), sum)).collect())
    }

    /// [`reduce_unit`](Self::reduce_unit), with the positions of this slot's variables.
    #[track_caller]
    pub(crate) fn reduce_parts(
        &self,
        ctx: &Replica,
        unit: &str,
        mut grad: impl FnMut(&str) -> Option<Tensor>,
    ) -> candle_core::Result<Vec<(usize, Tensor)>> {
        let runs = self.unit(unit)?;
        let mut sums = Vec::new();
        if !runs.trained_cut.is_empty() {
            let grads = self.grads(&runs.names, &runs.trained_cut, &mut grad)?;
            let reduced = ctx.reduce_runs(grads, &runs.reduced, ALL)?;
            sums.extend(self.own_positions(ctx, &runs.trained_cut)?.into_iter().zip(reduced));
        }
        if !runs.trained_whole.is_empty() {
            let grads = self.grads(&runs.names, &runs.trained_whole, &mut grad)?;
            let all: Vec<usize> = (0..grads.len()).collect();
            let positions = self.own_positions(ctx, &runs.trained_whole)?;
            for (position, sum) in positions.into_iter().zip(ctx.psum_list(grads, &all)?) {
                sums.push((position, sum.flatten_all()?));
            }
        }
        Ok(sums)
    }

    fn unit(&self, unit: &str) -> Result<&Unit> {
        self.0.units.get(unit).ok_or_else(|| unknown(unit))
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

    fn own_runs(&self, ctx: &Replica, params: &[usize]) -> Result<Vec<Tensor>> {
        let positions = self.own_positions(ctx, params)?;
        let parts = self.parts(ctx.slot())?;
        let run = |position: usize| parts[position].var.as_detached_tensor();
        Ok(positions.into_iter().map(run).collect())
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
            check_shape(self.info(param_idx), &found)?;
            widened(&found)
        };
        params.iter().map(&mut of_param).collect()
    }
}
