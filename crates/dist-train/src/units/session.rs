//! The work of one replica for the units of a sharded model during a step.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt, mem,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use candle_core::{DType, Result, Tensor, Var, backprop::GradStore};
use candle_nn::VarBuilder;
use core_types::Fingerprint;
use pmap_mesh::Replica;

use crate::{
    agreement::{self, halves},
    error::training::TrainingError,
    grad::{correct_gradient, widen},
    loss::{Loss, ShardLoss},
    precision::is_half,
    sharded::units::PendingGather,
    step::rules::{Goal, Rules},
    units::{
        accumulation::{Accumulation, UnreducedGrads},
        backward::{BackwardState, ReadyGrads, UpdatesInBackward},
        freed_params::{FreedParams, UnitPass},
        keep_rules::Keep,
        model::{Model, Unit, UnitMember},
        outside_use::RecordedLeaves,
        prefetch::{Order, PrefetchStep, Prefetcher},
        rules::Member,
        swap_storage::{free_storage, swap_storage},
    },
};

/// One replica's pass over a batch: it enters units and collects their gradients.
///
/// The operations of a batch's graph own the session, but not vice versa, so there is no reference
/// cycle.
pub(crate) struct Session {
    ctx: Replica,
    common: Arc<PassContext>,
    /// Updates parameters as soon as their gradients are final.
    updates: Option<Arc<dyn UpdatesInBackward>>,
    /// Whether this run of the loss only searches for parameters that are used outside their units.
    is_search: bool,
    /// An input of every operation with gradients to reduce. Without it, candle would not record an
    /// operation whose inputs are all integers or untracked.
    anchor: Var,
    prefetcher: Mutex<Prefetcher<PendingGather>>,
    backward: Mutex<BackwardState>,
    /// Leaves of units that no step has trained yet.
    recorded_leaves: Mutex<RecordedLeaves>,
}

/// Data shared by the replicas of a process during a batch.
#[derive(Debug)]
pub(crate) struct PassContext {
    pub(crate) model: Arc<Model>,
    pub(crate) rules: Rules,
    /// The gather order of an earlier batch.
    order: Order,
    freed: FreedParams,
}

/// The result of a batch's backward pass on a slot.
pub(crate) struct Gradients {
    /// The sums over all slots, for each of this slot's shards that is not updated yet.
    pub(crate) sums: Vec<Option<Tensor>>,
    /// Gradients that are not yet summed over the slots.
    pub(crate) unreduced: UnreducedGrads,
    /// For each trained variable of the model, in the order of names, whether it has a gradient on
    /// this slot.
    pub(crate) used: Vec<bool>,
}

impl PassContext {
    pub(crate) fn new(model: &Arc<Model>, rules: Rules) -> Arc<Self> {
        let order = model.order(rules.goal.differentiates());
        Arc::new(Self { model: Arc::clone(model), rules, order, freed: FreedParams::default() })
    }
}

impl Session {
    pub(crate) fn new(
        ctx: &Replica,
        common: &Arc<PassContext>,
        updates: Option<Arc<dyn UpdatesInBackward>>,
        is_search: bool,
    ) -> Result<Arc<Self>> {
        Ok(Arc::new(Self {
            ctx: ctx.clone(),
            common: Arc::clone(common),
            updates,
            is_search,
            anchor: Var::zeros((), DType::F32, ctx.device())?,
            prefetcher: Mutex::new(Prefetcher::new(
                common.model.prefetch,
                Arc::clone(&common.order),
            )),
            backward: Mutex::default(),
            recorded_leaves: Mutex::default(),
        }))
    }

    /// Returns a session for another run of this batch's loss, which frees no parameters.
    pub(crate) fn search_session(&self) -> Result<Arc<Self>> {
        Self::new(&self.ctx, &self.common, None, true)
    }

    pub(crate) fn is_search(&self) -> bool {
        self.is_search
    }

    /// Returns the unit of this name, and records that it is entered.
    pub(crate) fn enter(&self, name: &str) -> Result<&Unit> {
        let unit = self.find(name)?;
        self.backward().entered_units.insert(name.to_owned());
        Ok(unit)
    }

