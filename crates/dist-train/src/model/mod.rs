//! A model in training, however it lies on the devices.

mod build;
pub(crate) mod builder;
mod config;
pub(crate) mod doors;
mod gradients;
mod layout;
mod pass;
mod replicated;
mod settings;
mod sharded;
mod slot;
mod state;

use std::{
    collections::BTreeMap,
    path::Path,
    sync::{Arc, OnceLock},
};

use candle_core::{Result as CandleResult, Tensor};
use candle_nn::Optimizer;
use core_types::Seed;
use dist_checkpoint::ParameterError;
use fsdp_plan::{
    ShardingPlan,
    cost::{CostModel, Runtime},
};
use pmap_mesh::{DeviceMesh, Replica, TensorTree};

use self::{
    layout::{Layout, Pass},
    pass::ShardUse,
    slot::{SharedSlot, lock},
};
use crate::{
    batch::BatchShapes,
    error::{Error, Result, training::TrainingError},
    lora::save::{PretrainedFiles, save},
    loss::{self, Loss},
    precision::Precision,
    progress::Progress,
    schedule::Schedule,
    step::{
        inventory::Inventory,
        options::Options,
        rates::Rates,
        rules::{Evaluation, Goal, Report, Rules, Step},
    },
    tree,
    units::{keep::Keep, model::Unit},
};

/// A model that the devices of a mesh train together, and its optimizers: made by
/// [`DataParallel::builder`](crate::DataParallel::builder), of which every device has the whole, or by
/// [`FullyShard::builder`](crate::FullyShard::builder), of which every slot has its part.
///
/// `M` is what losses are lent: what the model's constructor returns, or
/// [`Units`](crate::Units) of it. `O` is the type of its optimizers. Methods, results and
/// checkpoints are the same however the model lies on the devices.
///
/// # What is refused
///
/// - A parameter without a gradient on any slot, in the first step: an operation without backward
///   ends the gradient, and nothing before it would learn
///   ([`allow_unused`](crate::ModelBuilder::allow_unused),
///   [`freeze`](crate::ModelBuilder::freeze)). In later steps it is left alone.
/// - A loss, a norm of gradients or a buffer that is not finite, before any parameter changes
///   ([`allow_non_finite`](crate::ModelBuilder::allow_non_finite)).
/// - A loss of integers, or of more than one item.
///
/// And if the model is sharded:
/// - a parameter in no unit, when the model is built;
/// - buffers, such as a running mean: the forward pass changes them;
/// - in the first step of a model that enters it, also of one that was [loaded](Self::load), a unit
///   that has another result when it is run again ([`TrainingError::NotRepeatable`]), one that is not
///   entered ([`TrainingError::NotEntered`]), and a parameter that the loss uses outside the function
///   of its unit without being a result of it ([`TrainingError::ParameterOutsideUnit`]);
/// - replicas that enter different units, or in another order:
///   [`CollectiveError::Mismatch`](pmap_mesh::CollectiveError::Mismatch) names both. Where units are
///   [prefetched](crate::ModelBuilder::prefetch), it names what each gathers then, or
///   [`TrainingError::OtherUnits`] all units that both have entered.
///
/// # Determinism
///
/// The loss of W slots is that of one slot on the same batches, up to the rounding of sums. On
/// meshes of one size it is the same to the bit every time, over threads and over processes: sums
/// are formed in rank order.
///
/// A sharded model has the bits of a replicated one on as many slots, whatever units keep and however
/// a plan cuts parameters. To rounding the same are: a value or parameter that several units use,
/// groups of slots that repeat the parts, gradients that are clipped, and batches that are
/// [accumulated](Self::accumulate) and [summed in each](crate::Accumulation::ReduceEach), whose sums
/// are formed in another order.
#[derive(Debug)]
pub struct DistributedModel<M, O> {
    mesh: DeviceMesh,
    inventory: Arc<Inventory>,
    options: Options,
    precision: Precision,
    progress: Progress,
    rates: Rates,
    /// Of this process. Each is locked by its own replica alone while a step runs.
    slots: Vec<SharedSlot<O>>,
    layout: Layout<M>,
}

