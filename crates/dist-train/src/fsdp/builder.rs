//! The options of a sharded model.

use std::{
    collections::BTreeMap,
    fmt,
    ops::Range,
    path::PathBuf,
    sync::{Arc, Mutex},
};

use candle_core::{DType, Tensor};
use candle_nn::{Optimizer, VarBuilder};
use core_types::{Fingerprint, Seed, WorldSize};
use fsdp_plan::{
    Cut, ParameterInfo, PlannedParameter, ShardingPlan,
    strategy::{Full, ShardingStrategy},
};
use pmap_mesh::{DeviceMesh, Specs, Uneven};

use crate::{
    data_parallel::{builder::Group, sync, vars::Sharing},
    error::{Doing, Error, Result, sharding::ShardingError, training::TrainingError},
    fsdp::{
        FullyShard,
        slot::{Part, PartsOptimizer, Slot},
    },
    grad::widened_dtype,
    parameters::{
        InitialValues, Initializer,
        declare::{Declared, declare},
        describe::declared_infos,
    },
    progress::Progress,
    schedule::Schedule,
    sharded::{OwnedPart, ShardedVars, precision::Precision},
    step::{
        inventory::Inventory,
        options::Options,
        rates::Rates,
        roles::{Choices, Role},
    },
    units::{
        accumulation::Accumulation,
        keep::{Keep, KeepRules},
        model::{Model, Unit, UnitMember},
        rules::{Member, UnitRules},
    },
};

/// Builds a [`FullyShard`]: made by [`FullyShard::builder`].
///
/// Patterns are those of [`DataParallelBuilder`](crate::DataParallelBuilder), over the names of
/// parameters or, where they are about units, of units.
#[must_use = "a model is made by `build`"]
pub struct FullyShardBuilder<'a, B> {
    mesh: &'a DeviceMesh,
    model: B,
    dtype: DType,
    init: Initializer,
    weights: Option<PathBuf>,
    units: UnitRules,
    keeps: KeepRules,
    prefetch: usize,
    precision: Precision,
    accumulation: Accumulation,
    updates_in_backward: bool,
    plan: Plan,
    choices: Choices,
    options: Options,
    seed: Seed,
}

/// What a process knows before it hears of the others.
struct Prepared {
    /// In the order of names.
    declared: Vec<Declared>,
    inventory: Inventory,
    units: Vec<(String, Vec<Member>)>,
    keeps: BTreeMap<String, Keep>,
    plan: ShardingPlan,
    initial: InitialValues,
    /// Where other processes have theirs.
    values: Option<Fingerprints>,
}

/// What processes compare of the values that they begin with.
#[derive(Clone, Copy)]
struct Fingerprints {
    init: u64,
    weights: u64,
}

/// Where the plan comes from.
enum Plan {
    By(Box<dyn ShardingStrategy>),
    Ready(Box<ShardingPlan>),
}

impl<'a, B> FullyShardBuilder<'a, B> {
    pub(super) fn new(mesh: &'a DeviceMesh, model: B) -> Self {
        Self {
            mesh,
            model,
            dtype: DType::F32,
            init: Initializer::Seeded(Seed::new(0)),
            weights: None,
            units: UnitRules::new(),
            keeps: KeepRules::default(),
            prefetch: 0,
            precision: Precision::default(),
            accumulation: Accumulation::default(),
            updates_in_backward: false,
            plan: Plan::By(Box::new(Full::default())),
            choices: Choices::default(),
            options: Options::default(),
            seed: Seed::new(0),
        }
    }

    /// Puts parameters into a unit by the beginnings of their names, as [`UnitRules::unit`].
    pub fn unit<S: Into<String>>(
        mut self,
        name: impl Into<String>,
        prefixes: impl IntoIterator<Item = S>,
    ) -> Self {
        self.units = self.units.unit(name, prefixes);
        self
    }

    /// Sets the rules by which parameters are put into units, those of
    /// [`Units::by`](crate::Units::by) with [`DataParallel`](crate::DataParallel); in place of
    /// those that were set before.
    pub fn unit_rules(self, rules: UnitRules) -> Self {
        Self { units: rules, ..self }
    }

    /// Sets how parameters are cut; by default [`Full`]: every one in dimension 0, as FSDP2 does.
    pub fn strategy(self, strategy: impl ShardingStrategy + 'static) -> Self {
        Self { plan: Plan::By(Box::new(strategy)), ..self }
    }

