//! The options of a model.

use std::{fmt, mem, ops::Range, path::PathBuf, sync::Arc};

use candle_core::{DType, Result as CandleResult, Tensor, Var};
use candle_nn::{VarBuilder, VarMap};
use core_types::Seed;
use fsdp_plan::{ShardingPlan, strategy::ShardingStrategy};
use pmap_mesh::{DeviceMesh, Specs, Uneven};

use crate::{
    error::Error,
    model::config::{ModelConfig, PlanSource, ShardingConfig, Sharing},
    parameters::{Initializer, declare::Declared},
    precision::Precision,
    schedule::Schedule,
    units::{Units, accumulation::Accumulation, keep::Keep, rules::UnitRules},
};

/// Builds a [`DistributedModel`](crate::DistributedModel): made by
/// [`DataParallel::builder`](crate::DataParallel::builder) and
/// [`FullyShard::builder`](crate::FullyShard::builder).
///
/// `M` is what losses are lent: what the constructor returns, or [`Units`] of it.
///
/// Patterns are those of [`fsdp_plan::Pattern`], over the names of parameters or, where they are
/// about units, of units: components such as `embeddings` or `encoder.layer.0`, or globs such as
/// `encoder.layer.*.output.*` and `**.bias`, in which `*` stays within a component. A pattern that
/// matches nothing is an error.
#[must_use = "a model is made by `build`"]
pub struct ModelBuilder<'a, M> {
    pub(super) mesh: &'a DeviceMesh,
    pub(super) source: Source<'a, M>,
    pub(super) config: ModelConfig,
    pub(super) is_sharded: bool,
    pub(super) sharding: ShardingConfig,
}

/// A model's constructor.
pub(crate) type Constructor<'a, M> = Box<dyn Fn(VarBuilder<'_>) -> CandleResult<M> + 'a>;

/// What is built on each slot.
pub(super) enum Source<'a, M> {
    /// What the constructor returns.
    Model(Constructor<'a, M>),
    /// Units of the parameters that the constructor asks for. Here `M` is `Units`, so both functions
    /// are the identity.
    Units {
        declare: Constructor<'a, ()>,
        rules: UnitRules,
        own: fn(Units) -> M,
        lend: LendUnits<M>,
    },
}

/// Returns units as what a loss is lent. It spares losses a trait, and models the `'static` that
/// `Any` or a boxed trait would want.
pub(crate) type LendUnits<M> = for<'a> fn(&'a Units) -> &'a M;

/// Some of the variables of a model, for which an optimizer is to be made.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Group {
    /// The name of the group: `default` for what no [`group`](ModelBuilder::group) has.
    pub name: String,
    /// Those of its variables that one slot updates, which may be none: whole parameters, or a
    /// sharded model's parts of them, each of one dimension.
    pub vars: Vec<Var>,
}

/// # Every model
impl<'a, M> ModelBuilder<'a, M> {
    pub(super) fn new(mesh: &'a DeviceMesh, model: Constructor<'a, M>) -> Self {
        Self {
            mesh,
            source: Source::Model(model),
            config: ModelConfig::default(),
            is_sharded: false,
            sharding: ShardingConfig::default(),
        }
    }

