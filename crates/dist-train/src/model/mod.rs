//! A model in training, for both layouts.

mod build;
pub(crate) mod builder;
mod config;
pub(crate) mod entry_points;
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
use fsdp_plan::{ShardingPlan, cost::CostModel};
use pmap_mesh::{DeviceMesh, Replica, TensorTree};

use self::{
    layout::{Layout, Pass},
    pass::ShardUse,
    slot::{SharedSlot, lock},
};
use crate::{
    batch::{self, BatchShapes},
    error::{Result, training::TrainingError},
    lora::save::{PretrainedFiles, save},
    loss::{self, Loss},
    precision::Precision,
    progress::Progress,
    schedule::Schedule,
    step::{
        inventory::Inventory,
        options::StepOptions,
        rates::Rates,
        rules::{Evaluation, Goal, Report, Rules, Step},
    },
    tree,
    units::keep_rules::Keep,
};

/// A model with its optimizers, trained by all devices of a mesh. It is built by
/// [`DataParallel::builder`](crate::DataParallel::builder), with a full replica on every device, or
/// by [`FullyShard::builder`](crate::FullyShard::builder), with a shard on every slot.
///
/// Losses borrow an `M`: the return value of the model's constructor, or [`Units`](crate::Units).
/// `O` is the type of its optimizers. Methods, results and checkpoints are the same for both
/// layouts.
///
/// # Rejected steps and models
///
/// - A parameter without a gradient on any slot in the first step: an operation without a backward
///   pass cuts the gradient, so earlier parameters would not train
///   ([`allow_unused`](crate::ModelBuilder::allow_unused),
///   [`freeze`](crate::ModelBuilder::freeze)). In later steps such a parameter is skipped.
/// - A non-finite loss, gradient norm or buffer, before any parameter changes
///   ([`allow_non_finite`](crate::ModelBuilder::allow_non_finite)).
/// - A loss of integers, or with more than one item.
///
/// A sharded model also rejects:
/// - a parameter in no unit, when the model is built;
/// - buffers, such as a running mean: the forward pass changes them;
/// - a unit that gives another result when it is recomputed ([`TrainingError::NotRepeatable`]), and a
///   parameter that the loss uses outside its unit's function, unless this function returns the
///   parameter ([`TrainingError::ParameterOutsideUnit`]). Both are found in the first step of the
///   model, also of a [loaded](Self::load) model, that enters the unit;
/// - a unit that no batch of the first update enters ([`TrainingError::NotEntered`]);
/// - replicas that enter different units, or in a different order:
///   [`CollectiveError::Mismatch`](pmap_mesh::CollectiveError::Mismatch) names both units. With
///   [prefetching](crate::ModelBuilder::prefetch), it names the units that were being gathered
///   instead. If the replicas gathered the same units, the error is
///   [`TrainingError::UnitMismatch`], which lists all units that each replica entered.
///
/// # Determinism
///
/// The loss on W slots equals the loss on one slot for the same batches, up to the rounding of
/// sums. On meshes of one size it is the same to the bit every time, with threads and with
/// processes, because sums are formed in rank order.
///
/// A sharded model has the same bits as a replicated model on as many slots, for any
/// [`Keep`](crate::Keep) and any plan. Results are equal only up to rounding if several units use a
/// value or parameter, if groups of slots replicate the shards, if gradients are clipped, or if
/// batches are [accumulated](Self::accumulate) and [reduced in each
/// batch](crate::Accumulation::ReduceEach), because sums are then formed in another order.
#[derive(Debug)]
pub struct DistributedModel<M, O> {
    mesh: DeviceMesh,
    inventory: Arc<Inventory>,
    options: StepOptions,
    precision: Precision,
    progress: Progress,
    rates: Rates,
    /// The slots of this process. During a step, only a slot's own replica locks it.
    slots: Vec<SharedSlot<O>>,
    layout: Layout<M>,
}