    /// Cuts parameters by a plan that was made elsewhere, of the parameters that the model has and
    /// with the units of the [rules](Self::unit).
    ///
    /// The units that [stay gathered](ShardingPlan::with_kept_units) in it do so here, unless the
    /// builder says what units [keep](Self::keep).
    pub fn plan(self, plan: ShardingPlan) -> Self {
        Self { plan: Plan::Ready(Box::new(plan)), ..self }
    }

    /// Sets what units keep between the forward and the backward pass; by default
    /// [`Keep::Inputs`].
    pub fn keep(mut self, keep: Keep) -> Self {
        self.keeps.set_default(keep);
        self
    }

    /// Sets what the units keep whose names a pattern matches. Of several that match, the last
    /// decides.
    pub fn keep_unit(mut self, pattern: impl Into<String>, keep: Keep) -> Self {
        self.keeps.add(pattern.into(), keep);
        self
    }

    /// Sets how many units are gathered ahead of the one in use; 0 by default.
    ///
    /// The next ones are those that the batch before has gathered after this one, in the forward
    /// and in the backward pass, so from the second batch on. One that goes another way has nothing
    /// gathered ahead. Gradients of a unit are then summed while the backward pass of the next one
    /// runs. Up to so many units more are in memory. The bits are the same.
    ///
    /// It hides the time of a network behind the computation. Between threads of one process there
    /// is no network, and nothing is gained. (`forward_prefetch` and `backward_prefetch` in
    /// PyTorch, `stage3_prefetch_bucket_size` in DeepSpeed.)
    pub fn prefetch(self, units: usize) -> Self {
        Self { prefetch: units, ..self }
    }

    /// Sets when the gradients of [accumulated](FullyShard::accumulate) batches are summed; by
    /// default [`Accumulation::ReduceEach`].
    pub fn accumulation(self, accumulation: Accumulation) -> Self {
        Self { accumulation, ..self }
    }

    /// Lets optimizers update the parameters of a unit in the backward pass, as soon as their
    /// gradients are summed, and drops these: a slot keeps 12 bytes for each of its parameters
    /// under AdamW, instead of 16. The bits are the same. (What PyTorch's
    /// `register_post_accumulate_grad_hook` is used for.)
    ///
    /// It is not the default, since such a step cannot be taken back:
    /// - all gradients are never there at once, so nothing can be
    ///   [clipped](Self::clip_grad_norm) or [accumulated](FullyShard::accumulate)
    ///   ([`TrainingError::NeedsAllGradients`]);
    /// - a step that fails in its backward pass, by a gradient that is not finite, say, may have
    ///   updated some units and not others. Then the model refuses everything but
    ///   [`load`](FullyShard::load) ([`TrainingError::HalfUpdated`]). A loss that is not finite, or
    ///   a unit that is not entered, is found before;
    /// - [`build`](Self::build) makes an optimizer for each unit and group, and each makes one
    ///   update per step. A parameter of several units is updated after the last of them.
    pub fn optimizer_in_backward(self) -> Self {
        Self { updates_in_backward: true, ..self }
    }

    /// Sets the seed of initial values; 0 by default. They are those that
    /// [`DataParallelBuilder::init`](crate::DataParallelBuilder::init) gives whole parameters, made
    /// part by part.
    pub fn init(self, seed: Seed) -> Self {
        Self { init: Initializer::Seeded(seed), ..self }
    }

