//! What every rank holds for a while within a step, whichever parts are its own.

use core_types::WorldSize;

use super::{
    CostModel, Runtime, fit,
    tally::{Buffer, Tally, UnitTally},
};
use crate::{arithmetic::index, error::Result, plan::ShardingPlan};

/// What a rank holds for a while within a step, at most: in 64 bits once it is known to fit.
#[derive(Clone, Copy, Debug)]
pub(super) struct WithinStep<T> {
    pub(super) gathered: T,
    pub(super) unreduced: T,
    pub(super) backward: T,
    pub(super) activations: T,
}

impl WithinStep<u128> {
    /// What there is if the units stay gathered that `stays` names.
    pub(super) fn of(
        plan: &ShardingPlan,
        model: &CostModel,
        tally: &Tally<'_>,
        stays: impl Fn(&str) -> bool,
    ) -> Self {
        let gathered: Vec<Gathered> =
            tally.units.iter().map(|unit| Gathered::of(plan, model, unit, &stays)).collect();
        let unreduced: Vec<u128> =
            tally.units.iter().map(|unit| unreduced_bytes(plan, model, unit)).collect();
        Self {
            gathered: gathered_bytes(model, &gathered),
            unreduced: unreduced_at_once(model, &unreduced),
            backward: match model.runtime {
                Runtime::Torch => 0,
                Runtime::Candle => 2 * tally.largest_grad_bytes,
            },
            activations: activation_bytes(model, &gathered),
        }
    }

    /// All of it.
    pub(super) fn sum(&self) -> u128 {
        self.gathered + self.unreduced + self.backward + self.activations
    }

    pub(super) fn fit(self) -> Result<WithinStep<u64>> {
        Ok(WithinStep {
            gathered: fit(self.gathered, "the bytes gathered at the same time")?,
            unreduced: fit(self.unreduced, "the bytes of a unit's gradients")?,
            backward: fit(self.backward, "the bytes of a parameter's gradients")?,
            activations: fit(self.activations, "the bytes of activations")?,
        })
    }
}

/// What is gathered of a unit.
#[derive(Clone, Copy, Debug)]
struct Gathered {
    bytes: u128,
    /// Whether any of its parameters travels.
    travels: bool,
    stays: bool,
}

impl Gathered {
    fn of(
        plan: &ShardingPlan,
        model: &CostModel,
        unit: &UnitTally<'_>,
        stays: impl Fn(&str) -> bool,
    ) -> Self {
        let bytes = match model.runtime {
            Runtime::Torch => sent_bytes(plan, &unit.gathered),
            Runtime::Candle => unit.gathered.payload_bytes + unit.replicated_bytes,
        };
        let travels = !unit.gathered.parameters.is_empty();
        Self { bytes, travels, stays: stays(unit.name) }
    }
}

/// The most parameters gathered at the same time: those that stay, and the largest run of others.
fn gathered_bytes(model: &CostModel, units: &[Gathered]) -> u128 {
    let gathered = |unit: &&Gathered| unit.travels || unit.bytes > 0;
    let (kept, passing): (Vec<_>, Vec<_>) =
        units.iter().filter(gathered).partition(|unit| unit.stays);
    let run = index(model.prefetch().saturating_add(1).min(passing.len() as u64)).max(1);
    let sum = |units: &[&Gathered]| units.iter().map(|unit| unit.bytes).sum::<u128>();
    sum(&kept) + passing.windows(run).map(sum).fold(0, u128::max)
}

/// The most gradients that are to be reduced at the same time: those of a unit, and beside them those
/// of the unit before, where candle's runtime sums them meanwhile.
fn unreduced_at_once(model: &CostModel, units: &[u128]) -> u128 {
    let overlaps = model.runtime == Runtime::Candle && model.prefetch() > 0;
    let run = if overlaps { units.len().clamp(1, 2) } else { 1 };
    units.windows(run).map(|units| units.iter().sum()).fold(0, u128::max)
}

/// The gradients of a unit that are to be reduced; with a rank's part of their sums, if it is updated
/// at once and counts as held nowhere else.
fn unreduced_bytes(plan: &ShardingPlan, model: &CostModel, unit: &UnitTally<'_>) -> u128 {
    let unreduced = match model.runtime {
        Runtime::Torch => sent_bytes(plan, &unit.reduced),
        Runtime::Candle => unit.reduced.payload_bytes + unit.copies.payload_bytes,
    };
    if !model.optimizer_in_backward {
        return unreduced;
    }
    unreduced + unit.reduced.largest_part(plan).bytes() + unit.copies.payload_bytes
}

/// PyTorch sends nothing, and has no buffer for it, in a group of one.
fn sent_bytes(plan: &ShardingPlan, buffer: &Buffer) -> u128 {
    if plan.shard_group() == WorldSize::ONE { 0 } else { buffer.bytes() }
}

/// The inputs that units keep, and the graphs that are there at the same time.
fn activation_bytes(model: &CostModel, units: &[Gathered]) -> u128 {
    let Some(activations) = model.activations else { return 0 };
    let is_passing = |unit: &&Gathered| model.runtime == Runtime::Candle && !unit.stays;
    let n_passing = units.iter().filter(is_passing).count();
    let n_recomputed = n_passing - index(model.kept_graphs.min(n_passing as u64));
    // Of those that are computed again one is there at a time.
    let n_graphs = units.len() - n_recomputed + n_recomputed.min(1);
    n_recomputed as u128 * u128::from(activations.input_bytes)
        + n_graphs as u128 * u128::from(activations.unit_bytes)
}
