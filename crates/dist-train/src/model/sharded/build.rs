//! Steps of building a sharded model.

use std::{
    collections::BTreeMap,
    fmt,
    sync::{Arc, Mutex},
};

use candle_core::Result as CandleResult;
use candle_nn::{Optimizer, VarBuilder};
use core_types::{Fingerprint, WorldSize};
use fsdp_plan::{Cut, ParameterInfo, ShardingPlan};
use pmap_mesh::DeviceMesh;

use crate::{
    error::{Doing, Error, Result},
    model::{
        builder::{Group, cannot_build},
        config::{ModelConfig, PlanSource, ShardingConfig},
        settings,
        sharded::{Sharded, accumulated::Accumulated},
        slot::{SharedSlot, Slot, SlotOptimizer, SlotVar},
    },
    parameters::{
        InitialValues,
        declare::{Declared, declare},
        describe::declared_infos,
    },
    precision::widened_dtype,
    sharded::{ShardVar, ShardedVars},
    step::{inventory::Inventory, roles::Role},
    units::{
        keep_rules::Keep,
        model::{Model, Unit, UnitMember},
        rules::{Member, UnitRules},
    },
};

/// Inputs for building a sharded model.
pub(crate) struct Description<'a> {
    pub(crate) mesh: &'a DeviceMesh,
    pub(crate) config: &'a ModelConfig,
    pub(crate) sharding: &'a ShardingConfig,
    pub(crate) rules: &'a UnitRules,
    pub(crate) declare: &'a dyn Fn(VarBuilder<'_>) -> CandleResult<()>,
}

/// State of a process before it communicates with other processes.
struct Prepared {
    /// The declared parameters, in the order of names.
    declared: Vec<Declared>,
    inventory: Inventory,
    units: Vec<(String, Vec<Member>)>,
    keeps: BTreeMap<String, Keep>,
    plan: ShardingPlan,
    initial: InitialValues,
    /// Fingerprints to compare with other processes, if there are any.
    values: Option<Fingerprints>,
}

/// Fingerprints of initial values, for comparison between processes.
#[derive(Clone, Copy)]
struct Fingerprints {
    init: u64,
    weights: u64,
}

/// Plans the parameters, initializes each slot's shards, and creates the optimizers.
pub(crate) fn build<O: Optimizer>(
    description: &Description<'_>,
    optimizer: &dyn Fn(Group) -> CandleResult<O>,
) -> Result<(Vec<SharedSlot<O>>, Sharded)> {
    let mesh = description.mesh;
    let prepared = mesh.all_ok(description.prepare())?;
    description.check_equal_inputs(&prepared)?;
    let model = mesh.all_ok(description.fill(prepared))?;
    if mesh.spans_processes() {
        check_replicas_equal(mesh, &model)?;
    }
    let slots = mesh.local_slots().map(|slot| build_slot(&model, slot, optimizer));
    let slots: Vec<Slot<O>> = mesh.all_ok(slots.collect())?;
    let accumulated = slots.iter().map(|_| Mutex::new(Accumulated::default())).collect();
    let slots = slots.into_iter().map(|slot| Arc::new(Mutex::new(slot))).collect();
    Ok((slots, Sharded { model: Arc::new(model), accumulated }))
}

