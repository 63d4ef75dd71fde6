//! The options of a data-parallel model.

use std::{
    fmt,
    ops::Range,
    path::PathBuf,
    sync::{Arc, Mutex},
};

use candle_core::{DType, Tensor, Var};
use candle_nn::{Optimizer, VarBuilder, VarMap};
use core_types::Seed;
use pmap_mesh::{DeviceMesh, Specs, Uneven};

use crate::{
    data_parallel::{
        DataParallel, Worker,
        slot::{GroupOptimizer, Slot, lock},
        sync,
        vars::{self, Part, Sharing, Use},
    },
    error::{Error, Result, training::TrainingError},
    parameters::{
        InitialValues, Initializer,
        declare::{Declared, declare},
    },
    progress::Progress,
    schedule::Schedule,
    step::{inventory::Inventory, options::Options, rates::Rates, roles::Choices},
};

/// Builds a [`DataParallel`]: made by [`DataParallel::builder`].
///
/// Patterns are those of [`fsdp_plan::Pattern`], over the names of variables: components such as
/// `embeddings` or `encoder.layer.0`, or globs such as `encoder.layer.*.output.*` and `**.bias`, in
/// which `*` stays within a component. A pattern that matches no variable is an error.
#[must_use = "a model is made by `build`"]
pub struct DataParallelBuilder<'a, B> {
    mesh: &'a DeviceMesh,
    model: B,
    vars: VarMap,
    dtype: Option<DType>,
    init: Initializer,
    weights: Option<PathBuf>,
    sharing: Sharing,
    choices: Choices,
    options: Options,
    seed: Seed,
}

/// Some of the variables of a model, for which an optimizer is to be made.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Group {
    /// The name of the group: `default` for what no [`group`](DataParallelBuilder::group) has.
    pub name: String,
    /// Those of its variables that one slot updates, which may be none.
    pub vars: Vec<Var>,
}

impl<'a, B> DataParallelBuilder<'a, B> {
    pub(super) fn new(mesh: &'a DeviceMesh, model: B) -> Self {
        Self {
            mesh,
            model,
            vars: VarMap::new(),
            dtype: None,
            init: Initializer::Seeded(Seed::new(0)),
            weights: None,
            sharing: Sharing::default(),
            choices: Choices::default(),
            options: Options::default(),
            seed: Seed::new(0),
        }
    }

    /// Sets the seed of initial values; 0 by default. Item i of a parameter is a function of the
    /// seed, the parameter's name and i, distributed as the layer's constructor says: the same on
    /// every device, in every process and for every number of slots.
    pub fn init(self, seed: Seed) -> Self {
        Self { init: Initializer::Seeded(seed), ..self }
    }

