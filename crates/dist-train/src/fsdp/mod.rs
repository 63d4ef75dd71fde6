//! Fully sharded training: each slot keeps its part of every parameter, and units are put together
//! where a loss enters them.

pub(crate) mod builder;
mod checked;
mod slot;
mod state;
mod updates;

use std::{
    path::Path,
    sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError},
};

use candle_core::Tensor;
use candle_nn::{Optimizer, VarBuilder};
use fsdp_plan::{
    ShardingPlan,
    cost::{CostModel, Runtime},
};
use pmap_mesh::{DeviceMesh, Replica, TensorTree};

use self::{builder::FullyShardBuilder, slot::Slot};
use crate::{
    batch::Layout,
    error::{Error, Result, training::TrainingError},
    lora::save::{PretrainedFiles, save},
    loss::Loss,
    progress::Progress,
    schedule::Schedule,
    step::{
        options::{EVALUATION, Options},
        rates::Rates,
        rules::{Evaluation, Report, Rules, Step, Then},
    },
    tree,
    units::{
        Units,
        keep::Keep,
        model::{Model, Unit},
        prefetch::Order,
        session::{PassContext, PassKind, Session},
        swap_storage::reads_freed_memory,
    },
};

/// A model whose parameters, gradients and optimizer state are cut over the devices of a mesh;
/// PyTorch's `fully_shard` (FSDP2), DeepSpeed's ZeRO stage 3.
///
/// Each slot keeps its part of every parameter. A loss is written by [units](Units::unit): entering
/// one gathers its parameters for as long as its function runs, and its backward gathers them again
/// and hands each slot its part of the summed gradients. So a slot holds one unit's parameters and
/// gradients, and of all others its part.
///
/// The face is that of [`DataParallel`](crate::DataParallel), and a loss by units runs with either.
///
/// # What is refused
///
/// What [`DataParallel`](crate::DataParallel#what-is-refused) refuses, and
/// - a parameter in no unit, when the model is built;
/// - buffers, such as a running mean: the forward pass changes them;
/// - in the first step of a model that enters it, also of one that was
///   [loaded](FullyShard::load), a unit that has another result when it is run again
///   ([`TrainingError::NotRepeatable`]), one that is not entered ([`TrainingError::NotEntered`]),
///   and a parameter that the loss uses outside the function of its unit without being a result of
///   it ([`TrainingError::ParameterOutsideUnit`]);
/// - replicas that enter different units, or in another order:
///   [`CollectiveError::Mismatch`](pmap_mesh::CollectiveError::Mismatch) names both. Where units
///   are [gathered ahead](FullyShardBuilder::prefetch), it names what each gathers then, or
///   [`TrainingError::OtherUnits`] all units that both have entered.
///
/// # Determinism
///
/// Losses and parameters have the bits that [`DataParallel`](crate::DataParallel) on as many slots
/// has, whatever units keep and however a plan cuts them. To rounding the same are: a value or
/// parameter that several units use, groups of slots that repeat the parts, gradients that are
/// clipped, and batches that are [accumulated](Self::accumulate) and
/// [summed in each](crate::Accumulation::ReduceEach), whose sums are formed in another order.
///
/// # Examples
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_nn::{Module, ParamsAdamW, VarBuilder, linear};
/// use dist_train::{AdamW, FullyShard, Units};
/// use candle_nn::Optimizer;
/// use pmap_mesh::{DeviceMesh, Replica};
///
/// // The constructor as for plain candle: names, shapes and initializers are read off it.
/// let build = |vb: VarBuilder<'_>| {
///     for n in 0..3 {
///         linear(4, 4, vb.pp(format!("blocks.{n}")))?;
///     }
///     linear(4, 1, vb.pp("head"))
/// };
/// let loss = |_: &Replica, model: &Units, (x, y): (Tensor, Tensor)| {
///     let mut x = x;
///     for n in 0..3 {
///         let block = |vb: VarBuilder<'_>, x: &Tensor| linear(4, 4, vb)?.forward(x)?.tanh();
///         x = model.unit(&format!("blocks.{n}"), &x, block)?;
///     }
///     let found = model.unit("head", &x, |vb, x| linear(4, 1, vb)?.forward(x))?;
///     (found - y)?.sqr()?.mean_all()
/// };
///
/// let mesh = DeviceMesh::cpu(2)?;
/// let params = ParamsAdamW { lr: 0.1, ..ParamsAdamW::default() };
/// let mut model = FullyShard::builder(&mesh, build)
///     .unit("head", ["head"])
///     .build(|group| AdamW::new(group.vars, params.clone()))?;
/// let x = Tensor::randn(0_f32, 1., (8, 4), &Device::Cpu)?;
/// let y = x.mean_keepdim(1)?;
/// let first = model.step((x.clone(), y.clone()), loss)?.loss;
/// for _ in 0..20 {
///     model.step((x.clone(), y.clone()), loss)?;
/// }
/// assert!(model.evaluate((x, y), loss)?.loss < first / 2.);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
#[doc(alias = "fully_shard")]
#[doc(alias = "FSDP")]
pub struct FullyShard<O> {
    mesh: DeviceMesh,
    model: Arc<Model>,
    /// Of this process. Each is locked by its own replica alone while a step runs, and shared with
    /// the operations of its graph.
    slots: Vec<Arc<Mutex<Slot<O>>>>,
    options: Options,
    progress: Progress,
    rates: Rates,
}