impl Description<'_> {
    /// Prepares a process without communication, and without memory for the model.
    fn prepare(&self) -> Result<Prepared> {
        let Self { config, sharding, .. } = self;
        sharding.check_in_backward(&config.step_options)?;
        let home = &self.mesh.devices()[0];
        let mut declared = declare(self.declare, config.dtype, home).map_err(cannot_build)?;
        declared.sort_by(|left, right| left.name.cmp(&right.name));
        let inventory = config.inventory(&declared)?;
        if let Some(&buffer) = inventory.roles.buffers().first() {
            return Err(Error::sharding(format!(
                "{} is a buffer, and a sharded model cannot have buffers: use a layer without one",
                inventory.name(buffer)
            )));
        }
        let infos = declared_infos(&declared, &inventory.roles)?;
        let units = self.rules.units(&infos)?;
        let keeps = sharding.keeps.unit_keeps(&unit_names(&units))?;
        let infos: Vec<ParameterInfo> = infos
            .iter()
            .map(|info| info.clone().with_unit(self.rules.units_of(info)[0].to_owned()))
            .collect();
        let plan = self.make_plan(&infos)?;
        let keeps = match &sharding.plan_source {
            PlanSource::Ready(plan) if sharding.keeps.is_empty() => keeps_of_plan(plan, keeps),
            _ => keeps,
        };
        let plan = with_kept_units(&plan, &keeps)?;
        if self.mesh.len() > 1
            && let Some(unit) = unit_over_half(&plan)
        {
            tracing::warn!("unit {unit} has over half of all parameters, and is gathered whole");
        }
        let initial = config.initial_values(&declared)?;
        let fingerprints = || -> Result<Fingerprints> {
            let init = initial.init.fingerprint(&declared)?;
            Ok(Fingerprints { init, weights: initial.fingerprint(&declared)? })
        };
        let values = self.mesh.spans_processes().then(fingerprints).transpose()?;
        Ok(Prepared { declared, inventory, units, keeps, plan, initial, values })
    }

    /// Checks that all processes build the same model with the same options.
    fn check_equal_inputs(&self, prepared: &Prepared) -> Result<()> {
        let Prepared { declared, inventory, keeps, plan, values, .. } = prepared;
        let Some(Fingerprints { init, weights }) = *values else { return Ok(()) };
        let Self { sharding, .. } = self;
        let dtypes = declared.iter().map(|declared| declared.dtype);
        let model_settings = settings::model_settings(inventory, dtypes, self.config, true);
        settings::check(self.mesh, &model_settings)?;
        let sharding_settings = [
            ("unit", settings::debug_fingerprint(self.rules)),
            // Compared before the plan, which contains the kept units too.
            ("keep", settings::debug_fingerprint(keeps)),
            ("prefetch", sharding.n_prefetched as u64),
            ("accumulation", settings::debug_fingerprint(&sharding.accumulation)),
            ("optimizer_in_backward", sharding.updates_in_backward.into()),
            ("strategy", settings::debug_fingerprint(plan)),
            ("init", init),
            ("weights", weights),
        ];
        settings::check(self.mesh, &sharding_settings)
    }

    /// Returns the model with the initial values of this process's shards.
    fn fill(&self, prepared: Prepared) -> Result<Model> {
        let Prepared { declared, inventory, units, keeps, plan, initial, .. } = prepared;
        let home = &self.mesh.devices()[0];
        let Self { sharding, config, .. } = self;
        let precision = config.precision;
        let names = units
            .iter()
            .map(|(unit, members)| (unit, members.iter().map(|member| member.name.as_str())));
        let vars = ShardedVars::new(self.mesh, plan, names, precision, |info, run| {
            initial.items(&declared[position(&inventory, info.name())], run, home)
        })?;
        let unit = |(name, members): (String, Vec<Member>)| {
            let members = unit_members(members, &inventory, &declared);
            let unit = Unit { members, keep: keeps[&name] };
            (name, unit)
        };
        let units = units.into_iter().map(unit).collect();
        Ok(Model {
            vars,
            units,
            inventory: Arc::new(inventory),
            dtype: precision.compute_dtype(config.dtype),
            precision,
            accumulation: sharding.accumulation,
            updates_in_backward: sharding.updates_in_backward,
            prefetch: sharding.n_prefetched,
            orders: Mutex::default(),
            repeatable: Mutex::default(),
        })
    }

    /// Returns the plan of these parameters, after checking that it fits them.
    fn make_plan(&self, infos: &[ParameterInfo]) -> Result<ShardingPlan> {
        let ranks = self.mesh.len() as u64;
        let world_size = WorldSize::new(ranks).map_err(fsdp_plan::Error::from)?;
        let plan = self.sharding.plan_source.plan(infos, world_size)?;
        // A custom strategy may have planned other parameters than `infos`.
        check_fits(&plan, infos)?;
        Ok(plan)
    }
}

