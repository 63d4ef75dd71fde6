//! The options of a model.

use std::{fmt, mem, ops::Range, path::PathBuf, sync::Arc};

use candle_core::{DType, Result as CandleResult, Tensor, Var};
use candle_nn::VarBuilder;
use core_types::Seed;
use fsdp_plan::{ShardingPlan, strategy::ShardingStrategy};
use pmap_mesh::{DeviceMesh, Specs, Uneven};

use crate::{
    error::Error,
    model::config::{ModelConfig, PlanSource, ShardingConfig, Sharing},
    parameters::{Initializer, declare::Declared},
    precision::Precision,
    schedule::Schedule,
    units::{Units, accumulation::Accumulation, keep_rules::Keep, rules::UnitRules},
};

/// Builds a [`DistributedModel`](crate::DistributedModel); created by
/// [`DataParallel::builder`](crate::DataParallel::builder) and
/// [`FullyShard::builder`](crate::FullyShard::builder).
///
/// Losses receive a reference to an `M`: the constructor's return value, or [`Units`].
///
/// Patterns are [`fsdp_plan::Pattern`]s over the names of parameters, or of units in options about
/// units: components such as `embeddings` or `encoder.layer.0`, or globs such as
/// `encoder.layer.*.output.*` and `**.bias`, where `*` stays within a component. A pattern that
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

/// The kind of model on each slot.
pub(super) enum Source<'a, M> {
    /// The constructor's return value.
    Model(Constructor<'a, M>),
    /// Units over the parameters that the constructor requests. `M` is `Units`, so both functions
    /// are the identity.
    Units {
        declare: Constructor<'a, ()>,
        rules: UnitRules,
        own: fn(Units) -> M,
        lend: LendUnits<M>,
    },
}

/// Converts units to the model type that a loss borrows. A function pointer avoids a trait on
/// losses, and the `'static` bound on models that `Any` or a boxed trait would need.
pub(crate) type LendUnits<M> = for<'a> fn(&'a Units) -> &'a M;

