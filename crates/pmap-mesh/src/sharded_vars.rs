//! A sharding plan carried out: variables of which each slot keeps its part.

use std::{collections::BTreeMap, sync::Arc};

use candle_core::{DType, Device, Tensor, Var, bail};
use core_types::{Rank, WorldSize};
use fsdp_plan::{Cut, ShardingPlan};

use crate::{
    ALL,
    assembly::Assembly,
    error::{Error, Result},
    mesh::DeviceMesh,
    placement::{dtype_of, index},
    replica::Replica,
    topology::MeshAxes,
};

/// The parameters of a model, of which every slot of a mesh keeps the part that a [`ShardingPlan`] gives it; what
/// PyTorch's `fully_shard` does, one call at a time.
///
/// A part is a variable of one dimension: a run of the parameter's items in row-major order. Parts are trained in place:
/// [`all_gather`](Self::all_gather) puts a parameter together where it is used, its backward sums the gradient and hands
/// each slot its part, and an optimizer of the slot's own [`vars`](Self::vars) updates it.
///
/// A plan with replicas (HSDP) needs a mesh of which the last axis is one shard group, and the others are the replicas.
///
/// # Examples
///
/// Two slots, each with half of a weight:
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_nn::{Init, VarMap};
/// use core_types::WorldSize;
/// use fsdp_plan::{Full, ShardingStrategy};
/// use pmap_mesh::{DeviceMesh, P, ShardedVars, parameter_infos};
///
/// let mesh = DeviceMesh::cpu(2)?;
/// let w = Tensor::arange(0_f32, 8., &Device::Cpu)?.reshape((4, 2))?;
/// let plan = Full::default().plan(&parameter_infos([("w", &w)])?, WorldSize::new(2)?)?;
/// let vars = ShardedVars::shard(&mesh, &plan, [("w", &w)])?;
/// assert_eq!(vars.bytes(0), 16);
///
/// let in_replica = vars.clone();
/// let grads = mesh
///     .pmap(move |ctx, x: Tensor| {
///         let w = in_replica.all_gather(ctx, "w")?;
///         let loss = x.matmul(&w)?.sum_all()?;
///         let grads = loss.backward()?;
///         // The gradient of this slot's part, summed over the batches of both.
///         let part = &in_replica.vars(ctx.index())[0];
///         grads.get(part).cloned().ok_or_else(|| candle_core::Error::msg("unused"))
///     })
///     .out_axes(Some(0));
/// let x = Tensor::ones((6, 4), DType::F32, &Device::Cpu)?;
/// assert_eq!(grads.call(x)?.to_vec1::<f32>()?, [6.; 8]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct ShardedVars(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    plan: ShardingPlan,
    devices: Vec<Device>,
    /// The axes along which a parameter is cut, and along which its parts are repeated.
    shard_axes: MeshAxes,
    replica_axes: Option<MeshAxes>,
    slots: Vec<Vec<Part>>,
}

/// What one slot keeps of one parameter, in one run.
#[derive(Clone, Debug)]
pub(crate) struct Part {
    pub(crate) param_idx: usize,
    /// The first item, in the parameter.
    pub(crate) start: usize,
    pub(crate) var: Var,
}

impl ShardedVars {
    /// Cuts named tensors as `plan` says and moves the parts to their devices: the variables of a `VarMap`, the tensors
    /// of a checkpoint.
    ///
    /// # Errors
    ///
    /// [`Error::PlanWorld`] if the plan is one for another number of ranks than the mesh has slots,
    /// [`Error::PlanMesh`] if it has replicas and the mesh is not of that shape, [`Error::Incomplete`] if a tensor is
    /// missing or smaller than planned, [`Error::Assemble`] if candle fails.
    pub fn shard<'a>(
        mesh: &DeviceMesh,
        plan: &ShardingPlan,
        tensors: impl IntoIterator<Item = (impl AsRef<str>, &'a Tensor)>,
    ) -> Result<Self> {
        let mut assembly = Assembly::new(mesh, plan)?;
        for (name, tensor) in tensors {
            if let Some(param_idx) = plan.index_of(name.as_ref()) {
                assembly.add(param_idx, 0, &tensor.flatten_all().map_err(Error::Assemble)?)?;
            }
        }
        Self::assembled(mesh, plan, assembly)
    }

    /// The same parameters, cut as another plan says, on a mesh of its size.
    ///
    /// # Errors
    ///
    /// Those of [`shard`](Self::shard).
    pub fn resharded(&self, mesh: &DeviceMesh, plan: &ShardingPlan) -> Result<Self> {
        let mut assembly = Assembly::new(mesh, plan)?;
        // Further replicas hold the same parts again.
        for part in self.0.slots.iter().take(self.0.plan.shard_group().as_usize()).flatten() {
            let name = self.name(part.param_idx);
            if let Some(param_idx) = plan.index_of(name) {
                assembly.add(param_idx, part.start, &part.var.as_detached_tensor())?;
            }
        }
        Self::assembled(mesh, plan, assembly)
    }

