//! Data-parallel training: one model on every device, kept equal by summing gradients.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex},
};

use candle_core::{Device, Tensor, Var, backprop::GradStore};
use candle_nn::{Optimizer, VarBuilder, VarMap};

use pmap_mesh::{ALL, DeviceMesh, P, Replica, Specs, TensorTree, Uneven};

use crate::{
    checkpoint::{Checkpoint, MODEL, StateDict},
    error::{Error, Result},
    grad::{deal, differentiate},
    optim::StatefulOptimizer,
    sync::{lock, same},
};

/// A model that the devices of a mesh train together; PyTorch's `DistributedDataParallel` for
/// candle.
///
/// Every slot has the model; slots on one device share its variables. A step cuts the batch,
/// differentiates the shards at the same time, sums their gradients and lets each slot of a device
/// update its part of the variables: the optimizer's work and memory are divided among the slots of
/// a device, and every device does them once.
///
/// The loss of W slots is that of one slot on the same batches, up to the rounding of sums.
///
/// # Where it differs from `DistributedDataParallel`
///
/// - Gradients are summed after `backward`, not during it: candle's `backward` calls nobody on its
///   way, except custom operations, and hanging one on each parameter would copy every parameter in
///   every step.
/// - Uneven shards are weighted by their rows, so the last batch of an epoch needs no padding to be
///   exact.
/// - The optimizer's state is not replicated within a device, as in ZeRO stage 1 (arXiv
///   1910.02054).
///
/// # Examples
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_nn::{AdamW, Module, Optimizer, ParamsAdamW, VarMap, linear, loss::mse};
/// use dist_train::DataParallel;
/// use pmap_mesh::DeviceMesh;
///
/// let mesh = DeviceMesh::cpu(2)?;
/// let vars = VarMap::new();
/// let params = ParamsAdamW { lr: 0.1, ..Default::default() };
/// let mut model = DataParallel::new(&mesh, &vars, |vb| linear(3, 1, vb), |vars| AdamW::new(vars, params.clone()))?
///     .in_axes(Some(0))
///     .clip_norm(1.0);
///
/// let x = Tensor::randn(0_f32, 1., (16, 3), &Device::Cpu)?;
/// let y = x.sum_keepdim(1)?;
/// let loss = |_: &_, model: &candle_nn::Linear, (x, y): (Tensor, Tensor)| mse(&model.forward(&x)?, &y);
/// let first = model.step((x.clone(), y.clone()), loss)?.to_scalar::<f32>()?;
/// for _ in 0..100 {
///     model.step((x.clone(), y.clone()), loss)?;
/// }
/// assert!(model.step((x, y), loss)?.to_scalar::<f32>()? < first / 10.);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct DataParallel<M, O> {
    mesh: DeviceMesh,
    names: Vec<String>,
    slots: Arc<Vec<Mutex<Slot<M, O>>>>,
    /// How many sets of variables there are, in all processes.
    replicas: usize,
    in_axes: Specs,
    uneven: Uneven,
    max_norm: Option<f64>,
}

/// What one worker keeps between steps.
#[derive(Debug)]
struct Slot<M, O> {
    model: M,
    /// All variables of its device, by name.
    vars: Vec<Var>,
    /// Those that it updates.
    owned: Vec<usize>,
    /// Those of them, by their position there, that it writes to checkpoints: every variable has
    /// one writer.
    saved: Vec<usize>,
    optimizer: O,
    /// The sums of gradients since the last update, and of how many batches.
    accumulated: Option<(Vec<Tensor>, usize)>,
}

