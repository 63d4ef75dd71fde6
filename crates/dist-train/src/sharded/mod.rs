//! A sharding plan carried out: variables of which each slot keeps its part.

pub(crate) mod describe;

use std::{collections::BTreeMap, ops::Range, sync::Arc};

use candle_core::{DType, Device, Tensor, Var, bail};
use core_types::{Rank, WorldSize};
use fsdp_plan::{Cut, ParameterInfo, PlannedParameter, ShardingPlan};

use pmap_mesh::{ALL, DeviceMesh, MeshAxes, Replica};

use crate::{
    checkpoint::{Checkpoint, MODEL, StateDict},
    error::{Error, Result},
    optim::StatefulOptimizer,
    sharded::describe::{dtype_of, index},
};

/// The parameters of a model, of which every slot of a mesh keeps the part that a [`ShardingPlan`]
/// gives it; what PyTorch's `fully_shard` does, one call at a time.
///
/// A part is a variable of one dimension: a run of the parameter's items in row-major order. Parts
/// are trained in place: [`all_gather`](Self::all_gather) puts a parameter together where it is
/// used, its backward sums the gradient and hands each slot its part, and an optimizer of the
/// slot's own [`vars`](Self::vars) updates it.
///
/// A plan with replicas (HSDP) needs a mesh of which the last axis is one shard group, and the
/// others are the replicas.
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
/// use dist_train::{ShardedVars, parameter_infos};
/// use pmap_mesh::{DeviceMesh, P};
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
///         let part = &in_replica.vars(ctx.slot())[0];
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
    mesh: DeviceMesh,
    /// The axes along which a parameter is cut, and along which its parts are repeated.
    shard_axes: MeshAxes,
    replica_axes: Option<MeshAxes>,
    /// Of this process's slots.
    slots: Vec<Vec<Part>>,
}

/// What one slot keeps of one parameter, in one run.
#[derive(Clone, Debug)]
struct Part {
    param_idx: usize,
    /// The first item, in the parameter.
    start: usize,
    var: Var,
}

impl ShardedVars {
    /// Cuts named tensors as `plan` says and moves the parts to their devices: the variables of a
    /// `VarMap`, the tensors of a checkpoint.
    ///
    /// # Errors
    ///
    /// [`Error::PlanWorld`] if the plan is one for another number of ranks than the mesh has slots,
    /// [`Error::PlanMesh`] if it has replicas and the mesh is not of that shape,
    /// [`Error::Incomplete`] if a tensor is missing or smaller than planned, [`Error::Assemble`] if
    /// candle fails.
    pub fn shard<'a>(
        mesh: &DeviceMesh,
        plan: &ShardingPlan,
        tensors: impl IntoIterator<Item = (impl AsRef<str>, &'a Tensor)>,
    ) -> Result<Self> {
        let mut given = BTreeMap::new();
        for (name, tensor) in tensors {
            given.insert(name.as_ref().to_owned(), tensor.flatten_all().map_err(Error::Assemble)?);
        }
        Self::cut(mesh, plan, |param_idx| {
            let name = plan.parameters()[param_idx].info().name();
            let whole = given.remove(name);
            Ok(move |run| run_of(whole.as_ref(), name, run))
        })
    }

    /// The same parameters, cut as another plan says, on a mesh of its size.
    ///
    /// If they span several processes, all of them call this, and each holds one whole parameter at
    /// a time.
    ///
    /// # Errors
    ///
    /// Those of [`shard`](Self::shard).
    pub fn resharded(&self, mesh: &DeviceMesh, plan: &ShardingPlan) -> Result<Self> {
        Self::cut(mesh, plan, |param_idx| {
            let name = plan.parameters()[param_idx].info().name();
            let known = self.0.plan.index_of(name).is_some();
            let whole = known
                .then(|| self.gather(name)?.flatten_all().map_err(Error::Assemble))
                .transpose()?;
            Ok(move |run| run_of(whole.as_ref(), name, run))
        })
    }

    /// What a checkpoint holds, cut as `plan` says: for another number of slots than wrote it, or
    /// another strategy.
    ///
    /// Every process reads what its own slots keep, no more.
    ///
    /// # Errors
    ///
    /// [`Error::UnknownParameter`] if the checkpoint has one that the plan lacks,
    /// [`Error::Incomplete`] if it lacks one, [`Error::OtherShape`] if one does not fit,
    /// [`Error::File`] if a file cannot be read, and those of [`shard`](Self::shard).
    pub fn load(mesh: &DeviceMesh, plan: &ShardingPlan, checkpoint: &Checkpoint) -> Result<Self> {
        checkpoint.expect(mesh, &shapes(plan))?;
        Self::cut(mesh, plan, |param_idx| {
            let name = plan.parameters()[param_idx].info().name();
            Ok(move |run| checkpoint.items(MODEL, name, run))
        })
    }