/// The variables of a parameter group, which need an optimizer.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Group {
    /// The name of the group: `default` for variables in no [`group`](ModelBuilder::group).
    pub name: String,
    /// The group's variables that one slot updates, possibly none: full parameters, or
    /// one-dimensional shards if the model is sharded.
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

    /// Makes losses borrow [units](Units) of the model, defined by `rules`, instead of the
    /// constructor's return value. The constructor then only declares the parameters, and units
    /// build their own layers.
    ///
    /// Such a model can be [sharded](Self::fully_shard), and a loss by units runs with both
    /// layouts.
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
        // The only place that creates these functions; `M` is `Units` here.
        let source = Source::Units { declare, rules, own: |units| units, lend: |units| units };
        ModelBuilder { mesh, source, config, is_sharded, sharding }
    }

    /// Sets the seed of initial values; 0 by default. Item i of a parameter depends only on the
    /// seed, the parameter's name and i, and has the distribution chosen by the layer's
    /// constructor. So it is the same on every device, in every process, for any number of slots
    /// and any plan.
    pub fn init(mut self, seed: Seed) -> Self {
        self.config.initializer = Initializer::Seeded(seed);
        self
    }

    /// Computes initial values by a function instead of the [seed](Self::init). The function gets a
    /// parameter and a range of its items, counted in row-major order, and returns these items as a
    /// one-dimensional tensor of the parameter's dtype: all items, or a slot's shard if the model
    /// is sharded.
    ///
    /// The result must depend on the arguments only, so that a range has the same values as in the
    /// full parameter.
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

    /// Starts with pretrained weights: a safetensors file, a Hugging Face index with a name ending
    /// in `.json`, or a folder with `model.safetensors` or `model.safetensors.index.json`, such as
    /// [`save_pretrained`](crate::DistributedModel::save_pretrained) writes. Names must match
    /// exactly. A missing parameter is an error unless [`allow_missing`](Self::allow_missing)
    /// matches it, and so is a tensor that the model does not have, unless
    /// [`allow_unexpected`](Self::allow_unexpected) matches it.
    ///
    /// The slots of a sharded model read only their own items. All processes must have the same
    /// weights, but none has all of them in memory. So processes compare the parameter names, and
    /// samples of the items of each parameter (all items of parameters with at most 256). This
    /// detects weights of another training run, but may miss a copy that differs in few items.
    /// Values that several processes store are compared to the bit.
    pub fn weights(mut self, path: impl Into<PathBuf>) -> Self {
        self.config.weights_path = Some(path.into());
        self
    }

    /// Allows the parameters that a pattern matches to be missing from the
    /// [`weights`](Self::weights): they are initialized from the [seed](Self::init).
    pub fn allow_missing<S: Into<String>>(mut self, patterns: impl IntoIterator<Item = S>) -> Self {
        self.config.role_patterns.missing.extend(texts(patterns));
        self
    }

    /// Skips the tensors of the [`weights`](Self::weights) that a pattern matches, if the model
    /// does not have them.
    pub fn allow_unexpected<S: Into<String>>(
        mut self,
        patterns: impl IntoIterator<Item = S>,
    ) -> Self {
        self.config.role_patterns.unexpected.extend(texts(patterns));
        self
    }

    /// Sets the dtype of parameters; single precision by default.
    ///
    /// Half-precision parameters are stored as such, with master weights in the state of
    /// [`AdamW`](crate::AdamW) and [`Sgd`](crate::Sgd). A checkpoint contains the master weights,
    /// so a model of any other dtype can load it.
    pub fn dtype(mut self, dtype: DType) -> Self {
        self.config.dtype = dtype;
        self
    }

    /// Computes with parameters as `param_dtype`, and reduces gradients as `reduce_dtype`.
    /// Variables or shards, reduced gradients, optimizer state and checkpoints stay in the
    /// [dtype](Self::dtype) of the parameters. (PyTorch's `MixedPrecisionPolicy(param_dtype,
    /// reduce_dtype)`.)
    ///
    /// A replicated model stores a rounded copy of each parameter beside the parameter. A sharded
    /// model gathers rounded parameters, which take half the memory and half the network time with
    /// [`DType::BF16`]. Both layouts have the same bits. Variable builders and buffers then have
    /// the dtype `param_dtype`. A loss must cast its inputs with `x.to_dtype(vb.dtype())`, and the
    /// logits before a cross-entropy to [`DType::F32`].
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

    /// Gives every slot its own variables, even if slots share a device. The slots of a sharded
    /// model always have their own variables, so a sharded model rejects the option.
    pub fn replicated(mut self) -> Self {
        self.config.sharing = Sharing::PerSlot;
        self
    }

    /// Freezes the parameters that a pattern matches: they have no gradient, are not reduced, and
    /// have no optimizer. They are saved like trained parameters. (A sharded model still gathers
    /// them.)
    ///
    /// Buffers are never trained, and buffers that a pattern matches are still changed by the
    /// forward pass: run a frozen batch norm with `train = false`.
    pub fn freeze<S: Into<String>>(mut self, patterns: impl IntoIterator<Item = S>) -> Self {
        self.config.role_patterns.frozen.extend(texts(patterns));
        self
    }

    /// Trains the parameters that a pattern matches, and [freezes](Self::freeze) all others.
    /// Checkpoints omit the frozen parameters, because these come from pretrained
    /// [weights](Self::weights). A model that loads such a checkpoint must start with the same
    /// weights, which is not checked. (For a new head on a frozen model, or the adapters of
    /// [`Lora`](crate::Lora).)
    pub fn train_only<S: Into<String>>(mut self, patterns: impl IntoIterator<Item = S>) -> Self {
        self.config.role_patterns.trained.extend(texts(patterns));
        self
    }

    /// Allows the parameters that a pattern matches to have no gradient in the first step,
    /// including the parameters of a unit that is not entered. Otherwise this is an error.
    /// Optimizers skip parameters without a gradient.
    pub fn allow_unused<S: Into<String>>(mut self, patterns: impl IntoIterator<Item = S>) -> Self {
        self.config.role_patterns.unused.extend(texts(patterns));
        self
    }

    /// Declares buffers: variables changed by the forward pass and not by optimizers.
    /// `**.running_mean`, `**.running_var` and `**.num_batches_tracked` are buffers in any model.
    ///
    /// Each slot has its own copy of the buffers. After each batch, a buffer is set to its mean
    /// over the slots, weighted by rows; a buffer of integers, which are counts, is set to its
    /// maximum. Buffers are saved with the parameters. A sharded model cannot have buffers.
    pub fn buffers<S: Into<String>>(mut self, patterns: impl IntoIterator<Item = S>) -> Self {
        self.config.role_patterns.buffers.extend(texts(patterns));
        self
    }

    /// Puts the parameters that a pattern matches into a group with its own optimizer, for example
    /// with another learning rate or without weight decay. A parameter can be in one group only.
    pub fn group<S: Into<String>>(
        mut self,
        name: impl Into<String>,
        patterns: impl IntoIterator<Item = S>,
    ) -> Self {
        self.config.role_patterns.groups.push((name.into(), texts(patterns).collect()));
        self
    }

    /// Sets the dimension along which each tensor of a batch is split, like
    /// [`PMap::in_axes`](pmap_mesh::PMap::in_axes). By default every tensor is split along
    /// dimension 0.
    pub fn in_axes(mut self, specs: impl Into<Specs>) -> Self {
        self.config.step_options.in_axes = specs.into();
        self
    }

    /// Sets the treatment of a batch that does not divide evenly among the slots, like
    /// [`PMap::uneven`](pmap_mesh::PMap::uneven). By default such a batch is rejected.
    pub fn uneven(mut self, uneven: Uneven) -> Self {
        self.config.step_options.uneven = uneven;
        self
    }

    /// Makes each process of the mesh pass different rows, which its slots compute: PyTorch's way
    /// of a loader per rank, and JAX's `make_array_from_process_local_data`. The step trains the rows
    /// of all processes, and weights them equally, although processes may pass different numbers of
    /// rows. In a single process this changes nothing.
    ///
    /// By default every process passes the whole batch, and computes the rows of its slots. Different
    /// batches are then an error in the first step
    /// ([`TrainingError::BatchMismatch`](crate::TrainingError::BatchMismatch)): processes compare
    /// shapes, dtypes and up to 1,024 items of each tensor on a CPU. They do not read the values of
    /// tensors on a GPU.
    ///
    /// [`in_axes`](Self::in_axes) may split tensors along all axes of the mesh, or not at all.
    #[doc(alias = "make_array_from_process_local_data")]
    #[doc(alias = "DistributedSampler")]
    pub fn local_batches(mut self) -> Self {
        self.config.step_options.local_batches = true;
        self
    }

    /// Sets the maximum norm of all gradients together. Above it, gradients are scaled down, like
    /// by PyTorch's `clip_grad_norm_`. By default they are not clipped.
    #[doc(alias = "clip_grad_norm_")]
    pub fn clip_grad_norm(mut self, max_norm: f64) -> Self {
        self.config.step_options.max_norm = Some(max_norm);
        self
    }

    /// Multiplies the learning rates by a factor that depends on the number of updates; constant by
    /// default. Checkpoints store the schedule.
    pub fn schedule(mut self, schedule: Schedule) -> Self {
        self.config.step_options.schedule = schedule;
        self
    }

    /// Sets the seed of [`Replica::rng`](pmap_mesh::Replica::rng) in losses; 0 by default. The
    /// numbers depend on the seed, the number of the batch since the start of training, and the
    /// slot.
    pub fn seed(mut self, seed: Seed) -> Self {
        self.config.rng_seed = seed;
        self
    }

    /// Continues training with infinite or NaN losses and gradients, for a loss scaler that then
    /// lowers its factor. By default such a step is an error and changes nothing.
    pub fn allow_non_finite(mut self) -> Self {
        self.config.step_options.allow_non_finite = true;
        self
    }
}