    /// Takes initial values from a function in place of the [seed](Self::init). Given a parameter
    /// and a range of its items, counted in row-major order, it returns these items as one
    /// dimension, of the parameter's type: a part of a slot.
    ///
    /// It is a function of its arguments alone, so that a part has the values that it has in the
    /// whole.
    ///
    /// # Examples
    ///
    /// ```
    /// use candle_core::{Device, Tensor};
    /// use candle_nn::{Optimizer, ParamsAdamW, linear};
    /// use dist_train::{AdamW, FullyShard};
    /// use pmap_mesh::DeviceMesh;
    ///
    /// let mesh = DeviceMesh::cpu(2)?;
    /// let model = FullyShard::builder(&mesh, |vb| linear(3, 1, vb))
    ///     .unit("all", ["weight", "bias"])
    ///     .init_with(|_, items| Tensor::arange(items.start as f32, items.end as f32, &Device::Cpu))
    ///     .build(|group| AdamW::new(group.vars, ParamsAdamW::default()))?;
    /// assert_eq!(model.gather("weight")?.to_vec2::<f32>()?, [[0., 1., 2.]]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn init_with(
        self,
        values: impl Fn(&Declared, Range<usize>) -> candle_core::Result<Tensor> + Send + Sync + 'static,
    ) -> Self {
        Self { init: Initializer::Given(Arc::new(values)), ..self }
    }

    /// Begins with pretrained weights, as
    /// [`DataParallelBuilder::weights`](crate::DataParallelBuilder::weights). Each slot reads its
    /// own items.
    ///
    /// All processes must have the same weights, and none has all of them in memory: compared are
    /// which parameters they have, and some items from all over each, all of those of up to 256. So
    /// weights of another training run are found, and a copy of which few items differ may not be.
    /// What several processes keep is compared to the bit.
    pub fn weights(self, path: impl Into<PathBuf>) -> Self {
        Self { weights: Some(path.into()), ..self }
    }

    /// Allows the parameters that a pattern matches to be missing from the
    /// [`weights`](Self::weights): they are initialized from the [seed](Self::init).
    pub fn allow_missing<S: Into<String>>(mut self, patterns: impl IntoIterator<Item = S>) -> Self {
        self.choices.missing.extend(patterns.into_iter().map(Into::into));
        self
    }

    /// Passes over the tensors of the [`weights`](Self::weights) that a pattern matches, if the
    /// model does not have them.
    pub fn allow_unexpected<S: Into<String>>(
        mut self,
        patterns: impl IntoIterator<Item = S>,
    ) -> Self {
        self.choices.unexpected.extend(patterns.into_iter().map(Into::into));
        self
    }

    /// Sets the type of parameters; [`DType::F32`] by default.
    pub fn dtype(self, dtype: DType) -> Self {
        Self { dtype, ..self }
    }

    /// Gathers parameters as `param_dtype`, in which units compute with them, and sums gradients as
    /// `reduce_dtype`; what slots keep stays in the [type](Self::dtype) of parameters: parts, sums
    /// and the optimizers' moments. (PyTorch's `MixedPrecisionPolicy(param_dtype, reduce_dtype)`.)
    ///
    /// With [`DType::BF16`] and [`DType::F32`] what is gathered takes half the memory and half the
    /// time of a network. Builders in units then have `param_dtype`, and a loss casts what else it
    /// computes with: `x.to_dtype(vb.dtype())`, and the logits before a cross-entropy to
    /// [`DType::F32`].
    ///
    /// Where all initial values are numbers of bf16, [`DataParallel`](crate::DataParallel) has the
    /// same bits with variables of [`dtype`](crate::DataParallelBuilder::dtype) [`DType::BF16`]:
    /// [`AdamW`](crate::AdamW) and [`Sgd`](crate::Sgd) round them from masters in single precision,
    /// and their gradients are summed in it.
    ///
    /// # Examples
    ///
    /// ```
    /// use candle_core::{DType, Device, Tensor};
    /// use candle_nn::{Module, Optimizer, ParamsAdamW, VarBuilder, linear};
    /// use dist_train::{AdamW, FullyShard, Units};
    /// use pmap_mesh::{DeviceMesh, Replica};
    ///
    /// let mesh = DeviceMesh::cpu(2)?;
    /// let mut model = FullyShard::builder(&mesh, |vb| linear(4, 4, vb.pp("0")))
    ///     .mixed_precision(DType::BF16, DType::F32)
    ///     .build(|group| AdamW::new(group.vars, ParamsAdamW::default()))?;
    /// let loss = |_: &Replica, model: &Units, x: Tensor| {
    ///     let layer = |vb: VarBuilder<'_>, x: &Tensor| {
    ///         let dtype = vb.dtype();
    ///         linear(4, 4, vb)?.forward(&x.to_dtype(dtype)?)
    ///     };
    ///     model.unit("0", &x, layer)?.to_dtype(DType::F32)?.sqr()?.mean_all()
    /// };
    /// model.step(Tensor::ones((6, 4), DType::F32, &Device::Cpu)?, loss)?;
    /// assert_eq!(model.gather("0.weight")?.dtype(), DType::F32);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn mixed_precision(self, param_dtype: DType, reduce_dtype: DType) -> Self {
        Self { precision: Precision::mixed(param_dtype, reduce_dtype), ..self }
    }

    /// Leaves the parameters that a pattern matches as they are: they are gathered, and have no
    /// gradient.
    pub fn freeze<S: Into<String>>(mut self, patterns: impl IntoIterator<Item = S>) -> Self {
        self.choices.frozen.extend(patterns.into_iter().map(Into::into));
        self
    }

    /// Trains the parameters that a pattern matches, and [freezes](Self::freeze) all others. They come
    /// from pretrained [weights](Self::weights), so checkpoints do without them. A model that loads
    /// one must begin with the same weights, which nothing compares. (A new head on a frozen model;
    /// the adapters of [`Lora`](crate::Lora).)
    pub fn train_only<S: Into<String>>(mut self, patterns: impl IntoIterator<Item = S>) -> Self {
        self.choices.trained.extend(patterns.into_iter().map(Into::into));
        self
    }

    /// Allows the parameters that a pattern matches to have no gradient in the first step, which is
    /// an error otherwise: also those of a unit that is not entered. Without a gradient an
    /// optimizer leaves them alone.
    pub fn allow_unused<S: Into<String>>(mut self, patterns: impl IntoIterator<Item = S>) -> Self {
        self.choices.unused.extend(patterns.into_iter().map(Into::into));
        self
    }

    /// Puts the parameters that a pattern matches into a group that has an optimizer of its own, as
    /// [`DataParallelBuilder::group`](crate::DataParallelBuilder::group).
    pub fn group<S: Into<String>>(
        mut self,
        name: impl Into<String>,
        patterns: impl IntoIterator<Item = S>,
    ) -> Self {
        let patterns = patterns.into_iter().map(Into::into).collect();
        self.choices.groups.push((name.into(), patterns));
        self
    }

    /// Sets how a batch is cut for the slots, as [`PMap::in_axes`](pmap_mesh::PMap::in_axes). By
    /// default every tensor is cut in dimension 0.
    pub fn in_axes(mut self, specs: impl Into<Specs>) -> Self {
        self.options.in_axes = specs.into();
        self
    }

    /// Sets what happens to a batch that the slots do not divide, as
    /// [`PMap::uneven`](pmap_mesh::PMap::uneven). By default it is refused.
    pub fn uneven(mut self, uneven: Uneven) -> Self {
        self.options.uneven = uneven;
        self
    }

    /// Sets the largest norm of the gradients of all parameters taken together: above it they are
    /// scaled down, as by PyTorch's `clip_grad_norm_`. By default they are not.
    #[doc(alias = "clip_grad_norm_")]
    pub fn clip_grad_norm(mut self, max_norm: f64) -> Self {
        self.options.max_norm = Some(max_norm);
        self
    }

    /// Multiplies the learning rates by a factor that follows the number of updates; by default
    /// they stay as they are set. It is kept in checkpoints.
    pub fn schedule(mut self, schedule: Schedule) -> Self {
        self.options.schedule = schedule;
        self
    }

    /// Sets the seed of [`Replica::rng`](pmap_mesh::Replica::rng) in losses; 0 by default.
    pub fn seed(self, seed: Seed) -> Self {
        Self { seed, ..self }
    }

    /// Trains on with a loss or gradients that are infinite or NaN. By default such a step is an
    /// error, and changes nothing.
    pub fn allow_non_finite(mut self) -> Self {
        self.options.allow_non_finite = true;
        self
    }

    /// Plans the parameters, fills each slot's parts, and makes the optimizers.
    ///
    /// A unit that has over half of all parameters is warned of in the log: where it is gathered
    /// little is saved.
    ///
    /// The model's constructor is called once, with parameters that take no memory. `optimizer` is
    /// called for each slot and group, and with
    /// [`optimizer_in_backward`](Self::optimizer_in_backward) for each unit besides, with the
    /// slot's parts, variables of one dimension; it is given the gradients of halves in single
    /// precision.
    ///
    /// # Errors
    ///
    /// [`Error::Setting`] if the largest norm is negative or NaN; [`Error::Model`] with what the
    /// constructor and `optimizer` return; [`Error::Sharding`] if a parameter is in no unit or is a
    /// buffer, or a plan is not for this model and mesh; [`Error::Training`] if a pattern matches
    /// nothing, groups overlap, nothing is trained, options exclude each other, or processes build
    /// other models or set other options or weights; [`Error::Diverged`] if they begin with other
    /// values of what several slots keep; [`Error::Plan`] for a pattern that is none or parameters
    /// that cannot be planned; [`Error::Checkpoint`] and [`Error::Parameter`] if weights cannot be
    /// read or are not the model's; [`Error::OtherProcess`] and [`Error::Mesh`] if another process
    /// fails or does not answer.
    pub fn build<M, O>(
        self,
        optimizer: impl Fn(Group) -> candle_core::Result<O>,
    ) -> Result<FullyShard<O>>
    where
        B: Fn(VarBuilder<'_>) -> candle_core::Result<M>,
        O: Optimizer,
    {
        let mesh = self.mesh;
        let prepared = mesh.all_ok(self.prepared())?;
        self.check_alike(&prepared)?;
        let model = mesh.all_ok(self.filled(prepared))?;
        if mesh.spans_processes() {
            check_replicas_equal(mesh, &model)?;
        }
        let slots = mesh.local_slots().map(|slot| of_slot(&model, slot, &optimizer));
        let slots: Vec<Slot<O>> = mesh.all_ok(slots.collect())?;
        let groups = &model.inventory.roles.groups;
        let own: Vec<f64> = (0..groups.len()).map(|group| slots[0].learning_rate(group)).collect();
        let bits = sync::of_numbers(own.iter().map(|rate| rate.to_bits()));
        sync::check_settings(mesh, &[("the optimizers' learning rates", bits)])?;
        Ok(FullyShard {
            slots: slots.into_iter().map(|slot| Arc::new(Mutex::new(slot))).collect(),
            mesh: mesh.clone(),
            rates: Rates::new(groups, own, self.options.schedule),
            model: Arc::new(model),
            options: self.options,
            progress: Progress { steps: 0, batches: 0, seed: self.seed },
        })
    }

    /// What this process can prepare without the others, and without memory for the model.
    fn prepared<M>(&self) -> Result<Prepared>
    where
        B: Fn(VarBuilder<'_>) -> candle_core::Result<M>,
    {
        self.options.check()?;
        self.check_in_backward()?;
        self.precision.check(self.options.allow_non_finite)?;
        let home = &self.mesh.devices()[0];
        let mut declared = declare(&self.model, self.dtype, home).map_err(cannot_build)?;
        declared.sort_by(|left, right| left.name.cmp(&right.name));
        let inventory = self.inventory(&declared)?;
        let infos = declared_infos(&declared, &inventory.roles)?;
        let units = self.units.units(&infos)?;
        let keeps = self.keeps.of_units(&unit_names(&units))?;
        let with_unit = |info: &ParameterInfo| {
            let unit = self.units.units_of(info)[0].to_owned();
            info.clone().with_unit(unit)
        };
        let infos: Vec<ParameterInfo> = infos.iter().map(with_unit).collect();
        let plan = self.planned(&infos)?;
        let keeps = match &self.plan {
            Plan::Ready(plan) if self.keeps.is_silent() => kept_by(plan, keeps),
            Plan::Ready(_) | Plan::By(_) => keeps,
        };
        let plan = with_kept_units(&plan, &keeps)?;
        if let (Some(unit), true) = (over_half(&plan), self.mesh.len() > 1) {
            tracing::warn!("unit {unit} has over half of all parameters, and is gathered whole");
        }
        let open = declared.iter().map(|declared| (declared, true));
        let initial =
            InitialValues::new(self.init.clone(), self.weights.as_deref(), &self.choices, open)?;
        let fingerprints = || -> Result<Fingerprints> {
            let init = initial.init.fingerprint(&declared)?;
            Ok(Fingerprints { init, weights: initial.fingerprint(&declared)? })
        };
        let values = self.mesh.spans_processes().then(fingerprints).transpose()?;
        Ok(Prepared { declared, inventory, units, keeps, plan, initial, values })
    }

    /// Refuses what cannot be while optimizers run inside the backward pass.
    fn check_in_backward(&self) -> Result<(), TrainingError> {
        let option = match self {
            Self { updates_in_backward: false, .. } => return Ok(()),
            Self { options: Options { max_norm: Some(_), .. }, .. } => "clip_grad_norm",
            Self { accumulation: Accumulation::ReduceLast, .. } => "accumulation",
            _ => return Ok(()),
        };
        Err(TrainingError::NeedsAllGradients { option })
    }

    /// Checks that all processes make the same model with the same options.
    fn check_alike(&self, prepared: &Prepared) -> Result<()> {
        let Prepared { declared, inventory, keeps, plan, values, .. } = prepared;
        let Some(Fingerprints { init, weights }) = *values else { return Ok(()) };
        let dtypes = declared.iter().map(|declared| declared.dtype);
        // Slots never share what they keep.
        let sharing = Sharing::PerSlot;
        let settings = sync::settings(inventory, dtypes, &self.options, sharing, self.seed);
        sync::check_settings(self.mesh, &settings)?;
        let settings = [
            ("unit", sync::of_debug(&self.units)),
            // Before the plan, which has it too.
            ("keep", sync::of_debug(keeps)),
            ("prefetch", self.prefetch as u64),
            ("mixed_precision", sync::of_debug(&self.precision)),
            ("accumulation", sync::of_debug(&self.accumulation)),
            ("optimizer_in_backward", self.updates_in_backward.into()),
            ("strategy", sync::of_debug(plan)),
            ("init", init),
            ("weights", weights),
        ];
        sync::check_settings(self.mesh, &settings)
    }

    /// The model with the values of this process's parts.
    fn filled(&self, prepared: Prepared) -> Result<Model> {
        let Prepared { declared, inventory, units, keeps, plan, initial, .. } = prepared;
        let home = &self.mesh.devices()[0];
        let names = units.iter().map(|(unit, members)| (unit, names_of(members)));
        let vars = ShardedVars::new(self.mesh, plan, names, self.precision, |info, run| {
            initial.items(&declared[position(&inventory, info.name())], run, home)
        })?;
        let unit = |(name, members): (String, Vec<Member>)| {
            let members = of_roles(members, &inventory, &declared);
            let unit = Unit { members, keep: keeps[&name] };
            (name, unit)
        };
        let units = units.into_iter().map(unit).collect();
        Ok(Model {
            vars,
            units,
            inventory: Arc::new(inventory),
            dtype: self.precision.gathered(self.dtype),
            precision: self.precision,
            accumulation: self.accumulation,
            updates_in_backward: self.updates_in_backward,
            prefetch: self.prefetch,
            orders: Mutex::default(),
            repeatable: Mutex::default(),
        })
    }

    fn inventory(&self, declared: &[Declared]) -> Result<Inventory> {
        let names: Vec<&str> = declared.iter().map(|declared| declared.name.as_str()).collect();
        let roles = self.choices.roles(&names)?;
        if let Some(&buffer) = roles.buffers().first() {
            return Err(ShardingError::Buffer { name: names[buffer].to_owned() }.into());
        }
        let described =
            |declared: &Declared| (declared.name.clone(), declared.shape.dims().to_vec());
        Ok(Inventory { parameters: declared.iter().map(described).collect(), roles })
    }

    fn planned(&self, infos: &[ParameterInfo]) -> Result<ShardingPlan> {
        let plan = match &self.plan {
            Plan::By(strategy) => {
                let world_size =
                    WorldSize::new(self.mesh.len() as u64).map_err(fsdp_plan::Error::from)?;
                strategy.plan(infos, world_size)?
            }
            Plan::Ready(plan) => (**plan).clone(),
        };
        // A strategy of somebody else may plan for other parameters than it was given.
        check_fits(&plan, infos)?;
        Ok(plan)
    }
}

impl<B> fmt::Debug for FullyShardBuilder<'_, B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FullyShardBuilder")
            .field("mesh", &self.mesh)
            .field("dtype", &self.dtype)
            .field("init", &self.init)
            .field("weights", &self.weights)
            .field("units", &self.units)
            .field("keeps", &self.keeps)
            .field("prefetch", &self.prefetch)
            .field("precision", &self.precision)
            .field("accumulation", &self.accumulation)
            .field("updates_in_backward", &self.updates_in_backward)
            .field("choices", &self.choices)
            .field("options", &self.options)
            .field("seed", &self.seed)
            .finish_non_exhaustive()
    }
}