impl FullyShard<()> {
    /// A model to be cut over the slots of `mesh`, of the parameters that `model`, a constructor as
    /// for plain candle, asks its builder for. What it returns is dropped: units make their layers
    /// themselves.
    ///
    /// Options are set on what is returned; [`build`](FullyShardBuilder::build) asks for the
    /// optimizers.
    pub fn builder<M, B>(mesh: &DeviceMesh, model: B) -> FullyShardBuilder<'_, B>
    where
        B: Fn(VarBuilder<'_>) -> candle_core::Result<M>,
    {
        FullyShardBuilder::new(mesh, model)
    }
}

impl<O: Optimizer + Send + 'static> FullyShard<O> {
    /// Differentiates the batch's loss and updates the parameters.
    ///
    /// As [`DataParallel::step`](crate::DataParallel::step), with a loss by [units](Units::unit).
    ///
    /// # Errors
    ///
    /// [`Error::Training`](crate::Error::Training) if the step [would train something
    /// wrong](Self#what-is-refused); [`Error::Mesh`](crate::Error::Mesh) with those of
    /// [`PMap::call`](pmap_mesh::PMap::call). If the step fails before the optimizers run, no
    /// parameter has changed, and accumulated gradients are dropped. If it fails later, by an
    /// optimizer's own error or when they run [inside the backward
    /// pass](FullyShardBuilder::optimizer_in_backward), some parameters may be updated and others
    /// not: from then on the model refuses everything but [`load`](Self::load)
    /// ([`TrainingError::HalfUpdated`]).
    #[track_caller]
    pub fn step<I, A, L, F>(&mut self, batch: I, loss: F) -> Result<Step<A>>
    where
        I: TensorTree,
        A: TensorTree,
        L: Into<Loss<A>>,
        F: Fn(&Replica, &Units, I) -> candle_core::Result<L> + Send + Sync,
    {
        let (Report { loss, grad_norm }, aux) = self.train(batch, loss, Then::Update)?;
        self.progress.steps += 1;
        Ok(Step { loss: loss.mean(), grad_norm, weight: loss.weight(), aux })
    }

    /// Differentiates the batch's loss and adds the gradients to those for the next
    /// [`step`](Self::step); returns the loss of this batch.
    ///
    /// Gradients are summed over the slots in every batch, so that a slot keeps its part of them
    /// alone, unless the builder says [otherwise](FullyShardBuilder::accumulation).
    ///
    /// # Errors
    ///
    /// Those of [`step`](Self::step); accumulated gradients are dropped.
    /// [`TrainingError::NeedsAllGradients`] if optimizers run inside the backward pass.
    #[track_caller]
    #[doc(alias = "set_requires_gradient_sync")]
    pub fn accumulate<I, A, L, F>(&mut self, batch: I, loss: F) -> Result<Evaluation<A>>
    where
        I: TensorTree,
        A: TensorTree,
        L: Into<Loss<A>>,
        F: Fn(&Replica, &Units, I) -> candle_core::Result<L> + Send + Sync,
    {
        if self.model.updates_in_backward {
            return Err(TrainingError::NeedsAllGradients { option: "accumulate" }.into());
        }
        let (Report { loss, .. }, aux) = self.train(batch, loss, Then::Keep)?;
        Ok(Evaluation { loss: loss.mean(), weight: loss.weight(), aux })
    }

