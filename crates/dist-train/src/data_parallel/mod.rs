//! Data-parallel training: one model on every device, kept equal by summing gradients.

mod slot;
mod vars;

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex},
};

use candle_core::{Tensor, Var};
use candle_nn::{Optimizer, VarBuilder, VarMap};
use pmap_mesh::{ALL, DeviceMesh, P, Replica, Specs, TensorTree, Uneven};

use self::{
    slot::{Clip, Slot, lock},
    vars::{Part, Sharing},
};
use crate::{
    checkpoint::{file::TensorKey, read::Checkpoint, state_dict::StateDict},
    error::{Doing, Error, Result},
    grad::differentiate,
    optim::StatefulOptimizer,
};

/// A model that the devices of a mesh train together; PyTorch's `DistributedDataParallel` for
/// candle.
///
/// Every slot has the model; slots on one device share its variables. A step cuts the batch,
/// differentiates the shards at the same time, sums their gradients and lets each slot of a device
/// update its part of the variables: the optimizer's work and memory are divided among the slots of
/// a device, and every device does them once.
///
/// # Determinism
///
/// The loss of W slots is that of one slot on the same batches, up to the rounding of sums. On
/// meshes of one size it is the same to the bit every time, over threads and over processes: sums
/// are formed in rank order.
///
/// # Where it differs from `DistributedDataParallel`
///
/// - Gradients are summed after `backward`, not during it: candle's `backward` calls nothing on its
///   way but custom operations, and one on each parameter would copy every parameter in every step.
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
    /// The names and shapes of the variables, in the order of names.
    parameters: Vec<(String, Vec<usize>)>,
    /// Of this process. A step runs in the slots' workers, which must own what they use: hence the
    /// `Arc`, and a lock for each.
    slots: Arc<Vec<Mutex<Slot<M, O>>>>,
    /// How many sets of variables there are, in all processes.
    n_sets: usize,
    in_axes: Specs,
    uneven: Uneven,
    max_norm: Option<f64>,
}

impl<M: Send + 'static, O: Optimizer + Send + 'static> DataParallel<M, O> {
    /// Builds a model on every slot of `mesh`.
    ///
    /// `build` is called once for each slot and asks for the same parameters each time. The first
    /// time it fills `vars` with those that are not there, initialized as it says. Slots on the
    /// device of `vars` use them directly, so they are what is trained, and they can be saved at any
    /// time between steps. Other devices get copies. Variables that are there must lie on the first
    /// device of the mesh: on that very one, as [`DeviceMesh::devices`] returns it.
    ///
    /// `optimizer` is called with the variables that one slot updates.
    ///
    /// # Errors
    ///
    /// [`Error::Model`] with what `build` and `optimizer` return, or if variables lie elsewhere.
    pub fn new(
        mesh: &DeviceMesh,
        vars: &VarMap,
        build: impl Fn(VarBuilder<'_>) -> candle_core::Result<M>,
        optimizer: impl Fn(Vec<Var>) -> candle_core::Result<O>,
    ) -> Result<Self> {
        Self::build(mesh, vars, build, optimizer, Sharing::PerDevice)
            .map_err(|cause| Error::Model { cause })
    }

    /// [`new`](Self::new) with variables of its own for every slot, even on one device: what as many
    /// devices would do.
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
        Self::build(mesh, vars, build, optimizer, Sharing::PerSlot)
            .map_err(|cause| Error::Model { cause })
    }

