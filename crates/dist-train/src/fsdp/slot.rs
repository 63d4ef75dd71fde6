//! What one slot keeps of a sharded model between steps, and how it trains its parts.

use std::sync::Arc;

use candle_core::{Result, Tensor, Var, backprop::GradStore};
use candle_nn::Optimizer;
use pmap_mesh::{Replica, TensorTree};

use crate::{
    agreement,
    fsdp::session::Session,
    grad::scaled,
    loss::Loss,
    optim::clip,
    step::{
        batch::{Accumulated, Batch},
        rules::{Report, Rules, Then},
    },
};

/// What one slot keeps of a sharded model between steps.
#[derive(Debug)]
pub(super) struct Slot<O> {
    pub(super) parts: Vec<Part>,
    /// An optimizer for each group, in their order.
    pub(super) optimizers: Vec<GroupOptimizer<O>>,
    /// What there is since the last update: the gradients are summed over all slots.
    pub(super) accumulated: Option<Accumulated>,
    /// Whether any batch since the last update has a gradient of each trained variable.
    used: Vec<bool>,
}

/// A run of a parameter's items.
#[derive(Debug)]
pub(super) struct Part {
    pub(super) var: Var,
    /// Its first item, in the parameter.
    pub(super) start: usize,
    /// The parameter's position among those of the model, and among those that are trained.
    pub(super) param: usize,
    pub(super) trained: Option<usize>,
    /// Whether this slot is the one that tells of it, where several have the same.
    pub(super) is_told: bool,
}

/// The optimizer of a group's parts.
#[derive(Debug)]
pub(super) struct GroupOptimizer<O> {
    /// The positions of its variables among the parts, in the order in which it was given them.
    pub(super) parts: Vec<usize>,
    pub(super) optimizer: O,
}

impl<O> Slot<O> {
    pub(super) fn new(
        parts: Vec<Part>,
        optimizers: Vec<GroupOptimizer<O>>,
        n_trained: usize,
    ) -> Self {
        Self { parts, optimizers, accumulated: None, used: vec![false; n_trained] }
    }

    /// Drops what was accumulated.
    pub(super) fn forget(&mut self) {
        self.accumulated = None;
        self.used.fill(false);
    }

    /// The optimizer that updates a part, if one does, and the part's position in it.
    pub(super) fn optimizer_of(&self, part: usize) -> Option<(&O, usize)> {
        self.optimizers.iter().find_map(|group| {
            let position = group.parts.iter().position(|&other| other == part)?;
            Some((&group.optimizer, position))
        })
    }
}

impl<O: Optimizer> Slot<O> {
    /// Differentiates the loss of this slot's part of a batch, and does with the gradients what the
    /// rules say. Returns what the whole mesh knows of the batch, or of the update.
    pub(super) fn train<A: TensorTree>(
        &mut self,
        ctx: &Replica,
        session: &Arc<Session>,
        rules: &Rules,
        loss: Loss<A>,
    ) -> Result<(Report, A)> {
        let (shard, batch) = Batch::agree(ctx, rules, loss, self.accumulated.take())?;
        let gradients = session.differentiate(shard, batch.scale)?;
        let used = agreement::any(ctx, &gradients.used)?;
        let sums = self.without_unused(gradients.sums, &used);
        self.used.iter_mut().zip(used).for_each(|(any, used)| *any |= used);
        let mut batch = batch.with_gradients(ctx, sums)?;
        match rules.then {
            Then::Keep => {
                let (accumulated, report, aux) = batch.kept();
                self.accumulated = Some(accumulated);
                Ok((report, aux))
            }
            Then::Update => {
                rules.check_used(&self.used)?;
                let sums = std::mem::take(&mut batch.all.grads);
                let grad_norm = self.update(ctx, rules, sums, batch.all.factor())?;
                self.used.fill(false);
                Ok(batch.updated(grad_norm))
            }
        }
    }

    /// The sums without those of parameters that have a gradient nowhere, for which all slots have
    /// brought zeros.
    fn without_unused(&self, sums: Vec<Option<Tensor>>, used: &[bool]) -> Vec<Option<Tensor>> {
        let is_used = |part: &Part| part.trained.is_some_and(|trained| used[trained]);
        let of_part = |(sum, part): (Option<Tensor>, &Part)| sum.filter(|_| is_used(part));
        sums.into_iter().zip(&self.parts).map(of_part).collect()
    }

    /// Updates the parts by `factor` times the sums. Returns the norm of all gradients before they
    /// are clipped.
    fn update(
        &mut self,
        ctx: &Replica,
        rules: &Rules,
        sums: Vec<Option<Tensor>>,
        factor: f64,
    ) -> Result<f64> {
        let norm = self.norm(ctx, rules, &sums, factor)?;
        let factor = factor * rules.max_norm.map_or(1.0, |max_norm| clip::factor(norm, max_norm));
        let mut store = GradStore::default();
        for (part, sum) in self.parts.iter().zip(sums) {
            let Some(sum) = sum else { continue };
            store.insert(&part.var, scaled(sum, factor)?);
        }
        for group in &mut self.optimizers {
            group.optimizer.step(&store)?;
        }
        Ok(norm)
    }

    /// The norm of all gradients, which are `factor` times the sums that the slots have.
    ///
    /// The squares of each parameter are added up over its parts in the order of slots, and then in
    /// the order of names: the same to the bit on all slots, and another rounding in double
    /// precision than that of a model whose parameters are whole.
    fn norm(
        &self,
        ctx: &Replica,
        rules: &Rules,
        sums: &[Option<Tensor>],
        factor: f64,
    ) -> Result<f64> {
        let mut here = vec![0.0; self.used.len()];
        for (part, sum) in self.parts.iter().zip(sums) {
            if let (true, Some(trained), Some(sum)) = (part.is_told, part.trained, sum) {
                here[trained] += clip::squares(sum)?;
            }
        }
        let squares = agreement::sums(ctx, &here)?;
        let norm = factor * squares.iter().sum::<f64>().sqrt();
        if norm.is_finite() || rules.allow_non_finite {
            return Ok(norm);
        }
        let cause = squares.iter().position(|squares| !squares.is_finite());
        Err(rules.non_finite_norm(norm, cause))
    }
}