    /// The loss of a batch, without gradients: units are gathered once, and no operation is
    /// recorded.
    ///
    /// All evaluations between two steps draw the same random numbers.
    ///
    /// # Errors
    ///
    /// As [`DataParallel::evaluate`](crate::DataParallel::evaluate), and those of
    /// [`Units::unit`].
    #[expect(clippy::expect_used, reason = "a call that succeeded has run every replica")]
    #[track_caller]
    pub fn evaluate<I, A, L, F>(&mut self, batch: I, loss: F) -> Result<Evaluation<A>>
    where
        I: TensorTree,
        A: TensorTree,
        L: Into<Loss<A>>,
        F: Fn(&Replica, &Units, I) -> candle_core::Result<L> + Send + Sync,
    {
        self.check_whole()?;
        let layout = Layout::of(&batch);
        let common = PassContext::new(&self.model, self.rules(Then::Keep), false);
        let rules = &common.rules;
        let order = OnceLock::new();
        let mean = OnceLock::new();
        let call = self.mesh.pmap_scoped(|ctx, shard: I| {
            let session = Session::new(ctx, &common, PassKind::Evaluation)?;
            let here = run_loss(ctx, &session, &layout, shard, &loss)?;
            session.finish_gathering()?;
            note(&order, ctx, &session);
            let evaluated = session
                .check_order()
                .and_then(|()| here.evaluate(ctx, rules.allow_non_finite, &rules.refusal));
            rules.refusal.outcome(evaluated.map(|(whole, aux)| {
                mean.get_or_init(|| whole);
                aux
            }))
        });
        let call = self.options.cut(call).seed(self.progress.seed.derive(EVALUATION));
        let outcome = rules.refusal.of(call.call_at(self.progress.steps, batch));
        let order = order.into_inner().filter(|_| outcome.is_ok());
        self.model.note_order(false, order);
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
        F: Fn(&Replica, &Units, I) -> candle_core::Result<L> + Send + Sync,
    {
        self.check_whole()?;
        self.set_rates(self.rates.after(self.progress.steps));
        let layout = Layout::of(&batch);
        let common = PassContext::new(&self.model, self.rules(then), true);
        let rules = &common.rules;
        let order = OnceLock::new();
        let report = OnceLock::new();
        let entered = OnceLock::new();
        let call = self.mesh.pmap_scoped(|ctx, shard: I| {
            let slot = &self.slots[ctx.local_index()];
            let session = Session::new(ctx, &common, self.purpose(slot))?;
            let here = run_loss(ctx, &session, &layout, shard, &loss)?;
            entered.get_or_init(|| session.entered());
            let trained = slot::train(slot, ctx, &session, rules, here);
            note(&order, ctx, &session);
            let outcome = rules.refusal.outcome(trained.map(|(whole, aux)| {
                report.get_or_init(|| whole);
                aux
            }))?;
            session.abandon()?;
            Ok(outcome)
        });
        let call = self.options.cut(call).seed(self.progress.seed);
        let outcome = rules.refusal.of(call.call_at(self.progress.batches, batch));
        for slot in &self.slots {
            match outcome {
                Ok(_) => lock(slot).is_half_updated = false,
                Err(_) => lock(slot).forget(),
            }
        }
        let order = order.into_inner().filter(|_| outcome.is_ok());
        self.model.note_order(true, order);
        let aux = outcome?;
        if let (Then::Update, Some(units)) = (then, entered.into_inner()) {
            self.model.note_repeatable(units);
        }
        self.progress.batches += 1;
        Ok((*report.get().expect("every replica has set the report"), aux))
    }

    /// What a replica is to do with gradients.
    fn purpose(&self, slot: &Arc<Mutex<Slot<O>>>) -> PassKind {
        if self.model.updates_in_backward {
            PassKind::InBackward(Arc::clone(slot) as _)
        } else {
            PassKind::Training
        }
    }

    /// Gives the optimizers the learning rate of each group.
    fn set_rates(&self, rates: Vec<f64>) {
        for (group, rate) in rates.into_iter().enumerate() {
            self.slots.iter().for_each(|slot| lock(slot).set_learning_rate(group, rate));
        }
    }

    fn rules(&self, then: Then) -> Rules {
        Rules::new(&self.model.inventory, &self.options, &self.progress, then)
    }
}

impl<O> FullyShard<O> {
    /// Sets the learning rate of all groups, by which the factor of the
    /// [schedule](Self::set_schedule) is multiplied.
    ///
    /// # Errors
    ///
    /// [`Error::Setting`](crate::Error::Setting) if it is negative or no number.
    pub fn set_learning_rate(&mut self, learning_rate: f64) -> Result<()> {
        self.rates.set_all(learning_rate)
    }

