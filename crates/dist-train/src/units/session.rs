//! What one replica does for the units of a sharded model, from the beginning of a step to its end.

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
    error::{Error, training::TrainingError},
    grad::{corrected, widened},
    loss::{Loss, ShardLoss},
    precision::is_half,
    sharded::units::UnderWay,
    step::rules::{Goal, Rules},
    units::{
        accumulation::{Accumulation, UnreducedGrads},
        backward::{BackwardState, ReadyGrads, UpdatesInBackward},
        freed::{FreedParams, Pass},
        keep::Keep,
        model::{Model, Unit, UnitMember},
        outside::GivenParameters,
        prefetch::{Order, PrefetchStep, Prefetcher},
        swap_storage::{free_storage, swap_storage},
    },
};

/// One replica's way through a batch: entering units, and collecting the gradients that they leave.
///
/// The operations of a batch's graph hold it, and it holds none of them.
pub(crate) struct Session {
    ctx: Replica,
    common: Arc<PassContext>,
    /// Updates parameters as soon as their gradients are known.
    updates: Option<Arc<dyn UpdatesInBackward>>,
    /// Whether a graph is recorded only to find parameters that are used outside their units.
    is_search: bool,
    /// An input of every operation that has a gradient to leave: candle records nothing of
    /// integers.
    anchor: Var,
    ahead: Mutex<Prefetcher<UnderWay>>,
    backward: Mutex<BackwardState>,
    /// Leaves of units that no step has trained yet.
    given: Mutex<GivenParameters>,
}

/// What the replicas of a process have in common while a batch is computed.
#[derive(Debug)]
pub(crate) struct PassContext {
    pub(crate) model: Arc<Model>,
    pub(crate) rules: Rules,
    /// What an earlier batch has gathered, in its order.
    order: Order,
    emptied: FreedParams,
}

/// What the backward pass of a batch leaves on a slot.
pub(crate) struct Gradients {
    /// The sums over all slots, for each of this slot's parts whose parameter is not updated yet.
    pub(crate) sums: Vec<Option<Tensor>>,
    /// What is not summed yet.
    pub(crate) whole: UnreducedGrads,
    /// Whether each trained variable of the model has a gradient here, in the order of names.
    pub(crate) used: Vec<bool>,
}

impl PassContext {
    pub(crate) fn new(model: &Arc<Model>, rules: Rules) -> Arc<Self> {
        let order = model.order(rules.goal.differentiates());
        Arc::new(Self { model: Arc::clone(model), rules, order, emptied: FreedParams::default() })
    }
}

impl Session {
    pub(crate) fn new(
        ctx: &Replica,
        common: &Arc<PassContext>,
        updates: Option<Arc<dyn UpdatesInBackward>>,
    ) -> Result<Arc<Self>> {
        Self::with_search(ctx, common, updates, false)
    }

