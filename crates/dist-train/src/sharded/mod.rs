//! A sharding plan carried out: variables of which each slot keeps its part.

mod axes;
pub(crate) mod describe;
pub(crate) mod precision;
mod runs;
pub(crate) mod units;

use std::{collections::BTreeMap, ops::Range, sync::Arc};

use candle_core::{DType, Device, Tensor, Var};
use fsdp_plan::{Cut, ParameterInfo, ShardingPlan};
use pmap_mesh::{ALL, DeviceMesh, Replica};

use self::{axes::PlanAxes, precision::Precision, runs::GatheredRun, units::Unit};
use crate::{
    checkpoint::{
        key::{MODEL, TensorKey},
        read::Checkpoint,
        state_dict::StateDict,
    },
    error::{Doing, Error, Result, parameter::ParameterError, sharding::ShardingError},
    grad::{widened, widened_dtype},
    moving::moved,
    optim::StatefulOptimizer,
    processes::agreed,
};

/// The parameters of a model, of which every slot of a mesh keeps the part that a [`ShardingPlan`]
/// gives it; what PyTorch's `fully_shard` does, one call at a time.
///
/// A part is a variable of one dimension: a run of the parameter's items in row-major order. Parts
/// are trained in place: [`all_gather`](Self::all_gather) puts a parameter together where it is
/// used, its backward sums the gradient and hands each slot its part, and an optimizer of the
/// slot's own [`vars`](Self::vars) updates it.
///
/// A plan with replicas (HSDP) needs a mesh whose last axis is one shard group; the other axes are
/// the replicas.
///
/// # Examples
///
/// Two slots, each with half of a weight:
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_nn::{Init, VarMap};
/// use core_types::WorldSize;
/// use fsdp_plan::strategy::{Full, ShardingStrategy};
/// use dist_train::{ShardedVars, parameter_infos};
/// use pmap_mesh::{DeviceMesh, P};
///
/// let mesh = DeviceMesh::cpu(2)?;
/// let w = Tensor::arange(0_f32, 8., &Device::Cpu)?.reshape((4, 2))?;
/// let plan = Full::default().plan(&parameter_infos([("w", &w)])?, WorldSize::new(2)?)?;
/// let vars = ShardedVars::shard(&mesh, &plan, [("w", &w)])?;
/// assert_eq!(vars.bytes(0)?, 16);
///
/// let in_replica = vars.clone();
/// let grads = mesh
///     .pmap(move |ctx, x: Tensor| {
///         let w = in_replica.all_gather(ctx, "w")?;
///         let loss = x.matmul(&w)?.sum_all()?;
///         let grads = loss.backward()?;
///         // The gradient of this slot's part, summed over the batches of both.
///         let part = &in_replica.vars(ctx.slot())?[0];
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
    axes: PlanAxes,
    precision: Precision,
    units: BTreeMap<String, Unit>,
    /// The parts of each slot of this process, in the order of the plan.
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

/// A part as its slot knows it.
#[derive(Clone, Debug)]
pub(crate) struct OwnedPart {
    /// The parameter's position in the plan.
    pub(crate) param_idx: usize,
    /// The first item, in the parameter.
    pub(crate) start: usize,
    pub(crate) var: Var,
    /// Whether this slot is the one that tells of it, where several have the same.
    pub(crate) is_told: bool,
}

