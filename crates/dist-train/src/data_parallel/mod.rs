//! Data-parallel training: one model on every device, kept equal by summing gradients.

pub(crate) mod builder;
mod checked;
mod slot;
mod state;
pub(crate) mod sync;
pub(crate) mod vars;

use std::{
    collections::BTreeMap,
    path::Path,
    sync::{Arc, Mutex, MutexGuard, OnceLock},
};

use candle_core::{Tensor, Var};
use candle_nn::{Optimizer, VarBuilder};
use pmap_mesh::{DeviceMesh, Replica, TensorTree};

use self::{
    builder::DataParallelBuilder,
    slot::{Slot, lock},
};
use crate::{
    batch::Layout,
    error::{Doing, Result, training::Refusal},
    lora::save::{PretrainedFiles, save},
    loss::Loss,
    parameters::describe::parameter_infos,
    progress::Progress,
    schedule::Schedule,
    step::{
        inventory::Inventory,
        options::{EVALUATION, Options},
        rates::Rates,
        rules::{Evaluation, Report, Rules, Step, Then},
    },
};

/// A model that the devices of a mesh train together; PyTorch's `DistributedDataParallel` for
/// candle.
///
/// Every slot has the model; slots on one device share its variables. A step cuts the batch,
/// differentiates the shards at the same time, sums their gradients and lets each slot of a device
/// update its part of the variables: the optimizer's work and memory are divided among the slots of
/// a device, and every device does them once.
///
/// # What is refused
///
/// - A variable without a gradient on any slot, in the first step: an operation without backward
///   ends the gradient, and nothing before it would learn
///   ([`allow_unused`](DataParallelBuilder::allow_unused),
///   [`freeze`](DataParallelBuilder::freeze)). In later steps it is left alone.
/// - A loss, a norm of gradients or a buffer that is not finite, before any variable changes
///   ([`allow_non_finite`](DataParallelBuilder::allow_non_finite)).
/// - A loss of integers, or of more than one item.
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
/// - Shards are weighted by what their losses are means over ([`Loss`]), so the last batch of an
///   epoch needs no padding to be exact, and a mean over tokens is one over all of them.
/// - The optimizer's state is not replicated within a device, as in ZeRO stage 1 (arXiv
///   1910.02054).
///
/// # Examples
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_nn::{Linear, Module, Optimizer, ParamsAdamW, linear, loss::mse};
/// use dist_train::{AdamW, DataParallel};
/// use pmap_mesh::{DeviceMesh, Replica};
///
/// let mesh = DeviceMesh::cpu(2)?;
/// let params = ParamsAdamW { lr: 0.1, ..ParamsAdamW::default() };
/// let mut model = DataParallel::builder(&mesh, |vb| linear(3, 1, vb))
///     .clip_grad_norm(1.0)
///     .build(|group| AdamW::new(group.vars, params.clone()))?;
///
/// let x = Tensor::randn(0_f32, 1., (16, 3), &Device::Cpu)?;
/// let y = x.sum_keepdim(1)?;
/// let loss = |_: &Replica, model: &Linear, (x, y): (Tensor, Tensor)| mse(&model.forward(&x)?, &y);
/// let first = model.step((x.clone(), y.clone()), loss)?.loss;
/// for _ in 0..100 {
///     model.step((x.clone(), y.clone()), loss)?;
/// }
/// assert!(model.evaluate((x, y), loss)?.loss < first / 10.);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
#[doc(alias = "DistributedDataParallel")]
#[doc(alias = "DDP")]
pub struct DataParallel<M, O> {
    mesh: DeviceMesh,
    inventory: Arc<Inventory>,
    /// Of this process. Each is locked by its own replica alone while a step runs.
    workers: Vec<Worker<M, O>>,
    /// How many sets of variables there are, in all processes.
    n_sets: usize,
    options: Options,
    progress: Progress,
    rates: Rates,
}

/// What one slot works on.
#[derive(Debug)]
struct Worker<M, O> {
    slot: Mutex<Slot<M, O>>,
    /// The model on the same variables, by which nothing is recorded for a backward pass.
    evaluated: Mutex<M>,
}