impl<M: Send, O: Optimizer + Send + 'static> DistributedModel<M, O> {
    /// Differentiates the batch's loss and updates the parameters.
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
    /// [`Error::Training`] if the step [would train something wrong](Self#what-is-refused);
    /// [`Error::Mesh`] with those of [`PMap::call`](pmap_mesh::PMap::call); [`Error::Diverged`] if it
    /// is time to [check](crate::ModelBuilder::check_in_sync_every). If the step fails before the
    /// optimizers run, no parameter has changed, and accumulated gradients are dropped. If it fails
    /// later, by an optimizer's own error or when they run [inside the backward
    /// pass](crate::ModelBuilder::optimizer_in_backward), some parameters may be updated and others
    /// not: from then on the model rejects everything but [`load`](Self::load)
    /// ([`TrainingError::HalfUpdated`]).
    #[track_caller]
    pub fn step<I, A, L, F>(&mut self, batch: I, loss: F) -> Result<Step<A>>
    where
        I: TensorTree,
        A: TensorTree,
        L: Into<Loss<A>>,
        F: Fn(&Replica, &M, I) -> CandleResult<L> + Send + Sync,
    {
        if self.options.check_every.is_some_and(|steps| self.progress.steps.is_multiple_of(steps)) {
            self.check_in_sync()?;
        }
        let (Report { loss, grad_norm }, aux) = self.train(batch, loss, Goal::Update)?;
        self.progress.steps += 1;
        Ok(Step { loss: loss.mean(), grad_norm, weight: loss.weight(), aux })
    }

    /// Differentiates the batch's loss and adds the gradients to those for the next
    /// [`step`](Self::step); returns the loss of this batch. (PyTorch's `no_sync`; but losses and
    /// weights are added up and divided once, so nothing need be divided by the number of batches.)
    /// A batch without weight adds nothing.
    ///
    /// A replicated model keeps the gradients on each slot. A sharded one sums them over the slots in
    /// every batch, so that a slot keeps its part of them alone, unless the builder says
    /// [otherwise](crate::ModelBuilder::accumulation).
    ///
    /// # Errors
    ///
    /// Those of [`step`](Self::step); accumulated gradients are dropped.
    /// [`TrainingError::NeedsAllGradients`] if optimizers run inside the backward pass.
    #[track_caller]
    #[doc(alias = "no_sync")]
    #[doc(alias = "set_requires_gradient_sync")]
    pub fn accumulate<I, A, L, F>(&mut self, batch: I, loss: F) -> Result<Evaluation<A>>
    where
        I: TensorTree,
        A: TensorTree,
        L: Into<Loss<A>>,
        F: Fn(&Replica, &M, I) -> CandleResult<L> + Send + Sync,
    {
        let (Report { loss, .. }, aux) = self.train(batch, loss, Goal::Accumulate)?;
        Ok(Evaluation { loss: loss.mean(), weight: loss.weight(), aux })
    }

    /// Returns the loss of a batch, without gradients: the model is given the same variables, by which
    /// no operation is recorded, and units are gathered once. What the forward pass makes of buffers
    /// is taken back.
    ///
    /// All evaluations between two steps draw the same random numbers, so that one of the same batch
    /// has the same loss, and that a run draws the same whether it was evaluated on the way or not.
    /// They are others than those of steps.
    ///
    /// # Errors
    ///
    /// [`Error::Training`] if a loss is no scalar of floats, not finite, or no shard has weight, or
    /// with [`TrainingError::HalfUpdated`]; [`Error::Mesh`] with those of
    /// [`PMap::call`](pmap_mesh::PMap::call) and [`Units::unit`](crate::Units::unit).
    #[track_caller]
    pub fn evaluate<I, A, L, F>(&mut self, batch: I, loss: F) -> Result<Evaluation<A>>
    where
        I: TensorTree,
        A: TensorTree,
        L: Into<Loss<A>>,
        F: Fn(&Replica, &M, I) -> CandleResult<L> + Send + Sync,
    {
        self.check_whole()?;
        let pass = self.layout.begin(&self.slots, self.rules(Goal::Evaluate))?;
        let stream = self.progress.evaluation_stream();
        let (Report { loss, .. }, aux) = self.run(&pass, stream, batch, loss)?;
        Ok(Evaluation { loss: loss.mean(), weight: loss.weight(), aux })
    }

    #[track_caller]
    fn train<I, A, L, F>(&mut self, batch: I, loss: F, goal: Goal) -> Result<(Report, A)>
    where
        I: TensorTree,
        A: TensorTree,
        L: Into<Loss<A>>,
        F: Fn(&Replica, &M, I) -> CandleResult<L> + Send + Sync,
    {
        self.check_whole()?;
        for (group, rate) in self.rates.after(self.progress.steps).into_iter().enumerate() {
            self.slots.iter().for_each(|slot| lock(slot).set_learning_rate(group, rate));
        }
        let pass = self.layout.begin(&self.slots, self.rules(goal))?;
        let outcome = self.run(&pass, self.progress.stream(), batch, loss)?;
        drop(pass);
        self.progress.batches += 1;
        Ok(outcome)
    }

    /// Runs a batch through the replicas. Every kind of batch comes through here; the random numbers
    /// of its losses are those of a seed, at a position.
    #[expect(clippy::expect_used, reason = "a call that succeeded has run every replica")]
    #[track_caller]
    fn run<I, A, L, F>(
        &self,
        pass: &Pass<'_, M, O>,
        (seed, position): (Seed, u64),
        batch: I,
        loss: F,
    ) -> Result<(Report, A)>
    where
        I: TensorTree,
        A: TensorTree,
        L: Into<Loss<A>>,
        F: Fn(&Replica, &M, I) -> CandleResult<L> + Send + Sync,
    {
        let shapes = BatchShapes::of(&batch);
        let report = OnceLock::new();
        let call = self.mesh.pmap_scoped(|ctx, shard: I| {
            let mut shard = Some(shard);
            let mut form = None;
            let outcome = pass.replica(ctx, &mut |model, shard_use| {
                let shard = match shard_use {
                    ShardUse::Repeated => {
                        shard.as_ref().map(|shard| tree::map(shard, Tensor::clone))
                    }
                    ShardUse::Last => shard.take(),
                };
                let shard = shard.expect("a shard is used until its last use");
                let loss = shapes.explain(shard, |shard| loss(ctx, model, shard))?.into();
                let (loss, leafless) = loss.into_leaves();
                form = Some(leafless);
                Ok(loss)
            })?;
            Ok(outcome.map(|(of_all, sums)| {
                report.get_or_init(|| of_all);
                let form = form.expect("a loss was evaluated");
                loss::with_leaves(&form, sums)
            }))
        });
        let call = self.options.cut(call).seed(seed);
        let outcome = pass.rules().refusal.of(call.call_at(position, batch));
        pass.end(outcome.is_ok())?;
        let aux = outcome?;
        Ok((*report.get().expect("every replica has set the report"), aux))
    }
}