impl ShardedVars {
    /// Cuts named tensors as `plan` says and moves the parts to their devices: the variables of a
    /// `VarMap`, the tensors of a checkpoint.
    ///
    /// Tensors that the plan does not name are ignored, and so are those tied to others.
    ///
    /// # Errors
    ///
    /// [`ShardingError::World`] if the plan is for another number of ranks than the mesh has slots,
    /// [`ShardingError::Replicas`] if it has replicas and the mesh is not of that shape,
    /// [`ParameterError::Missing`], [`ParameterError::Shape`] or [`ParameterError::Dtype`] if a
    /// tensor is not as planned, [`ParameterError::UnknownDtype`] if the plan has a type that
    /// candle lacks, [`Error::Tensor`] if candle fails.
    pub fn shard<'a>(
        mesh: &DeviceMesh,
        plan: &ShardingPlan,
        tensors: impl IntoIterator<Item = (impl AsRef<str>, &'a Tensor)>,
    ) -> Result<Self> {
        let given: BTreeMap<String, &Tensor> =
            tensors.into_iter().map(|(name, tensor)| (name.as_ref().to_owned(), tensor)).collect();
        Self::cut(mesh, plan, |info| {
            let whole = given.get(info.name()).map(|whole| flat(info, whole)).transpose()?;
            Ok(move |run| match &whole {
                Some(whole) => items(whole, run),
                None => Err(ParameterError::Missing { name: info.name().to_owned() }.into()),
            })
        })
    }

    /// The same parameters, cut as another plan says, on a mesh of its size.
    ///
    /// If they span several processes, all of them call this, and each holds one whole parameter at
    /// a time.
    ///
    /// # Errors
    ///
    /// [`ParameterError::Unknown`] if `plan` has a parameter that is not here, and those of
    /// [`shard`](Self::shard) and [`gather`](Self::gather).
    pub fn resharded(&self, mesh: &DeviceMesh, plan: &ShardingPlan) -> Result<Self> {
        Self::cut(mesh, plan, |info| {
            let whole = flat(info, &self.gather(info.name())?)?;
            Ok(move |run| items(&whole, run))
        })
    }

    /// What a checkpoint holds, cut as `plan` says: for another number of slots than wrote it, or
    /// another strategy.
    ///
    /// Every process reads what its own slots keep, no more.
    ///
    /// # Errors
    ///
    /// [`Error::Parameter`] if the checkpoint has other parameters than the plan or lacks some of
    /// their items, [`Error::Checkpoint`] if a file is damaged or cannot be read, or another
    /// process loads another checkpoint, [`Error::OtherProcess`] if another process fails, and
    /// those of [`shard`](Self::shard).
    pub fn load(mesh: &DeviceMesh, plan: &ShardingPlan, checkpoint: &Checkpoint) -> Result<Self> {
        checkpoint.check_fits(mesh, &runs::shapes(plan))?;
        let loaded =
            Self::cut(mesh, plan, |info| Ok(|run| checkpoint.items(MODEL, info.name(), run)));
        agreed(mesh, loaded)
    }

    /// Makes the variables of this process's slots. `source` is asked for each parameter in turn,
    /// and what it returns for the runs of that parameter, as tensors of one dimension.
    pub(crate) fn cut<'p, R: Fn(Range<usize>) -> Result<Tensor>>(
        mesh: &DeviceMesh,
        plan: &'p ShardingPlan,
        mut source: impl FnMut(&'p ParameterInfo) -> Result<R>,
    ) -> Result<Self> {
        let axes = axes::of_plan(mesh, plan)?;
        let mut slots: Vec<Vec<Part>> = mesh.devices().iter().map(|_| Vec::new()).collect();
        for (param_idx, parameter) in plan.parameters().iter().enumerate() {
            let info = parameter.info();
            // What is tied to another parameter is kept as that one.
            if info.tied_to().is_some() {
                continue;
            }
            let run_of = source(info)?;
            let ranks_here = runs::ranks(plan.world_size()).skip(mesh.local_slots().start);
            for ((rank, parts), device) in ranks_here.zip(&mut slots).zip(mesh.devices()) {
                for run in runs::of_rank(plan, param_idx, rank)? {
                    let start = run.start;
                    let var = variable(info, &run_of(run)?, device)?;
                    parts.push(Part { param_idx, start, var });
                }
            }
        }
        let units = units::of_plan(plan)?;
        Ok(Self(Arc::new(Inner {
            plan: plan.clone(),
            mesh: mesh.clone(),
            axes,
            precision: Precision::default(),
            units,
            slots,
        })))
    }