impl DataParallel<(), ()> {
    /// A model to be built on every slot of `mesh`, of the layers that `model` makes of the
    /// variables that it asks its builder for: candle's own constructors.
    ///
    /// Options are set on what is returned; [`build`](DataParallelBuilder::build) asks for the
    /// optimizers.
    pub fn builder<M, B>(mesh: &DeviceMesh, model: B) -> DataParallelBuilder<'_, B>
    where
        B: Fn(VarBuilder<'_>) -> candle_core::Result<M>,
    {
        DataParallelBuilder::new(mesh, model)
    }
}

impl<M: Send, O: Optimizer + Send> DataParallel<M, O> {
    /// Differentiates the batch's loss and updates the variables.
    ///
    /// `loss` returns a [`Loss`], or a tensor: the mean over the rows of its shard, or over the
    /// first [`Replica::valid_len`] of them if the shard may be padded. If batches were
    /// [accumulated](Self::accumulate) before, the update uses the gradient of the mean over all of
    /// them and this one. It may borrow what lies around it: the step waits for all replicas, and
    /// on a mesh with a [deadline](pmap_mesh::DeviceMeshBuilder::deadline) a replica that never
    /// returns ends the process (see [`DeviceMesh::pmap_scoped`]).
    ///
    /// # Errors
    ///
    /// [`Error::Training`](crate::Error::Training) if the step [would train something
    /// wrong](Self#what-is-refused); [`Error::Mesh`](crate::Error::Mesh) with those of
    /// [`PMap::call`](pmap_mesh::PMap::call); [`Error::Diverged`](crate::Error::Diverged) if it is
    /// time to [check](DataParallelBuilder::check_in_sync_every). If the step fails before
    /// gradients are summed, no variable has changed, and accumulated gradients are dropped; if an
    /// optimizer fails, variables may be changed in part.
    #[track_caller]
    pub fn step<I, A, L, F>(&mut self, batch: I, loss: F) -> Result<Step<A>>
    where
        I: TensorTree,
        A: TensorTree,
        L: Into<Loss<A>>,
        F: Fn(&Replica, &M, I) -> candle_core::Result<L> + Send + Sync,
    {
        if self.options.check_every.is_some_and(|steps| self.progress.steps.is_multiple_of(steps)) {
            self.check_in_sync()?;
        }
        let (Report { loss, grad_norm }, aux) = self.train(batch, loss, Then::Update)?;
        self.progress.steps += 1;
        Ok(Step { loss: loss.mean(), grad_norm, weight: loss.weight(), aux })
    }

    /// Differentiates the batch's loss and keeps the gradients on each slot for the next
    /// [`step`](Self::step); returns the loss of this batch. (PyTorch's `no_sync`; but losses and
    /// weights are added up and divided once, so nothing need be divided by the number of batches.)
    /// A batch without weight adds nothing.
    ///
    /// # Errors
    ///
    /// Those of [`step`](Self::step); accumulated gradients are dropped.
    #[track_caller]
    #[doc(alias = "no_sync")]
    pub fn accumulate<I, A, L, F>(&mut self, batch: I, loss: F) -> Result<Evaluation<A>>
    where
        I: TensorTree,
        A: TensorTree,
        L: Into<Loss<A>>,
        F: Fn(&Replica, &M, I) -> candle_core::Result<L> + Send + Sync,
    {
        let (Report { loss, .. }, aux) = self.train(batch, loss, Then::Keep)?;
        Ok(Evaluation { loss: loss.mean(), weight: loss.weight(), aux })
    }