impl<M, O> DistributedModel<M, O> {
    /// Sets the learning rate of all groups, by which the factor of the
    /// [schedule](Self::set_schedule) is multiplied.
    ///
    /// # Errors
    ///
    /// [`Error::Setting`] if it is negative or no number.
    pub fn set_learning_rate(&mut self, learning_rate: f64) -> Result<()> {
        self.rates.set_all(learning_rate)
    }

    /// Sets the learning rate of a [group](crate::ModelBuilder::group).
    ///
    /// # Errors
    ///
    /// [`TrainingError::UnknownGroup`] if no group of that name has a variable, [`Error::Setting`] if
    /// the rate is negative or no number.
    pub fn set_group_learning_rate(&mut self, name: &str, learning_rate: f64) -> Result<()> {
        self.rates.set_group(name, learning_rate)
    }

    /// Sets how learning rates follow the number of updates from now on, in place of what the
    /// [builder](crate::ModelBuilder::schedule) or a checkpoint said.
    ///
    /// # Errors
    ///
    /// [`Error::Setting`] if the warm-up is not over before the schedule, or the floor is not from 0
    /// to 1.
    pub fn set_schedule(&mut self, schedule: Schedule) -> Result<()> {
        self.rates.set_schedule(schedule)
    }

    /// Returns the number of updates since the start of training, those before a checkpoint included.
    pub fn steps(&self) -> u64 {
        self.progress.steps
    }

