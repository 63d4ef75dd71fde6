//! What one slot keeps of a sharded model between steps, and how it trains its parts.

use std::{collections::BTreeSet, iter, mem, sync::Mutex};

use candle_core::{Result, Tensor, Var};
use candle_nn::Optimizer;
use pmap_mesh::{Replica, TensorTree};

use crate::{
    agreement,
    fsdp::lock,
    loss::Loss,
    optim::clip,
    step::{
        batch::{Batch, Totals, added},
        rules::{Report, Rules, Then},
        update::{clipped, norm, update},
    },
    units::{
        accumulation::UnreducedGrads,
        session::{Gradients, Session},
    },
};

/// What one slot keeps of a sharded model between steps.
#[derive(Debug)]
pub(super) struct Slot<O> {
    pub(super) parts: Vec<Part>,
    /// Of each group at least one, in the order of groups.
    pub(super) optimizers: Vec<PartsOptimizer<O>>,
    /// What there is since the last update.
    accumulated: Accumulated,
    /// The squares of the gradients by which parameters were updated in the backward pass that is
    /// under way, for each trained parameter of the model.
    pub(super) squares: Vec<f64>,
    /// Whether a step has begun to update parameters and not come to its end.
    pub(super) is_half_updated: bool,
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
    pub(super) is_primary: bool,
}

/// The optimizer of some of a group's parts: of all of them, or where it runs in the backward pass
/// of those of one unit.
#[derive(Debug)]
pub(super) struct PartsOptimizer<O> {
    pub(super) group: usize,
    /// The positions of its variables among the parts, in the order in which it was given them.
    pub(super) parts: Vec<usize>,
    pub(super) optimizer: O,
    /// Whether it has made the step that is under way.
    pub(super) has_stepped: bool,
}

/// Batches that are not yet trained on.
#[derive(Debug, Default)]
struct Accumulated {
    totals: Option<Totals>,
    /// The sums over all slots of the gradients of each part; none at all before the first batch.
    sums: Vec<Option<Tensor>>,
    /// What is not summed yet.
    whole: UnreducedGrads,
    /// Whether any of the batches has a gradient of each trained variable.
    used: Vec<bool>,
    /// The units that the batches have entered.
    entered: BTreeSet<String>,
}

impl<O> Slot<O> {
    pub(super) fn new(
        parts: Vec<Part>,
        optimizers: Vec<PartsOptimizer<O>>,
        n_trained: usize,
    ) -> Self {
        Self {
            parts,
            optimizers,
            accumulated: Accumulated::default(),
            squares: vec![0.0; n_trained],
            is_half_updated: false,
        }
    }

    /// Drops what was accumulated.
    pub(super) fn forget(&mut self) {
        self.accumulated = Accumulated::default();
    }

    /// The optimizer that updates a part, if one does, and the part's position in it.
    pub(super) fn optimizer_of(&self, part: usize) -> Option<(&O, usize)> {
        self.optimizers.iter().find_map(|of_parts| {
            let position = of_parts.parts.iter().position(|&other| other == part)?;
            Some((&of_parts.optimizer, position))
        })
    }

    /// The parts of some trained parameters, each with the position of its parameter among those.
    pub(super) fn parts_of(&self, trained: &[usize]) -> Vec<(usize, usize)> {
        let of_part = |(position, part): (usize, &Part)| Some((position, part.trained?));
        let all = self.parts.iter().enumerate().filter_map(of_part);
        all.filter(|(_, of_part)| trained.contains(of_part)).collect()
    }

    /// The squares of this slot's sums, added up for each trained parameter in the order of items.
    pub(super) fn squares_here(&self, sums: &[(usize, Tensor)]) -> Result<Vec<f64>> {
        let mut here = vec![0.0; self.squares.len()];
        for (part, sum) in sums {
            if let Part { is_primary: true, trained: Some(trained), .. } = self.parts[*part] {
                here[trained] += clip::squares(sum)?;
            }
        }
        Ok(here)
    }

    /// Begins a batch whose loss has entered these units; returns what is known of those before it,
    /// and what was kept whole.
    fn begin(&mut self, entered: Vec<String>) -> (Option<Totals>, UnreducedGrads) {
        self.squares.fill(0.0);
        self.optimizers.iter_mut().for_each(|of_parts| of_parts.has_stepped = false);
        let Accumulated { totals, whole, .. } = &mut self.accumulated;
        let before = (totals.take(), mem::take(whole));
        self.accumulated.entered.extend(entered);
        before
    }
}

impl<O: Optimizer> Slot<O> {
    /// The learning rate of a group.
    #[expect(clippy::expect_used, reason = "a group has an optimizer on every slot")]
    pub(super) fn learning_rate(&self, group: usize) -> f64 {
        let of_group = self.optimizers.iter().find(|of_parts| of_parts.group == group);
        of_group.expect("every group has an optimizer").optimizer.learning_rate()
    }

