//! Steps of building a replicated model.

use std::{
    path::Path,
    sync::{Arc, Mutex},
};

use candle_core::{DType, Result as CandleResult, Var};
use candle_nn::{Optimizer, VarBuilder, VarMap};
use pmap_mesh::DeviceMesh;

use crate::{
    error::{Result, training::TrainingError},
    grad::has_halves,
    model::{
        builder::{Group, cannot_build},
        config::ModelConfig,
        replicated::{
            Replicated, sync,
            vars::{self, OwnedVars, Use},
            worker::Worker,
        },
        settings,
        slot::{SharedSlot, Slot, SlotOptimizer, SlotVar},
    },
    parameters::{
        InitialValues,
        declare::{Declared, declare},
    },
    precision::{Precision, widened_dtype},
    step::{
        inventory::Inventory,
        roles::{Role, Roles},
    },
};

/// Builds a model from variables, given the dtype in which they are stored: the builder has the dtype
/// in which the model computes.
pub(crate) type TypedConstructor<'a, M> = dyn Fn(VarBuilder<'_>, DType) -> CandleResult<M> + 'a;

/// Builds a model and its optimizers on every slot.
pub(crate) fn build<M, O: Optimizer>(
    mesh: &DeviceMesh,
    config: &ModelConfig,
    model: &TypedConstructor<'_, M>,
    optimizer: &dyn Fn(Group) -> CandleResult<O>,
) -> Result<(Inventory, Vec<SharedSlot<O>>, Replicated<M>)> {
    let map = config.map.clone().unwrap_or_else(VarMap::new);
    let Prepared { inventory, vars, dtype } = mesh.all_ok(prepare(mesh, config, &map, model))?;
    let dtypes = vars.iter().map(|var| var.dtype());
    settings::check(mesh, &settings::model_settings(&inventory, dtypes, config, false))?;
    let sets = vars::sets(mesh, vars.clone(), config.sharing).map_err(cannot_build);
    let sets = mesh.all_ok(sets)?;
    sync::begin_alike(mesh, &inventory, &sets)?;
    let precision = config.precision;
    let rounded = sets.iter().map(|set| set.rounded(&inventory.roles, precision));
    let rounded: CandleResult<Vec<_>> = rounded.collect();
    let rounded = mesh.all_ok(rounded.map_err(cannot_build))?;

    let devices = mesh.devices();
    // Every process has the same number of slots, and of sets.
    let n_sets = sets.len() * (mesh.len() / devices.len());
    let first_set = sets.len() * (mesh.local_slots().start / devices.len());
    let on_slot = |part: OwnedVars| {
        let device = &devices[part.slot];
        let vars = sets[part.set].slot_vars(part.slot, &inventory.roles)?;
        let vars: Vec<_> = vars.into_iter().zip(rounded[part.set].clone()).collect();
        let computed: Vec<Var> =
            vars.iter().map(|(var, rounded)| rounded.as_ref().unwrap_or(var).clone()).collect();
        let built = |purpose| {
            let computed_dtype = precision.compute_dtype(dtype);
            model(vars::builder(&inventory, &computed, purpose, computed_dtype, device), dtype)
        };
        let models = [built(Use::Training)?, built(Use::Evaluation)?];
        let worker = worker(&inventory, &part, &vars, &computed, models, precision);
        let is_first_set = first_set + part.set == 0;
        let slot = slot(&inventory, &part, vars, is_first_set, optimizer)?;
        Ok((Arc::new(Mutex::new(slot)), Mutex::new(worker)))
    };
    let parts = vars::parts(&sets, &inventory, n_sets, first_set);
    let built: CandleResult<Vec<_>> = parts.into_iter().map(on_slot).collect();
    let built = built.and_then(|built| {
        vars::add(&map, &inventory, &vars)?;
        Ok(built)
    });
    let (slots, workers) = mesh.all_ok(built.map_err(cannot_build))?.into_iter().unzip();
    Ok((inventory, slots, Replicated { workers, n_sets, is_shared: config.map.is_some() }))
}

/// State of a process before it communicates with others.
struct Prepared {
    inventory: Inventory,
    /// The variables on the first device, in the order of names.
    vars: Vec<Var>,
    dtype: DType,
}