impl<M: Send + 'static, O: Optimizer + Send + 'static> DataParallel<M, O> {
    /// Builds a model on every slot of `mesh`.
    ///
    /// `build` is called once for each slot and asks for the same parameters each time. The first
    /// time it fills `vars` with those that are not there, initialized as it says; slots on the
    /// device of `vars` use them directly, so they are what is trained and can be saved at any time
    /// between steps. Other devices get copies. Variables that are there must lie on the first
    /// device of the mesh: that very one, as [`DeviceMesh::devices`] returns it.
    ///
    /// `optimizer` is called with the variables that one slot is to update.
    ///
    /// # Errors
    ///
    /// [`Error::Model`] with whatever `build` and `optimizer` return.
    pub fn new(
        mesh: &DeviceMesh,
        vars: &VarMap,
        build: impl Fn(VarBuilder<'_>) -> candle_core::Result<M>,
        optimizer: impl Fn(Vec<Var>) -> candle_core::Result<O>,
    ) -> Result<Self> {
        Self::build(mesh, vars, build, optimizer, true).map_err(Error::Model)
    }

    /// [`new`](Self::new) with variables of its own for every slot, even if they are on one device:
    /// as many devices would do it.
    ///
    /// # Errors
    ///
    /// Those of [`new`](Self::new).
    pub fn replicated(
        mesh: &DeviceMesh,
        vars: &VarMap,
        build: impl Fn(VarBuilder<'_>) -> candle_core::Result<M>,
        optimizer: impl Fn(Vec<Var>) -> candle_core::Result<O>,
    ) -> Result<Self> {
        Self::build(mesh, vars, build, optimizer, false).map_err(Error::Model)
    }

    fn build(
        mesh: &DeviceMesh,
        vars: &VarMap,
        build: impl Fn(VarBuilder<'_>) -> candle_core::Result<M>,
        optimizer: impl Fn(Vec<Var>) -> candle_core::Result<O>,
        share: bool,
    ) -> candle_core::Result<Self> {
        let home = &mesh.devices()[0];
        let known = named(vars)?;
        if let Some((name, var)) = known.iter().find(|(_, var)| !var.device().same_device(home)) {
            candle_core::bail!(
                "variable {name} lies on {:?}, the first slot is on {home:?}",
                var.device()
            );
        }
        let dtype = known.first().map_or(candle_core::DType::F32, |(_, var)| var.dtype());
        let build_on =
            |vars: &VarMap, device: &Device| build(VarBuilder::from_varmap(vars, dtype, device));
        let mut first_model = Some(build_on(vars, home)?);

        let sets = variable_sets(mesh, vars, share)?;
        let (names, sizes): (Vec<String>, Vec<usize>) =
            named(vars)?.into_iter().map(|(name, var)| (name, var.elem_count())).unzip();
        // Every process has as many sets.
        let replicas = sets.len() * (mesh.len() / mesh.devices().len());
        let first_set = sets.len() * (mesh.local_slots().start / mesh.devices().len());
        let mut slots = Vec::new();
        for ((vars, sharers), of_set) in
            sets.iter().zip(deal(&sizes, replicas).split_off(first_set))
        {
            let values: Vec<Var> = named(vars)?.into_iter().map(|(_, var)| var).collect();
            for (&slot, owned) in sharers.iter().zip(deal(&sizes, sharers.len())) {
                let model =
                    first_model.take().map_or_else(|| build_on(vars, &mesh.devices()[slot]), Ok)?;
                let optimizer = optimizer(owned.iter().map(|&var| values[var].clone()).collect())?;
                let saved = (0..owned.len())
                    .filter(|&position| of_set.contains(&owned[position]))
                    .collect();
                let vars = values.clone();
                slots.push((
                    slot,
                    Mutex::new(Slot { model, vars, owned, saved, optimizer, accumulated: None }),
                ));
            }
        }
        slots.sort_by_key(|(slot, _)| *slot);
        Ok(Self {
            mesh: mesh.clone(),
            names,
            slots: Arc::new(slots.into_iter().map(|(_, slot)| slot).collect()),
            replicas,
            in_axes: Specs::first_and_rest(P::shard(0, ALL), P::replicate()),
            uneven: Uneven::default(),
            max_norm: None,
        })
    }

    /// Sets what each slot gets of a batch, as [`PMap::in_axes`](crate::PMap::in_axes).
    #[must_use]
    pub fn in_axes(self, specs: impl Into<Specs>) -> Self {
        Self { in_axes: specs.into(), ..self }
    }

    /// Sets what happens to a batch that the slots do not divide, as
    /// [`PMap::uneven`](crate::PMap::uneven).
    #[must_use]
    pub fn uneven(self, uneven: Uneven) -> Self {
        Self { uneven, ..self }
    }

    /// Scales gradients down whose norm over all parameters, taken together, is above `max_norm`.
    #[must_use]
    pub fn clip_norm(self, max_norm: f64) -> Self {
        Self { max_norm: Some(max_norm), ..self }
    }

    /// Sets the learning rate of all optimizers.
    pub fn set_learning_rate(&mut self, learning_rate: f64) {
        self.slots.iter().for_each(|slot| lock(slot).optimizer.set_learning_rate(learning_rate));
    }

    /// Differentiates the batch's loss and updates the variables; returns the mean loss, a scalar.
    ///
    /// `loss` returns the mean over the rows of its shard: over the first [`Replica::valid_len`],
    /// if it may be padded. If batches were [accumulated](Self::accumulate) before, the update uses
    /// the mean of their gradients and this batch's.
    ///
    /// # Errors
    ///
    /// Those of [`PMap::call`](crate::PMap::call). If it fails before gradients are summed, no
    /// variable has changed, and accumulated gradients are dropped; if an optimizer fails,
    /// variables may be changed in part.
    pub fn step<I, F>(&mut self, batch: I, loss: F) -> Result<Tensor>
    where
        I: TensorTree,
        F: Fn(&Replica, &M, I) -> candle_core::Result<Tensor> + Send + Sync + 'static,
    {
        self.run(batch, loss, true)
    }

    /// Differentiates the batch's loss and keeps the gradients on each slot for the next
    /// [`step`](Self::step); returns the mean loss. (PyTorch's `no_sync`, but gradients are
    /// averaged over batches, not summed.)
    ///
    /// # Errors
    ///
    /// Those of [`PMap::call`](crate::PMap::call).
    pub fn accumulate<I, F>(&mut self, batch: I, loss: F) -> Result<Tensor>
    where
        I: TensorTree,
        F: Fn(&Replica, &M, I) -> candle_core::Result<Tensor> + Send + Sync + 'static,
    {
        self.run(batch, loss, false)
    }

    fn run<I, F>(&mut self, batch: I, loss: F, update: bool) -> Result<Tensor>
    where
        I: TensorTree,
        F: Fn(&Replica, &M, I) -> candle_core::Result<Tensor> + Send + Sync + 'static,
    {
        let (slots, max_norm, replicas) = (Arc::clone(&self.slots), self.max_norm, self.replicas);
        let run = self.mesh.pmap(move |ctx, shard: I| {
            let slot = &mut *lock(&slots[ctx.local_index()]);
            let loss = loss(ctx, &slot.model, shard)?;
            let (loss, grads) = differentiate(ctx, &slot.vars, loss)?;
            slot.add(grads)?;
            if update {
                slot.update(ctx, max_norm, replicas)?;
            }
            Ok(loss)
        });
        let run = run.in_axes(self.in_axes.clone()).out_axes(P::replicate()).uneven(self.uneven);
        let outcome = run.call(batch);
        if outcome.is_err() {
            // Some slots may have added their part and others not.
            self.slots.iter().for_each(|slot| lock(slot).accumulated = None);
        }
        Ok(outcome?)
    }

    /// Checks that all devices still have the same variables, to the bit.
    ///
    /// # Errors
    ///
    /// [`Error::Diverged`] with the first variable that differs, [`Error::Model`] if it cannot be
    /// read.
    pub fn check_in_sync(&self) -> Result<()> {
        let of_slot = |slot: &Mutex<Slot<M, O>>| {
            lock(slot).vars.iter().map(Var::as_detached_tensor).collect()
        };
        let vars: Vec<Vec<Tensor>> =
            self.mesh.process_allgather(self.slots.iter().map(of_slot).collect())?;
        for (replica, of_replica) in vars.iter().enumerate() {
            for (name, (expected, var)) in self.names.iter().zip(vars[0].iter().zip(of_replica)) {
                if !same(expected, var).map_err(Error::Model)? {
                    return Err(Error::Diverged { name: name.clone(), replica });
                }
            }
        }
        Ok(())
    }
}

impl<M, O: StatefulOptimizer> DataParallel<M, O> {
    /// The variables and what the optimizers keep for them, for
    /// [`Checkpoints::save`](crate::Checkpoints::save): each slot of the mesh, in whatever process,
    /// writes its part. Accumulated gradients are not among them.
    pub fn state_dict(&self) -> StateDict {
        let mut state = StateDict::new(&self.mesh, self.shapes());
        for (index, slot) in self.slots.iter().enumerate() {
            let slot = lock(slot);
            for &position in &slot.saved {
                let (name, var) =
                    (&self.names[slot.owned[position]], &slot.vars[slot.owned[position]]);
                state.add(index, MODEL, name, 0, var.as_detached_tensor());
                slot.optimizer
                    .state(position)
                    .into_iter()
                    .for_each(|(kind, items)| state.add(index, kind, name, 0, items));
            }
        }
        state
    }

    /// Gives all variables and optimizers the values of a checkpoint, whatever number of devices
    /// wrote it; accumulated gradients are dropped. Every process of the mesh calls this, with the
    /// same checkpoint.
    ///
    /// # Errors
    ///
    /// [`Error::UnknownParameter`] if the checkpoint has one that the model lacks,
    /// [`Error::Incomplete`] if it lacks one, [`Error::OtherShape`] if one does not fit,
    /// [`Error::File`] if a file cannot be read, [`Error::Model`] if candle fails. Some variables
    /// may then be changed.
    pub fn load(&mut self, checkpoint: &Checkpoint) -> Result<()> {
        checkpoint.expect(&self.mesh, &self.shapes())?;
        for slot in self.slots.iter() {
            let slot = &mut *lock(slot);
            slot.accumulated = None;
            for (position, &index) in slot.owned.iter().enumerate() {
                let (name, var) = (&self.names[index], &slot.vars[index]);
                let value = checkpoint.like(MODEL, name, 0, var)?;
                value
                    .to_device(var.device())
                    .and_then(|value| var.set(&value))
                    .map_err(Error::Model)?;
                for (kind, like) in slot.optimizer.state(position) {
                    let value = checkpoint.like(kind, name, 0, &like)?;
                    slot.optimizer.load_state(position, kind, &value).map_err(Error::Model)?;
                }
            }
        }
        Ok(())
    }

    /// The shapes of the variables, by name.
    fn shapes(&self) -> BTreeMap<String, Vec<usize>> {
        let Some(first) = self.slots.first() else { return BTreeMap::new() };
        let first = lock(first);
        self.names.iter().cloned().zip(first.vars.iter().map(|var| var.dims().to_vec())).collect()
    }
}

impl<M, O: Optimizer> Slot<M, O> {
    fn add(&mut self, grads: Vec<Tensor>) -> candle_core::Result<()> {
        self.accumulated = Some(match self.accumulated.take() {
            None => (grads, 1),
            Some((sums, batches)) => {
                let sums = sums.iter().zip(&grads).map(|(sum, grad)| sum + grad);
                (sums.collect::<candle_core::Result<_>>()?, batches + 1)
            }
        });
        Ok(())
    }

    /// Sums the gradients of its own variables over all slots, and updates these variables.
    fn update(
        &mut self,
        ctx: &Replica,
        max_norm: Option<f64>,
        replicas: usize,
    ) -> candle_core::Result<()> {
        let Some((grads, batches)) = self.accumulated.take() else { return Ok(()) };
        let mut sums = ctx.psum_list(grads, &self.owned)?;
        let mut factor = 1.0 / batches as f64;
        if let Some(max_norm) = max_norm {
            // Every set of variables adds the whole of its gradient to the sum.
            let squares = squares(&sums, ctx.device())?;
            let norm = factor * (scalar(&ctx.psum(&squares, ALL)?)? / replicas as f64).sqrt();
            factor *= (max_norm / (norm + 1e-6)).min(1.0);
        }
        if factor < 1.0 {
            sums = sums.iter().map(|sum| sum * factor).collect::<candle_core::Result<_>>()?;
        }
        let mut store = GradStore::default();
        for (&var, sum) in self.owned.iter().zip(sums) {
            store.insert(&self.vars[var], sum);
        }
        self.optimizer.step(&store)
    }
}

/// The sum of the squares of all items, in double precision.
fn squares(tensors: &[Tensor], device: &Device) -> candle_core::Result<Tensor> {
    let square = |tensor: &Tensor| scalar(&tensor.sqr()?.sum_all()?);
    let sum = tensors
        .iter()
        .try_fold(0.0, |sum, tensor| Ok::<_, candle_core::Error>(sum + square(tensor)?))?;
    Tensor::new(sum, device)
}

fn scalar(tensor: &Tensor) -> candle_core::Result<f64> {
    tensor.to_dtype(candle_core::DType::F64)?.to_scalar()
}

/// The variables of each device, or of each slot if they are not to `share`, and which of this
/// process's slots use them; the first are `vars` themselves.
fn variable_sets(
    mesh: &DeviceMesh,
    vars: &VarMap,
    share: bool,
) -> candle_core::Result<Vec<(VarMap, Vec<usize>)>> {
    let mut sets: Vec<(VarMap, Vec<usize>)> = vec![(vars.clone(), vec![0])];
    for (slot, device) in mesh.devices().iter().enumerate().skip(1) {
        let shared = sets
            .iter_mut()
            .find(|(_, slots)| share && mesh.devices()[slots[0]].same_device(device));
        match shared {
            Some((_, slots)) => slots.push(slot),
            None => sets.push((copied(vars, device)?, vec![slot])),
        }
    }
    Ok(sets)
}

/// The variables of a map, by name.
fn named(vars: &VarMap) -> candle_core::Result<Vec<(String, Var)>> {
    let Ok(vars) = vars.data().lock() else {
        candle_core::bail!("the variables are locked by a thread that panicked")
    };
    let mut named: Vec<_> = vars.iter().map(|(name, var)| (name.clone(), var.clone())).collect();
    named.sort_by(|(left, _), (right, _)| left.cmp(right));
    Ok(named)
}

/// The same variables on another device.
fn copied(vars: &VarMap, device: &Device) -> candle_core::Result<VarMap> {
    let copies = VarMap::new();
    for (name, var) in named(vars)? {
        let copy = Var::from_tensor(&var.as_detached_tensor().to_device(device)?)?;
        let Ok(mut data) = copies.data().lock() else {
            candle_core::bail!("new variables cannot be locked")
        };
        data.insert(name, copy);
    }
    Ok(copies)
}