    /// Sets the learning rate of a group.
    pub(super) fn set_learning_rate(&mut self, group: usize, learning_rate: f64) {
        let of_group = self.optimizers.iter_mut().filter(|of_parts| of_parts.group == group);
        of_group.for_each(|of_parts| of_parts.optimizer.set_learning_rate(learning_rate));
    }

    /// Lets the optimizers of these parts make a step, by `factor` times their sums.
    pub(super) fn update(&mut self, sums: Vec<(usize, Tensor)>, factor: f64) -> Result<()> {
        let Self { parts, optimizers, .. } = self;
        let has_any = |of_parts: &PartsOptimizer<O>| {
            of_parts.parts.iter().any(|part| sums.iter().any(|(summed, _)| summed == part))
        };
        let mut stepped = Vec::new();
        for of_parts in optimizers.iter_mut().filter(|of_parts| has_any(of_parts)) {
            of_parts.has_stepped = true;
            stepped.push(&mut of_parts.optimizer);
        }
        let sums = sums.into_iter().map(|(part, sum)| (&parts[part].var, sum));
        update(stepped, sums, factor)
    }

    /// Lets the optimizers make a step that had no part with a gradient, so that all count as many.
    pub(super) fn step_remaining(&mut self) -> Result<()> {
        let waiting = self.optimizers.iter_mut().filter(|of_parts| !of_parts.has_stepped);
        update(waiting.map(|of_parts| &mut of_parts.optimizer), [], 1.0)
    }

    /// Adds a differentiated batch to what there is, and does with it what the rules say.
    fn finish<A: TensorTree>(
        &mut self,
        ctx: &Replica,
        rules: &Rules,
        batch: Batch<A>,
        gradients: Gradients,
        is_updated: bool,
    ) -> Result<(Report, A)> {
        if is_updated {
            self.forget();
            return Ok(batch.updated(norm(rules, &self.squares, 1.0)?));
        }
        let used = agreement::any(ctx, &gradients.used)?;
        let sums = self.without_unused(gradients.sums, &used);
        let Accumulated { sums: before, used: used_before, entered, .. } =
            mem::take(&mut self.accumulated);
        let sums = added(before, sums)?;
        let used = either(&used_before, used);
        match rules.then {
            Then::Keep => {
                let (totals, report, aux) = batch.kept();
                let whole = gradients.whole;
                self.accumulated = Accumulated { totals: Some(totals), sums, whole, used, entered };
                Ok((report, aux))
            }
            Then::Update => {
                rules.check_used(&used)?;
                let grad_norm = self.update_all(ctx, rules, sums, batch.factor())?;
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

    /// Updates all parts by `factor` times the sums. Returns the norm of all gradients before they
    /// are clipped.
    ///
    /// The squares of each parameter are added up over its parts in the order of slots, and then in
    /// the order of names: the same to the bit on all slots, and another rounding in double
    /// precision than that of a model whose parameters are whole.
    fn update_all(
        &mut self,
        ctx: &Replica,
        rules: &Rules,
        sums: Vec<Option<Tensor>>,
        factor: f64,
    ) -> Result<f64> {
        let sums = sums.into_iter().enumerate().filter_map(|(part, sum)| Some((part, sum?)));
        let sums: Vec<(usize, Tensor)> = sums.collect();
        let squares = agreement::sums(ctx, &self.squares_here(&sums)?)?;
        let norm = norm(rules, &squares, factor)?;
        self.is_half_updated = true;
        self.update(sums, clipped(rules, norm, factor))?;
        self.step_remaining()?;
        Ok(norm)
    }
}

/// Differentiates the loss of a slot's part of a batch, and does with the gradients what the rules
/// say. Returns what the whole mesh knows of the batch, or of the update.
///
/// The slot is not locked while the loss is differentiated: its parts may be updated on the way.
pub(super) fn train<O: Optimizer, A: TensorTree>(
    slot: &Mutex<Slot<O>>,
    ctx: &Replica,
    session: &Session,
    rules: &Rules,
    loss: Loss<A>,
) -> Result<(Report, A)> {
    let (totals, whole) = lock(slot).begin(session.entered());
    session.check_order()?;
    let (shard, batch) = Batch::agree(ctx, rules, loss, totals)?;
    session.check_entered(&lock(slot).accumulated.entered)?;
    let gradients = session.differentiate(shard, batch.scale, whole)?;
    lock(slot).finish(ctx, rules, batch, gradients, session.updates_in_backward())
}

/// Whether either list has a flag set; the first may be empty.
fn either(before: &[bool], flags: Vec<bool>) -> Vec<bool> {
    let was_set = before.iter().copied().chain(iter::repeat(false));
    flags.into_iter().zip(was_set).map(|(flag, before)| flag || before).collect()
}
