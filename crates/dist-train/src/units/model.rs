//! A sharded model as every replica knows it.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use candle_core::DType;
use dist_checkpoint::support::dtype_of;

use crate::{
    error::training::TrainingError,
    precision::{Precision, is_half},
    sharded::ShardedVars,
    step::inventory::Inventory,
    units::{accumulation::Accumulation, keep::Keep, prefetch::Order, rules::Member},
};

/// A sharded model: the same on every slot but for the parts that each keeps.
#[derive(Debug)]
pub(crate) struct Model {
    pub(crate) vars: ShardedVars,
    pub(crate) units: BTreeMap<String, Unit>,
    pub(crate) inventory: Arc<Inventory>,
    /// The type that builders have.
    pub(crate) dtype: DType,
    pub(crate) precision: Precision,
    pub(crate) accumulation: Accumulation,
    /// Whether optimizers run inside the backward pass.
    pub(crate) updates_in_backward: bool,
    /// How many units are gathered ahead of the one in use.
    pub(crate) prefetch: usize,
    /// What the last batches have gathered.
    pub(crate) orders: Mutex<Orders>,
    /// The units that had the same result both times in all passes of a step.
    pub(crate) repeatable: Mutex<BTreeSet<String>>,
}

/// The units that batches gather one after the other.
#[derive(Debug, Default)]
pub(crate) struct Orders {
    training: Order,
    evaluation: Order,
}

/// Parameters that are gathered together.
#[derive(Debug)]
pub(crate) struct Unit {
    pub(crate) members: Vec<UnitMember>,
    pub(crate) keep: Keep,
}

/// A parameter of a unit.
#[derive(Debug)]
pub(crate) struct UnitMember {
    pub(crate) names: Member,
    /// Its position among the parameters that are trained, if it is.
    pub(crate) trained: Option<usize>,
    /// Whether it may have no gradient.
    pub(crate) may_be_unused: bool,
    /// The shape of the whole, and the type in which its gradients are held.
    pub(crate) shape: Vec<usize>,
    pub(crate) dtype: DType,
}

impl Model {
    /// Whether a unit is known to have the same result when it is run again.
    pub(crate) fn is_repeatable(&self, unit: &str) -> bool {
        self.repeatable().contains(unit)
    }

    /// Notes the units of a step in which all of them were seen to be repeatable.
    pub(crate) fn note_repeatable(&self, units: Vec<String>) {
        self.repeatable().extend(units);
    }

    /// What the last batch that was differentiated, or was not, has gathered.
    pub(crate) fn order(&self, is_training: bool) -> Order {
        let orders = self.orders();
        Arc::clone(if is_training { &orders.training } else { &orders.evaluation })
    }

    /// Notes what a batch has gathered; nothing if it failed, since other processes may have come
    /// further, and all expect the same.
    pub(crate) fn note_order(&self, is_training: bool, order: Option<Order>) {
        let mut orders = self.orders();
        let noted = if is_training { &mut orders.training } else { &mut orders.evaluation };
        *noted = order.unwrap_or_default();
    }

    fn orders(&self) -> MutexGuard<'_, Orders> {
        self.orders.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A set is whole whoever panicked beside it.
    fn repeatable(&self) -> MutexGuard<'_, BTreeSet<String>> {
        self.repeatable.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether a parameter is computed with in half precision.
    pub(crate) fn has_halves(&self) -> bool {
        let parameters = self.vars.plan().parameters();
        parameters.iter().any(|parameter| {
            let held = dtype_of(parameter.info().dtype());
            held.is_some_and(|held| is_half(self.precision.computed(held)))
        })
    }

    /// The units that have a parameter: several, if it is tied.
    pub(crate) fn units_of(&self, name: &str) -> impl Iterator<Item = &String> {
        let has = move |unit: &Unit| unit.members.iter().any(|member| member.names.name == name);
        self.units.iter().filter(move |(_, unit)| has(unit)).map(|(unit, _)| unit)
    }

    /// Why batches that have entered these units alone train less than the model, if they do.
    pub(crate) fn not_entered(&self, entered: &BTreeSet<String>) -> Option<TrainingError> {
        let is_missing = |member: &UnitMember| {
            let mut units = self.units_of(&member.names.name);
            !member.may_be_unused && !units.any(|unit| entered.contains(unit))
        };
        self.units.iter().find_map(|(unit, Unit { members, .. })| {
            let trained = members.iter().filter(|member| member.trained.is_some());
            let missing = trained.filter(|member| is_missing(member));
            let parameters: Vec<String> = missing.map(|member| member.names.name.clone()).collect();
            let unit = unit.clone();
            (!parameters.is_empty()).then_some(TrainingError::NotEntered { unit, parameters })
        })
    }
}

impl Unit {
    pub(crate) fn is_trained(&self) -> bool {
        self.trained().next().is_some()
    }

    /// Its parameters that are trained, with their positions among all that are.
    pub(crate) fn trained(&self) -> impl Iterator<Item = (usize, &UnitMember)> {
        self.members.iter().filter_map(|member| Some((member.trained?, member)))
    }
}