    pub(crate) fn assembled(mesh: &DeviceMesh, plan: &ShardingPlan, assembly: Assembly) -> Result<Self> {
        let (shard_axes, replica_axes) = axes(mesh, plan)?;
        let slots = assembly.finish(plan, mesh.devices())?;
        let (plan, devices) = (plan.clone(), mesh.devices().to_vec());
        Ok(Self(Arc::new(Inner { plan, devices, shard_axes, replica_axes, slots })))
    }

    /// The plan that is carried out.
    pub fn plan(&self) -> &ShardingPlan {
        &self.0.plan
    }

    /// The variables of one slot, in the order of the plan: what its optimizer is given.
    ///
    /// # Panics
    ///
    /// If there is no such slot.
    pub fn vars(&self, slot: usize) -> Vec<Var> {
        self.0.slots[slot].iter().map(|part| part.var.clone()).collect()
    }

    /// The memory that one slot's parts take, in bytes: the plan's `param_bytes`.
    ///
    /// # Panics
    ///
    /// If there is no such slot.
    pub fn bytes(&self, slot: usize) -> u64 {
        let bytes = |part: &Part| part.var.elem_count() as u64 * part.var.dtype().size_in_bytes() as u64;
        self.0.slots[slot].iter().map(bytes).sum()
    }

    /// The parts of one slot.
    pub(crate) fn parts(&self, slot: usize) -> &[Part] {
        &self.0.slots[slot]
    }

    pub(crate) fn name(&self, param_idx: usize) -> &str {
        self.0.plan.parameters()[param_idx].info().name()
    }

    /// The whole of a parameter, on the first device.
    ///
    /// # Errors
    ///
    /// [`Error::UnknownParameter`], or [`Error::Assemble`] if candle fails.
    pub fn gather(&self, name: &str) -> Result<Tensor> {
        let param_idx = self.index_of(name)?;
        let group = &self.0.slots[..self.0.plan.shard_group().as_usize()];
        let parts = group.iter().flatten().filter(|part| part.param_idx == param_idx);
        let mut parts: Vec<(usize, Tensor)> = parts.map(|part| (part.start, part.var.as_detached_tensor())).collect();
        parts.sort_by_key(|(start, _)| *start);
        parts.dedup_by_key(|(start, _)| *start);
        let joined = || {
            let here = parts.iter().map(|(_, part)| part.to_device(&self.0.devices[0]));
            let here = here.collect::<candle_core::Result<Vec<_>>>()?;
            self.shaped(param_idx, &here, &self.0.devices[0])
        };
        joined().map_err(Error::Assemble)
    }

    /// The whole of a parameter, put together by all slots; to be called in replicas, by all of them.
    ///
    /// Gradients run back to the slots' [`vars`](Self::vars): summed over all, and each gets those of its parts.
    ///
    /// # Errors
    ///
    /// If the plan has no such parameter, and those of [`Replica::all_gather`].
    #[track_caller]
    pub fn all_gather(&self, ctx: &Replica, name: &str) -> candle_core::Result<Tensor> {
        let param_idx = self.index_of(name).map_err(|error| ctx.refuse(error))?;
        let mine = self.mine(ctx, param_idx)?;
        if self.0.plan.parameters()[param_idx].cut() == Cut::Replicated {
            return self.shaped(param_idx, &[ctx.pvary(&mine, ALL)?], ctx.device());
        }
        let mine = match &self.0.replica_axes {
            Some(axes) => ctx.pvary(&mine, axes)?,
            None => mine,
        };
        let gathered = ctx.all_gather(&mine, 0, &self.0.shard_axes)?;
        let mut runs = self.runs(param_idx).map_err(|error| ctx.refuse(error))?;
        if !runs.is_sorted() {
            runs.sort_unstable();
            let run = |&(_, offset, len): &(usize, usize, usize)| gathered.narrow(0, offset, len);
            return self.shaped(
                param_idx,
                &runs.iter().map(run).collect::<candle_core::Result<Vec<_>>>()?,
                ctx.device(),
            );
        }
        self.shaped(param_idx, &[gathered], ctx.device())
    }

    /// Every parameter of a unit by its name, as [`all_gather`](Self::all_gather).
    ///
    /// # Errors
    ///
    /// If the plan has no such unit, and those of [`Replica::all_gather`].
    #[track_caller]
    pub fn all_gather_unit(&self, ctx: &Replica, unit: &str) -> candle_core::Result<BTreeMap<String, Tensor>> {
        let parameters = self.0.plan.parameters().iter().filter(|parameter| parameter.info().unit() == unit);
        let names: Vec<&str> = parameters.map(|parameter| parameter.info().name()).collect();
        if names.is_empty() {
            return Err(ctx.refuse(Error::UnknownParameter { name: unit.to_owned() }));
        }
        let mut gathered = BTreeMap::new();
        for name in names {
            gathered.insert(name.to_owned(), self.all_gather(ctx, name)?);
        }
        Ok(gathered)
    }