    /// Takes initial values from a function in place of the [seed](Self::init). Given a parameter
    /// and a range of its items, counted in row-major order, it returns these items as one
    /// dimension, of the parameter's type: the whole parameter, so all.
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
    /// assert_eq!(model.variables()["weight"].to_vec2::<f32>()?, [[0., 1., 2.]]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn init_with(
        self,
        values: impl Fn(&Declared, Range<usize>) -> candle_core::Result<Tensor> + Send + Sync + 'static,
    ) -> Self {
        Self { init: Initializer::Given(Arc::new(values)), ..self }
    }

    /// Begins with pretrained weights: a safetensors file, a Hugging Face index, whose name ends in
    /// `.json`, or a folder with `model.safetensors` or `model.safetensors.index.json`, as
    /// [`save_pretrained`](super::DataParallel::save_pretrained) writes it. Names are matched
    /// exactly. A parameter that is not there is an error unless
    /// [`allow_missing`](Self::allow_missing) names it or it [has a value](Self::variables), and so
    /// is one that has both, and a tensor that the model does not have, unless
    /// [`allow_unexpected`](Self::allow_unexpected) does.
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

    /// Trains the variables of `vars` that the model asks for, with the values they have; those
    /// that are not there are added to it. Those that are there must lie on the first device of the
    /// mesh: on that very one, as [`DeviceMesh::devices`] returns it. None has two names: layers
    /// that share a variable ask for the same name.
    ///
    /// Slots on the first device use them directly, so between steps they are what was trained.
    pub fn variables(self, vars: &VarMap) -> Self {
        Self { vars: vars.clone(), ..self }
    }

    /// Sets the type of new variables; by default that of those which are
    /// [there](Self::variables), or single precision.
    pub fn dtype(self, dtype: DType) -> Self {
        Self { dtype: Some(dtype), ..self }
    }

    /// Gives every slot variables of its own, even on one device: what as many devices would do.
    pub fn replicated(self) -> Self {
        Self { sharing: Sharing::PerSlot, ..self }
    }

    /// Leaves the variables that a pattern matches as they are: they have no gradient, nothing is
    /// sent for them, no optimizer has them. They are saved with the others.
    ///
    /// Buffers are not trained in any case, and those that a pattern matches still follow the forward
    /// pass: run a frozen batch norm with `train = false`.
    pub fn freeze<S: Into<String>>(mut self, patterns: impl IntoIterator<Item = S>) -> Self {
        self.choices.frozen.extend(patterns.into_iter().map(Into::into));
        self
    }

    /// Trains the variables that a pattern matches, and [freezes](Self::freeze) all others. They come
    /// from pretrained [weights](Self::weights), so checkpoints do without them. A model that loads
    /// one must begin with the same weights, which nothing compares. (A new head on a frozen model;
    /// the adapters of [`Lora`](crate::Lora).)
    pub fn train_only<S: Into<String>>(mut self, patterns: impl IntoIterator<Item = S>) -> Self {
        self.choices.trained.extend(patterns.into_iter().map(Into::into));
        self
    }

    /// Allows the variables that a pattern matches to have no gradient in the first step, which is
    /// an error otherwise. Without a gradient an optimizer leaves them alone.
    pub fn allow_unused<S: Into<String>>(mut self, patterns: impl IntoIterator<Item = S>) -> Self {
        self.choices.unused.extend(patterns.into_iter().map(Into::into));
        self
    }

    /// Names buffers: variables that the forward pass changes and no optimizer does, besides
    /// `**.running_mean`, `**.running_var` and `**.num_batches_tracked`, which are buffers in
    /// any model.
    ///
    /// Each slot has its own; after each batch they get their mean over the slots, weighted by rows
    /// (integers, which count something, the largest). They are saved with the others.
    pub fn buffers<S: Into<String>>(mut self, patterns: impl IntoIterator<Item = S>) -> Self {
        self.choices.buffers.extend(patterns.into_iter().map(Into::into));
        self
    }

    /// Puts the variables that a pattern matches into a group that has an optimizer of its own:
    /// with another learning rate, or without weight decay. A variable can be in one group only.
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

    /// Sets the largest norm of the gradients of all variables taken together: above it they are
    /// scaled down, as by PyTorch's `clip_grad_norm_`. By default they are not.
    #[doc(alias = "clip_grad_norm_")]
    pub fn clip_grad_norm(mut self, max_norm: f64) -> Self {
        self.options.max_norm = Some(max_norm);
        self
    }

    /// Multiplies the learning rates by a factor that follows the number of updates; by default they
    /// stay as they are set. It is kept in checkpoints.
    pub fn schedule(mut self, schedule: Schedule) -> Self {
        self.options.schedule = schedule;
        self
    }

    /// Sets the seed of [`Replica::rng`](pmap_mesh::Replica::rng) in losses; 0 by default. The
    /// numbers depend on the seed, the number of the batch since the start of training, and the
    /// slot.
    pub fn seed(self, seed: Seed) -> Self {
        Self { seed, ..self }
    }

    /// Trains on with a loss or gradients that are infinite or NaN, as a scaler of losses that
    /// lowers its factor then wants it. By default such a step is an error, and changes nothing.
    pub fn allow_non_finite(mut self) -> Self {
        self.options.allow_non_finite = true;
        self
    }

    /// Has a step in `steps` begin with [`check_in_sync`](DataParallel::check_in_sync); by default
    /// only [`state_dict`](DataParallel::state_dict) does. At least 1.
    pub fn check_in_sync_every(mut self, steps: u64) -> Self {
        self.options.check_every = Some(steps);
        self
    }

    /// Builds the model on every slot, and the optimizers.
    ///
    /// The model's constructor is called several times, and must ask for the same variables each
    /// time; the first time they are all zeros of no size, and what it makes of them is dropped.
    /// Where the mesh spans several processes, all begin with the values of the first, and all must
    /// set the same options. If one of them fails, all return at once.
    ///
    /// `optimizer` is called for each slot and group with the variables that this slot updates. It
    /// is given the gradients of halves in single precision, as [`AdamW`](crate::AdamW) and
    /// [`Sgd`](crate::Sgd) take them; candle's own optimizers need variables of the gradients' type,
    /// and so no halves.
    ///
    /// # Errors
    ///
    /// [`Error::Setting`] if the largest norm is negative or NaN, or variables are to be checked
    /// every 0 steps; [`Error::Model`] with what the constructor and `optimizer` return, or if
    /// variables lie elsewhere; [`Error::Training`] if a pattern matches nothing, groups overlap, a
    /// variable has two names, nothing is trained, or processes build other models or set other
    /// options; [`Error::Plan`] for a pattern that is none; [`Error::Checkpoint`] and
    /// [`Error::Parameter`] if weights cannot be read or are not the model's;
    /// [`Error::OtherProcess`] with the message of another process that fails; [`Error::Mesh`] if a
    /// process does not answer. The [`variables`](Self::variables) may then have the values of the first
    /// process, and this model's new ones.
    pub fn build<M, O>(
        self,
        optimizer: impl Fn(Group) -> candle_core::Result<O>,
    ) -> Result<DataParallel<M, O>>
    where
        B: Fn(VarBuilder<'_>) -> candle_core::Result<M>,
        O: Optimizer,
    {
        let mesh = self.mesh;
        let Prepared { inventory, vars, dtype } = mesh.all_ok(self.prepared())?;
        let dtypes = vars.iter().map(|var| var.dtype());
        let settings = sync::settings(&inventory, dtypes, &self.options, self.sharing, self.seed);
        sync::check_settings(mesh, &settings)?;
        let sets = vars::sets(mesh, vars.clone(), self.sharing).map_err(cannot_build);
        let sets = mesh.all_ok(sets)?;
        sync::begin_alike(mesh, &inventory, &sets)?;

        let devices = mesh.devices();
        // Every process has as many slots, and as many sets.
        let n_sets = sets.len() * (mesh.len() / devices.len());
        let first_set = sets.len() * (mesh.local_slots().start / devices.len());
        let worker = |part: Part| {
            let device = &devices[part.slot];
            let vars = sets[part.set].of_slot(part.slot, &inventory.roles)?;
            let built =
                |purpose| (self.model)(vars::builder(&inventory, &vars, purpose, dtype, device));
            let trained = built(Use::Training)?;
            let evaluated = built(Use::Evaluation)?;
            let is_first_set = first_set + part.set == 0;
            let slot = Slot { is_first_set, ..slot(&inventory, part, trained, vars, &optimizer)? };
            Ok(Worker { slot: Mutex::new(slot), evaluated: Mutex::new(evaluated) })
        };
        let parts = vars::parts(&sets, &inventory, n_sets, first_set);
        let workers: candle_core::Result<Vec<_>> = parts.into_iter().map(worker).collect();
        let workers = workers.and_then(|workers| {
            vars::add(&self.vars, &inventory, &vars)?;
            Ok(workers)
        });
        let workers = mesh.all_ok(workers.map_err(cannot_build))?;
        let own = learning_rates(&workers[0]);
        let bits = sync::of_numbers(own.iter().map(|rate| rate.to_bits()));
        sync::check_settings(mesh, &[("the optimizers' learning rates", bits)])?;
        Ok(DataParallel {
            mesh: mesh.clone(),
            rates: Rates::new(&inventory.roles.groups, own, self.options.schedule),
            inventory: Arc::new(inventory),
            workers,
            n_sets,
            options: self.options,
            progress: Progress { steps: 0, batches: 0, seed: self.seed },
        })
    }

    /// What this process can prepare without the others. It changes nothing.
    fn prepared<M>(&self) -> Result<Prepared>
    where
        B: Fn(VarBuilder<'_>) -> candle_core::Result<M>,
    {
        self.options.check()?;
        let home = &self.mesh.devices()[0];
        let known = vars::dtype(&self.vars, home).map_err(cannot_build)?;
        let dtype = self.dtype.or(known).unwrap_or(DType::F32);
        let mut declared = declare(&self.model, dtype, home).map_err(cannot_build)?;
        declared.sort_by(|left, right| left.name.cmp(&right.name));
        let names: Vec<&str> = declared.iter().map(|declared| declared.name.as_str()).collect();
        let roles = self.choices.roles(&names)?;
        let vars = self.first_variables(&declared)?;
        let described = |(name, var): (&&str, &Var)| ((*name).to_owned(), var.dims().to_vec());
        let parameters = names.iter().zip(&vars).map(described).collect();
        Ok(Prepared { inventory: Inventory { parameters, roles }, vars, dtype })
    }

    /// The variables that the model declares, on the first device: those that are there, and new
    /// ones.
    fn first_variables(&self, declared: &[Declared]) -> Result<Vec<Var>> {
        let home = &self.mesh.devices()[0];
        let known: Vec<Option<Var>> = declared
            .iter()
            .map(|declared| vars::known(&self.vars, &declared.name))
            .collect::<candle_core::Result<_>>()
            .map_err(cannot_build)?;
        check_distinct(declared, &known)?;
        let open = declared.iter().zip(&known).map(|(declared, known)| (declared, known.is_none()));
        let initial =
            InitialValues::new(self.init.clone(), self.weights.as_deref(), &self.choices, open)?;
        let variable = |(declared, known): (&Declared, Option<Var>)| match known {
            Some(var) => Ok(var),
            None => Var::from_tensor(&initial.tensor(declared, home)?).map_err(cannot_build),
        };
        declared.iter().zip(known).map(variable).collect()
    }
}

/// What a process knows before it hears of the others.
struct Prepared {
    inventory: Inventory,
    /// On the first device, in the order of their names.
    vars: Vec<Var>,
    dtype: DType,
}

impl<B> fmt::Debug for DataParallelBuilder<'_, B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { mesh, dtype, init, weights, sharing, choices, options, seed, .. } = self;
        f.debug_struct("DataParallelBuilder")
            .field("mesh", mesh)
            .field("dtype", dtype)
            .field("init", init)
            .field("weights", weights)
            .field("sharing", sharing)
            .field("choices", choices)
            .field("options", options)
            .field("seed", seed)
            .finish_non_exhaustive()
    }
}