/// Checks that parts which several slots keep are the same: those of parameters that are not cut,
/// and those of other groups.
pub(super) fn check_replicas_equal(mesh: &DeviceMesh, model: &Model) -> Result<()> {
    let Model { vars, inventory, .. } = model;
    let plan = vars.plan();
    let group = plan.shard_group().as_usize();
    let repeats = |planned: &PlannedParameter| {
        matches!(planned.cut(), Cut::Replicated)
            .then_some(1)
            .or((group < mesh.len()).then_some(group))
    };
    // After how many slots the parts of each parameter come again, in the order of names.
    let mut periods = vec![None; inventory.parameters.len()];
    for planned in plan.parameters() {
        periods[position(inventory, planned.info().name())] = repeats(planned);
    }
    if periods.iter().all(Option::is_none) {
        return Ok(());
    }
    let of_slot = |slot| -> Result<Vec<u64>> {
        let mut found = vec![Fingerprint::new(); periods.len()];
        for OwnedPart { param_idx, var, .. } in vars.owned_parts(slot)? {
            let param = position(inventory, plan.parameters()[param_idx].info().name());
            if periods[param].is_some() {
                found[param].write_u64(sync::of_value(&var).doing("comparing parameters")?);
            }
        }
        Ok(found.iter().map(Fingerprint::finish).collect())
    };
    let here = mesh.all_ok(mesh.local_slots().map(of_slot).collect())?;
    let slots = mesh.gather_number_lists(here)?;
    for (param, period) in periods.into_iter().enumerate() {
        let Some(period) = period else { continue };
        let differs = |&slot: &usize| slots[slot][param] != slots[slot % period][param];
        if let Some(replica) = (0..slots.len()).find(differs) {
            return Err(Error::Diverged { name: inventory.name(param).to_owned(), replica });
        }
    }
    Ok(())
}