    /// Sums the gradient of a whole parameter over all slots; returns this slot's variables with their parts of it.
    ///
    /// For gradients that were computed apart from [`all_gather`](Self::all_gather), whose backward does the same.
    ///
    /// # Errors
    ///
    /// If the plan has no such parameter, and those of [`Replica::psum`].
    #[track_caller]
    pub fn reduce_scatter(&self, ctx: &Replica, name: &str, grad: &Tensor) -> candle_core::Result<Vec<(Var, Tensor)>> {
        let param_idx = self.index_of(name).map_err(|error| ctx.refuse(error))?;
        let sum = ctx.psum(&grad.detach(), ALL)?.flatten_all()?;
        let mine = self.parts_here(ctx, param_idx);
        mine.map(|part| Ok((part.var.clone(), sum.narrow(0, part.start, part.var.elem_count())?))).collect()
    }

    /// The position of a parameter, or of the one that it is tied to.
    fn index_of(&self, name: &str) -> Result<usize> {
        let unknown = || Error::UnknownParameter { name: name.to_owned() };
        let parameter = self.0.plan.index_of(name).ok_or_else(unknown)?;
        match self.0.plan.parameters()[parameter].info().tied_to() {
            None => Ok(parameter),
            Some(other) => self.0.plan.index_of(other).ok_or_else(unknown),
        }
    }

    /// This slot's parts of a parameter.
    fn parts_here(&self, ctx: &Replica, param_idx: usize) -> impl Iterator<Item = &Part> {
        self.parts(ctx.index()).iter().filter(move |part| part.param_idx == param_idx)
    }

    /// This slot's parts of a parameter in one tensor, which may be empty.
    fn mine(&self, ctx: &Replica, param_idx: usize) -> candle_core::Result<Tensor> {
        let mine: Vec<&Tensor> = self.parts_here(ctx, param_idx).map(|part| part.var.as_tensor()).collect();
        match mine[..] {
            // A variable too: its slot must take part in the backward as the others do.
            [] => Ok(Var::zeros(0, self.dtype(param_idx)?, ctx.device())?.into_inner()),
            [only] => Ok(only.clone()),
            _ => Tensor::cat(&mine, 0),
        }
    }

    fn dtype(&self, param_idx: usize) -> candle_core::Result<DType> {
        let elem = self.0.plan.parameters()[param_idx].info().dtype();
        match dtype_of(elem) {
            Some(dtype) => Ok(dtype),
            None => bail!("candle has no type {elem}"),
        }
    }

    /// Where each run of a parameter begins, where it lies among what all slots of a group bring, and how long it is.
    fn runs(&self, param_idx: usize) -> Result<Vec<(usize, usize, usize)>> {
        let mut offset = 0;
        let mut runs = Vec::new();
        for rank in ranks(self.0.plan.shard_group()) {
            for (start, len) in runs_of(&self.0.plan, param_idx, rank)? {
                runs.push((start, offset, len));
                offset += len;
            }
        }
        Ok(runs)
    }

    fn shaped(&self, param_idx: usize, runs: &[Tensor], device: &Device) -> candle_core::Result<Tensor> {
        let shape: Vec<usize> =
            self.0.plan.parameters()[param_idx].info().shape().iter().map(|&dim| index(dim)).collect();
        match runs {
            [] => Tensor::zeros(shape, self.dtype(param_idx)?, device),
            [only] => only.reshape(shape),
            runs => Tensor::cat(runs, 0)?.reshape(shape),
        }
    }
}

/// The runs of a parameter that one rank keeps: first item and number of items.
pub(crate) fn runs_of(plan: &ShardingPlan, param_idx: usize, rank: Rank) -> Result<Vec<(usize, usize)>> {
    Ok(plan.shards(param_idx, rank)?.map(|shard| (index(shard.start_offset), index(shard.shard_size))).collect())
}

pub(crate) fn ranks(world_size: WorldSize) -> impl Iterator<Item = Rank> {
    world_size.placements().map(core_types::Placement::rank)
}

/// The axes along which a plan cuts, and along which it repeats.
fn axes(mesh: &DeviceMesh, plan: &ShardingPlan) -> Result<(MeshAxes, Option<MeshAxes>)> {
    let (ranks, slots) = (plan.world_size().as_u64(), mesh.len());
    if mesh.local_slots().len() != slots {
        return Err(Error::SeveralProcesses { what: "sharded variables" });
    }
    if ranks != slots as u64 {
        return Err(Error::PlanWorld { ranks, slots });
    }
    if plan.replicas() == 1 {
        return Ok((ALL, None));
    }
    let axes: Vec<(&str, usize)> = mesh.axes().collect();
    let group = plan.shard_group().as_u64();
    match axes.split_last() {
        Some(((shard, size), replicas)) if *size as u64 == group => {
            Ok(((*shard).into(), Some(replicas.iter().map(|(name, _)| (*name).to_owned()).collect())))
        }
        _ => Err(Error::PlanMesh { group, replicas: plan.replicas() }),
    }
}