    /// The same with units of other parameters than the plan says, one of which may be in several,
    /// gathered and summed in these types.
    pub(crate) fn with_units<'a, N: Iterator<Item = &'a str>>(
        self,
        units: impl Iterator<Item = (&'a String, N)>,
        precision: Precision,
    ) -> Result<Self> {
        let units = units::of_names(&self.0.plan, units, precision)?;
        let Inner { plan, mesh, axes, slots, .. } = &*self.0;
        Ok(Self(Arc::new(Inner {
            plan: plan.clone(),
            mesh: mesh.clone(),
            axes: axes.clone(),
            precision,
            units,
            slots: slots.clone(),
        })))
    }

    /// The plan that is carried out.
    pub fn plan(&self) -> &ShardingPlan {
        &self.0.plan
    }

    /// The variables of one slot, in the order of the plan: what its optimizer is given.
    ///
    /// # Errors
    ///
    /// [`ShardingError::Slot`] if this process has no such slot.
    pub fn vars(&self, slot: usize) -> Result<Vec<Var>> {
        Ok(self.parts(slot)?.iter().map(|part| part.var.clone()).collect())
    }

    /// The memory that one slot's parts take, in bytes: the plan's `param_bytes`.
    ///
    /// # Errors
    ///
    /// [`ShardingError::Slot`] if this process has no such slot.
    pub fn bytes(&self, slot: usize) -> Result<u64> {
        let bytes = |part: &Part| (part.var.elem_count() * part.var.dtype().size_in_bytes()) as u64;
        Ok(self.parts(slot)?.iter().map(bytes).sum())
    }

    /// What this process's slots keep, to be written to a checkpoint: each parameter once, though
    /// replicas repeat it.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::Kind`](crate::CheckpointError::Kind) if two of the parts have one name.
    pub fn state_dict(&self) -> Result<StateDict> {
        let mut state = StateDict::new(&self.0.mesh, runs::shapes(&self.0.plan));
        for (local_slot, slot) in self.0.mesh.local_slots().enumerate() {
            for (_, part) in self.saved_parts(slot)? {
                state.add(local_slot, self.key(part), part.var.as_detached_tensor())?;
            }
        }
        Ok(state)
    }

    /// Adds to a [`state_dict`](Self::state_dict) what a slot's optimizer, made with its
    /// [`vars`](Self::vars), keeps for them.
    ///
    /// # Errors
    ///
    /// [`ShardingError::Slot`] if this process has no such slot, [`Error::Optimizer`] if the
    /// optimizer cannot tell its state, [`CheckpointError::Kind`](crate::CheckpointError::Kind) if
    /// its state has a name that cannot be written, or was added before.
    pub fn add_optimizer(
        &self,
        state: &mut StateDict,
        slot: usize,
        optimizer: &impl StatefulOptimizer,
    ) -> Result<()> {
        let local_slot = self.local(slot)?;
        for (var, part) in self.saved_parts(slot)? {
            state.add_optimizer(local_slot, self.key(part), optimizer, var)?;
        }
        Ok(())
    }

    /// Gives a slot's optimizer, made with its [`vars`](Self::vars), what a checkpoint has for
    /// them, whatever plan it was written under.
    ///
    /// # Errors
    ///
    /// [`ShardingError::Slot`] if this process has no such slot, [`ParameterError::Incomplete`] if
    /// something is missing, [`CheckpointError::Io`](crate::CheckpointError::Io) if a file cannot
    /// be read, [`Error::Optimizer`] if the optimizer refuses its state.
    pub fn load_optimizer(
        &self,
        checkpoint: &Checkpoint,
        slot: usize,
        optimizer: &mut impl StatefulOptimizer,
    ) -> Result<()> {
        for (var, part) in self.parts(slot)?.iter().enumerate() {
            checkpoint.load_optimizer(self.key(part), optimizer, var)?;
        }
        Ok(())
    }

    /// The parts of a slot, in the order of [`vars`](Self::vars).
    pub(crate) fn owned_parts(&self, slot: usize) -> Result<Vec<OwnedPart>, ShardingError> {
        let owned = |part: &Part| OwnedPart {
            param_idx: part.param_idx,
            start: part.start,
            var: part.var.clone(),
            is_told: self.is_told_by(slot, part),
        };
        Ok(self.parts(slot)?.iter().map(owned).collect())
    }

    /// The parts that a slot writes to checkpoints, with the positions of their variables: others
    /// of its group, or of other groups, may have the same parts.
    fn saved_parts(&self, slot: usize) -> Result<impl Iterator<Item = (usize, &Part)>> {
        let parts = self.parts(slot)?.iter().enumerate();
        Ok(parts.filter(move |(_, part)| self.is_told_by(slot, part)))
    }

    /// Whether a slot is the first of those that have this part.
    fn is_told_by(&self, slot: usize, part: &Part) -> bool {
        match self.0.plan.parameters()[part.param_idx].cut() {
            Cut::Replicated => slot == 0,
            _ => slot < self.0.plan.shard_group().as_usize(),
        }
    }

    /// The parts of one slot.
    fn parts(&self, slot: usize) -> Result<&[Part], ShardingError> {
        Ok(&self.0.slots[self.local(slot)?])
    }

    /// The position of a slot among this process's.
    fn local(&self, slot: usize) -> Result<usize, ShardingError> {
        let slots = self.0.mesh.local_slots();
        if !slots.contains(&slot) {
            return Err(ShardingError::Slot { slot, slots });
        }
        Ok(slot - slots.start)
    }

    fn key(&self, part: &Part) -> TensorKey<'_> {
        TensorKey::model(self.info(part.param_idx).name(), part.start)
    }