    fn build(
        mesh: &DeviceMesh,
        vars: &VarMap,
        build: impl Fn(VarBuilder<'_>) -> candle_core::Result<M>,
        optimizer: impl Fn(Vec<Var>) -> candle_core::Result<O>,
        sharing: Sharing,
    ) -> candle_core::Result<Self> {
        let devices = mesh.devices();
        let dtype = vars::dtype(vars, &devices[0])?;
        // The first model fills `vars`, which the other devices copy.
        let mut first_model = Some(build(VarBuilder::from_varmap(vars, dtype, &devices[0]))?);
        let parameters = described(vars)?;
        let sizes: Vec<u64> = parameters.iter().map(|(_, shape)| numel(shape)).collect();

        let sets = vars::sets(mesh, vars, sharing)?;
        // Every process has as many slots, and as many sets.
        let n_sets = sets.len() * (mesh.len() / devices.len());
        let first_set = sets.len() * (mesh.local_slots().start / devices.len());
        let mut slots = Vec::with_capacity(devices.len());
        for Part { slot, set, owned, saved } in vars::parts(&sets, &sizes, n_sets, first_set) {
            let map = &sets[set].map;
            let model = match first_model.take() {
                Some(first) => first,
                None => build(VarBuilder::from_varmap(map, dtype, &devices[slot]))?,
            };
            let vars: Vec<Var> = vars::named(map)?.into_iter().map(|(_, var)| var).collect();
            let optimizer = optimizer(owned.iter().map(|&var| vars[var].clone()).collect())?;
            slots.push(Mutex::new(Slot {
                model,
                vars,
                owned,
                saved,
                optimizer,
                accumulated: None,
            }));
        }
        Ok(Self {
            mesh: mesh.clone(),
            parameters,
            slots: Arc::new(slots),
            n_sets,
            in_axes: Specs::first_and_rest(P::shard(0, ALL), P::replicate()),
            uneven: Uneven::default(),
            max_norm: None,
        })
    }

    /// Sets how a batch is cut for the slots, as [`PMap::in_axes`](pmap_mesh::PMap::in_axes). By
    /// default the first tensor is cut in dimension 0 and every slot gets all of the others: for a
    /// batch of inputs and targets write `.in_axes(Some(0))`, which cuts them all.
    #[must_use]
    pub fn in_axes(self, specs: impl Into<Specs>) -> Self {
        Self { in_axes: specs.into(), ..self }
    }

    /// Sets what happens to a batch that the slots do not divide, as
    /// [`PMap::uneven`](pmap_mesh::PMap::uneven). By default it is refused.
    #[must_use]
    pub fn uneven(self, uneven: Uneven) -> Self {
        Self { uneven, ..self }
    }

    /// Sets the largest norm of the gradients of all parameters taken together: above it they are
    /// scaled down, as by PyTorch's `clip_grad_norm_`. By default they are not.
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
    /// `loss` returns the mean over the rows of its shard, or over the first
    /// [`Replica::valid_len`] of them if the shard may be padded. If batches were
    /// [accumulated](Self::accumulate) before, the update uses the mean of their gradients and this
    /// batch's.
    ///
    /// # Errors
    ///
    /// [`Error::Mesh`] with those of [`PMap::call`](pmap_mesh::PMap::call). If the step fails before
    /// gradients are summed, no variable has changed, and accumulated gradients are dropped; if an
    /// optimizer fails, variables may be changed in part.
    pub fn step<I, F>(&mut self, batch: I, loss: F) -> Result<Tensor>
    where
        I: TensorTree,
        F: Fn(&Replica, &M, I) -> candle_core::Result<Tensor> + Send + Sync + 'static,
    {
        self.run(batch, loss, Then::Update)
    }

    /// Differentiates the batch's loss and keeps the gradients on each slot for the next
    /// [`step`](Self::step); returns the mean loss. (PyTorch's `no_sync`, but gradients are
    /// averaged over batches, not summed.)
    ///
    /// # Errors
    ///
    /// [`Error::Mesh`] with those of [`PMap::call`](pmap_mesh::PMap::call); accumulated gradients are
    /// dropped.
    pub fn accumulate<I, F>(&mut self, batch: I, loss: F) -> Result<Tensor>
    where
        I: TensorTree,
        F: Fn(&Replica, &M, I) -> candle_core::Result<Tensor> + Send + Sync + 'static,
    {
        self.run(batch, loss, Then::Keep)
    }

    fn run<I, F>(&mut self, batch: I, loss: F, then: Then) -> Result<Tensor>
    where
        I: TensorTree,
        F: Fn(&Replica, &M, I) -> candle_core::Result<Tensor> + Send + Sync + 'static,
    {
        let slots = Arc::clone(&self.slots);
        let n_sets = self.n_sets;
        let clip = self.max_norm.map(|max_norm| Clip { max_norm, n_sets });
        let step = self.mesh.pmap(move |ctx, shard: I| {
            let slot = &mut *lock(&slots[ctx.local_index()]);
            let shard_loss = loss(ctx, &slot.model, shard)?;
            let (mean_loss, grads) = differentiate(ctx, &slot.vars, shard_loss)?;
            let gradients = slot.accumulated_with(grads)?;
            match then {
                Then::Update => slot.update(ctx, gradients, clip)?,
                Then::Keep => slot.accumulated = Some(gradients),
            }
            Ok(mean_loss)
        });
        let outcome = step
            .in_axes(self.in_axes.clone())
            .out_axes(P::replicate())
            .uneven(self.uneven)
            .call(batch);
        if outcome.is_err() {
            // Some slots may have added this batch's part to theirs, and others not.
            self.slots.iter().for_each(|slot| lock(slot).accumulated = None);
        }
        Ok(outcome?)
    }

    /// Checks that all devices still have the same variables, to the bit.
    ///
    /// # Errors
    ///
    /// [`Error::Diverged`] with the first variable that differs, [`Error::Tensor`] if one cannot be
    /// read, [`Error::Mesh`] if a process does not answer.
    pub fn check_in_sync(&self) -> Result<()> {
        let replicas = self.mesh.process_allgather(self.slots.iter().map(values).collect())?;
        for (replica, vars) in replicas.iter().enumerate() {
            for ((name, _), (expected, var)) in
                self.parameters.iter().zip(replicas[0].iter().zip(vars))
            {
                if !same_bits(expected, var).doing("comparing variables")? {
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
    ///
    /// # Errors
    ///
    /// [`Error::Optimizer`] if an optimizer cannot tell its state,
    /// [`CheckpointError::Kind`](crate::CheckpointError::Kind) if its state has a name that cannot be
    /// written.
    pub fn state_dict(&self) -> Result<StateDict> {
        let mut state = StateDict::new(&self.mesh, self.shapes());
        for (local_slot, slot) in self.slots.iter().enumerate() {
            let slot = lock(slot);
            for &position in &slot.saved {
                let index = slot.owned[position];
                let key = TensorKey::model(&self.parameters[index].0, 0);
                state.add(local_slot, key, slot.vars[index].as_detached_tensor())?;
                state.add_optimizer(local_slot, key, &slot.optimizer, position)?;
            }
        }
        Ok(state)
    }

    /// Gives all variables and optimizers the values of a checkpoint, whatever number of devices
    /// wrote it; accumulated gradients are dropped. Every process of the mesh calls this, with the
    /// same checkpoint.
    ///
    /// # Errors
    ///
    /// [`Error::Parameter`] if the checkpoint has other parameters than the model or lacks some of
    /// their items, [`Error::Checkpoint`] if a file cannot be read or another process loads another
    /// step, [`Error::Optimizer`] if an optimizer refuses its state, [`Error::Tensor`] if candle
    /// fails. Some variables may then be changed.
    pub fn load(&mut self, checkpoint: &Checkpoint) -> Result<()> {
        checkpoint.check_fits(&self.mesh, &self.shapes())?;
        for slot in self.slots.iter() {
            let slot = &mut *lock(slot);
            slot.accumulated = None;
            for (position, &index) in slot.owned.iter().enumerate() {
                let key = TensorKey::model(&self.parameters[index].0, 0);
                let var = &slot.vars[index];
                assign(var, &checkpoint.like(key, var)?).doing("loading a variable")?;
                checkpoint.load_optimizer(key, &mut slot.optimizer, position)?;
            }
        }
        Ok(())
    }

    /// The shapes of the variables, by name.
    fn shapes(&self) -> BTreeMap<String, Vec<usize>> {
        self.parameters.iter().cloned().collect()
    }
}

/// What becomes of a batch's gradients.
#[derive(Clone, Copy, Debug)]
enum Then {
    /// With those accumulated before, they update the variables.
    Update,
    /// They are kept for the next update.
    Keep,
}

/// The names and shapes of variables, in the order of names.
fn described(vars: &VarMap) -> candle_core::Result<Vec<(String, Vec<usize>)>> {
    let named = vars::named(vars)?;
    Ok(named.into_iter().map(|(name, var)| (name, var.dims().to_vec())).collect())
}

fn numel(shape: &[usize]) -> u64 {
    shape.iter().product::<usize>() as u64
}

/// The variables of a slot's device.
fn values<M, O>(slot: &Mutex<Slot<M, O>>) -> Vec<Tensor> {
    lock(slot).vars.iter().map(Var::as_detached_tensor).collect()
}

fn assign(var: &Var, value: &Tensor) -> candle_core::Result<()> {
    var.set(&value.to_device(var.device())?)
}

/// Whether two tensors are equal to the bit: NaN equals itself, and zeros of two signs differ.
fn same_bits(left: &Tensor, right: &Tensor) -> candle_core::Result<bool> {
    Ok(left.shape() == right.shape()
        && left.dtype() == right.dtype()
        && bytes(left)? == bytes(right)?)
}

fn bytes(tensor: &Tensor) -> candle_core::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    tensor.force_contiguous()?.write_bytes(&mut bytes)?;
    Ok(bytes)
}