/// Checks that all slots with the same shard have equal values: replicated parameters, and shards
/// in other groups.
pub(crate) fn check_replicas_equal(mesh: &DeviceMesh, model: &Model) -> Result<()> {
    let Model { vars, inventory, .. } = model;
    let plan = vars.plan();
    let group = plan.shard_group().as_usize();
    // The distance in slots between equal shards of each parameter, in the order of names; `None`
    // if unique.
    let mut periods = vec![None; inventory.parameters.len()];
    for planned in plan.parameters() {
        let is_replicated = matches!(planned.cut(), Cut::Replicated);
        let group_period = (group < mesh.len()).then_some(group);
        periods[position(inventory, planned.info().name())] =
            is_replicated.then_some(1).or(group_period);
    }
    if periods.iter().all(Option::is_none) {
        return Ok(());
    }
    let slot_fingerprints = |slot| -> Result<Vec<u64>> {
        let mut fingerprints = vec![Fingerprint::new(); periods.len()];
        for shard in vars.shards(slot) {
            let param = position(inventory, plan.parameters()[shard.param_idx].info().name());
            if periods[param].is_some() {
                fingerprints[param].write_u64(
                    settings::value_fingerprint(&shard.var).doing("comparing parameters")?,
                );
            }
        }
        Ok(fingerprints.iter().map(Fingerprint::finish).collect())
    };
    let fingerprints: Vec<Vec<u64>> =
        mesh.all_ok(mesh.local_slots().map(slot_fingerprints).collect())?;
    settings::check_values(mesh, inventory, &fingerprints, &periods)
}

fn unit_names(units: &[(String, Vec<Member>)]) -> Vec<&str> {
    units.iter().map(|(name, _)| name.as_str()).collect()
}

/// Replaces the kept data of each unit by the kept data of the plan.
fn keeps_of_plan(plan: &ShardingPlan, mut keeps: BTreeMap<String, Keep>) -> BTreeMap<String, Keep> {
    for (unit, keep) in &mut keeps {
        *keep = if plan.keeps_gathered(unit) { Keep::Gathered } else { Keep::Inputs };
    }
    keeps
}

/// Returns the plan with the units that stay gathered. A unit does not exist, if all its
/// parameters are counted for other units, in the plan, and is skipped.
fn with_kept_units(plan: &ShardingPlan, keeps: &BTreeMap<String, Keep>) -> Result<ShardingPlan> {
    let kept: Vec<&str> =
        plan.units().into_iter().filter(|unit| keeps.get(*unit) == Some(&Keep::Gathered)).collect();
    Ok(plan.clone().with_kept_units(kept)?)
}

/// Returns the unit with more than half of all parameters, if any.
fn unit_over_half(plan: &ShardingPlan) -> Option<&str> {
    let mut sizes: BTreeMap<&str, u128> = BTreeMap::new();
    for parameter in plan.parameters() {
        *sizes.entry(parameter.info().unit()).or_default() += u128::from(parameter.info().numel());
    }
    sizes.into_iter().find(|(_, size)| 2 * size > plan.numel()).map(|(unit, _)| unit)
}

/// Rejects a plan with different parameters or units.
fn check_fits(plan: &ShardingPlan, infos: &[ParameterInfo]) -> Result<()> {
    for info in infos {
        let name = info.name();
        let Some(position) = plan.index_of(name) else {
            return Err(Error::plan_mismatch(format_args!("it has no parameter {name}")));
        };
        let planned = plan.parameters()[position].info();
        let facts: [(&str, &dyn fmt::Debug, &dyn fmt::Debug); 5] = [
            ("the shape", &planned.shape(), &info.shape()),
            ("the type", &planned.dtype(), &info.dtype()),
            ("the unit", &planned.unit(), &info.unit()),
            ("whether a gradient is required", &planned.requires_grad(), &info.requires_grad()),
            ("the parameter tied to it", &planned.tied_to(), &info.tied_to()),
        ];
        for (fact, planned, expected) in facts {
            let [planned, expected] = [planned, expected].map(|value| format!("{value:?}"));
            if planned != expected {
                let reason = format_args!("{fact} of {name} is {planned}, not {expected}");
                return Err(Error::plan_mismatch(reason));
            }
        }
    }
    let (found, expected) = (plan.parameters().len(), infos.len());
    if found > expected {
        let reason = format_args!("it has {found} parameters, the model {expected}");
        return Err(Error::plan_mismatch(reason));
    }
    Ok(())
}