impl<M: Send, O: Optimizer + Send + 'static> DistributedModel<M, O> {
    /// Differentiates the batch's loss and updates the parameters.
    ///
    /// `loss` returns a [`Loss`], or a tensor: the mean over the rows of its shard, or over the
    /// first [`Replica::valid_len`] of them if the shard may be padded. If earlier batches were
    /// [accumulated](Self::accumulate), the update uses the gradient of the mean over all of them
    /// and this batch. `loss` may borrow local variables: the step waits for all replicas, and on a
    /// mesh with a [deadline](pmap_mesh::DeviceMeshBuilder::deadline) a replica that never returns
    /// ends the process (see [`DeviceMesh::pmap_scoped`]).
    ///
    /// # Errors
    ///
    /// - [`Error::Training`](crate::Error::Training) if the step is
    ///   [rejected](Self#rejected-steps-and-models), or with [`TrainingError::BatchMismatch`] if
    ///   processes pass different batches;
    /// - [`Error::Mesh`](crate::Error::Mesh) if [`PMap::call`](pmap_mesh::PMap::call) fails.
    ///
    /// If the step fails before the optimizers run, no parameter has changed, and accumulated
    /// gradients are dropped. It may fail later because of an optimizer's own error, or because
    /// optimizers run [inside the backward pass](crate::ModelBuilder::optimizer_in_backward). Then
    /// possibly only some parameters have been updated, and the model rejects everything except
    /// [`load`](Self::load) ([`TrainingError::HalfUpdated`]).
    #[track_caller]
    pub fn step<I, A, L, F>(&mut self, batch: I, loss: F) -> Result<Step<A>>
    where
        I: TensorTree,
        A: TensorTree,
        L: Into<Loss<A>>,
        F: Fn(&Replica, &M, I) -> CandleResult<L> + Send + Sync,
    {
        let learning_rate = self.learning_rate();
        let (Report { loss, grad_norm }, aux) = self.train(batch, loss, Goal::Update)?;
        self.progress.steps += 1;
        Ok(Step { loss: loss.mean(), grad_norm, weight: loss.weight(), learning_rate, aux })
    }

    /// Differentiates the batch's loss and adds the gradients to the next [`step`](Self::step);
    /// returns the loss of this batch. (Like PyTorch's `no_sync`, but losses and weights are added
    /// up and divided once, so there is no need to divide by the number of batches.) A batch
    /// without weight adds nothing.
    ///
    /// A replicated model stores the gradients on each slot. A sharded model reduces them in every
    /// batch, so that a slot stores only its shards, unless the builder sets [another
    /// time](crate::ModelBuilder::accumulation).
    ///
    /// # Errors
    ///
    /// Returns the errors of [`step`](Self::step), and drops accumulated gradients;
    /// [`TrainingError::Option`] if optimizers run inside the backward pass.
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

    /// Returns the loss of a batch, without gradients: no operations are recorded, and units are
    /// gathered once. Changes of buffers by the forward pass are reverted.
    ///
    /// All evaluations between two steps draw the same random numbers, which differ from the
    /// numbers of steps. So the same batch always has the same loss, and evaluations do not change
    /// the random numbers of a run.
    ///
    /// # Errors
    ///
    /// Returns [`Error::Training`](crate::Error::Training) if a loss is not a floating-point scalar
    /// or not finite, if no shard has weight, or with [`TrainingError::HalfUpdated`]; and
    /// [`Error::Mesh`](crate::Error::Mesh) if [`PMap::call`](pmap_mesh::PMap::call) or
    /// [`Units::unit`](crate::Units::unit) fails.
    #[track_caller]
    pub fn evaluate<I, A, L, F>(&mut self, batch: I, loss: F) -> Result<Evaluation<A>>
    where
        I: TensorTree,
        A: TensorTree,
        L: Into<Loss<A>>,
        F: Fn(&Replica, &M, I) -> CandleResult<L> + Send + Sync,
    {
        self.check_not_half_updated()?;
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
        self.check_not_half_updated()?;
        for (group, rate) in self.rates.after(self.progress.steps).into_iter().enumerate() {
            self.slots.iter().for_each(|slot| lock(slot).set_learning_rate(group, rate));
        }
        let pass = self.layout.begin(&self.slots, self.rules(goal))?;
        let outcome = self.run(&pass, self.progress.stream(), batch, loss)?;
        drop(pass);
        self.progress.batches += 1;
        Ok(outcome)
    }

    /// Runs a batch for any [`Goal`] through the replicas. The random numbers of its losses start
    /// at `position` in the stream of `seed`.
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
        let shapes = BatchShapes::new(&batch);
        let is_local = self.options.local_batches;
        let fingerprint =
            if is_local { None } else { batch::shared_fingerprint(&self.mesh, &batch)? };
        let report = OnceLock::new();
        let call = self.mesh.pmap_scoped(|ctx, shard: I| {
            let mut shard = Some(shard);
            let mut aux_tree = None;
            // `pass` may evaluate the loss several times. The last evaluation takes the shard.
            let outcome = pass.replica(ctx, &mut |model, shard_use| {
                let shard = match shard_use {
                    ShardUse::Repeated => {
                        shard.as_ref().map(|shard| tree::map(shard, Tensor::clone))
                    }
                    ShardUse::Last => shard.take(),
                };
                let shard = shard.expect("the shard is taken by its last use only");
                let shard_loss = shapes.explain(shard, |shard| loss(ctx, model, shard))?.into();
                let (shard_loss, shard_tree) = shard_loss.into_leaves();
                aux_tree = Some(shard_tree);
                Ok(shard_loss.of_batch(fingerprint))
            })?;
            Ok(outcome.map(|(batch_report, aux)| {
                report.get_or_init(|| batch_report);
                loss::with_leaves(&aux_tree.expect("a loss was evaluated"), aux)
            }))
        });
        let call = self.options.configure(call).seed(seed);
        let result = pass.rules().errors.call_result(call.call_at(position, batch));
        pass.end(result.is_ok())?;
        let aux = result?;
        Ok((*report.get().expect("every replica has set the report"), aux))
    }
}

