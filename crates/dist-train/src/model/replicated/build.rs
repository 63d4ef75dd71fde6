//! Steps of building a replicated model.

use std::sync::{Arc, Mutex};

use candle_core::{DType, Device, Result as CandleResult, Var};
use candle_nn::{Optimizer, VarBuilder};
use pmap_mesh::DeviceMesh;

use crate::{
    error::Result,
    grad::has_halves,
    model::{
        builder::{Group, cannot_build},
        config::ModelConfig,
        replicated::{
            Replicated, sync,
            vars::{self, ModelUse, SlotDuties, VarSet},
            worker::Worker,
        },
        settings,
        slot::{SharedSlot, Slot, SlotOptimizer, SlotVar},
    },
    parameters::declare::{Declared, declare},
    precision::{Precision, widened_dtype},
    step::{
        inventory::Inventory,
        roles::{Role, Roles},
    },
};

/// Constructs a model from a variable builder and a dtype. The builder has the compute dtype, and the
/// second argument is the storage dtype.
pub(crate) type TypedConstructor<'a, M> = dyn Fn(VarBuilder<'_>, DType) -> CandleResult<M> + 'a;

/// Builds a model and its optimizers on every slot.
pub(crate) fn build<M, O: Optimizer>(
    mesh: &DeviceMesh,
    config: &ModelConfig,
    model: &TypedConstructor<'_, M>,
    optimizer: &dyn Fn(Group) -> CandleResult<O>,
) -> Result<(Inventory, Vec<SharedSlot<O>>, Replicated<M>)> {
    let Prepared { inventory, vars } = mesh.all_ok(prepare(mesh, config, model))?;
    let dtypes = vars.iter().map(|var| var.dtype());
    let is_sharded = false;
    settings::check(mesh, &settings::model_settings(&inventory, dtypes, config, is_sharded))?;
    let sets = vars::sets(mesh, vars, config.sharing).map_err(cannot_build);
    let sets = mesh.all_ok(sets)?;
    sync::broadcast_vars(mesh, &inventory, &sets)?;
    let precision = config.precision;
    let rounded: CandleResult<Vec<_>> =
        sets.iter().map(|set| set.rounded_copies(&inventory.roles, precision)).collect();
    let rounded_by_set = mesh.all_ok(rounded.map_err(cannot_build))?;

    let n_local_slots = mesh.devices().len();
    // Every process has the same number of slots, and of sets.
    let n_sets = sets.len() * (mesh.len() / n_local_slots);
    let first_set = sets.len() * (mesh.local_slots().start / n_local_slots);
    let builder = SlotBuilder {
        mesh,
        inventory: &inventory,
        sets: &sets,
        rounded_by_set: &rounded_by_set,
        first_set,
        precision,
        dtype: config.dtype,
        model,
        optimizer,
    };
    let duties = vars::assign_duties(&sets, &inventory, n_sets, first_set);
    let built: CandleResult<Vec<_>> = duties.iter().map(|duties| builder.build(duties)).collect();
    let (slots, workers) = mesh.all_ok(built.map_err(cannot_build))?.into_iter().unzip();
    Ok((inventory, slots, Replicated { workers, n_sets }))
}

/// Inputs for building the slots of a process.
struct SlotBuilder<'a, M, O> {
    mesh: &'a DeviceMesh,
    inventory: &'a Inventory,
    sets: &'a [VarSet],
    /// For each set, the rounded copies of its variables.
    rounded_by_set: &'a [Vec<Option<Var>>],
    /// The index of this process's first set in the mesh.
    first_set: usize,
    precision: Precision,
    /// The storage dtype of variables.
    dtype: DType,
    model: &'a TypedConstructor<'a, M>,
    optimizer: &'a dyn Fn(Group) -> CandleResult<O>,
}

impl<M, O> SlotBuilder<'_, M, O> {
    /// Builds the stored state and the worker of a slot.
    fn build(&self, duties: &SlotDuties) -> CandleResult<(SharedSlot<O>, Mutex<Worker<M>>)> {
        let Self { inventory, precision, dtype, .. } = *self;
        let device = &self.mesh.devices()[duties.slot];
        let stored_vars = self.sets[duties.set].slot_vars(duties.slot, &inventory.roles)?;
        let rounded = self.rounded_by_set[duties.set].iter().cloned();
        let vars: Vec<(Var, Option<Var>)> = stored_vars.into_iter().zip(rounded).collect();
        let model_vars: Vec<Var> =
            vars.iter().map(|(var, rounded)| rounded.as_ref().unwrap_or(var).clone()).collect();
        let build_model = |model_use| {
            let compute_dtype = precision.compute_dtype(dtype);
            let vb = vars::builder(inventory, &model_vars, model_use, compute_dtype, device);
            (self.model)(vb, dtype)
        };
        let models = [build_model(ModelUse::Training)?, build_model(ModelUse::Evaluation)?];
        let worker = worker(inventory, duties, &vars, &model_vars, models, precision);
        let is_first_set = self.first_set + duties.set == 0;
        let slot = slot(inventory, duties, vars, is_first_set, self.optimizer)?;
        Ok((Arc::new(Mutex::new(slot)), Mutex::new(worker)))
    }
}