    /// The loss of a batch, without gradients: the model is given the same variables, by which no
    /// operation is recorded. What the forward pass makes of buffers is taken back.
    ///
    /// All evaluations between two steps draw the same random numbers, so that one of the same batch
    /// has the same loss, and that a run draws the same whether it was evaluated on the way or not.
    /// They are others than those of steps.
    ///
    /// # Errors
    ///
    /// [`Error::Training`](crate::Error::Training) if a loss is no scalar of floats, not finite, or
    /// no shard has weight; [`Error::Mesh`](crate::Error::Mesh) with those of
    /// [`PMap::call`](pmap_mesh::PMap::call).
    #[expect(clippy::expect_used, reason = "a call that succeeded has run every replica")]
    #[track_caller]
    pub fn evaluate<I, A, L, F>(&mut self, batch: I, loss: F) -> Result<Evaluation<A>>
    where
        I: TensorTree,
        A: TensorTree,
        L: Into<Loss<A>>,
        F: Fn(&Replica, &M, I) -> candle_core::Result<L> + Send + Sync,
    {
        let layout = Layout::of(&batch);
        let refusal = Refusal::default();
        let mean = OnceLock::new();
        let buffers = self.inventory.roles.buffers();
        let call = self.mesh.pmap_scoped(|ctx, shard: I| {
            let worker = &self.workers[ctx.local_index()];
            lock(&worker.slot).begin(&buffers)?;
            let model = lock(&worker.evaluated);
            let here = layout.explain(shard, |shard| loss(ctx, &model, shard))?.into();
            let evaluated = here.evaluate(ctx, self.options.allow_non_finite, &refusal);
            refusal.outcome(evaluated.map(|(whole, aux)| {
                mean.get_or_init(|| whole);
                aux
            }))
        });
        let call = self.options.cut(call).seed(self.progress.seed.derive(EVALUATION));
        let outcome = refusal.of(call.call_at(self.progress.steps, batch));
        for worker in &self.workers {
            lock(&worker.slot).take_back_buffers().doing("taking back a buffer")?;
        }
        let aux = outcome?;
        let whole = mean.get().expect("every replica has set the mean");
        Ok(Evaluation { loss: whole.mean(), weight: whole.weight(), aux })
    }

    #[expect(clippy::expect_used, reason = "a call that succeeded has run every replica")]
    #[track_caller]
    fn train<I, A, L, F>(&mut self, batch: I, loss: F, then: Then) -> Result<(Report, A)>
    where
        I: TensorTree,
        A: TensorTree,
        L: Into<Loss<A>>,
        F: Fn(&Replica, &M, I) -> candle_core::Result<L> + Send + Sync,
    {
        self.set_rates(self.rates.after(self.progress.steps));
        let layout = Layout::of(&batch);
        let rules = self.rules(then);
        let report = OnceLock::new();
        let call = self.mesh.pmap_scoped(|ctx, shard: I| {
            let slot = &mut *lock(&self.workers[ctx.local_index()].slot);
            slot.begin(&rules.buffers)?;
            let here = layout.explain(shard, |shard| loss(ctx, &slot.model, shard))?;
            let trained = slot.train(ctx, &rules, here.into());
            rules.refusal.outcome(trained.map(|(whole, aux)| {
                report.get_or_init(|| whole);
                aux
            }))
        });
        let call = self.options.cut(call).seed(self.progress.seed);
        let outcome = rules.refusal.of(call.call_at(self.progress.batches, batch));
        for worker in &self.workers {
            let slot = &mut *lock(&worker.slot);
            match outcome {
                Ok(_) => slot.commit(),
                Err(_) => slot.roll_back().doing("taking back a buffer")?,
            }
        }
        let aux = outcome?;
        self.progress.batches += 1;
        Ok((*report.get().expect("every replica has set the report"), aux))
    }

    /// Gives the optimizers the learning rate of each group.
    fn set_rates(&self, rates: Vec<f64>) {
        for (group, rate) in rates.into_iter().enumerate() {
            for worker in &self.workers {
                lock(&worker.slot).optimizers[group].optimizer.set_learning_rate(rate);
            }
        }
    }

    fn rules(&self, then: Then) -> Rules {
        Rules::new(&self.inventory, &self.options, &self.progress, then)
    }
}

impl<M, O> DataParallel<M, O> {
    /// Sets the learning rate of all groups, by which the factor of the
    /// [schedule](Self::set_schedule) is multiplied.
    ///
    /// # Errors
    ///
    /// [`Error::Setting`](crate::Error::Setting) if it is negative or no number.
    pub fn set_learning_rate(&mut self, learning_rate: f64) -> Result<()> {
        self.rates.set_all(learning_rate)
    }

    /// Sets the learning rate of a [group](DataParallelBuilder::group).
    ///
    /// # Errors
    ///
    /// [`TrainingError::UnknownGroup`](crate::TrainingError::UnknownGroup) if no group of that name
    /// has a variable, [`Error::Setting`](crate::Error::Setting) if the rate is negative or no
    /// number.
    pub fn set_group_learning_rate(&mut self, name: &str, learning_rate: f64) -> Result<()> {
        self.rates.set_group(name, learning_rate)
    }