    /// Lends losses [units](Units) of the model, by these rules, in place of what its constructor
    /// returns. The constructor is then only asked which parameters there are, and units make their
    /// layers themselves.
    ///
    /// Such a model can be [sharded](Self::fully_shard), and a loss by units runs either way.
    ///
    /// # Examples
    ///
    /// ```
    /// use candle_core::{Device, Tensor};
    /// use candle_nn::{Module, Optimizer, VarBuilder, linear};
    /// use dist_train::{DataParallel, Sgd, UnitRules, Units};
    /// use pmap_mesh::{DeviceMesh, Replica};
    ///
    /// let layers = |vb: VarBuilder<'_>| linear(4, 4, vb.pp("first"));
    /// let loss = |_: &Replica, model: &Units, x: Tensor| {
    ///     model.unit("first", &x, |vb, x| linear(4, 4, vb)?.forward(x))?.sqr()?.mean_all()
    /// };
    /// let mesh = DeviceMesh::cpu(2)?;
    /// let x = Tensor::randn(0_f32, 1., (8, 4), &Device::Cpu)?;
    /// let mut losses = Vec::new();
    /// for is_sharded in [false, true] {
    ///     let rules = UnitRules::new().unit("first", ["first"]);
    ///     let builder = DataParallel::builder(&mesh, layers).by_units(rules);
    ///     let builder = if is_sharded { builder.fully_shard() } else { builder };
    ///     let mut model = builder.build(|group| Sgd::new(group.vars, Default::default()))?;
    ///     losses.push(model.step(x.clone(), loss)?.loss);
    /// }
    /// assert_eq!(losses[0], losses[1]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn by_units(self, rules: UnitRules) -> ModelBuilder<'a, Units>
    where
        M: 'a,
    {
        let Self { mesh, source, config, is_sharded, sharding } = self;
        let declare: Constructor<'a, ()> = match source {
            Source::Model(model) => Box::new(move |vb| model(vb).map(drop)),
            Source::Units { declare, .. } => declare,
        };
        // The one place that makes these functions, and here `M` is `Units`.
        let source = Source::Units { declare, rules, own: |units| units, lend: |units| units };
        ModelBuilder { mesh, source, config, is_sharded, sharding }
    }

    /// Sets the seed of initial values; 0 by default. Item i of a parameter is a function of the
    /// seed, the parameter's name and i, distributed as the layer's constructor says: the same on
    /// every device, in every process, for every number of slots and for every plan.
    pub fn init(mut self, seed: Seed) -> Self {
        self.config.initializer = Initializer::Seeded(seed);
        self
    }

    /// Takes initial values from a function in place of the [seed](Self::init). Given a parameter
    /// and a range of its items, counted in row-major order, it returns these items as one
    /// dimension, of the parameter's type: all of them, or those of a slot if the model is sharded.
    ///
    /// It is a function of its arguments alone, so that a part has the values that it has in the
    /// whole.
    ///
    /// # Examples
    ///
    /// ```
    /// use candle_core::{Device, Tensor};
    /// use candle_nn::{Optimizer, ParamsAdamW, linear};
    /// use dist_train::{AdamW, DataParallel};
    /// use pmap_mesh::DeviceMesh;
    ///
    /// let mesh = DeviceMesh::cpu(2)?;
    /// let model = DataParallel::builder(&mesh, |vb| linear(3, 1, vb))
    ///     .init_with(|_, items| Tensor::arange(items.start as f32, items.end as f32, &Device::Cpu))
    ///     .build(|group| AdamW::new(group.vars, ParamsAdamW::default()))?;
    /// assert_eq!(model.parameter("weight")?.to_vec2::<f32>()?, [[0., 1., 2.]]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn init_with(
        mut self,
        values: impl Fn(&Declared, Range<usize>) -> CandleResult<Tensor> + Send + Sync + 'static,
    ) -> Self {
        self.config.initializer = Initializer::Given(Arc::new(values));
        self
    }

    /// Begins with pretrained weights: a safetensors file, a Hugging Face index, whose name ends in
    /// `.json`, or a folder with `model.safetensors` or `model.safetensors.index.json`, as
    /// [`save_pretrained`](crate::DistributedModel::save_pretrained) writes it. Names are matched
    /// exactly. A parameter that is not there is an error unless
    /// [`allow_missing`](Self::allow_missing) names it or it [has a value](Self::with_variables), and
    /// so is one that has both, and a tensor that the model does not have, unless
    /// [`allow_unexpected`](Self::allow_unexpected) does.
    ///
    /// The slots of a sharded model read their own items. All processes must have the same weights,
    /// and none has all of them in memory: compared are which parameters they have, and some items
    /// from all over each, all of those of up to 256. So weights of another training run are found,
    /// and a copy of which few items differ may not be. What several processes keep is compared to
    /// the bit.
    pub fn weights(mut self, path: impl Into<PathBuf>) -> Self {
        self.config.weights_path = Some(path.into());
        self
    }

    /// Allows the parameters that a pattern matches to be missing from the
    /// [`weights`](Self::weights): they are initialized from the [seed](Self::init).
    pub fn allow_missing<S: Into<String>>(mut self, patterns: impl IntoIterator<Item = S>) -> Self {
        self.config.choices.missing.extend(texts(patterns));
        self
    }

    /// Skips the tensors of the [`weights`](Self::weights) that a pattern matches, if the model does
    /// not have them.
    pub fn allow_unexpected<S: Into<String>>(
        mut self,
        patterns: impl IntoIterator<Item = S>,
    ) -> Self {
        self.config.choices.unexpected.extend(texts(patterns));
        self
    }

    /// Trains the variables of `vars` that the model asks for, with the values they have; those
    /// that are not there are added to it. Those that are there must lie on the first device of the
    /// mesh: on that very one, as [`DeviceMesh::devices`] returns it. None has two names: layers
    /// that share a variable ask for the same name.
    ///
    /// Slots on the first device use them directly, so between steps they are what was trained. A
    /// sharded model has no such variables and rejects the option.
    pub fn with_variables(mut self, vars: &VarMap) -> Self {
        self.config.map = Some(vars.clone());
        self
    }

    /// Sets the type of new parameters; by default that of [variables](Self::with_variables) that
    /// are there, or single precision.
    ///
    /// Halves are stored as such, and [`AdamW`](crate::AdamW) and [`Sgd`](crate::Sgd) keep their
    /// masters in single precision. Checkpoints have the masters, so a model of another type loads
    /// them, too.
    pub fn dtype(mut self, dtype: DType) -> Self {
        self.config.given_dtype = Some(dtype);
        self
    }

    /// Computes with parameters as `param_dtype`, and sums gradients as `reduce_dtype`; what slots
    /// store stays in the [type](Self::dtype) of parameters: values, sums and the optimizers'
    /// moments. (PyTorch's `MixedPrecisionPolicy(param_dtype, reduce_dtype)`.)
    ///
    /// With [`DType::BF16`] and [`DType::F32`] a replicated model stores a rounded copy of each
    /// parameter beside it, and a sharded one gathers half the bytes, in half the time of a network.
    /// Both have the same bits. Builders then have `param_dtype`, as have buffers, and a loss casts
    /// what else it computes with: `x.to_dtype(vb.dtype())`, and the logits before a cross-entropy
    /// to [`DType::F32`].
    ///
    /// # Examples
    ///
    /// ```
    /// use candle_core::{DType, Device, Tensor};
    /// use candle_nn::{Linear, Module, Optimizer, ParamsAdamW, linear};
    /// use dist_train::{AdamW, DataParallel};
    /// use pmap_mesh::{DeviceMesh, Replica};
    ///
    /// let mesh = DeviceMesh::cpu(2)?;
    /// let mut model = DataParallel::builder(&mesh, |vb| linear(4, 4, vb))
    ///     .mixed_precision(DType::BF16, DType::F32)
    ///     .build(|group| AdamW::new(group.vars, ParamsAdamW::default()))?;
    /// let loss = |_: &Replica, layer: &Linear, x: Tensor| {
    ///     layer.forward(&x.to_dtype(DType::BF16)?)?.to_dtype(DType::F32)?.sqr()?.mean_all()
    /// };
    /// model.step(Tensor::ones((6, 4), DType::F32, &Device::Cpu)?, loss)?;
    /// assert_eq!(model.parameter("weight")?.dtype(), DType::F32);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn mixed_precision(mut self, param_dtype: DType, reduce_dtype: DType) -> Self {
        self.config.precision = Precision::mixed(param_dtype, reduce_dtype);
        self
    }

    /// Gives every slot variables of its own, even on one device: what as many devices would do. The
    /// slots of a sharded model have their own in any case, and it rejects the option.
    pub fn replicated(mut self) -> Self {
        self.config.sharing = Sharing::PerSlot;
        self
    }

    /// Leaves the parameters that a pattern matches as they are: they have no gradient, nothing is
    /// sent for them, no optimizer has them. They are saved with the others. (A sharded model still
    /// gathers them.)
    ///
    /// Buffers are not trained in any case, and those that a pattern matches still follow the forward
    /// pass: run a frozen batch norm with `train = false`.
    pub fn freeze<S: Into<String>>(mut self, patterns: impl IntoIterator<Item = S>) -> Self {
        self.config.choices.frozen.extend(texts(patterns));
        self
    }

    /// Trains the parameters that a pattern matches, and [freezes](Self::freeze) all others. They come
    /// from pretrained [weights](Self::weights), so checkpoints do without them. A model that loads
    /// one must begin with the same weights, which nothing compares. (A new head on a frozen model;
    /// the adapters of [`Lora`](crate::Lora).)
    pub fn train_only<S: Into<String>>(mut self, patterns: impl IntoIterator<Item = S>) -> Self {
        self.config.choices.trained.extend(texts(patterns));
        self
    }

    /// Allows the parameters that a pattern matches to have no gradient in the first step, which is
    /// an error otherwise: also those of a unit that is not entered. Without a gradient an optimizer
    /// leaves them alone.
    pub fn allow_unused<S: Into<String>>(mut self, patterns: impl IntoIterator<Item = S>) -> Self {
        self.config.choices.unused.extend(texts(patterns));
        self
    }

    /// Names buffers: variables that the forward pass changes and no optimizer does, besides
    /// `**.running_mean`, `**.running_var` and `**.num_batches_tracked`, which are buffers in
    /// any model.
    ///
    /// Each slot has its own; after each batch they get their mean over the slots, weighted by rows
    /// (integers, which count something, the largest). They are saved with the others. A sharded
    /// model has none.
    pub fn buffers<S: Into<String>>(mut self, patterns: impl IntoIterator<Item = S>) -> Self {
        self.config.choices.buffers.extend(texts(patterns));
        self
    }

    /// Puts the parameters that a pattern matches into a group that has an optimizer of its own:
    /// with another learning rate, or without weight decay. A parameter can be in one group only.
    pub fn group<S: Into<String>>(
        mut self,
        name: impl Into<String>,
        patterns: impl IntoIterator<Item = S>,
    ) -> Self {
        self.config.choices.groups.push((name.into(), texts(patterns).collect()));
        self
    }

    /// Sets how a batch is cut for the slots, as [`PMap::in_axes`](pmap_mesh::PMap::in_axes). By
    /// default every tensor is cut in dimension 0.
    pub fn in_axes(mut self, specs: impl Into<Specs>) -> Self {
        self.config.options.in_axes = specs.into();
        self
    }

    /// Sets what happens to a batch that the slots do not divide, as
    /// [`PMap::uneven`](pmap_mesh::PMap::uneven). By default it is rejected.
    pub fn uneven(mut self, uneven: Uneven) -> Self {
        self.config.options.uneven = uneven;
        self
    }

    /// Sets the largest norm of the gradients of all parameters taken together: above it they are
    /// scaled down, as by PyTorch's `clip_grad_norm_`. By default they are not.
    #[doc(alias = "clip_grad_norm_")]
    pub fn clip_grad_norm(mut self, max_norm: f64) -> Self {
        self.config.options.max_norm = Some(max_norm);
        self
    }

    /// Multiplies the learning rates by a factor that follows the number of updates; by default they
    /// stay as they are set. It is stored in checkpoints.
    pub fn schedule(mut self, schedule: Schedule) -> Self {
        self.config.options.schedule = schedule;
        self
    }

    /// Sets the seed of [`Replica::rng`](pmap_mesh::Replica::rng) in losses; 0 by default. The
    /// numbers depend on the seed, the number of the batch since the start of training, and the
    /// slot.
    pub fn seed(mut self, seed: Seed) -> Self {
        self.config.rng_seed = seed;
        self
    }

    /// Trains on with a loss or gradients that are infinite or NaN, as a scaler of losses that
    /// lowers its factor then wants it. By default such a step is an error, and changes nothing.
    pub fn allow_non_finite(mut self) -> Self {
        self.config.options.allow_non_finite = true;
        self
    }

    /// Has a step in `steps` begin with [`check_in_sync`](crate::DistributedModel::check_in_sync);
    /// by default only [`state_dict`](crate::DistributedModel::state_dict) and
    /// [`save_pretrained`](crate::DistributedModel::save_pretrained) do. At least 1.
    pub fn check_in_sync_every(mut self, steps: u64) -> Self {
        self.config.options.check_every = Some(steps);
        self
    }
}