impl<M, O> DistributedModel<M, O> {
    /// Sets the learning rate of all groups. Each update uses this rate times the factor of the
    /// [schedule](Self::set_schedule).
    ///
    /// # Errors
    ///
    /// Returns [`Error::Setting`](crate::Error::Setting) if the rate is negative or not a number.
    pub fn set_learning_rate(&mut self, learning_rate: f64) -> Result<()> {
        self.rates.set_all(learning_rate)
    }

    /// Returns the learning rate of the next update, with the factor of the
    /// [schedule](Self::set_schedule); of the first group, if the model has several.
    #[doc(alias = "get_last_lr")]
    pub fn learning_rate(&self) -> f64 {
        self.rates.after(self.progress.steps)[0]
    }

    /// Sets the learning rate of a [group](crate::ModelBuilder::group).
    ///
    /// # Errors
    ///
    /// Returns [`TrainingError::Option`] if no group of that name has a variable, and
    /// [`Error::Setting`](crate::Error::Setting) if the rate is negative or not a number.
    pub fn set_group_learning_rate(&mut self, name: &str, learning_rate: f64) -> Result<()> {
        self.rates.set_group(name, learning_rate)
    }

    /// Replaces the learning rate schedule set by the [builder](crate::ModelBuilder::schedule) or a
    /// checkpoint, from now on.
    ///
    /// # Errors
    ///
    /// Returns [`Error::Setting`](crate::Error::Setting) if the warm-up is not shorter than the
    /// schedule, or if the floor is not from 0 to 1.
    pub fn set_schedule(&mut self, schedule: Schedule) -> Result<()> {
        self.rates.set_schedule(schedule)
    }

    /// Returns the number of updates since the start of training, including updates before a
    /// checkpoint.
    pub fn steps(&self) -> u64 {
        self.progress.steps
    }

    /// Returns a full parameter on this process's first device. For a replicated model it shares
    /// memory with the trained variable, and changes with it; for a sharded model it is gathered.
    /// Every process of the mesh must call this.
    ///
    /// # Errors
    ///
    /// Returns [`TrainingError::HalfUpdated`] after a partial update, [`ParameterError::Unknown`],
    /// [`Error::Tensor`](crate::Error::Tensor) if candle fails, and
    /// [`Error::Mesh`](crate::Error::Mesh) if a process does not respond.
    #[doc(alias = "full_tensor")]
    #[doc(alias = "gather")]
    pub fn parameter(&self, name: &str) -> Result<Tensor> {
        self.check_not_half_updated()?;
        let parameters = &self.inventory.parameters;
        let position = parameters.binary_search_by(|(other, _)| other.as_str().cmp(name));
        let position = position.map_err(|_| ParameterError::Unknown { name: name.to_owned() })?;
        self.layout.parameter(&self.inventory, &self.slots, position)
    }

