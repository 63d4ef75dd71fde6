//! The parameters of a unit, which are gathered and reduced in one collective.

use std::collections::BTreeMap;

use candle_core::{Tensor, Var};
use fsdp_plan::{Cut, ParameterInfo, ShardingPlan};
use pmap_mesh::{ALL, Replica, Run, RunLayout};

use super::{Part, ShardedVars, check_shape, runs, unknown};
use crate::error::{Error, Result, parameter::ParameterError};

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
    /// Of all ranks; in every shard group, somebody wants each run.
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

/// The position of a parameter, or of the one that it is tied to.
pub(super) fn index_of(plan: &ShardingPlan, name: &str) -> Result<usize> {
    let named = |name: &str| plan.index_of(name).ok_or_else(|| unknown(name));
    let param_idx = named(name)?;
    match plan.parameters()[param_idx].info().tied_to() {
        None => Ok(param_idx),
        Some(other) => named(other),
    }
}

/// The layout of these parameters on the ranks of a shard group.
pub(super) fn layout(plan: &ShardingPlan, name: &str, params: &[usize]) -> Result<RunLayout> {
    let tensor = |&param_idx: &usize| {
        let info = plan.parameters()[param_idx].info();
        Ok((runs::shape(info), runs::dtype(info)?))
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
        let gathered = layout(plan, unit, &cut)?;
        let reduced = gathered.repeated(runs::index(plan.replicas()));
        Ok(Self { names, cut, whole, gathered, reduced })
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
        let own = self.own_runs(ctx, &runs.cut)?;
        let gathered = ctx.gather_runs(own, &runs.gathered, &self.0.axes.shard)?;
        let mut wholes: BTreeMap<usize, Var> = runs.cut.iter().copied().zip(gathered).collect();
        for &param_idx in &runs.whole {
            let mine = self.mine(ctx, param_idx)?.reshape(runs::shape(self.info(param_idx)))?;
            wholes.insert(param_idx, Var::from_tensor(&mine.detach())?);
        }
        let named = runs.names.iter();
        Ok(named.map(|(name, param_idx)| (name.clone(), wholes[param_idx].clone())).collect())
    }

    /// Sums the gradients of a unit's whole parameters over all slots, in one collective; returns
    /// this slot's variables with their parts of the sums.
    ///
    /// `grad` is asked for the gradient of each parameter that the unit keeps or is tied to, by
    /// each of its names in this unit until there is one.
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
        grad: impl Fn(&str) -> Option<Tensor>,
    ) -> candle_core::Result<Vec<(Var, Tensor)>> {
        let runs = self.unit(unit)?;
        let mut sums = Vec::new();
        let grads = runs.grads(&runs.cut, &grad, |idx| self.info(idx))?;
        let reduced = ctx.reduce_runs(grads, &runs.reduced, ALL)?;
        sums.extend(
            self.own_parts(ctx, &runs.cut)?.into_iter().map(|part| part.var.clone()).zip(reduced),
        );
        if !runs.whole.is_empty() {
            let grads = runs.grads(&runs.whole, &grad, |idx| self.info(idx))?;
            let all: Vec<usize> = (0..grads.len()).collect();
            let parts = self.own_parts(ctx, &runs.whole)?;
            for (part, sum) in parts.into_iter().zip(ctx.psum_list(grads, &all)?) {
                sums.push((part.var.clone(), sum.flatten_all()?));
            }
        }
        Ok(sums)
    }

    fn unit(&self, unit: &str) -> Result<&Unit> {
        self.0.units.get(unit).ok_or_else(|| unknown(unit))
    }

    /// This slot's parts of some parameters, in the order of their layout.
    fn own_parts(&self, ctx: &Replica, params: &[usize]) -> Result<Vec<&Part>> {
        let mut parts = Vec::new();
        for &param_idx in params {
            parts.extend(self.parts_here(ctx, param_idx)?);
        }
        Ok(parts)
    }

    fn own_runs(&self, ctx: &Replica, params: &[usize]) -> Result<Vec<Tensor>> {
        let parts = self.own_parts(ctx, params)?;
        Ok(parts.into_iter().map(|part| part.var.as_detached_tensor()).collect())
    }
}

impl Unit {
    /// The gradients of some of the unit's parameters.
    fn grads<'a>(
        &self,
        params: &[usize],
        grad: impl Fn(&str) -> Option<Tensor>,
        info: impl Fn(usize) -> &'a ParameterInfo,
    ) -> Result<Vec<Tensor>> {
        let of_param = |&param_idx: &usize| {
            let mut names = self.names.iter().filter(|(_, named)| *named == param_idx);
            let found = names.find_map(|(name, _)| grad(name)).ok_or_else(|| {
                Error::Parameter(ParameterError::Missing {
                    name: info(param_idx).name().to_owned(),
                })
            })?;
            check_shape(info(param_idx), &found)?;
            Ok(found)
        };
        params.iter().map(of_param).collect()
    }
}