    fn with_search(
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
            ahead: Mutex::new(Prefetcher::new(common.model.prefetch, Arc::clone(&common.order))),
            backward: Mutex::default(),
            given: Mutex::default(),
        }))
    }

    /// Returns a session for another run of this batch's loss, which frees no parameter.
    pub(crate) fn search(&self) -> Result<Arc<Self>> {
        Self::with_search(&self.ctx, &self.common, None, true)
    }

    pub(crate) fn is_search(&self) -> bool {
        self.is_search
    }

    /// The unit of this name, which is entered.
    pub(crate) fn enter(&self, name: &str) -> Result<&Unit> {
        let unit = self.find(name)?;
        self.backward().entered.insert(name.to_owned());
        Ok(unit)
    }

    /// The unit of this name.
    pub(crate) fn find(&self, name: &str) -> Result<&Unit> {
        self.model().units.get(name).ok_or_else(|| {
            let units = self.model().units.keys().cloned().collect();
            self.refuse(TrainingError::UnknownUnit { unit: name.to_owned(), units })
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

    /// Whether it is to be seen that a unit has the same result twice. A run that is resumed may have
    /// been trained by a model that runs units once, so the number of its steps does not tell.
    pub(crate) fn checks_determinism(&self, unit: &str) -> bool {
        !self.model().is_repeatable(unit)
    }

    /// Returns true if a pass through a unit that no step has trained yet may free its parameters.
    pub(crate) fn may_free_unproven(&self) -> bool {
        let mut units = self.model().units.iter();
        let frees = |(name, unit): (&String, &Unit)| {
            unit.keep == Keep::Graph && self.checks_determinism(name)
        };
        self.is_training() && !self.is_search() && units.any(frees)
    }

    /// Refuses a loss that uses a parameter outside the function of its unit.
    pub(crate) fn check_outside<A>(&self, loss: &Loss<A>) -> Result<()> {
        let found = self.given().find_in_graph(loss.value());
        found.map_or(Ok(()), |error| Err(self.refuse(error)))
    }

    /// Returns the error of a unit whose function uses variables that are not its own.
    pub(crate) fn refuse_captured(&self, unit: &str, variables: &[&Tensor]) -> candle_core::Error {
        let outside = self.given().find(variables.iter().copied());
        self.refuse(outside.unwrap_or_else(|| TrainingError::Captured { unit: unit.to_owned() }))
    }

    /// An error that this replica alone knows of.
    pub(crate) fn refuse(&self, error: TrainingError) -> candle_core::Error {
        self.rules().refusal.alone(error)
    }

    /// The whole parameters of a unit, by their names.
    ///
    /// Begins with those of the units that are expected next, where units are gathered ahead.
    pub(crate) fn gather(&self, unit: &str) -> Result<BTreeMap<String, Var>> {
        let Model { vars, .. } = self.model();
        let PrefetchStep { begun, dropped, next } = self.ahead().turn(unit);
        if !self.ahead().is_on() {
            return vars.gather_unit(&self.ctx, unit);
        }
        self.drop_gathered(dropped)?;
        let under_way = match begun {
            Some(begun) => begun,
            None => vars.start_gather_unit(&self.ctx, unit)?,
        };
        for unit in &next {
            let under_way = vars.start_gather_unit(&self.ctx, unit)?;
            self.ahead().begin(under_way);
        }
        vars.finish_gather_unit(&self.ctx, under_way)
    }

    /// Waits for what was gathered ahead and not used, as a collective that was started demands.
    fn drop_gathered(&self, dropped: Vec<UnderWay>) -> Result<()> {
        let vars = &self.model().vars;
        dropped.into_iter().try_for_each(|unit| vars.finish_gather_unit(&self.ctx, unit).map(drop))
    }

    /// Ends the gathering of a batch: what was expected and has not come is not needed.
    pub(crate) fn finish_gathering(&self) -> Result<()> {
        let rest = self.ahead().rest();
        self.drop_gathered(rest)
    }

    /// Waits for all that is under way and of no use any more, where all replicas end a batch before
    /// its end.
    pub(crate) fn abandon(&self) -> Result<()> {
        self.finish_gathering()?;
        // Taken before, so that the lock is not held while this waits.
        let under_way = self.backward().under_way.take();
        match under_way {
            Some(sums) => self.model().vars.finish_reduce_parts(&self.ctx, sums).map(drop),
            None => Ok(()),
        }
    }

    /// Refuses, on all slots, a loss for which the slots of a shard group have entered other units.
    ///
    /// Where units are gathered ahead, their collectives do not show it: a unit that one slot has
    /// left out was begun by all, and what it begins instead the others begin ahead.
    pub(crate) fn check_order(&self) -> Result<()> {
        if !self.ahead().is_on() {
            return Ok(());
        }
        let order = self.order();
        let mut fingerprint = Fingerprint::new();
        for unit in order.iter() {
            fingerprint.write_bytes(unit.as_bytes());
        }
        let orders = agreement::words(&self.ctx, &halves(fingerprint.finish()))?;
        let group_size = self.model().vars.plan().shard_group().as_usize();
        let first_of_group = |slot: usize| slot / group_size * group_size;
        let differs = |&slot: &usize| orders[slot] != orders[first_of_group(slot)];
        match (0..orders.len()).find(differs) {
            Some(slot) => Err(self.other_units(&order, first_of_group(slot), slot)?),
            None => Ok(()),
        }
    }

    /// The error of two slots that have entered other units, which all slots tell each other:
    /// `order` are those of this one.
    #[expect(clippy::expect_used, reason = "positions of units, sent by other slots")]
    fn other_units(&self, order: &Order, left: usize, right: usize) -> Result<candle_core::Error> {
        let names: Vec<&String> = self.model().units.keys().collect();
        let position =
            |unit: &String| names.binary_search(&unit).expect("a unit of the model") as u64;
        let here: Vec<u64> = order.iter().map(position).collect();
        let orders = agreement::lists(&self.ctx, &here)?;
        let name =
            |&at: &u64| names[usize::try_from(at).expect("it was sent as a position")].clone();
        let units_of = |slot: usize| orders[slot].iter().map(name).collect();
        let error = TrainingError::OtherUnits {
            left,
            left_units: units_of(left),
            right,
            right_units: units_of(right),
        };
        Ok(self.rules().refusal.agreed(error))
    }

    /// The units that this batch has gathered, in their order.
    pub(crate) fn order(&self) -> Order {
        self.ahead().order()
    }

    /// Frees the parameters of a unit whose graph is kept, as soon as no slot of this process
    /// computes with them.
    pub(crate) fn free_parameters(
        &self,
        name: &str,
        gathered: &BTreeMap<String, Var>,
    ) -> Result<Pass> {
        let vars = &self.model().vars;
        let sharing = vars.sharing(&self.ctx);
        let pass = Pass { first: sharing[0], n_before: self.backward().next_emptied() };
        let (shared, own) = vars.split_shared(name, gathered)?;
        own.into_iter().try_for_each(|name| free_storage(&gathered[name]))?;
        let shared = shared.into_iter().map(|name| &gathered[name]);
        self.common.emptied.leave(pass, sharing.len(), shared)?;
        Ok(pass)
    }

    /// Gives the parameters that a graph has kept their memory back.
    pub(crate) fn refill(
        &self,
        name: &str,
        pass: Pass,
        kept: &BTreeMap<String, Var>,
    ) -> Result<()> {
        let again = self.gather(name)?;
        let (shared, own) = self.model().vars.split_shared(name, kept)?;
        own.into_iter().try_for_each(|name| swap_storage(&kept[name], &again[name]))?;
        let shared = shared.into_iter().map(|name| (&kept[name], &again[name]));
        self.common.emptied.restore(pass, shared)
    }

    /// The builder of a unit's layers. What is trained is in the graph if it `records`.
    pub(crate) fn builder(
        &self,
        name: &str,
        unit: &Unit,
        gathered: &BTreeMap<String, Var>,
        records: bool,
    ) -> VarBuilder<'static> {
        let is_noted = records && (self.checks_determinism(name) || self.is_search());
        let mut inner = Vec::new();
        for UnitMember { names, trained, .. } in &unit.members {
            let var = &gathered[&names.name];
            let is_leaf = records && (trained.is_some() || self.is_search());
            if is_leaf && is_noted {
                self.given().add(var, name, &names.name);
            }
            let tensor = if is_leaf { var.as_tensor().clone() } else { var.as_detached_tensor() };
            inner.push((names.inner_name.clone(), tensor));
        }
        let inner = inner.into_iter().collect();
        VarBuilder::from_tensors(inner, self.model().dtype, self.ctx.device())
    }

    /// Refuses the backward pass of a unit that the step has not begun.
    pub(crate) fn check_under_way(&self, unit: &str) -> Result<()> {
        if self.backward().is_under_way {
            return Ok(());
        }
        Err(self.differentiated(unit, "by the loss itself"))
    }

    pub(crate) fn differentiated(&self, unit: &str, how: &'static str) -> candle_core::Error {
        self.refuse(TrainingError::Differentiated { unit: unit.to_owned(), how })
    }

    /// Notes that a pass through a unit was recorded, whose gradients are to come.
    pub(crate) fn expect_gradients(&self, unit: &str) {
        *self.backward().expected.entry(unit.to_owned()).or_default() += 1;
    }

    /// Takes what a pass through a unit leaves on this slot: its parameters, and their gradients.
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
                own.insert(name.clone(), self.share(&grad)?);
            }
        }
        // Not held any longer than need be: this is when a step holds the most.
        drop((gathered, grads));
        self.backward().mark_used(own.keys());
        if self.keeps_whole() {
            return self.backward().whole.add(unit, own);
        }
        self.reduce(unit, own)
    }

    /// What a gradient on this slot adds to the sum.
    fn share(&self, grad: &Tensor) -> Result<Tensor> {
        let (is_empty, rest) = {
            let backward = self.backward();
            (backward.is_empty, backward.rest)
        };
        // One at a time: gradients of a linear layer's weights may be transposed views, which the
        // sum would make contiguous all together, beside themselves.
        corrected(widened(grad)?.contiguous()?, is_empty, rest)
    }

    /// Whether gradients are not summed yet.
    fn keeps_whole(&self) -> bool {
        self.rules().goal == Goal::Accumulate
            && self.model().accumulation == Accumulation::ReduceLast
    }

    /// Sums the gradients of a unit's parameters over all slots, with those that were kept whole:
    /// while the backward pass goes on, if units are gathered ahead.
    fn reduce(&self, unit: &str, mut own: BTreeMap<String, Tensor>) -> Result<()> {
        let mut whole = mem::take(&mut self.backward().whole);
        whole.units.remove(unit);
        let mut all = BTreeMap::new();
        for (_, member) in self.model().units[unit].trained() {
            let name = &member.names.name;
            let grad = match (whole.grads.remove(name), own.remove(name)) {
                (Some(before), Some(grad)) => (before + grad)?,
                (Some(grad), None) | (None, Some(grad)) => grad,
                (None, None) => Tensor::zeros(&*member.shape, member.dtype, self.ctx.device())?,
            };
            all.insert(name.clone(), grad);
        }
        self.backward().whole = whole;
        let vars = &self.model().vars;
        if !self.ahead().is_on() {
            let sums = vars.reduce_parts(&self.ctx, unit, |name| all.remove(name))?;
            return self.apply_sums(unit, sums);
        }
        // One at a time, so that the gradients of one unit wait and no more.
        self.finish_reducing()?;
        let under_way = vars.start_reduce_parts(&self.ctx, unit, |name| all.remove(name))?;
        self.backward().under_way = Some(under_way);
        Ok(())
    }

    /// Waits for the sums that are under way.
    fn finish_reducing(&self) -> Result<()> {
        let Some(under_way) = self.backward().under_way.take() else { return Ok(()) };
        let unit = under_way.unit.clone();
        let sums = self.model().vars.finish_reduce_parts(&self.ctx, under_way)?;
        self.apply_sums(&unit, sums)
    }

    /// Does what is to be done with the sums of a unit.
    fn apply_sums(&self, unit: &str, sums: Vec<(usize, Tensor)>) -> Result<()> {
        self.backward().add(sums)?;
        match &self.updates {
            Some(updates) => {
                self.backward().leave(unit);
                let known = self.backward().known(self.model(), unit);
                self.update(&**updates, &known)
            }
            None => Ok(()),
        }
    }

    /// Differentiates a shard's sum over `scale`, through all units that it has entered; `whole`
    /// are gradients that were kept before.
    pub(crate) fn differentiate(
        &self,
        shard: ShardLoss,
        scale: f64,
        whole: UnreducedGrads,
    ) -> Result<Gradients> {
        let halves = is_half(shard.dtype()) || self.model().has_halves();
        let is_empty = shard.is_empty();
        let (sum, rest) = shard.share(scale, halves)?;
        self.backward().begin(whole, is_empty, rest);
        sum.backward()?;
        drop(sum);
        self.finish()?;
        let mut backward = mem::take(&mut *self.backward());
        let n_parts = self.model().vars.n_parts(self.ctx.slot()).map_err(Error::from)?;
        Ok(Gradients {
            sums: (0..n_parts).map(|part| backward.sums.remove(&part)).collect(),
            used: backward.used_flags(self.model()),
            whole: backward.whole,
        })
    }

    /// Does what waits for the end of the backward pass.
    fn finish(&self) -> Result<()> {
        self.finish_gathering()?;
        if !self.keeps_whole() {
            // Of units that only batches before this one have entered.
            let units = self.backward().whole.units.clone();
            units.iter().try_for_each(|unit| self.reduce(unit, BTreeMap::new()))?;
        }
        self.finish_reducing()?;
        match &self.updates {
            Some(updates) => {
                let rest = self.backward().rest_of(self.model());
                self.update(&**updates, &rest)?;
                updates.finish()
            }
            None => Ok(()),
        }
    }

    /// Updates the parameters whose gradients are known.
    fn update(&self, updates: &dyn UpdatesInBackward, known: &ReadyGrads) -> Result<()> {
        if known.trained.is_empty() {
            return Ok(());
        }
        let mut sums = mem::take(&mut self.backward().sums);
        updates.update(&self.ctx, self.rules(), known, &mut sums)?;
        self.backward().sums = sums;
        Ok(())
    }

    /// Whether parameters are updated during the backward pass.
    pub(crate) fn updates_in_backward(&self) -> bool {
        self.updates.is_some()
    }

    /// Refuses an update, the first one, by batches that have not entered all units that are
    /// trained: `entered` are the units of all of them.
    pub(crate) fn check_entered(&self, entered: &BTreeSet<String>) -> Result<()> {
        let is_first_update = self.rules().goal == Goal::Update && self.rules().all_used;
        let refused = is_first_update.then(|| self.model().not_entered(entered)).flatten();
        // All slots have entered the same units.
        refused.map_or(Ok(()), |error| Err(self.rules().refusal.agreed(error)))
    }

    /// The names of the units that the loss has entered.
    pub(crate) fn entered(&self) -> Vec<String> {
        self.backward().entered.iter().cloned().collect()
    }

    /// Not held while anything is gathered.
    fn ahead(&self) -> MutexGuard<'_, Prefetcher<UnderWay>> {
        self.ahead.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Held for an entry or a search alone.
    fn given(&self) -> MutexGuard<'_, GivenParameters> {
        self.given.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Not held while anything is computed or waited for.
    fn backward(&self) -> MutexGuard<'_, BackwardState> {
        self.backward.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Session {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Session").field("ctx", &self.ctx).finish_non_exhaustive()
    }
}