    /// Returns the unit of this name.
    pub(crate) fn find(&self, name: &str) -> Result<&Unit> {
        self.model().units.get(name).ok_or_else(|| {
            let units = self.model().units.keys().cloned().collect();
            self.record_local(TrainingError::UnknownUnit { unit: name.to_owned(), units })
        })
    }

    fn model(&self) -> &Model {
        &self.common.model
    }

    fn rules(&self) -> &Rules {
        &self.common.rules
    }

    pub(crate) fn anchor(&self) -> &Tensor {
        self.anchor.as_tensor()
    }

    pub(crate) fn is_training(&self) -> bool {
        self.rules().goal.differentiates()
    }

    /// Returns true if recomputing the unit must be checked to give the same result: until a step
    /// of this model has trained the unit. The number of steps does not decide, because a resumed
    /// run may have been trained by a model that does not recompute units.
    pub(crate) fn checks_determinism(&self, unit: &str) -> bool {
        !self.model().repeatable().contains(unit)
    }

    /// Returns true if this pass may free parameters of a unit that no step has trained yet.
    pub(crate) fn may_free_untrained(&self) -> bool {
        if !self.is_training() || self.is_search() {
            return false;
        }
        let mut units = self.model().units.iter();
        units.any(|(name, unit)| unit.keep == Keep::Graph && self.checks_determinism(name))
    }

    /// Returns an error if a loss uses a parameter outside the function of its unit.
    pub(crate) fn check_outside<A>(&self, loss: &Loss<A>) -> Result<()> {
        let found = self.recorded_leaves().find_in_graph(loss.value());
        found.map_or(Ok(()), |error| Err(self.record_local(error)))
    }

    /// Records and returns the error of a unit with a function that uses variables of other
    /// units.
    pub(crate) fn record_captured(&self, unit: &str, variables: &[&Tensor]) -> candle_core::Error {
        let outside = self.recorded_leaves().find(variables.iter().copied());
        self.record_local(
            outside.unwrap_or_else(|| TrainingError::Captured { unit: unit.to_owned() }),
        )
    }

    /// Records an error that only this replica detects, and returns an error to fail with.
    pub(crate) fn record_local(&self, error: TrainingError) -> candle_core::Error {
        self.rules().errors.record_local(error)
    }

    /// Gathers the full parameters of a unit, by name.
    ///
    /// Also starts the all-gathers of the next expected units if prefetching is on.
    pub(crate) fn gather(&self, unit: &str) -> Result<BTreeMap<String, Var>> {
        let Model { vars, .. } = self.model();
        let PrefetchStep { prefetched, unneeded, next } = self.prefetcher().enter_unit(unit);
        if !self.prefetcher().is_on() {
            return vars.gather_unit(&self.ctx, unit);
        }
        self.finish_unneeded(unneeded)?;
        let pending = match prefetched {
            Some(pending) => pending,
            None => vars.start_gather_unit(&self.ctx, unit)?,
        };
        for next_unit in &next {
            let next_pending = vars.start_gather_unit(&self.ctx, next_unit)?;
            self.prefetcher().push_in_flight(next_pending);
        }
        vars.finish_gather_unit(&self.ctx, pending)
    }

    /// Finishes the all-gathers of unneeded units, because a started collective must be waited for.
    fn finish_unneeded(&self, unneeded: Vec<PendingGather>) -> Result<()> {
        let vars = &self.model().vars;
        unneeded.into_iter().try_for_each(|unit| vars.finish_gather_unit(&self.ctx, unit).map(drop))
    }

    /// Ends the gathering of a batch by dropping prefetched units that were not used.
    pub(crate) fn finish_gathering(&self) -> Result<()> {
        let rest = self.prefetcher().take_in_flight();
        self.finish_unneeded(rest)
    }

    /// Waits for all collectives in flight if all replicas end a batch early.
    pub(crate) fn abandon(&self) -> Result<()> {
        self.finish_gathering()?;
        // Taken first, so that the lock is not held while waiting.
        let in_flight = self.backward().in_flight.take();
        match in_flight {
            Some(sums) => self.model().vars.finish_reduce_parts(&self.ctx, sums).map(drop),
            None => Ok(()),
        }
    }

