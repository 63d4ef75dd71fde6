//! Rules shared by all replicas of a step, and the results of a step.

use std::sync::Arc;

use crate::{
    error::training::{StepErrors, TrainingError},
    loss::BatchLoss,
    progress::Progress,
    step::{inventory::Inventory, options::StepOptions},
};

/// The result of a step; returned by [`DistributedModel::step`](crate::DistributedModel::step).
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Step<A = ()> {
    /// Mean loss of all batches since the previous update, computed with the variables before this
    /// update.
    pub loss: f64,
    /// Norm of the gradients of all variables together, before clipping.
    pub grad_norm: f64,
    /// Weight of the mean loss: the total number of rows in the batches, or the sum of the weights
    /// given to [`Loss::sum`](crate::Loss::sum).
    pub weight: f64,
    /// The learning rate of this update, with the schedule's factor; of the first group, if the
    /// model has several.
    pub learning_rate: f64,
    /// Tensors attached to the losses: [sums](crate::Loss::with_sums) or
    /// [joined rows](crate::Loss::with_rows).
    pub aux: A,
}

/// The loss of a batch; returned by
/// [`DistributedModel::evaluate`](crate::DistributedModel::evaluate) and
/// [`accumulate`](crate::DistributedModel::accumulate).
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Evaluation<A = ()> {
    /// Mean loss; NaN for a batch without weight, which only
    /// [`accumulate`](crate::DistributedModel::accumulate) accepts.
    pub loss: f64,
    /// Weight of the mean loss: the number of rows in the batch without padding, or the sum over
    /// the slots of the weights given to [`Loss::sum`](crate::Loss::sum).
    pub weight: f64,
    /// Tensors attached to the loss: [sums](crate::Loss::with_sums) or
    /// [joined rows](crate::Loss::with_rows).
    pub aux: A,
}

/// The purpose of a batch's computation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Goal {
    /// The loss only, without recording operations.
    Evaluate,
    /// The loss only, with the forward pass of training.
    Measure,
    /// The gradients, without an update.
    Differentiate,
    /// The gradients, stored for the next update.
    Accumulate,
    /// The gradients, and an update by their sum with the stored gradients.
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

/// Rules shared by all replicas of a step.
#[derive(Debug)]
pub(crate) struct Rules {
    pub(crate) inventory: Arc<Inventory>,
    /// Indices of the buffers among all variables.
    pub(crate) buffers: Vec<usize>,
    pub(crate) goal: Goal,
    /// Maximum norm of all gradients together; larger gradients are clipped.
    pub(crate) max_norm: Option<f64>,
    pub(crate) allow_non_finite: bool,
    /// Whether every trained variable must have a gradient: only in the first step.
    pub(crate) must_use_all: bool,
    /// The errors that replicas of this process report during the step.
    pub(crate) errors: StepErrors,
}

/// The result of a batch or an update, the same on all replicas.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Report {
    pub(crate) loss: BatchLoss,
    /// The gradient norm; 0 without an update.
    pub(crate) grad_norm: f64,
}

impl Rules {
    pub(crate) fn new(
        inventory: &Arc<Inventory>,
        options: &StepOptions,
        progress: &Progress,
        goal: Goal,
    ) -> Self {
        Self {
            inventory: Arc::clone(inventory),
            buffers: inventory.roles.buffers(),
            goal,
            max_norm: options.max_norm,
            allow_non_finite: options.allow_non_finite,
            must_use_all: progress.steps == 0,
            errors: StepErrors::default(),
        }
    }

    /// Checks in the first step that every trained variable has a gradient on some slot, except for
    /// the variables that may be unused.
    pub(crate) fn check_used(&self, has_gradient: &[bool]) -> candle_core::Result<()> {
        if !self.must_use_all {
            return Ok(());
        }
        let roles = &self.inventory.roles;
        let trained = roles.trained();
        let mut missing = Vec::new();
        for (&var, &has_gradient) in trained.iter().zip(has_gradient) {
            if !has_gradient && !roles.may_be_unused[var] {
                missing.push(self.inventory.name(var).to_owned());
            }
        }
        if missing.is_empty() {
            return Ok(());
        }
        Err(self
            .errors
            .record_agreed(TrainingError::NoGradient { missing, trained: trained.len() }))
    }
}