    /// Sets the learning rate of a [group](FullyShardBuilder::group).
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
    /// [builder](FullyShardBuilder::schedule) or a checkpoint said.
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

    /// Compares to the bit what several slots keep of the parameters: parts of other groups of
    /// slots (HSDP), and parameters that a plan replicates. They are updated alike, so they differ
    /// only if something has gone wrong: memory, or an optimizer that does not do the same
    /// everywhere. Every process of the mesh calls it.
    ///
    /// # Errors
    ///
    /// [`Error::Diverged`](crate::Error::Diverged) with the first parameter and the first slot that
    /// has other values, [`TrainingError::HalfUpdated`] after a step that failed on its way,
    /// [`Error::Tensor`](crate::Error::Tensor) if candle fails, [`Error::Mesh`](crate::Error::Mesh)
    /// if a process does not answer.
    pub fn check_in_sync(&self) -> Result<()> {
        self.check_whole()?;
        builder::check_replicas_equal(&self.mesh, &self.model)
    }

    /// The plan by which parameters are cut.
    ///
    /// A parameter that is in several units counts in its cost and schedule for the first of them,
    /// though it is gathered and summed for each; and whole gradients that
    /// [`Accumulation::ReduceLast`](crate::Accumulation::ReduceLast) keeps between batches, as many
    /// bytes as the model on every slot, are not counted.
    pub fn plan(&self) -> &ShardingPlan {
        self.model.vars.plan()
    }

    /// What the cost of the [plan](Self::plan) depends on besides it, as this model carries it out:
    /// what its units keep, how many are gathered ahead, in which types, and when its optimizers
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
    /// let cost = model.plan().cost(&model.cost_model())?;
    /// assert_eq!(cost.ranks[0].param_bytes, 4 * (2 * 4 + 2));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn cost_model(&self) -> CostModel {
        let keeps_graph = |unit: &&Unit| unit.keep == Keep::Graph;
        let n_graphs = self.model.units.values().filter(keeps_graph).count();
        let cost = CostModel::default()
            .with_runtime(Runtime::Candle)
            .with_prefetch(self.model.prefetch as u64)
            .with_kept_graphs(n_graphs as u64);
        let cost = self.model.precision.of_cost(cost);
        if self.model.updates_in_backward { cost.with_optimizer_in_backward() } else { cost }
    }

    /// The units of the model, in the order of names.
    pub fn units(&self) -> impl ExactSizeIterator<Item = &str> {
        self.model.units.keys().map(String::as_str)
    }

    /// Refuses a model of which a step has updated some parameters and not others.
    fn check_whole(&self) -> Result<(), TrainingError> {
        let is_half_updated = self.slots.iter().any(|slot| lock(slot).is_half_updated);
        if is_half_updated { Err(TrainingError::HalfUpdated) } else { Ok(()) }
    }