    /// Returns an error on all slots if the slots of a shard group entered different units.
    ///
    /// With prefetching, the collectives do not detect this: if one slot skips a unit, it has
    /// prefetched this unit like all slots, and the other slots prefetch the unit that it gathers
    /// instead.
    pub(crate) fn check_order(&self) -> Result<()> {
        if !self.prefetcher().is_on() {
            return Ok(());
        }
        let order = self.order();
        let mut fingerprint = Fingerprint::new();
        for unit in order.iter() {
            fingerprint.write_bytes(unit.as_bytes());
        }
        let orders = agreement::gather_words(&self.ctx, &halves(fingerprint.finish()))?;
        let group_size = self.model().vars.plan().shard_group().as_usize();
        let first_of_group = |slot: usize| slot / group_size * group_size;
        let different =
            (0..orders.len()).find(|&slot| orders[slot] != orders[first_of_group(slot)]);
        match different {
            Some(slot) => Err(self.order_error(&order, first_of_group(slot), slot)?),
            None => Ok(()),
        }
    }

    /// Exchanges the orders, and returns the error of the slots `left` and `right`, which entered
    /// different units; `order` is this slot's order.
    #[expect(clippy::expect_used, reason = "all slots send indices of the same units")]
    fn order_error(&self, order: &Order, left: usize, right: usize) -> Result<candle_core::Error> {
        let names: Vec<&String> = self.model().units.keys().collect();
        let here: Vec<u64> = order
            .iter()
            .map(|unit| names.binary_search(&unit).expect("a unit of the model") as u64)
            .collect();
        let orders = agreement::gather_lists(&self.ctx, &here)?;
        let units_of = |slot: usize| {
            orders[slot]
                .iter()
                .map(|&index| {
                    let index = usize::try_from(index).expect("slots send indices of units");
                    names[index].clone()
                })
                .collect()
        };
        let error = TrainingError::UnitMismatch {
            left,
            left_units: units_of(left),
            right,
            right_units: units_of(right),
        };
        Ok(self.rules().errors.record_agreed(error))
    }

    /// Returns the units that this batch gathered, in order.
    pub(crate) fn order(&self) -> Order {
        self.prefetcher().order()
    }

    /// Frees the parameters in a unit's kept graph. Parameters that several slots of this process
    /// share are freed by the last of these slots.
    pub(crate) fn free_parameters(
        &self,
        name: &str,
        gathered: &BTreeMap<String, Var>,
    ) -> Result<UnitPass> {
        let vars = &self.model().vars;
        let sharing = vars.sharing_slots(&self.ctx);
        let pass = UnitPass { first: sharing[0], n_before: self.backward().next_freed_pass() };
        let (shared, own) = vars.split_shared(name, gathered)?;
        own.into_iter().try_for_each(|name| free_storage(&gathered[name]))?;
        let shared = shared.into_iter().map(|name| &gathered[name]);
        self.common.freed.leave(pass, sharing.len(), shared)?;
        Ok(pass)
    }

    /// Restores the memory of the parameters `kept` in a unit's graph, by gathering them again.
    pub(crate) fn restore_parameters(
        &self,
        name: &str,
        pass: UnitPass,
        kept: &BTreeMap<String, Var>,
    ) -> Result<()> {
        let gathered = self.gather(name)?;
        let (shared, own) = self.model().vars.split_shared(name, kept)?;
        own.into_iter().try_for_each(|name| swap_storage(&kept[name], &gathered[name]))?;
        let shared = shared.into_iter().map(|name| (&kept[name], &gathered[name]));
        self.common.freed.restore(pass, shared)
    }

    /// Returns the names in a unit; empty if there is no such unit.
    pub(crate) fn members(&self, unit: &str) -> Vec<Member> {
        let members = self.model().units.get(unit).into_iter().flat_map(|unit| &unit.members);
        members.map(|member| member.names.clone()).collect()
    }