    /// Sets how learning rates follow the number of updates from now on, in place of what the
    /// [builder](DataParallelBuilder::schedule) or a checkpoint said.
    ///
    /// # Errors
    ///
    /// [`Error::Setting`](crate::Error::Setting) if the warm-up is not over before the schedule, or
    /// the floor is not from 0 to 1.
    pub fn set_schedule(&mut self, schedule: Schedule) -> Result<()> {
        self.rates.set_schedule(schedule)
    }

    /// The number of updates since the start of training, those before a checkpoint included.
    pub fn steps(&self) -> u64 {
        self.progress.steps
    }

    /// The model on the first device, with the variables as they are now, by which no operation is
    /// recorded. It is locked as long as it is held.
    pub fn model(&self) -> MutexGuard<'_, M> {
        lock(&self.workers[0].evaluated)
    }

    /// The variables on the first device by name: what `candle_core::safetensors::save` writes.
    /// They share the memory of what is trained, and change with it.
    pub fn variables(&self) -> BTreeMap<String, Tensor> {
        let slot = lock(&self.workers[0].slot);
        let names = self.inventory.parameters.iter().map(|(name, _)| name.clone());
        names.zip(slot.vars.iter().map(Var::as_detached_tensor)).collect()
    }

    /// Writes the variables as pretrained weights into `folder`, beside what is there: files with
    /// the names and the index that Hugging Face's libraries look for, which
    /// [`weights`](DataParallelBuilder::weights) of that folder reads, too. A model that is there is
    /// replaced: if the new one is a single file, in one step, and otherwise so that a reader finds
    /// the old one, none for a moment, or the new one.
    ///
    /// Every process of the mesh calls it, with the same arguments, and the first one writes.
    ///
    /// # Errors
    ///
    /// On all processes: those of [`check_in_sync`](Self::check_in_sync), with which it begins;
    /// [`CheckpointError::NotFinite`](crate::CheckpointError::NotFinite) unless they are
    /// [allowed](PretrainedFiles::allow_non_finite);
    /// [`CheckpointError::Io`](crate::CheckpointError::Io) if a file cannot be written, and
    /// [`Error::OtherProcess`](crate::Error::OtherProcess) on the others.
    ///
    /// # Examples
    ///
    /// ```
    /// use candle_nn::{Optimizer, ParamsAdamW, linear};
    /// use dist_train::{AdamW, DataParallel, PretrainedFiles};
    /// use pmap_mesh::DeviceMesh;
    ///
    /// let mesh = DeviceMesh::cpu(2)?;
    /// let adam = |group: dist_train::Group| AdamW::new(group.vars, ParamsAdamW::default());
    /// let model = DataParallel::builder(&mesh, |vb| linear(3, 1, vb)).build(adam)?;
    /// # let folder = tempfile::tempdir()?;
    /// # let folder = folder.path();
    /// model.save_pretrained(folder, PretrainedFiles::default())?;
    /// assert!(folder.join("model.safetensors").exists());
    /// let again = DataParallel::builder(&mesh, |vb| linear(3, 1, vb)).weights(folder).build(adam)?;
    /// # let first = |model: &DataParallel<_, AdamW>| model.variables()["bias"].to_vec1::<f32>();
    /// assert_eq!(first(&again)?, first(&model)?);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn save_pretrained(&self, folder: impl AsRef<Path>, files: PretrainedFiles) -> Result<()> {
        self.check_in_sync()?;
        let variables = self.variables();
        let parameters = parameter_infos(&variables)?;
        save(&self.mesh, folder.as_ref(), files, &parameters, |name| Ok(variables[name].clone()))
    }

    /// Checks that all devices still have the same variables, to the bit: fingerprints of them are
    /// compared. Every process of the mesh calls it.
    ///
    /// # Errors
    ///
    /// [`Error::Diverged`](crate::Error::Diverged) with the first variable that differs,
    /// [`Error::Tensor`](crate::Error::Tensor) if one cannot be read,
    /// [`Error::Mesh`](crate::Error::Mesh) if a process does not answer.
    pub fn check_in_sync(&self) -> Result<()> {
        // One set of variables is equal to itself.
        if self.n_sets == 1 && self.inventory.roles.buffers().is_empty() {
            return Ok(());
        }
        let slots: Vec<_> = self.workers.iter().map(|worker| lock(&worker.slot)).collect();
        let vars: Vec<&[Var]> = slots.iter().map(|slot| &slot.vars[..]).collect();
        sync::check(&self.mesh, &self.inventory, sync::of_slots(&vars)?)
    }
}
