//! Steps of building a replicated model.

use std::{
    path::Path,
    sync::{Arc, Mutex},
};

use candle_core::{DType, Result as CandleResult, Var};
use candle_nn::{Optimizer, VarBuilder, VarMap};
use pmap_mesh::DeviceMesh;

use crate::{
    error::{Error, Result, training::TrainingError},
    grad::has_halves,
    model::{
        builder::Group,
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
    step::inventory::Inventory,
};

/// Builds a model and its optimizers on every slot.
pub(crate) fn build<M, O: Optimizer>(
    mesh: &DeviceMesh,
    config: &ModelConfig,
    model: &dyn Fn(VarBuilder<'_>) -> CandleResult<M>,
    optimizer: &dyn Fn(Group) -> CandleResult<O>,
) -> Result<(Inventory, Vec<SharedSlot<O>>, Replicated<M>)> {
    let map = config.map.clone().unwrap_or_else(VarMap::new);
    let Prepared { inventory, vars, dtype } = mesh.all_ok(prepare(mesh, config, &map, model))?;
    let dtypes = vars.iter().map(|var| var.dtype());
    settings::check(mesh, &settings::of_model(&inventory, dtypes, config, false))?;
    let sets = vars::sets(mesh, vars.clone(), config.sharing).map_err(cannot_build);
    let sets = mesh.all_ok(sets)?;
    sync::begin_alike(mesh, &inventory, &sets)?;

    let devices = mesh.devices();
    // Every process has the same number of slots, and of sets.
    let n_sets = sets.len() * (mesh.len() / devices.len());
    let first_set = sets.len() * (mesh.local_slots().start / devices.len());
    let on_slot = |part: OwnedVars| {
        let device = &devices[part.slot];
        let vars = sets[part.set].of_slot(part.slot, &inventory.roles)?;
        let built = |purpose| model(vars::builder(&inventory, &vars, purpose, dtype, device));
        let (trained, evaluated) = (built(Use::Training)?, built(Use::Evaluation)?);
        let worker = worker(&inventory, &part, &vars, trained, evaluated);
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
    Ok((inventory, slots, Replicated { workers, n_sets }))
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
    model: &dyn Fn(VarBuilder<'_>) -> CandleResult<M>,
) -> Result<Prepared> {
    let home = &mesh.devices()[0];
    let known = vars::dtype(map, home).map_err(cannot_build)?;
    let dtype = config.given_dtype.or(known).unwrap_or(DType::F32);
    let mut declared = declare(model, dtype, home).map_err(cannot_build)?;
    declared.sort_by(|left, right| left.name.cmp(&right.name));
    let names: Vec<&str> = declared.iter().map(|declared| declared.name.as_str()).collect();
    let roles = config.choices.roles(&names)?;
    let vars = first_variables(mesh, config, map, &declared)?;
    let described = |(name, var): (&&str, &Var)| ((*name).to_owned(), var.dims().to_vec());
    let parameters = names.iter().zip(&vars).map(described).collect();
    Ok(Prepared { inventory: Inventory { parameters, roles }, vars, dtype })
}

/// Returns the variables that the model declares, on the first device: existing and new ones.
fn first_variables(
    mesh: &DeviceMesh,
    config: &ModelConfig,
    map: &VarMap,
    declared: &[Declared],
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
    let variable = |(declared, known): (&Declared, Option<Var>)| match known {
        Some(var) => Ok(var),
        None => Var::from_tensor(&initial.tensor(declared, home)?).map_err(cannot_build),
    };
    declared.iter().zip(known).map(variable).collect()
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
    vars: &[Var],
    model: M,
    evaluated: M,
) -> Worker<M> {
    let trained = inventory.roles.trained().into_iter().enumerate();
    let owned = trained.clone().filter(|(_, var)| part.owned.contains(var));
    Worker {
        model,
        evaluated,
        trained: trained.clone().map(|(_, var)| vars[var].clone()).collect(),
        owned: owned.collect(),
        has_halves: has_halves(vars),
        grads: Vec::new(),
        buffers_before: Vec::new(),
    }
}

/// Returns the stored state of a slot.
fn slot<O>(
    inventory: &Inventory,
    part: &OwnedVars,
    vars: Vec<Var>,
    is_first_set: bool,
    optimizer: &dyn Fn(Group) -> CandleResult<O>,
) -> CandleResult<Slot<O>> {
    let mut optimizers = Vec::new();
    for (group, name) in inventory.roles.groups.iter().enumerate() {
        let of_group = inventory.roles.of_group(group);
        let own: Vec<usize> =
            part.owned.iter().copied().filter(|var| of_group.contains(var)).collect();
        let given = own.iter().map(|&var| vars[var].clone()).collect();
        let optimizer = optimizer(Group { name: name.clone(), vars: given })?;
        optimizers.push(SlotOptimizer { group, vars: own, optimizer, has_stepped: false });
    }
    let trained = inventory.roles.trained();
    let slot_var = |(param, var): (usize, Var)| SlotVar {
        var,
        param,
        start: 0,
        trained: trained.binary_search(&param).ok(),
        is_primary: is_first_set && part.owned.contains(&param),
        is_saved: part.saved.contains(&param),
        is_loaded: part.loaded.contains(&param),
    };
    let vars = vars.into_iter().enumerate().map(slot_var).collect();
    Ok(Slot::new(vars, optimizers, trained.len()))
}

fn cannot_build(cause: candle_core::Error) -> Error {
    Error::Model { cause }
}