    /// Variables for this process's slots; `source` is asked for each parameter in turn and then
    /// for its runs, as tensors of one dimension.
    fn cut<R: Fn(Range<usize>) -> Result<Tensor>>(
        mesh: &DeviceMesh,
        plan: &ShardingPlan,
        mut source: impl FnMut(usize) -> Result<R>,
    ) -> Result<Self> {
        let (shard_axes, replica_axes) = axes(mesh, plan)?;
        let mut slots: Vec<Vec<Part>> = mesh.devices().iter().map(|_| Vec::new()).collect();
        for (param_idx, parameter) in plan.parameters().iter().enumerate() {
            let dtype = dtype(parameter.info()).map_err(Error::Assemble)?;
            let run = source(param_idx)?;
            let here = ranks(plan.world_size()).skip(mesh.local_slots().start);
            for ((rank, parts), device) in here.zip(&mut slots).zip(mesh.devices()) {
                for (start, len) in runs_of(plan, param_idx, rank)? {
                    let var = variable(&run(start..start + len)?, dtype, device)
                        .map_err(Error::Assemble)?;
                    parts.push(Part { param_idx, start, var });
                }
            }
        }
        Ok(Self(Arc::new(Inner {
            plan: plan.clone(),
            mesh: mesh.clone(),
            shard_axes,
            replica_axes,
            slots,
        })))
    }

    /// The plan that is carried out.
    pub fn plan(&self) -> &ShardingPlan {
        &self.0.plan
    }

    /// The variables of one slot, in the order of the plan: what its optimizer is given.
    ///
    /// # Panics
    ///
    /// If this process has no such slot.
    pub fn vars(&self, slot: usize) -> Vec<Var> {
        self.parts(slot).iter().map(|part| part.var.clone()).collect()
    }

    /// The memory that one slot's parts take, in bytes: the plan's `param_bytes`.
    ///
    /// # Panics
    ///
    /// If this process has no such slot.
    pub fn bytes(&self, slot: usize) -> u64 {
        let bytes =
            |part: &Part| part.var.elem_count() as u64 * part.var.dtype().size_in_bytes() as u64;
        self.parts(slot).iter().map(bytes).sum()
    }

    /// What this process's slots keep, to be written to a checkpoint: each parameter once, though
    /// replicas repeat it.
    pub fn state_dict(&self) -> StateDict {
        let mut state = StateDict::new(&self.0.mesh, shapes(&self.0.plan));
        for slot in self.0.mesh.local_slots() {
            for part in self.parts(slot).iter().filter(|part| self.is_saved(slot, part)) {
                let items = part.var.as_detached_tensor();
                state.add(self.local(slot), MODEL, self.name(part.param_idx), part.start, items);
            }
        }
        state
    }

    /// Adds to a [`state_dict`](Self::state_dict) what a slot's optimizer, made with its
    /// [`vars`](Self::vars), keeps for them.
    ///
    /// # Panics
    ///
    /// If this process has no such slot.
    pub fn add_optimizer(
        &self,
        state: &mut StateDict,
        slot: usize,
        optimizer: &impl StatefulOptimizer,
    ) {
        for (var, part) in
            self.parts(slot).iter().enumerate().filter(|(_, part)| self.is_saved(slot, part))
        {
            for (kind, items) in optimizer.state(var) {
                state.add(self.local(slot), kind, self.name(part.param_idx), part.start, items);
            }
        }
    }

    /// Gives a slot's optimizer, made with its [`vars`](Self::vars), what a checkpoint has for
    /// them, whatever plan it was written under.
    ///
    /// # Errors
    ///
    /// [`Error::File`] if a file cannot be read, [`Error::Incomplete`] if something is missing.
    ///
    /// # Panics
    ///
    /// If this process has no such slot.
    pub fn load_optimizer(
        &self,
        checkpoint: &Checkpoint,
        slot: usize,
        optimizer: &mut impl StatefulOptimizer,
    ) -> Result<()> {
        for (var, part) in self.parts(slot).iter().enumerate() {
            for (kind, like) in optimizer.state(var) {
                let value = checkpoint.like(kind, self.name(part.param_idx), part.start, &like)?;
                optimizer.load_state(var, kind, &value).map_err(Error::Assemble)?;
            }
        }
        Ok(())
    }

