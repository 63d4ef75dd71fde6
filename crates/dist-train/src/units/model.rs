//! A sharded model, as shared by the replicas.

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
    units::{accumulation::Accumulation, keep_rules::Keep, prefetch::Order, rules::Member},
};

/// A sharded model; equal on every slot except for its shards.
#[derive(Debug)]
pub(crate) struct Model {
    pub(crate) vars: ShardedVars,
    pub(crate) units: BTreeMap<String, Unit>,
    pub(crate) inventory: Arc<Inventory>,
    /// The dtype of the units' variable builders.
    pub(crate) dtype: DType,
    pub(crate) precision: Precision,
    pub(crate) accumulation: Accumulation,
    /// Whether optimizers run inside the backward pass.
    pub(crate) updates_in_backward: bool,
    /// Number of units to prefetch.
    pub(crate) prefetch: usize,
    /// Gather orders of the last batches.
    pub(crate) orders: Mutex<GatherOrders>,
    pub(crate) repeatable: Mutex<BTreeSet<String>>,
}

/// The gather order of the last batch, separate for training and evaluation.
#[derive(Debug, Default)]
pub(crate) struct GatherOrders {
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
    /// The parameter's index among the trained parameters; `None` if it is not trained.
    pub(crate) trained_index: Option<usize>,
    /// Whether the parameter may have no gradient.
    pub(crate) may_be_unused: bool,
    /// The shape of the full parameter.
    pub(crate) shape: Vec<usize>,
    /// The storage dtype of the parameter's gradients.
    pub(crate) dtype: DType,
}

impl Model {
    /// Returns the gather order of the last training or evaluation batch.
    pub(crate) fn order(&self, is_training: bool) -> Order {
        let orders = self.orders();
        Arc::clone(if is_training { &orders.training } else { &orders.evaluation })
    }

    /// Records the gather order of a batch, or clears it if the batch failed: other
    /// processes may have got further in the order, and all must expect the same.
    pub(crate) fn note_order(&self, is_training: bool, order: Option<Order>) {
        let mut orders = self.orders();
        let last_order = if is_training { &mut orders.training } else { &mut orders.evaluation };
        *last_order = order.unwrap_or_default();
    }

    fn orders(&self) -> MutexGuard<'_, GatherOrders> {
        self.orders.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the units that a step has trained, so that recomputing them is known to give the same
    /// result. Ignores poisoning: inserting into a set leaves no partial state.
    pub(crate) fn repeatable(&self) -> MutexGuard<'_, BTreeSet<String>> {
        self.repeatable.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns true if any parameter is gathered in half precision.
    pub(crate) fn has_halves(&self) -> bool {
        let parameters = self.vars.plan().parameters();
        parameters.iter().any(|parameter| {
            let stored = dtype_of(parameter.info().dtype());
            stored.is_some_and(|stored| is_half(self.precision.compute_dtype(stored)))
        })
    }

    /// Returns the units of a parameter; a tied parameter has several.
    pub(crate) fn units_of(&self, name: &str) -> impl Iterator<Item = &String> {
        self.units
            .iter()
            .filter(move |(_, unit)| unit.members.iter().any(|member| member.names.name == name))
            .map(|(unit, _)| unit)
    }

    /// Returns an error if batches that entered only these units leave trained parameters without a
    /// gradient.
    pub(crate) fn not_entered(&self, entered: &BTreeSet<String>) -> Option<TrainingError> {
        for (unit, Unit { members, .. }) in &self.units {
            let mut parameters = Vec::new();
            for member in members.iter().filter(|member| member.trained_index.is_some()) {
                let mut units = self.units_of(&member.names.name);
                if !member.may_be_unused && !units.any(|unit| entered.contains(unit)) {
                    parameters.push(member.names.name.clone());
                }
            }
            if !parameters.is_empty() {
                return Some(TrainingError::NotEntered { unit: unit.clone(), parameters });
            }
        }
        None
    }
}

impl Unit {
    pub(crate) fn is_trained(&self) -> bool {
        self.trained().next().is_some()
    }

    /// Returns the trained parameters, with their indices among all trained parameters.
    pub(crate) fn trained(&self) -> impl Iterator<Item = (usize, &UnitMember)> {
        self.members.iter().filter_map(|member| Some((member.trained_index?, member)))
    }
}