    /// Returns all [parameters](Self::parameter) by name, in the form that
    /// `candle_core::safetensors::save` writes. If a sharded model does not fit one device, call
    /// [`parameter`](Self::parameter) for one name at a time.
    ///
    /// # Errors
    ///
    /// Returns the errors of [`parameter`](Self::parameter).
    #[doc(alias = "named_parameters")]
    #[doc(alias = "variables")]
    pub fn parameters(&self) -> Result<BTreeMap<String, Tensor>> {
        let names = self.inventory.parameters.iter().map(|(name, _)| name);
        names.map(|name| Ok((name.clone(), self.parameter(name)?))).collect()
    }

    /// Writes the parameters as pretrained weights into `folder`, next to other files, with the
    /// names and the index that Hugging Face's libraries expect.
    /// [`weights`](crate::ModelBuilder::weights) can read the folder too. An existing model is
    /// replaced: atomically if the new one is a single file, and otherwise so that a reader finds
    /// the old model, briefly no model, or the new model.
    ///
    /// Every process of the mesh must call this with the same arguments; rank 0 writes. Only one
    /// parameter of a sharded model is in memory at a time.
    ///
    /// # Errors
    ///
    /// On all processes:
    /// - the errors of [`check_in_sync`](Self::check_in_sync), which runs first;
    /// - [`CheckpointError::NotFinite`](crate::CheckpointError::NotFinite) unless non-finite
    ///   parameters are [allowed](PretrainedFiles::allow_non_finite);
    /// - [`CheckpointError::Io`](crate::CheckpointError::Io) if a file cannot be written, and
    ///   [`Error::OtherProcess`](crate::Error::OtherProcess) on the other processes.
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

    /// Checks that values stored by several devices are the same to the bit: the variables of a
    /// replicated model, and in a sharded model the shards in other groups of slots (HSDP) and the
    /// parameters that a plan replicates. They get the same updates, so they differ only because of
    /// a fault, such as bad memory or an optimizer that is not deterministic.
    /// [`state_dict`](Self::state_dict) and [`save_pretrained`](Self::save_pretrained) call this
    /// first. Every process of the mesh must call this.
    ///
    /// # Errors
    ///
    /// Returns [`Error::Diverged`](crate::Error::Diverged) with the first parameter and the first
    /// slot with different values, [`TrainingError::HalfUpdated`] after a partial update,
    /// [`Error::Tensor`](crate::Error::Tensor) if a parameter cannot be read, and
    /// [`Error::Mesh`](crate::Error::Mesh) if a process does not respond.
    pub fn check_in_sync(&self) -> Result<()> {
        self.check_not_half_updated()?;
        self.layout.check_in_sync(&self.mesh, &self.inventory, &self.slots)
    }

    /// Returns the sharding plan if the model is sharded.
    ///
    /// The plan's cost and schedule count a parameter of several units for the first unit only,
    /// although it is gathered and reduced for each unit. They also do not count the unreduced
    /// gradients that [`Accumulation::ReduceLast`](crate::Accumulation::ReduceLast) stores between
    /// batches, which have as many bytes as the full model on every slot.
    pub fn plan(&self) -> Option<&ShardingPlan> {
        Some(self.layout.sharded()?.vars.plan())
    }

    /// Returns the settings of this model that the cost of the [plan](Self::plan) depends on: kept
    /// data, prefetching, dtypes, and the time at which optimizers run. It assumes Adam, and does
    /// not set the size of [activations](CostModel::activations).
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
        let n_graphs = model.units.values().filter(|unit| unit.keep == Keep::Graph).count();
        Some(CostModel {
            prefetch: Some(model.prefetch as u64),
            kept_graphs: n_graphs as u64,
            optimizer_in_backward: model.updates_in_backward,
            ..model.precision.cost_model()
        })
    }

    /// Returns an error if a failed step or load left the model partially updated.
    fn check_not_half_updated(&self) -> Result<(), TrainingError> {
        let is_half_updated = self.slots.iter().any(|slot| lock(slot).is_half_updated);
        if is_half_updated { Err(TrainingError::HalfUpdated) } else { Ok(()) }
    }

    fn rules(&self, goal: Goal) -> Rules {
        Rules::new(&self.inventory, &self.options, &self.progress, goal)
    }
}