    /// The whole of a parameter, on this process's first device. Every process of the mesh calls
    /// it.
    ///
    /// # Errors
    ///
    /// [`TrainingError::HalfUpdated`] after a step that failed on its way,
    /// [`ParameterError::Unknown`](crate::ParameterError::Unknown),
    /// [`Error::Tensor`](crate::Error::Tensor) if candle fails, [`Error::Mesh`](crate::Error::Mesh)
    /// if a process does not answer.
    pub fn gather(&self, name: &str) -> Result<Tensor> {
        self.check_whole()?;
        self.model.vars.gather(name)
    }

    /// Writes the model as pretrained weights, one parameter in memory after the other; as
    /// [`DataParallel::save_pretrained`](crate::DataParallel::save_pretrained), whose bytes it
    /// writes.
    ///
    /// # Errors
    ///
    /// Those of [`DataParallel::save_pretrained`](crate::DataParallel::save_pretrained) and of
    /// [`gather`](Self::gather).
    pub fn save_pretrained(&self, folder: impl AsRef<Path>, files: PretrainedFiles) -> Result<()> {
        let parameters = self.plan().parameters().iter().map(|part| part.info().clone());
        let parameters: Vec<_> = parameters.collect();
        save(&self.mesh, folder.as_ref(), files, &parameters, |name| self.gather(name))
    }

    /// Hands the whole of each parameter to `f`, one after the other in the order of names: a model
    /// that fills all devices can be written out by one. Every process of the mesh calls it.
    ///
    /// # Errors
    ///
    /// Those of [`gather`](Self::gather), and the first of `f`, in the process that has it: the
    /// rest is put together for the others all the same.
    pub fn for_each_whole<E: From<Error>>(
        &self,
        mut f: impl FnMut(&str, Tensor) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut outcome = Ok(());
        for (name, _) in &self.model.inventory.parameters {
            let whole = self.gather(name)?;
            outcome = outcome.and_then(|()| f(name, whole));
        }
        outcome
    }
}

/// Returns the loss of this replica's shard of a batch.
///
/// # Errors
///
/// What the loss fails with, and [`TrainingError::ParameterOutsideUnit`].
fn run_loss<I, A, L, F>(
    ctx: &Replica,
    session: &Arc<Session>,
    layout: &Layout,
    shard: I,
    loss: F,
) -> candle_core::Result<Loss<A>>
where
    I: TensorTree,
    A: TensorTree,
    L: Into<Loss<A>>,
    F: Fn(&Replica, &Units, I) -> candle_core::Result<L>,
{
    let run = |session: &Arc<Session>, shard| {
        let units = Units::sharded(Arc::clone(session));
        let loss = layout.explain(shard, |shard| loss(ctx, &units, shard))?.into();
        session.check_outside(&loss)?;
        Ok(loss)
    };
    let again = session.may_free_unproven().then(|| tree::map(&shard, Tensor::clone));
    match (run(session, shard), again) {
        // A parameter of a unit that keeps its graph is freed and cannot be read outside. candle's
        // error names none, so the loss runs once more and frees nothing: on all replicas alike, for
        // all of them read the same.
        (Err(error), Some(shard)) if reads_freed_memory(&error) => {
            session.abandon()?;
            let _unchanged: Loss<A> = run(&session.search()?, shard)?;
            Err(error)
        }
        (outcome, _) => outcome,
    }
}

/// Notes what a batch has gathered, as the first slot of this process has: groups of slots that go
/// other ways expect the same.
fn note(order: &OnceLock<Order>, ctx: &Replica, session: &Session) {
    if ctx.local_index() == 0 {
        order.get_or_init(|| session.order());
    }
}

/// Locks what a slot keeps. A step locks it in the slot's own worker alone, and everything else
/// between steps, so that nobody waits.
///
/// A panic fails the step as an error does, and a failed step leaves a slot that can be used, so a
/// poisoned lock says nothing that the caller was not told.
fn lock<T>(slot: &Mutex<T>) -> MutexGuard<'_, T> {
    slot.lock().unwrap_or_else(PoisonError::into_inner)
}