    /// Whether a slot writes a part to checkpoints: others of its group, or of other groups, may
    /// have the same.
    fn is_saved(&self, slot: usize, part: &Part) -> bool {
        match self.0.plan.parameters()[part.param_idx].cut() {
            Cut::Replicated => slot == 0,
            _ => slot < self.0.plan.shard_group().as_usize(),
        }
    }

    /// The parts of one slot.
    fn parts(&self, slot: usize) -> &[Part] {
        &self.0.slots[self.local(slot)]
    }

    /// The position of a slot among this process's.
    fn local(&self, slot: usize) -> usize {
        slot - self.0.mesh.local_slots().start
    }

    fn name(&self, param_idx: usize) -> &str {
        self.0.plan.parameters()[param_idx].info().name()
    }

    /// The whole of a parameter, on this process's first device.
    ///
    /// On a mesh of several processes all of them call this.
    ///
    /// # Errors
    ///
    /// [`Error::UnknownParameter`], or [`Error::Assemble`] if candle fails.
    pub fn gather(&self, name: &str) -> Result<Tensor> {
        let param_idx = self.index_of(name)?;
        let of_slot = |parts: &Vec<Part>| {
            let parts = parts.iter().filter(|part| part.param_idx == param_idx);
            parts.map(|part| part.var.as_detached_tensor()).collect()
        };
        let of_all = self.0.mesh.process_allgather(self.0.slots.iter().map(of_slot).collect())?;
        let mut parts = BTreeMap::new();
        for (rank, items) in ranks(self.0.plan.shard_group()).zip(of_all) {
            parts.extend(
                runs_of(&self.0.plan, param_idx, rank)?
                    .into_iter()
                    .map(|(start, _)| start)
                    .zip(items),
            );
        }
        let device = &self.0.mesh.devices()[0];
        let here = parts
            .values()
            .map(|part| part.to_device(device))
            .collect::<candle_core::Result<Vec<_>>>();
        here.and_then(|here| self.shaped(param_idx, &here, device)).map_err(Error::Assemble)
    }

