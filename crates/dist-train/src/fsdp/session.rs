//! What one replica does for the units of a sharded model, from the beginning of a step to its end.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use candle_core::{DType, Result, Tensor, Var, backprop::GradStore};
use candle_nn::VarBuilder;
use pmap_mesh::Replica;

use crate::{
    error::training::TrainingError,
    fsdp::model::{Model, Unit},
    grad::{corrected, is_half, widened},
    loss::ShardLoss,
    step::rules::Rules,
};

/// One replica's way through a batch: entering units, and collecting the gradients that they leave.
///
/// The operations of a batch's graph hold it, and it holds none of them.
pub(crate) struct Session {
    ctx: Replica,
    model: Arc<Model>,
    rules: Arc<Rules>,
    purpose: Purpose,
    /// An input of every operation that has a gradient to leave: candle records nothing of integers.
    anchor: Var,
    backward: Mutex<Backward>,
}

/// Whether what units compute is differentiated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Purpose {
    Training,
    Evaluation,
}

/// What is known of the backward pass.
#[derive(Debug, Default)]
struct Backward {
    /// Whether it has begun: a loss that differentiates for itself would have gradients summed.
    is_under_way: bool,
    /// Whether nothing of the batch is here.
    is_empty: bool,
    /// What gradients are multiplied by: in halves the loss has a part of its factor alone.
    rest: f64,
    /// The sums over all slots, by the position of this slot's part.
    sums: BTreeMap<usize, Tensor>,
    /// The parameters that have a gradient on this slot.
    used: BTreeSet<String>,
}

/// What the backward pass of a batch leaves on a slot.
pub(super) struct Gradients {
    /// The sums over all slots, for each of this slot's parts.
    pub(super) sums: Vec<Option<Tensor>>,
    /// Whether each trained variable of the model has a gradient here, in the order of names.
    pub(super) used: Vec<bool>,
}

impl Session {
    pub(super) fn new(
        ctx: &Replica,
        model: &Arc<Model>,
        rules: &Arc<Rules>,
        purpose: Purpose,
    ) -> Result<Arc<Self>> {
        Ok(Arc::new(Self {
            ctx: ctx.clone(),
            model: Arc::clone(model),
            rules: Arc::clone(rules),
            purpose,
            anchor: Var::zeros((), DType::F32, ctx.device())?,
            backward: Mutex::default(),
        }))
    }

    /// The unit of this name.
    pub(super) fn find(&self, name: &str) -> Result<&Unit> {
        self.model.units.get(name).ok_or_else(|| {
            let units = self.model.units.keys().cloned().collect();
            self.refuse(TrainingError::UnknownUnit { unit: name.to_owned(), units })
        })
    }

    pub(super) fn anchor(&self) -> &Tensor {
        self.anchor.as_tensor()
    }

    pub(super) fn is_training(&self) -> bool {
        self.purpose == Purpose::Training
    }

    /// Whether it is to be seen that units have the same result twice: in the first step.
    pub(super) fn compares(&self) -> bool {
        self.rules.all_used
    }

    /// An error that this replica alone knows of.
    pub(super) fn refuse(&self, error: TrainingError) -> candle_core::Error {
        self.rules.refusal.alone(error)
    }

    /// The whole parameters of a unit, by their names.
    pub(super) fn gather(&self, unit: &str) -> Result<BTreeMap<String, Var>> {
        self.model.vars.gather_unit(&self.ctx, unit)
    }

    /// The builder of a unit's layers. What is trained is in the graph if it `records`.
    pub(super) fn builder(
        &self,
        unit: &Unit,
        gathered: &BTreeMap<String, Var>,
        records: bool,
    ) -> VarBuilder<'static> {
        let inner = unit.members.iter().map(|member| {
            let var = &gathered[&member.names.name];
            let is_leaf = records && member.is_trained;
            let tensor = if is_leaf { var.as_tensor().clone() } else { var.as_detached_tensor() };
            (member.names.inner_name.clone(), tensor)
        });
        VarBuilder::from_tensors(inner.collect(), self.model.dtype, self.ctx.device())
    }

    /// Refuses the backward pass of a unit that the step has not begun.
    pub(super) fn check_under_way(&self, unit: &str) -> Result<()> {
        if self.backward().is_under_way {
            return Ok(());
        }
        Err(self.differentiated(unit, "by the loss itself"))
    }

    pub(super) fn differentiated(&self, unit: &str, how: &'static str) -> candle_core::Error {
        self.refuse(TrainingError::Differentiated { unit: unit.to_owned(), how })
    }

    /// Sums the gradients of a unit's parameters over all slots.
    pub(super) fn reduce(
        &self,
        name: &str,
        gathered: BTreeMap<String, Var>,
        mut grads: GradStore,
    ) -> Result<()> {
        let (is_empty, rest) = {
            let backward = self.backward();
            (backward.is_empty, backward.rest)
        };
        let mut of_params = BTreeMap::new();
        let mut used = Vec::new();
        for member in self.model.units[name].members.iter().filter(|member| member.is_trained) {
            let name = &member.names.name;
            let var = &gathered[name];
            let grad = match grads.remove(var) {
                Some(grad) => {
                    used.push(name.clone());
                    // One at a time: gradients of a linear layer's weights are transposed views,
                    // which the sum would make contiguous all together, beside themselves.
                    let grad = widened(&grad)?.contiguous()?;
                    corrected(grad, is_empty, rest)?
                }
                None => widened(&var.zeros_like()?)?,
            };
            of_params.insert(name.clone(), grad);
        }
        // Not held any longer than need be: this is when a step holds the most.
        drop((gathered, grads));
        let sums = self.model.vars.reduce_parts(&self.ctx, name, |name| of_params.remove(name))?;
        self.backward().add(sums, used)
    }

    /// Differentiates a shard's sum over `scale`, through all units that it has entered.
    pub(super) fn differentiate(&self, shard: ShardLoss, scale: f64) -> Result<Gradients> {
        let halves = is_half(shard.dtype()) || self.model.has_halves();
        let is_empty = shard.is_empty();
        let (sum, rest) = shard.share(scale, halves)?;
        {
            let mut backward = self.backward();
            backward.is_under_way = true;
            backward.is_empty = is_empty;
            backward.rest = rest;
        }
        sum.backward()?;
        drop(sum);
        let Backward { mut sums, used, .. } = std::mem::take(&mut *self.backward());
        let n_parts = self.model.vars.vars(self.ctx.slot())?.len();
        let inventory = &self.model.inventory;
        let trained = inventory.roles.trained();
        Ok(Gradients {
            sums: (0..n_parts).map(|part| sums.remove(&part)).collect(),
            used: trained.iter().map(|&var| used.contains(inventory.name(var))).collect(),
        })
    }

    /// Not held while anything is computed or waited for.
    fn backward(&self) -> MutexGuard<'_, Backward> {
        self.backward.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Backward {
    /// Adds what one pass through a unit leaves: it may be entered several times.
    fn add(&mut self, sums: Vec<(usize, Tensor)>, used: Vec<String>) -> Result<()> {
        for (part, sum) in sums {
            let sum = match self.sums.remove(&part) {
                Some(before) => (before + sum)?,
                None => sum,
            };
            self.sums.insert(part, sum);
        }
        self.used.extend(used);
        Ok(())
    }
}

impl fmt::Debug for Session {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Session")
            .field("ctx", &self.ctx)
            .field("purpose", &self.purpose)
            .finish_non_exhaustive()
    }
}