fn unit_names(units: &[(String, Vec<Member>)]) -> Vec<&str> {
    units.iter().map(|(name, _)| name.as_str()).collect()
}

fn names_of(members: &[Member]) -> impl Iterator<Item = &str> {
    members.iter().map(|member| member.name.as_str())
}

/// What units keep by a plan that says which stay gathered.
fn kept_by(plan: &ShardingPlan, keeps: BTreeMap<String, Keep>) -> BTreeMap<String, Keep> {
    let keep = |unit: &str| if plan.keeps_gathered(unit) { Keep::Gathered } else { Keep::Inputs };
    keeps.into_keys().map(|unit| (unit.clone(), keep(&unit))).collect()
}

/// The plan with the units that stay gathered. One whose parameters are all counted for others is
/// none of the plan's.
fn with_kept_units(plan: &ShardingPlan, keeps: &BTreeMap<String, Keep>) -> Result<ShardingPlan> {
    let is_kept = |unit: &&str| keeps.get(*unit) == Some(&Keep::Gathered);
    let kept: Vec<&str> = plan.units().into_iter().filter(is_kept).collect();
    Ok(plan.clone().with_kept_units(kept)?)
}

/// The unit that has over half of all parameters, if one has.
fn over_half(plan: &ShardingPlan) -> Option<&str> {
    let mut sizes: BTreeMap<&str, u128> = BTreeMap::new();
    for parameter in plan.parameters() {
        *sizes.entry(parameter.info().unit()).or_default() += u128::from(parameter.info().numel());
    }
    sizes.into_iter().find(|(_, size)| 2 * size > plan.numel()).map(|(unit, _)| unit)
}

