//! What all replicas of a step go by, and what a step returns.

use std::sync::Arc;

use crate::{
    error::training::{Refusal, TrainingError},
    loss::BatchLoss,
    progress::Progress,
    step::{inventory::Inventory, options::Options},
};

/// What a step has done: made by [`DistributedModel::step`](crate::DistributedModel::step).
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Step<A = ()> {
    /// The mean loss of all batches since the update before, with the variables as they were before
    /// this one.
    pub loss: f64,
    /// The norm of the gradients of all variables taken together, before they were clipped.
    pub grad_norm: f64,
    /// What the loss is the mean over: the rows of the batches, or what
    /// [`Loss::sum`](crate::Loss::sum) said, added up.
    pub weight: f64,
    /// What came [with](crate::Loss::with) the losses, added up.
    pub aux: A,
}

/// The loss of a batch: made by [`DistributedModel::evaluate`](crate::DistributedModel::evaluate) and
/// [`accumulate`](crate::DistributedModel::accumulate).
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Evaluation<A = ()> {
    /// The mean loss; NaN of a batch without weight, which only
    /// [`accumulate`](crate::DistributedModel::accumulate) takes.
    pub loss: f64,
    /// What it is the mean over: the rows of the batch, or what [`Loss::sum`](crate::Loss::sum)
    /// said, added up over the slots. Rows of padding are none.
    pub weight: f64,
    /// What came [with](crate::Loss::with) the losses, added up over the slots.
    pub aux: A,
}

/// What a batch is computed for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Goal {
    /// Its loss alone.
    Evaluate,
    /// Its loss alone, by the model that is differentiated.
    Measure,
    /// Its gradients, which update nothing.
    Differentiate,
    /// Its gradients, which are stored for the next update.
    Accumulate,
    /// An update, by its gradients and those that are stored.
    Update,
}

impl Goal {
    /// Returns true if the loss is differentiated.
    pub(crate) fn differentiates(self) -> bool {
        match self {
            Self::Evaluate | Self::Measure => false,
            Self::Differentiate | Self::Accumulate | Self::Update => true,
        }
    }
}

/// What all replicas of a step go by.
#[derive(Debug)]
pub(crate) struct Rules {
    pub(crate) inventory: Arc<Inventory>,
    /// The positions of the buffers among all variables.
    pub(crate) buffers: Vec<usize>,
    pub(crate) goal: Goal,
    /// The largest norm of all gradients taken together.
    pub(crate) max_norm: Option<f64>,
    pub(crate) allow_non_finite: bool,
    /// Whether a variable without a gradient is an error: in the first step.
    pub(crate) all_used: bool,
    pub(crate) refusal: Refusal,
}

/// What a replica knows of a batch or an update, the same as all others.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Report {
    pub(crate) loss: BatchLoss,
    /// 0 if nothing was updated.
    pub(crate) grad_norm: f64,
}

impl Rules {
    pub(crate) fn new(
        inventory: &Arc<Inventory>,
        options: &Options,
        progress: &Progress,
        goal: Goal,
    ) -> Self {
        Self {
            inventory: Arc::clone(inventory),
            buffers: inventory.roles.buffers(),
            goal,
            max_norm: options.max_norm,
            allow_non_finite: options.allow_non_finite,
            all_used: progress.steps == 0,
            refusal: Refusal::default(),
        }
    }

    /// Checks, in the first step, that each trained variable has a gradient somewhere.
    pub(crate) fn check_used(&self, has_gradient: &[bool]) -> candle_core::Result<()> {
        if !self.all_used {
            return Ok(());
        }
        let roles = &self.inventory.roles;
        let trained = roles.trained();
        let is_missing =
            |&(&var, &has_gradient): &(&usize, &bool)| !has_gradient && !roles.may_be_unused[var];
        let missing = trained.iter().zip(has_gradient).filter(is_missing);
        let missing: Vec<String> =
            missing.map(|(&var, _)| self.inventory.name(var).to_owned()).collect();
        if missing.is_empty() {
            return Ok(());
        }
        Err(self.refusal.agreed(TrainingError::NoGradient { missing, trained: trained.len() }))
    }

    /// The error of a norm that is not finite, given the position among the trained variables of
    /// the first whose gradient is the cause.
    pub(crate) fn non_finite_norm(&self, value: f64, cause: Option<usize>) -> candle_core::Error {
        let trained = self.inventory.roles.trained();
        let variable = cause.map(|cause| self.inventory.name(trained[cause]).to_owned());
        self.refusal.agreed(TrainingError::NonFiniteNorm { value, variable })
    }
}