/// Refuses a variable that has two names: it would have its gradient under one of them alone.
fn check_distinct(declared: &[Declared], known: &[Option<Var>]) -> Result<(), TrainingError> {
    let named: Vec<(&Declared, &Var)> = declared
        .iter()
        .zip(known)
        .filter_map(|(declared, known)| Some((declared, known.as_ref()?)))
        .collect();
    for (position, (second, var)) in named.iter().enumerate() {
        if let Some((first, _)) = named[..position].iter().find(|(_, other)| other.id() == var.id())
        {
            let (first, second) = (first.name.clone(), second.name.clone());
            return Err(TrainingError::SameVariable { first, second });
        }
    }
    Ok(())
}

/// The bits of the learning rates of a worker's optimizers.
fn learning_rates<M, O: Optimizer>(worker: &Worker<M, O>) -> Vec<f64> {
    let optimizers = &lock(&worker.slot).optimizers;
    optimizers.iter().map(|group| group.optimizer.learning_rate()).collect()
}

/// What a slot keeps.
fn slot<M, O>(
    inventory: &Inventory,
    part: Part,
    model: M,
    vars: Vec<Var>,
    optimizer: impl Fn(Group) -> candle_core::Result<O>,
) -> candle_core::Result<Slot<M, O>> {
    let trained = inventory.roles.trained();
    let of_group = |(group, name): (usize, &String)| {
        let all = inventory.roles.of_group(group);
        let own: Vec<usize> = part.owned.iter().copied().filter(|var| all.contains(var)).collect();
        let given = own.iter().map(|&var| vars[var].clone()).collect();
        let optimizer = optimizer(Group { name: name.clone(), vars: given })?;
        Ok(GroupOptimizer { vars: own, optimizer })
    };
    let optimizers = inventory.roles.groups.iter().enumerate().map(of_group);
    let optimizers = optimizers.collect::<candle_core::Result<_>>()?;
    let is_owned = |position: &usize| part.owned.contains(&trained[*position]);
    Ok(Slot {
        model,
        trained: trained.iter().map(|&var| vars[var].clone()).collect(),
        owned: (0..trained.len()).filter(is_owned).collect(),
        vars,
        is_first_set: false,
        saved: part.saved,
        loaded: part.loaded,
        optimizers,
        totals: None,
        grads: Vec::new(),
        buffers_before: Vec::new(),
    })
}

fn cannot_build(cause: candle_core::Error) -> Error {
    Error::Model { cause }
}