/// Refuses a plan of other parameters than these, or with other units.
fn check_fits(plan: &ShardingPlan, infos: &[ParameterInfo]) -> Result<(), ShardingError> {
    let other = |reason: String| Err(ShardingError::OtherPlan { reason });
    for info in infos {
        let Some(position) = plan.index_of(info.name()) else {
            return other(format!("it has no parameter {}", info.name()));
        };
        let planned = plan.parameters()[position].info();
        let says = |what: &str, planned: &dyn fmt::Debug, expected: &dyn fmt::Debug| {
            other(format!("{what} of {} is {planned:?}, not {expected:?}", info.name()))
        };
        if planned.shape() != info.shape() {
            return says("the shape", &planned.shape(), &info.shape());
        }
        if planned.dtype() != info.dtype() {
            return says("the type", &planned.dtype(), &info.dtype());
        }
        if planned.unit() != info.unit() {
            return says("the unit", &planned.unit(), &info.unit());
        }
        if planned.requires_grad() != info.requires_grad() {
            return says(
                "whether a gradient is required",
                &planned.requires_grad(),
                &info.requires_grad(),
            );
        }
        if planned.tied_to().is_some() {
            return other(format!("{} is tied to another parameter", info.name()));
        }
    }
    if plan.parameters().len() > infos.len() {
        let reason =
            format!("it has {} parameters, the model {}", plan.parameters().len(), infos.len());
        return other(reason);
    }
    Ok(())
}