    fn info(&self, param_idx: usize) -> &ParameterInfo {
        self.0.plan.parameters()[param_idx].info()
    }

    /// The whole of a parameter, on this process's first device.
    ///
    /// On a mesh of several processes all of them call this.
    ///
    /// # Errors
    ///
    /// [`ParameterError::Unknown`], [`Error::Tensor`] if candle fails, or
    /// [`Error::Mesh`] if a process does not answer.
    pub fn gather(&self, name: &str) -> Result<Tensor> {
        let value =
            |slot: usize, part: usize| Some(self.0.slots[slot][part].var.as_detached_tensor());
        self.gather_of(name, value)
    }

    /// The whole of something that each slot of this process, by its position among them, keeps for
    /// its parts of a parameter, by their positions.
    ///
    /// # Errors
    ///
    /// [`ParameterError::Missing`] if it is not there for a part, and those of
    /// [`gather`](Self::gather).
    pub(crate) fn gather_of(
        &self,
        name: &str,
        kept: impl Fn(usize, usize) -> Option<Tensor>,
    ) -> Result<Tensor> {
        let param_idx = self.index_of(name)?;
        let missing = || ParameterError::Missing { name: name.to_owned() };
        let of_slot = |slot: usize| {
            let parts = self.0.slots[slot].iter().enumerate();
            let own = parts.filter(|(_, part)| part.param_idx == param_idx);
            own.map(|(part, _)| kept(slot, part).ok_or_else(missing)).collect()
        };
        let lists: Result<Vec<Vec<Tensor>>, _> = (0..self.0.slots.len()).map(of_slot).collect();
        let lists = self.0.mesh.process_allgather(lists?)?;
        let mut by_start = BTreeMap::new();
        for (rank, list) in runs::ranks(self.0.plan.shard_group()).zip(lists) {
            let runs = runs::of_rank(&self.0.plan, param_idx, rank)?;
            by_start.extend(runs.into_iter().map(|run| run.start).zip(list));
        }
        let device = &self.0.mesh.devices()[0];
        let here: candle_core::Result<Vec<_>> =
            by_start.values().map(|run| moved(run, device)).collect();
        let here = here.doing("moving the parts of a parameter")?;
        self.joined(param_idx, &here, device)
    }