/// Returns the index of a parameter in the order of names.
#[expect(clippy::expect_used, reason = "a plan has the parameters that the model has")]
fn position(inventory: &Inventory, name: &str) -> usize {
    let found = inventory.parameters.binary_search_by(|(other, _)| other.as_str().cmp(name));
    found.expect("a parameter of the plan is one of the model")
}

/// Returns the members of a unit; `declared` is in the order of names.
fn unit_members(
    members: Vec<Member>,
    inventory: &Inventory,
    declared: &[Declared],
) -> Vec<UnitMember> {
    let trained = inventory.roles.trained();
    let mut unit_members = Vec::with_capacity(members.len());
    for names in members {
        let param = position(inventory, &names.name);
        unit_members.push(UnitMember {
            names,
            trained_index: trained.binary_search(&param).ok(),
            may_be_unused: inventory.roles.may_be_unused[param],
            shape: declared[param].shape.dims().to_vec(),
            dtype: widened_dtype(declared[param].dtype),
        });
    }
    unit_members
}

/// Returns the stored state of a slot.
fn build_slot<O>(
    model: &Model,
    slot: usize,
    optimizer: &dyn Fn(Group) -> CandleResult<O>,
) -> Result<Slot<O>> {
    let Model { vars, inventory, .. } = model;
    let trained = inventory.roles.trained();
    let mut slot_vars = Vec::new();
    for ShardVar { param_idx, start, var, is_primary } in vars.shards(slot).iter().cloned() {
        let param = position(inventory, vars.plan().parameters()[param_idx].info().name());
        let trained_index = trained.binary_search(&param).ok();
        let is_loaded = inventory.roles.is_saved(param);
        let is_saved = is_primary && is_loaded;
        slot_vars.push(SlotVar {
            var,
            rounded: None,
            param,
            start,
            trained_index,
            is_primary,
            is_saved,
            is_loaded,
        });
    }
    let mut optimizers = Vec::new();
    for (group, params) in optimizer_params(model) {
        let own: Vec<usize> =
            (0..slot_vars.len()).filter(|&var| params.contains(&slot_vars[var].param)).collect();
        let vars = own.iter().map(|&var| slot_vars[var].var.clone()).collect();
        let name = inventory.roles.groups[group].clone();
        let optimizer = optimizer(Group { name, vars }).map_err(cannot_build)?;
        optimizers.push(SlotOptimizer { group, vars: own, optimizer, has_stepped: false });
    }
    Ok(Slot::new(slot_vars, optimizers, trained.len()))
}

/// Returns the parameters that each optimizer updates, by index, with their group. An optimizer
/// updates a whole group, or, inside the backward pass, the parameters of a group that become final
/// at the same time.
fn optimizer_params(model: &Model) -> Vec<(usize, Vec<usize>)> {
    let Inventory { roles, .. } = &*model.inventory;
    let mut together: BTreeMap<(usize, Vec<&String>), Vec<usize>> = BTreeMap::new();
    for (param, role) in roles.by_variable.iter().enumerate() {
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

#[cfg(test)]
mod tests {
    use fsdp_plan::{
        ElemType,
        strategy::{Full, ShardingStrategy},
    };

    use super::*;

    #[test]
    fn a_unit_with_over_half_of_the_parameters_is_found() {
        let found = |sizes: [u64; 3]| {
            let infos: Vec<_> = sizes
                .iter()
                .enumerate()
                .map(|(n, &size)| {
                    ParameterInfo::new(format!("{n}.w"), [size], ElemType::F32).unwrap()
                })
                .collect();
            let plan = Full::default().plan(&infos, WorldSize::new(2).unwrap()).unwrap();
            unit_over_half(&plan).map(str::to_owned)
        };
        assert_eq!(found([2, 4, 2]), None);
        assert_eq!(found([2, 5, 2]).as_deref(), Some("1"));
    }
}