/// State of a process before it communicates with other processes.
struct Prepared {
    inventory: Inventory,
    /// The variables on the first device, in the order of names.
    vars: Vec<Var>,
}

/// Prepares a process without communication or side effects.
fn prepare<M>(
    mesh: &DeviceMesh,
    config: &ModelConfig,
    model: &TypedConstructor<'_, M>,
) -> Result<Prepared> {
    let (home, dtype) = (&mesh.devices()[0], config.dtype);
    let mut declared = declare(|vb| model(vb, dtype), dtype, home).map_err(cannot_build)?;
    declared.sort_by(|left, right| left.name.cmp(&right.name));
    let inventory = config.inventory(&declared)?;
    let vars = first_variables(config, &declared, &inventory.roles, home)?;
    Ok(Prepared { inventory, vars })
}

/// Creates the variables that the model declares, on the first device.
fn first_variables(
    config: &ModelConfig,
    declared: &[Declared],
    roles: &Roles,
    home: &Device,
) -> Result<Vec<Var>> {
    let initial = config.initial_values(declared)?;
    let mut vars = Vec::with_capacity(declared.len());
    for (declared, role) in declared.iter().zip(&roles.by_variable) {
        // Layers write to buffers. A rounded copy would not see these writes, so a buffer is stored
        // in the compute dtype and has no rounded copy.
        let dtype = match role {
            Role::Buffer => config.precision.compute_dtype(declared.dtype),
            Role::Trained(_) | Role::Frozen => declared.dtype,
        };
        let value = initial.tensor(declared, home)?;
        let var = value.to_dtype(dtype).and_then(|value| Var::from_tensor(&value));
        vars.push(var.map_err(cannot_build)?);
    }
    Ok(vars)
}

/// Returns the worker of a slot. `vars` are the stored variables with their rounded copies, and
/// `model_vars` are the variables of the model in its compute dtype.
fn worker<M>(
    inventory: &Inventory,
    duties: &SlotDuties,
    vars: &[(Var, Option<Var>)],
    model_vars: &[Var],
    [model, eval_model]: [M; 2],
    precision: Precision,
) -> Worker<M> {
    let trained = inventory.roles.trained();
    let positions = trained.iter().copied().enumerate();
    let owned = positions.filter(|(_, var_index)| duties.owned.contains(var_index));
    Worker {
        model,
        eval_model,
        trained: trained.iter().map(|&var_index| model_vars[var_index].clone()).collect(),
        sum_dtypes: trained
            .iter()
            .map(|&var_index| widened_dtype(vars[var_index].0.dtype()))
            .collect(),
        owned: owned.collect(),
        precision,
        has_halves: has_halves(model_vars),
        grads: Vec::new(),
        buffers_before: Vec::new(),
    }
}

/// Returns the stored state of a slot, with an optimizer for each group.
fn slot<O>(
    inventory: &Inventory,
    duties: &SlotDuties,
    vars: Vec<(Var, Option<Var>)>,
    is_first_set: bool,
    optimizer: &dyn Fn(Group) -> CandleResult<O>,
) -> CandleResult<Slot<O>> {
    let mut optimizers = Vec::new();
    for (group, name) in inventory.roles.groups.iter().enumerate() {
        let trained = inventory.roles.trained_in(group);
        let own: Vec<usize> =
            duties.owned.iter().copied().filter(|var_index| trained.contains(var_index)).collect();
        let group_vars = own.iter().map(|&var_index| vars[var_index].0.clone()).collect();
        let optimizer = optimizer(Group { name: name.clone(), vars: group_vars })?;
        optimizers.push(SlotOptimizer { group, vars: own, optimizer, has_stepped: false });
    }
    let trained = inventory.roles.trained();
    let slot_vars = vars.into_iter().enumerate().map(|(var_index, (var, rounded))| SlotVar {
        var,
        rounded,
        param: var_index,
        start: 0,
        trained_index: trained.binary_search(&var_index).ok(),
        is_primary: is_first_set && duties.owned.contains(&var_index),
        is_saved: duties.saved.contains(&var_index),
        is_loaded: duties.loaded.contains(&var_index),
    });
    Ok(Slot::new(slot_vars.collect(), optimizers, trained.len()))
}