    /// The whole of a parameter, put together by all slots; to be called in replicas, by all of
    /// them.
    ///
    /// Gradients flow back to the slots' [`vars`](Self::vars): they are summed over all slots, and
    /// each slot gets those of its parts.
    ///
    /// # Errors
    ///
    /// [`ParameterError::Unknown`] if the plan has no such parameter,
    /// [`ShardingError::OtherMesh`] in a replica of a mesh of another size, and those of
    /// [`Replica::all_gather`].
    #[track_caller]
    pub fn all_gather(&self, ctx: &Replica, name: &str) -> candle_core::Result<Tensor> {
        let param_idx = self.index_of(name)?;
        let mine = self.mine(ctx, param_idx)?;
        if self.0.plan.parameters()[param_idx].cut() == Cut::Replicated {
            let whole = ctx.pvary(&mine, ALL)?;
            return Ok(self.joined(param_idx, &[whole], ctx.device())?);
        }
        let mine = match &self.0.axes.replica {
            Some(axes) => ctx.pvary(&mine, axes)?,
            None => mine,
        };
        let gathered = ctx.all_gather(&mine, 0, &self.0.axes.shard)?;
        let runs = runs::gathered(&self.0.plan, param_idx)?;
        let parts = in_order_of_parameter(gathered, runs)?;
        Ok(self.joined(param_idx, &parts, ctx.device())?)
    }

    /// Every parameter of a unit by its name, as [`all_gather`](Self::all_gather).
    ///
    /// # Errors
    ///
    /// [`ParameterError::Unknown`] if the plan has no such unit, and those of
    /// [`all_gather`](Self::all_gather).
    #[track_caller]
    pub fn all_gather_unit(
        &self,
        ctx: &Replica,
        unit: &str,
    ) -> candle_core::Result<BTreeMap<String, Tensor>> {
        let mut gathered = BTreeMap::new();
        for parameter in self.0.plan.parameters() {
            if parameter.info().unit() == unit {
                let name = parameter.info().name();
                gathered.insert(name.to_owned(), self.all_gather(ctx, name)?);
            }
        }
        if gathered.is_empty() {
            return Err(unknown(unit).into());
        }
        Ok(gathered)
    }

    /// Sums the gradient of a whole parameter over all slots; returns this slot's variables with
    /// their parts of the sum.
    ///
    /// For gradients that were computed apart from [`all_gather`](Self::all_gather), whose backward
    /// does the same. Those of halves are summed in single precision.
    ///
    /// # Errors
    ///
    /// [`ParameterError::Unknown`] if the plan has no such parameter, [`ParameterError::Shape`] if
    /// the gradient is not of its shape, [`ShardingError::OtherMesh`] in a replica of a mesh of
    /// another size, and those of [`Replica::psum`].
    #[track_caller]
    pub fn reduce_scatter(
        &self,
        ctx: &Replica,
        name: &str,
        grad: &Tensor,
    ) -> candle_core::Result<Vec<(Var, Tensor)>> {
        let param_idx = self.index_of(name)?;
        let parts = self.parts_here(ctx, param_idx).map_err(Error::from)?;
        check_shape(self.info(param_idx), grad)?;
        if self.0.plan.parameters()[param_idx].cut() == Cut::Replicated {
            let sum = ctx.psum(&widened(&grad.detach())?, ALL)?.flatten_all()?;
            return Ok(parts.map(|part| (part.var.clone(), sum.clone())).collect());
        }
        let layout = units::layout(&self.0.plan, name, &[param_idx], widened_dtype)?;
        let sums = self.reduce_runs(ctx, vec![widened(grad)?], &layout)?;
        Ok(parts.map(|part| part.var.clone()).zip(sums).collect())
    }

    fn index_of(&self, name: &str) -> Result<usize> {
        units::index_of(&self.0.plan, name)
    }