    /// Returns a whole parameter, on this process's first device. That of a replicated model shares
    /// the memory of what is trained, and changes with it; that of a sharded one is gathered. Every
    /// process of the mesh calls it.
    ///
    /// # Errors
    ///
    /// [`TrainingError::HalfUpdated`] after a step that failed on its way,
    /// [`ParameterError::Unknown`], [`Error::Tensor`] if candle fails, [`Error::Mesh`] if a process
    /// does not answer.
    #[doc(alias = "full_tensor")]
    #[doc(alias = "gather")]
    pub fn parameter(&self, name: &str) -> Result<Tensor> {
        self.check_whole()?;
        let parameters = &self.inventory.parameters;
        let position = parameters.binary_search_by(|(other, _)| other.as_str().cmp(name));
        let unknown = |_| ParameterError::Unknown { name: name.to_owned() };
        self.layout.parameter(&self.inventory, &self.slots, position.map_err(unknown)?)
    }

    /// Returns all [parameters](Self::parameter) by name: what `candle_core::safetensors::save`
    /// writes. A sharded model that does not fit one device hands them out [one after the
    /// other](Self::for_each_parameter).
    ///
    /// # Errors
    ///
    /// Those of [`parameter`](Self::parameter).
    #[doc(alias = "named_parameters")]
    #[doc(alias = "variables")]
    pub fn parameters(&self) -> Result<BTreeMap<String, Tensor>> {
        let names = self.inventory.parameters.iter().map(|(name, _)| name);
        names.map(|name| Ok((name.clone(), self.parameter(name)?))).collect()
    }

    /// Hands each whole [parameter](Self::parameter) to `f`, one after the other in the order of
    /// names: a sharded model that fills all devices can be written out by one. Every process of the
    /// mesh calls it.
    ///
    /// # Errors
    ///
    /// Those of [`parameter`](Self::parameter), and the first of `f`, in the process that has it: the
    /// rest is gathered for the others all the same.
    pub fn for_each_parameter<E: From<Error>>(
        &self,
        mut f: impl FnMut(&str, Tensor) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut outcome = Ok(());
        for (name, _) in &self.inventory.parameters {
            let whole = self.parameter(name)?;
            outcome = outcome.and_then(|()| f(name, whole));
        }
        outcome
    }