/// Prepares a process without communication or side effects.
fn prepare<M>(
    mesh: &DeviceMesh,
    config: &ModelConfig,
    map: &VarMap,
    model: &TypedConstructor<'_, M>,
) -> Result<Prepared> {
    let home = &mesh.devices()[0];
    let known = vars::dtype(map, home).map_err(cannot_build)?;
    let dtype = config.given_dtype.or(known).unwrap_or(DType::F32);
    let mut declared = declare(|vb| model(vb, dtype), dtype, home).map_err(cannot_build)?;
    declared.sort_by(|left, right| left.name.cmp(&right.name));
    let inventory = config.inventory(&declared)?;
    let vars = first_variables(mesh, config, map, &declared, &inventory.roles)?;
    Ok(Prepared { inventory, vars, dtype })
}

/// Returns the variables that the model declares, on the first device: existing and new ones.
fn first_variables(
    mesh: &DeviceMesh,
    config: &ModelConfig,
    map: &VarMap,
    declared: &[Declared],
    roles: &Roles,
) -> Result<Vec<Var>> {
    let home = &mesh.devices()[0];
    let known: Vec<Option<Var>> = declared
        .iter()
        .map(|declared| vars::known(map, &declared.name))
        .collect::<CandleResult<_>>()
        .map_err(cannot_build)?;
    check_distinct(declared, &known)?;
    let open = declared.iter().zip(&known).map(|(declared, known)| (declared, known.is_none()));
    let weights: Option<&Path> = config.weights_path.as_deref();
    let initial = InitialValues::new(config.initializer.clone(), weights, &config.choices, open)?;
    let mut vars = Vec::with_capacity(declared.len());
    for ((declared, known), role) in declared.iter().zip(known).zip(&roles.of) {
        if let Some(var) = known {
            vars.push(var);
            continue;
        }
        // Layers set buffers themselves, so a buffer has one copy, in the dtype the model computes in.
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

/// Rejects a variable with two names, which would get its gradient under only one of them.
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

/// Returns the worker of a slot.
fn worker<M>(
    inventory: &Inventory,
    part: &OwnedVars,
    vars: &[(Var, Option<Var>)],
    computed: &[Var],
    [model, evaluated]: [M; 2],
    precision: Precision,
) -> Worker<M> {
    let trained = inventory.roles.trained();
    let positions = trained.iter().copied().enumerate();
    let owned = positions.filter(|(_, var)| part.owned.contains(var));
    Worker {
        model,
        evaluated,
        trained: trained.iter().map(|&var| computed[var].clone()).collect(),
        sum_dtypes: trained.iter().map(|&var| widened_dtype(vars[var].0.dtype())).collect(),
        owned: owned.collect(),
        precision,
        has_halves: has_halves(computed),
        grads: Vec::new(),
        buffers_before: Vec::new(),
    }
}

/// Returns the stored state of a slot.
fn slot<O>(
    inventory: &Inventory,
    part: &OwnedVars,
    vars: Vec<(Var, Option<Var>)>,
    is_first_set: bool,
    optimizer: &dyn Fn(Group) -> CandleResult<O>,
) -> CandleResult<Slot<O>> {
    let mut optimizers = Vec::new();
    for (group, name) in inventory.roles.groups.iter().enumerate() {
        let trained = inventory.roles.trained_in(group);
        let own: Vec<usize> =
            part.owned.iter().copied().filter(|var| trained.contains(var)).collect();
        let given = own.iter().map(|&var| vars[var].0.clone()).collect();
        let optimizer = optimizer(Group { name: name.clone(), vars: given })?;
        optimizers.push(SlotOptimizer { group, vars: own, optimizer, has_stepped: false });
    }
    let trained = inventory.roles.trained();
    let vars = vars.into_iter().enumerate().map(|(param, (var, rounded))| SlotVar {
        var,
        rounded,
        param,
        start: 0,
        trained: trained.binary_search(&param).ok(),
        is_primary: is_first_set && part.owned.contains(&param),
        is_saved: part.saved.contains(&param),
        is_loaded: part.loaded.contains(&param),
    });
    Ok(Slot::new(vars.collect(), optimizers, trained.len()))
}