/// # A model by units, which can be sharded
impl ModelBuilder<'_, Units> {
    /// Cuts parameters, gradients and optimizer state over the slots of the mesh: PyTorch's
    /// `fully_shard`. See [`FullyShard`](crate::FullyShard).
    #[doc(alias = "fsdp")]
    pub fn fully_shard(self) -> Self {
        Self { is_sharded: true, ..self.with_rules() }
    }

    /// A constructor that returns units says nothing of rules: then there are none.
    fn with_rules(self) -> Self {
        match self.source {
            Source::Units { .. } => self,
            Source::Model(_) => self.by_units(UnitRules::new()),
        }
    }

    /// Puts parameters into a unit by the beginnings of their names, as [`UnitRules::unit`].
    pub fn unit<S: Into<String>>(
        self,
        name: impl Into<String>,
        prefixes: impl IntoIterator<Item = S>,
    ) -> Self {
        let mut builder = self.with_rules();
        if let Source::Units { rules, .. } = &mut builder.source {
            *rules = mem::take(rules).unit(name, prefixes);
        }
        builder
    }

    /// Sets how parameters are cut; by default [`Full`](fsdp_plan::strategy::Full): every one in
    /// dimension 0, as FSDP2 does.
    pub fn strategy(mut self, strategy: impl ShardingStrategy + 'static) -> Self {
        self.sharding.plan_source = PlanSource::Strategy(Box::new(strategy));
        self
    }

    /// Cuts parameters by a plan that was made elsewhere, of the parameters that the model has and
    /// with the units of the [rules](Self::unit).
    ///
    /// The units that [stay gathered](ShardingPlan::with_kept_units) in it do so here, unless the
    /// builder says what units [keep](Self::keep).
    pub fn plan(mut self, plan: ShardingPlan) -> Self {
        self.sharding.plan_source = PlanSource::Ready(Box::new(plan));
        self
    }

    /// Sets what units keep between the forward and the backward pass; by default
    /// [`Keep::Inputs`].
    pub fn keep(mut self, keep: Keep) -> Self {
        self.sharding.keeps.set_default(keep);
        self
    }

    /// Sets what the units keep whose names a pattern matches. Of several that match, the last
    /// decides.
    pub fn keep_unit(mut self, pattern: impl Into<String>, keep: Keep) -> Self {
        self.sharding.keeps.add(pattern.into(), keep);
        self
    }

    /// Sets how many units are gathered before the one in use has returned; 0 by default.
    ///
    /// The next ones are those that the batch before has gathered after this one, in the forward
    /// and in the backward pass, so from the second batch on. A batch that enters units in another
    /// order prefetches nothing. Gradients of a unit are then summed while the backward pass of the
    /// next one runs. Up to so many units more are in memory. The bits are the same.
    ///
    /// It hides the time of a network behind the computation. Between threads of one process there
    /// is no network, and nothing is gained. (`forward_prefetch` and `backward_prefetch` in
    /// PyTorch, `stage3_prefetch_bucket_size` in DeepSpeed.)
    pub fn prefetch(mut self, units: usize) -> Self {
        self.sharding.n_prefetched = units;
        self
    }

    /// Sets when the gradients of [accumulated](crate::DistributedModel::accumulate) batches are
    /// summed; by default [`Accumulation::ReduceEach`].
    pub fn accumulation(mut self, accumulation: Accumulation) -> Self {
        self.sharding.reduction = accumulation;
        self
    }

    /// Lets optimizers update the parameters of a unit in the backward pass, as soon as their
    /// gradients are summed, and drops these: a slot keeps 12 bytes for each of its parameters
    /// under AdamW, instead of 16. The bits are the same. (What PyTorch's
    /// `register_post_accumulate_grad_hook` is used for.)
    ///
    /// It is not the default, since such a step cannot be taken back:
    /// - all gradients are never there at once, so nothing can be
    ///   [clipped](Self::clip_grad_norm) or [accumulated](crate::DistributedModel::accumulate)
    ///   ([`TrainingError::NeedsAllGradients`](crate::TrainingError::NeedsAllGradients));
    /// - a step that fails in its backward pass, by a gradient that is not finite, say, may have
    ///   updated some units and not others. Then the model rejects everything but
    ///   [`load`](crate::DistributedModel::load)
    ///   ([`TrainingError::HalfUpdated`](crate::TrainingError::HalfUpdated)). A loss that is not
    ///   finite, or a unit that is not entered, is found before;
    /// - [`build`](Self::build) makes an optimizer for each unit and group, and each makes one
    ///   update per step. A parameter of several units is updated after the last of them.
    pub fn optimizer_in_backward(mut self) -> Self {
        self.sharding.updates_in_backward = true;
        self
    }
}

pub(super) fn cannot_build(cause: candle_core::Error) -> Error {
    Error::Model { cause }
}

fn texts<S: Into<String>>(patterns: impl IntoIterator<Item = S>) -> impl Iterator<Item = String> {
    patterns.into_iter().map(Into::into)
}

impl<M> fmt::Debug for ModelBuilder<'_, M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { mesh, is_sharded, .. } = self;
        let mut debug = f.debug_struct("ModelBuilder");
        debug.field("mesh", mesh).field("is_sharded", is_sharded).finish_non_exhaustive()
    }
}