/// The position of a parameter in the order of names.
#[expect(clippy::expect_used, reason = "a plan has the parameters that the model has")]
fn position(inventory: &Inventory, name: &str) -> usize {
    let found = inventory.parameters.binary_search_by(|(other, _)| other.as_str().cmp(name));
    found.expect("a parameter of the plan is one of the model")
}

/// The parameters of a unit; those that are declared are in the order of names.
fn of_roles(members: Vec<Member>, inventory: &Inventory, declared: &[Declared]) -> Vec<UnitMember> {
    let trained = inventory.roles.trained();
    let member = |names: Member| {
        let param = position(inventory, &names.name);
        UnitMember {
            names,
            trained: trained.binary_search(&param).ok(),
            may_be_unused: inventory.roles.may_be_unused[param],
            shape: declared[param].shape.dims().to_vec(),
            dtype: widened_dtype(declared[param].dtype),
        }
    };
    members.into_iter().map(member).collect()
}

/// What a slot keeps.
fn of_slot<O>(
    model: &Model,
    slot: usize,
    optimizer: impl Fn(Group) -> candle_core::Result<O>,
) -> Result<Slot<O>> {
    let Model { vars, inventory, .. } = model;
    let trained = inventory.roles.trained();
    let part = |owned: OwnedPart| {
        let OwnedPart { param_idx, start, var, is_primary } = owned;
        let param = position(inventory, vars.plan().parameters()[param_idx].info().name());
        Part { var, start, param, trained: trained.binary_search(&param).ok(), is_primary }
    };
    let parts: Vec<Part> = vars.owned_parts(slot)?.into_iter().map(part).collect();
    let of_params = |(group, params): (usize, Vec<usize>)| {
        let is_of = |part: &usize| params.contains(&parts[*part].param);
        let own: Vec<usize> = (0..parts.len()).filter(is_of).collect();
        let vars = own.iter().map(|&part| parts[part].var.clone()).collect();
        let name = inventory.roles.groups[group].clone();
        let optimizer = optimizer(Group { name, vars })?;
        Ok(PartsOptimizer { group, parts: own, optimizer, has_stepped: false })
    };
    let optimizers = updated_together(model).into_iter().map(of_params);
    let optimizers: candle_core::Result<_> = optimizers.collect();
    let optimizers = optimizers.map_err(cannot_build)?;
    Ok(Slot::new(parts, optimizers, trained.len()))
}