/// # A model by units, which can be sharded
impl ModelBuilder<'_, Units> {
    /// Shards parameters, gradients and optimizer state over the slots of the mesh, like PyTorch's
    /// `fully_shard`. See [`FullyShard`](crate::FullyShard).
    #[doc(alias = "fsdp")]
    pub fn fully_shard(self) -> Self {
        Self { is_sharded: true, ..self.with_rules() }
    }

    /// Sets empty rules if there are none, because the constructor itself returns units.
    fn with_rules(self) -> Self {
        match self.source {
            Source::Units { .. } => self,
            Source::Model(_) => self.by_units(UnitRules::new()),
        }
    }

    /// Assigns parameters to a unit by name prefixes, like [`UnitRules::unit`].
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

    /// Sets the sharding strategy; by default [`Full`](fsdp_plan::strategy::Full), which shards
    /// every parameter along dimension 0, like FSDP2.
    pub fn strategy(mut self, strategy: impl ShardingStrategy + 'static) -> Self {
        self.sharding.plan_source = PlanSource::Strategy(Box::new(strategy));
        self
    }

    /// Shards parameters by a given plan. It must have the parameters of the model, and the units
    /// of the [rules](Self::unit).
    ///
    /// The plan's [kept units](ShardingPlan::with_kept_units) stay gathered, unless the builder
    /// sets [`keep`](Self::keep).
    pub fn plan(mut self, plan: ShardingPlan) -> Self {
        self.sharding.plan_source = PlanSource::Ready(Box::new(plan));
        self
    }

    /// Sets the data that units keep between the forward and the backward pass; by default
    /// [`Keep::Inputs`].
    pub fn keep(mut self, keep: Keep) -> Self {
        self.sharding.keeps.set_default(keep);
        self
    }

    /// Sets the data that matching units keep; the last matching pattern wins.
    pub fn keep_unit(mut self, pattern: impl Into<String>, keep: Keep) -> Self {
        self.sharding.keeps.add(pattern.into(), keep);
        self
    }

    /// Sets the number of units to prefetch while a unit is in use; 0 by default.
    ///
    /// The prefetched units are the next units of the previous batch, in the forward and in the
    /// backward pass, so prefetching starts with the second batch. A batch that enters units in
    /// another order prefetches nothing. The reduction of a unit's gradients overlaps with the
    /// backward pass of the next unit. Up to `units` more units are in memory. The bits do not
    /// change.
    ///
    /// Prefetching hides network time behind computation. Between threads of one process there is
    /// no network, so nothing is gained. (`forward_prefetch` and `backward_prefetch` in PyTorch,
    /// `stage3_prefetch_bucket_size` in DeepSpeed.)
    pub fn prefetch(mut self, units: usize) -> Self {
        self.sharding.n_prefetched = units;
        self
    }

    /// Sets the time at which the gradients of [accumulated](crate::DistributedModel::accumulate)
    /// batches are reduced; by default [`Accumulation::ReduceEach`].
    pub fn accumulation(mut self, accumulation: Accumulation) -> Self {
        self.sharding.accumulation = accumulation;
        self
    }

    /// Updates the parameters of a unit during the backward pass, as soon as their gradients are
    /// reduced, and frees these gradients. Under AdamW a slot then stores 12 bytes per parameter
    /// instead of 16. The bits do not change. (PyTorch uses `register_post_accumulate_grad_hook`
    /// for this.)
    ///
    /// This is not the default, because such a step cannot be undone:
    /// - all gradients never exist at once, so they cannot be [clipped](Self::clip_grad_norm) or
    ///   [accumulated](crate::DistributedModel::accumulate)
    ///   ([`TrainingError::Option`](crate::TrainingError::Option));
    /// - a step that fails in its backward pass, for example because of a non-finite gradient, may
    ///   have updated only some units. The model then rejects everything except
    ///   [`load`](crate::DistributedModel::load)
    ///   ([`TrainingError::HalfUpdated`](crate::TrainingError::HalfUpdated)). Non-finite losses and
    ///   units that are not entered are detected earlier;
    /// - [`build`](Self::build) creates an optimizer for each unit and group, each of which makes
    ///   one update per step. A parameter of several units is updated after the last of its units.
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