    /// Returns the builder of a unit's layers. If `has_graph`, the trained parameters are leaves of
    /// candle's graph.
    pub(crate) fn builder(
        &self,
        name: &str,
        unit: &Unit,
        gathered: &BTreeMap<String, Var>,
        has_graph: bool,
    ) -> VarBuilder<'static> {
        let records_leaves = self.checks_determinism(name) || self.is_search();
        let mut inner = Vec::new();
        for UnitMember { names, trained_index, .. } in &unit.members {
            let var = &gathered[&names.name];
            let is_leaf = has_graph && (trained_index.is_some() || self.is_search());
            if is_leaf && records_leaves {
                self.recorded_leaves().add(var, name, &names.name);
            }
            let tensor = if is_leaf { var.as_tensor().clone() } else { var.as_detached_tensor() };
            inner.push((names.inner_name.clone(), tensor));
        }
        let inner = inner.into_iter().collect();
        VarBuilder::from_tensors(inner, self.model().dtype, self.ctx.device())
    }

    /// Returns an error if the step has not started the backward pass of a unit.
    pub(crate) fn check_started(&self, unit: &str) -> Result<()> {
        if self.backward().has_started {
            return Ok(());
        }
        Err(self.differentiated_error(unit, "by the loss itself"))
    }

    /// Records and returns the error of a unit that is not differentiated exactly once by the step.
    pub(crate) fn differentiated_error(&self, unit: &str, how: &'static str) -> candle_core::Error {
        self.record_local(TrainingError::Differentiated { unit: unit.to_owned(), how })
    }

    /// Records a pass through a unit with gradients to reduce.
    pub(crate) fn expect_gradients(&self, unit: &str) {
        *self.backward().expected.entry(unit.to_owned()).or_default() += 1;
    }

    /// Ends the backward pass of a unit: frees its parameters, and reduces their gradients or
    /// stores them for a later batch.
    pub(crate) fn leave(
        &self,
        unit: &str,
        gathered: BTreeMap<String, Var>,
        mut grads: GradStore,
    ) -> Result<()> {
        let mut own = BTreeMap::new();
        for (_, member) in self.model().units[unit].trained() {
            let name = &member.names.name;
            if let Some(grad) = grads.remove(&gathered[name]) {
                own.insert(name.clone(), self.correct(&grad)?);
            }
        }
        // Freed as early as possible, because memory use peaks here.
        drop((gathered, grads));
        self.backward().used.extend(own.keys().cloned());
        if self.defers_reduction() {
            return self.backward().unreduced.add(unit, own);
        }
        self.reduce(unit, own)
    }

    /// Returns the contribution of a local gradient to the sum over the slots.
    fn correct(&self, grad: &Tensor) -> Result<Tensor> {
        let (is_empty, rest) = {
            let backward = self.backward();
            (backward.is_empty, backward.rest)
        };
        // Made contiguous one at a time: gradients of linear weights may be transposed views, and
        // the reduction would otherwise copy all of them at once.
        correct_gradient(widen(grad)?.contiguous()?, is_empty, rest)
    }

    /// Returns true if gradients stay unreduced until a later batch.
    fn defers_reduction(&self) -> bool {
        self.rules().goal == Goal::Accumulate
            && self.model().accumulation == Accumulation::ReduceLast
    }

    /// Reduces the gradients of a unit's parameters over all slots, together with earlier unreduced
    /// gradients. With prefetching, the reduction overlaps with the backward pass.
    fn reduce(&self, unit: &str, mut own: BTreeMap<String, Tensor>) -> Result<()> {
        let mut unreduced = mem::take(&mut self.backward().unreduced);
        unreduced.units.remove(unit);
        let mut all = BTreeMap::new();
        for (_, member) in self.model().units[unit].trained() {
            let name = &member.names.name;
            let grad = match (unreduced.grads.remove(name), own.remove(name)) {
                (Some(before), Some(grad)) => (before + grad)?,
                (Some(grad), None) | (None, Some(grad)) => grad,
                (None, None) => Tensor::zeros(&*member.shape, member.dtype, self.ctx.device())?,
            };
            all.insert(name.clone(), grad);
        }
        self.backward().unreduced = unreduced;
        let vars = &self.model().vars;
        if !self.prefetcher().is_on() {
            let sums = vars.reduce_parts(&self.ctx, unit, all)?;
            return self.apply_sums(unit, sums);
        }
        // Only one reduction is in flight, so that only one unit's gradients wait in memory.
        self.finish_reducing()?;
        let in_flight = vars.start_reduce_parts(&self.ctx, unit, all)?;
        self.backward().in_flight = Some(in_flight);
        Ok(())
    }

    /// Waits for the reduction in flight.
    fn finish_reducing(&self) -> Result<()> {
        let Some(in_flight) = self.backward().in_flight.take() else { return Ok(()) };
        let unit = in_flight.unit.clone();
        let sums = self.model().vars.finish_reduce_parts(&self.ctx, in_flight)?;
        self.apply_sums(&unit, sums)
    }

    /// Stores a unit's reduced gradients, or updates its parameters with them.
    fn apply_sums(&self, unit: &str, sums: Vec<(usize, Tensor)>) -> Result<()> {
        self.backward().add(sums)?;
        match &self.updates {
            Some(updates) => {
                self.backward().leave(unit);
                let ready = self.backward().take_ready(self.model(), unit);
                self.update(&**updates, &ready)
            }
            None => Ok(()),
        }
    }

    /// Differentiates a shard's sum divided by `scale` through all units that it entered;
    /// `unreduced` are unreduced gradients of earlier batches.
    pub(crate) fn differentiate(
        &self,
        shard: ShardLoss,
        scale: f64,
        unreduced: UnreducedGrads,
    ) -> Result<Gradients> {
        let halves = is_half(shard.dtype()) || self.model().has_halves();
        let is_empty = shard.is_empty();
        let (sum, rest) = shard.into_scaled_sum(scale, halves)?;
        self.backward().begin(unreduced, is_empty, rest);
        sum.backward()?;
        drop(sum);
        self.finish()?;
        let mut backward = mem::take(&mut *self.backward());
        let n_shards = self.model().vars.shards(self.ctx.slot()).len();
        Ok(Gradients {
            sums: (0..n_shards).map(|shard_idx| backward.sums.remove(&shard_idx)).collect(),
            used: backward.used_flags(self.model()),
            unreduced: backward.unreduced,
        })
    }

    /// Completes collectives, reductions and updates at the end of the backward pass.
    fn finish(&self) -> Result<()> {
        self.finish_gathering()?;
        if !self.defers_reduction() {
            // These are units that only earlier batches entered.
            let units = self.backward().unreduced.units.clone();
            units.iter().try_for_each(|unit| self.reduce(unit, BTreeMap::new()))?;
        }
        self.finish_reducing()?;
        match &self.updates {
            Some(updates) => {
                let rest = self.backward().take_rest(self.model());
                self.update(&**updates, &rest)?;
                updates.finish()
            }
            None => Ok(()),
        }
    }

    /// Updates the parameters with final gradients.
    fn update(&self, updates: &dyn UpdatesInBackward, ready: &ReadyGrads) -> Result<()> {
        if ready.trained.is_empty() {
            return Ok(());
        }
        let mut sums = mem::take(&mut self.backward().sums);
        updates.update(&self.ctx, self.rules(), ready, &mut sums)?;
        self.backward().sums = sums;
        Ok(())
    }

    /// Returns true if parameters are updated during the backward pass.
    pub(crate) fn updates_in_backward(&self) -> bool {
        self.updates.is_some()
    }

    /// Returns an error for the first update if its batches did not enter all trained units;
    /// `entered` are the units that all these batches entered.
    pub(crate) fn check_entered(&self, entered: &BTreeSet<String>) -> Result<()> {
        let is_first_update = self.rules().goal == Goal::Update && self.rules().must_use_all;
        if is_first_update && let Some(error) = self.model().not_entered(entered) {
            // All slots entered the same units, so all return the same error.
            return Err(self.rules().errors.record_agreed(error));
        }
        Ok(())
    }

    /// Returns the names of the units that the loss entered.
    pub(crate) fn entered_units(&self) -> Vec<String> {
        self.backward().entered_units.iter().cloned().collect()
    }

    /// Locks the prefetcher; never held during a collective.
    fn prefetcher(&self) -> MutexGuard<'_, Prefetcher<PendingGather>> {
        self.prefetcher.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Locks the recorded leaves, only to add or to search.
    fn recorded_leaves(&self) -> MutexGuard<'_, RecordedLeaves> {
        self.recorded_leaves.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Locks the state of the backward pass; never held during a computation or a wait.
    fn backward(&self) -> MutexGuard<'_, BackwardState> {
        self.backward.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Session {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Session").field("ctx", &self.ctx).finish_non_exhaustive()
    }
}