/// The parameters, by their positions in the model, that one optimizer updates, each with its
/// group: those of a group, or those of a group that are known at the same time in the backward
/// pass.
fn updated_together(model: &Model) -> Vec<(usize, Vec<usize>)> {
    let Inventory { roles, .. } = &*model.inventory;
    let mut together: BTreeMap<(usize, Vec<&String>), Vec<usize>> = BTreeMap::new();
    for (param, role) in roles.of.iter().enumerate() {
        let Role::Trained(group) = *role else { continue };
        let units = if model.updates_in_backward {
            model.units_of(model.inventory.name(param)).collect()
        } else {
            Vec::new()
        };
        together.entry((group, units)).or_default().push(param);
    }
    together.into_iter().map(|((group, _), params)| (group, params)).collect()
}

fn cannot_build(cause: candle_core::Error) -> Error {
    Error::Model { cause }
}

#[cfg(test)]
mod tests {
    use fsdp_plan::ElemType;

    use super::*;

    #[test]
    fn a_unit_with_over_half_of_the_parameters_is_found() {
        let found = |sizes: [u64; 3]| {
            let info = |(n, &size): (usize, &u64)| {
                ParameterInfo::new(format!("{n}.w"), [size], ElemType::F32).unwrap()
            };
            let infos: Vec<_> = sizes.iter().enumerate().map(info).collect();
            let plan = Full::default().plan(&infos, WorldSize::new(2).unwrap()).unwrap();
            over_half(&plan).map(str::to_owned)
        };
        assert_eq!(found([2, 4, 2]), None);
        assert_eq!(found([2, 5, 2]).as_deref(), Some("1"));
    }
}