    /// Writes the parameters as pretrained weights into `folder`, beside what is there: files with
    /// the names and the index that Hugging Face's libraries look for, which
    /// [`weights`](crate::ModelBuilder::weights) of that folder reads, too. A model that is there is
    /// replaced: if the new one is a single file, in one step, and otherwise so that a reader finds
    /// the old one, none for a moment, or the new one.
    ///
    /// Every process of the mesh calls it, with the same arguments, and the first one writes. One
    /// parameter of a sharded model is in memory at a time.
    ///
    /// # Errors
    ///
    /// On all processes: those of [`check_in_sync`](Self::check_in_sync), with which it begins;
    /// [`CheckpointError::NotFinite`](crate::CheckpointError::NotFinite) unless they are
    /// [allowed](PretrainedFiles::allow_non_finite);
    /// [`CheckpointError::Io`](crate::CheckpointError::Io) if a file cannot be written, and
    /// [`Error::OtherProcess`] on the others.
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
    /// assert_eq!(again.parameter("bias")?.to_vec1::<f32>()?, model.parameter("bias")?.to_vec1::<f32>()?);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn save_pretrained(&self, folder: impl AsRef<Path>, files: PretrainedFiles) -> Result<()> {
        self.check_in_sync()?;
        let parameters = self.layout.infos(&self.inventory, &self.slots)?;
        save(&self.mesh, folder.as_ref(), files, &parameters, |name| self.parameter(name))
    }

    /// Checks that what several devices store of the parameters is the same to the bit: the variables
    /// of a replicated model, and of a sharded one the parts of other groups of slots (HSDP) and the
    /// parameters that a plan replicates. They are updated alike, so they differ only if something has
    /// gone wrong: memory, or an optimizer that does not do the same everywhere. Every process of the
    /// mesh calls it.
    ///
    /// # Errors
    ///
    /// [`Error::Diverged`] with the first parameter and the first slot that has other values,
    /// [`TrainingError::HalfUpdated`] after a step that failed on its way, [`Error::Tensor`] if one
    /// cannot be read, [`Error::Mesh`] if a process does not answer.
    pub fn check_in_sync(&self) -> Result<()> {
        self.check_whole()?;
        self.layout.check_in_sync(&self.mesh, &self.inventory, &self.slots)
    }

    /// Returns the plan by which parameters are cut, if the model is sharded.
    ///
    /// A parameter that is in several units counts in its cost and schedule for the first of them,
    /// though it is gathered and summed for each; and whole gradients that
    /// [`Accumulation::ReduceLast`](crate::Accumulation::ReduceLast) keeps between batches, as many
    /// bytes as the model on every slot, are not counted.
    pub fn plan(&self) -> Option<&ShardingPlan> {
        Some(self.layout.sharded()?.vars.plan())
    }

    /// Returns what the cost of the [plan](Self::plan) depends on besides it, as this model carries
    /// it out: what its units keep, how many are prefetched, in which types, and when its optimizers
    /// run. The optimizer is taken to be Adam, and the activations are [to be
    /// told](CostModel::with_activations).
    ///
    /// # Examples
    ///
    /// ```
    /// # use candle_nn::{Optimizer, ParamsAdamW, linear};
    /// # use dist_train::{AdamW, FullyShard};
    /// # use pmap_mesh::DeviceMesh;
    /// # let mesh = DeviceMesh::cpu(2)?;
    /// let model = FullyShard::builder(&mesh, |vb| linear(4, 4, vb.pp(0)))
    ///     .build(|group| AdamW::new(group.vars, ParamsAdamW::default()))?;
    /// let (plan, costs) = (model.plan().unwrap(), model.cost_model().unwrap());
    /// assert_eq!(plan.cost(&costs)?.ranks[0].param_bytes, 4 * (2 * 4 + 2));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn cost_model(&self) -> Option<CostModel> {
        let model = self.layout.sharded()?;
        let keeps_graph = |unit: &&Unit| unit.keep == Keep::Graph;
        let n_graphs = model.units.values().filter(keeps_graph).count();
        let cost = CostModel::default()
            .with_runtime(Runtime::Candle)
            .with_prefetch(model.prefetch as u64)
            .with_kept_graphs(n_graphs as u64);
        let cost = model.precision.of_cost(cost);
        Some(if model.updates_in_backward { cost.with_optimizer_in_backward() } else { cost })
    }

    /// Returns the units of the model in the order of names, if it is sharded, and otherwise none.
    pub fn units(&self) -> impl Iterator<Item = &str> {
        let units = self.layout.sharded().into_iter().flat_map(|model| model.units.keys());
        units.map(String::as_str)
    }

    /// Rejects a model of which a step has updated some parameters and not others.
    fn check_whole(&self) -> Result<(), TrainingError> {
        let is_half_updated = self.slots.iter().any(|slot| lock(slot).is_half_updated);
        if is_half_updated { Err(TrainingError::HalfUpdated) } else { Ok(()) }
    }

    fn rules(&self, goal: Goal) -> Rules {
        Rules::new(&self.inventory, &self.options, &self.progress, goal)
    }
}