    /// This slot's parts of a parameter.
    fn parts_here(
        &self,
        ctx: &Replica,
        param_idx: usize,
    ) -> Result<impl Iterator<Item = &Part>, ShardingError> {
        self.check_mesh(ctx)?;
        let parts = self.parts(ctx.slot())?;
        Ok(parts.iter().filter(move |part| part.param_idx == param_idx))
    }

    /// Refuses a replica of another mesh.
    fn check_mesh(&self, ctx: &Replica) -> Result<(), ShardingError> {
        let slots = self.0.mesh.len();
        if ctx.count() == slots {
            return Ok(());
        }
        Err(ShardingError::OtherMesh { replicas: ctx.count(), slots })
    }

    /// This slot's parts of a parameter in one tensor, which may be empty.
    fn mine(&self, ctx: &Replica, param_idx: usize) -> candle_core::Result<Tensor> {
        let parts = self.parts_here(ctx, param_idx).map_err(Error::from)?;
        let mine: Vec<&Tensor> = parts.map(|part| part.var.as_tensor()).collect();
        match mine[..] {
            // A variable too: its slot must take part in the backward as the others do.
            [] => Ok(Var::zeros(0, self.dtype(param_idx)?, ctx.device())?.into_inner()),
            [only] => Ok(only.clone()),
            _ => Tensor::cat(&mine, 0),
        }
    }

    fn dtype(&self, param_idx: usize) -> Result<DType> {
        Ok(runs::dtype(self.info(param_idx))?)
    }

    /// A parameter from its runs, in their order.
    fn joined(&self, param_idx: usize, runs: &[Tensor], device: &Device) -> Result<Tensor> {
        let shape = runs::shape(self.info(param_idx));
        let joined = match runs {
            [] => Tensor::zeros(shape, self.dtype(param_idx)?, device),
            [only] => only.reshape(shape),
            runs => Tensor::cat(runs, 0).and_then(|items| items.reshape(shape)),
        };
        joined.doing("joining the parts of a parameter")
    }
}

fn unknown(name: &str) -> Error {
    ParameterError::Unknown { name: name.to_owned() }.into()
}

fn check_shape(parameter: &ParameterInfo, tensor: &Tensor) -> Result<()> {
    let expected = runs::shape(parameter);
    Ok(ParameterError::check_shape(parameter.name(), tensor.dims(), &expected)?)
}

/// The items of a whole parameter in one dimension, if it is of the planned shape.
fn flat(parameter: &ParameterInfo, whole: &Tensor) -> Result<Tensor> {
    check_shape(parameter, whole)?;
    whole.flatten_all().doing("cutting a parameter")
}

/// A run of a flat parameter's items.
fn items(whole: &Tensor, run: Range<usize>) -> Result<Tensor> {
    whole.narrow(0, run.start, run.len()).doing("cutting a parameter")
}

/// A run of a parameter's items as a variable of its own.
fn variable(parameter: &ParameterInfo, items: &Tensor, device: &Device) -> Result<Var> {
    let expected = runs::dtype(parameter)?;
    if items.dtype() != expected {
        return Err(Error::Parameter(ParameterError::Dtype {
            name: parameter.name().to_owned(),
            found: items.dtype().as_str(),
            expected: expected.as_str(),
        }));
    }
    items
        .force_contiguous()
        .and_then(|items| Var::from_tensor(&moved(&items, device)?))
        .doing("moving a part of a parameter")
}

/// The runs of a parameter in its own order, from what all slots contributed: that is the order of
/// ranks, but for plans that were made for another number of them.
fn in_order_of_parameter(
    gathered: Tensor,
    mut runs: Vec<GatheredRun>,
) -> candle_core::Result<Vec<Tensor>> {
    if runs.is_sorted_by_key(|run| run.start) {
        return Ok(vec![gathered]);
    }
    runs.sort_unstable_by_key(|run| run.start);
    runs.iter().map(|run| gathered.narrow(0, run.offset, run.len)).collect()
}