    /// The whole of a parameter, put together by all slots; to be called in replicas, by all of
    /// them.
    ///
    /// Gradients run back to the slots' [`vars`](Self::vars): summed over all, and each gets those
    /// of its parts.
    ///
    /// # Errors
    ///
    /// If the plan has no such parameter, and those of [`Replica::all_gather`].
    #[track_caller]
    pub fn all_gather(&self, ctx: &Replica, name: &str) -> candle_core::Result<Tensor> {
        let param_idx = self.index_of(name).map_err(candle_core::Error::wrap)?;
        let mine = self.mine(ctx, param_idx)?;
        if self.0.plan.parameters()[param_idx].cut() == Cut::Replicated {
            return self.shaped(param_idx, &[ctx.pvary(&mine, ALL)?], ctx.device());
        }
        let mine = match &self.0.replica_axes {
            Some(axes) => ctx.pvary(&mine, axes)?,
            None => mine,
        };
        let gathered = ctx.all_gather(&mine, 0, &self.0.shard_axes)?;
        let mut runs = self.runs(param_idx).map_err(candle_core::Error::wrap)?;
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
    pub fn all_gather_unit(
        &self,
        ctx: &Replica,
        unit: &str,
    ) -> candle_core::Result<BTreeMap<String, Tensor>> {
        let parameters =
            self.0.plan.parameters().iter().filter(|parameter| parameter.info().unit() == unit);
        let names: Vec<&str> = parameters.map(|parameter| parameter.info().name()).collect();
        if names.is_empty() {
            return Err(candle_core::Error::wrap(Error::UnknownParameter {
                name: unit.to_owned(),
            }));
        }
        let mut gathered = BTreeMap::new();
        for name in names {
            gathered.insert(name.to_owned(), self.all_gather(ctx, name)?);
        }
        Ok(gathered)
    }

    /// Sums the gradient of a whole parameter over all slots; returns this slot's variables with
    /// their parts of it.
    ///
    /// For gradients that were computed apart from [`all_gather`](Self::all_gather), whose backward
    /// does the same.
    ///
    /// # Errors
    ///
    /// If the plan has no such parameter, and those of [`Replica::psum`].
    #[track_caller]
    pub fn reduce_scatter(
        &self,
        ctx: &Replica,
        name: &str,
        grad: &Tensor,
    ) -> candle_core::Result<Vec<(Var, Tensor)>> {
        let param_idx = self.index_of(name).map_err(candle_core::Error::wrap)?;
        let sum = ctx.psum(&grad.detach(), ALL)?.flatten_all()?;
        let mine = self.parts_here(ctx, param_idx);
        mine.map(|part| Ok((part.var.clone(), sum.narrow(0, part.start, part.var.elem_count())?)))
            .collect()
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
        self.parts(ctx.slot()).iter().filter(move |part| part.param_idx == param_idx)
    }

    /// This slot's parts of a parameter in one tensor, which may be empty.
    fn mine(&self, ctx: &Replica, param_idx: usize) -> candle_core::Result<Tensor> {
        let mine: Vec<&Tensor> =
            self.parts_here(ctx, param_idx).map(|part| part.var.as_tensor()).collect();
        match mine[..] {
            // A variable too: its slot must take part in the backward as the others do.
            [] => Ok(Var::zeros(0, self.dtype(param_idx)?, ctx.device())?.into_inner()),
            [only] => Ok(only.clone()),
            _ => Tensor::cat(&mine, 0),
        }
    }

    fn dtype(&self, param_idx: usize) -> candle_core::Result<DType> {
        dtype(self.0.plan.parameters()[param_idx].info())
    }

    /// Where each run of a parameter begins, where it lies among what all slots of a group bring,
    /// and how long it is.
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

    fn shaped(
        &self,
        param_idx: usize,
        runs: &[Tensor],
        device: &Device,
    ) -> candle_core::Result<Tensor> {
        let shape = shape(self.0.plan.parameters()[param_idx].info());
        match runs {
            [] => Tensor::zeros(shape, self.dtype(param_idx)?, device),
            [only] => only.reshape(shape),
            runs => Tensor::cat(runs, 0)?.reshape(shape),
        }
    }
}

/// The shapes of the parameters that are kept, by name; those that are tied to others are not.
fn shapes(plan: &ShardingPlan) -> BTreeMap<String, Vec<usize>> {
    let kept = plan
        .parameters()
        .iter()
        .map(PlannedParameter::info)
        .filter(|info| info.tied_to().is_none());
    kept.map(|info| (info.name().to_owned(), shape(info))).collect()
}

fn shape(parameter: &ParameterInfo) -> Vec<usize> {
    parameter.shape().iter().map(|&dim| index(dim)).collect()
}

fn dtype(parameter: &ParameterInfo) -> candle_core::Result<DType> {
    match dtype_of(parameter.dtype()) {
        Some(dtype) => Ok(dtype),
        None => bail!("candle has no type {}", parameter.dtype()),
    }
}

/// A run of a parameter's items as a variable of its own.
fn variable(items: &Tensor, dtype: DType, device: &Device) -> candle_core::Result<Var> {
    if items.dtype() != dtype {
        bail!("items are {}, the plan says {}", items.dtype().as_str(), dtype.as_str());
    }
    Var::from_tensor(&items.force_contiguous()?.to_device(device)?)
}

/// A run of a flat parameter's items.
fn run_of(parameter: Option<&Tensor>, name: &str, run: Range<usize>) -> Result<Tensor> {
    match parameter {
        Some(items) if run.end <= items.elem_count() => {
            items.narrow(0, run.start, run.len()).map_err(Error::Assemble)
        }
        other => {
            let there = other.map_or(0, Tensor::elem_count);
            Err(Error::Incomplete { name: name.to_owned(), missing: there.max(run.start) })
        }
    }
}

/// The runs of a parameter that one rank keeps: first item and number of items.
fn runs_of(plan: &ShardingPlan, param_idx: usize, rank: Rank) -> Result<Vec<(usize, usize)>> {
    Ok(plan
        .shards(param_idx, rank)?
        .map(|shard| (index(shard.start_offset), index(shard.shard_size)))
        .collect())
}

fn ranks(world_size: WorldSize) -> impl Iterator<Item = Rank> {
    world_size.placements().map(core_types::Placement::rank)
}

/// The axes along which a plan cuts, and along which it repeats.
fn axes(mesh: &DeviceMesh, plan: &ShardingPlan) -> Result<(MeshAxes, Option<MeshAxes>)> {
    let (ranks, slots) = (plan.world_size().as_u64(), mesh.len());
    if ranks != slots as u64 {
        return Err(Error::PlanWorld { ranks, slots });
    }
    if plan.replicas() == 1 {
        return Ok((ALL, None));
    }
    let axes: Vec<(&str, usize)> = mesh.axes().collect();
    let group = plan.shard_group().as_u64();
    match axes.split_last() {
        Some(((shard, size), replicas)) if *size as u64 == group => Ok((
            (*shard).into(),
            Some(replicas.iter().map(|(name, _)| (*name).to_owned()).collect()),
        )),
        _ => Err(Error::PlanMesh { group, replicas: plan.replicas() }),
    }
}
