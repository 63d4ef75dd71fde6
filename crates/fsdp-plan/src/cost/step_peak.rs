//! The temporary memory of every rank within a step.

use core_types::WorldSize;

use super::{
    CostModel, Runtime, fit,
    tally::{CallBuffer, PlanTally, UnitTally},
};
use crate::{arithmetic::index, error::Result, plan::ShardingPlan};

/// The peak temporary memory of a rank in a step, by category. `T` is `u128` during the
/// computation, and `u64` after [`fit`](StepPeak::fit).
#[derive(Clone, Copy, Debug)]
pub(super) struct StepPeak<T> {
    pub(super) gathered: T,
    pub(super) unreduced: T,
    pub(super) backward: T,
    pub(super) activations: T,
}

impl StepPeak<u128> {
    /// Computes the peak if `is_kept` returns true for the units that stay gathered.
    pub(super) fn new(
        plan: &ShardingPlan,
        model: &CostModel,
        tally: &PlanTally<'_>,
        is_kept: impl Fn(&str) -> bool,
    ) -> Self {
        let mut gathered = Vec::with_capacity(tally.units.len());
        let mut unreduced = Vec::with_capacity(tally.units.len());
        for unit in &tally.units {
            gathered.push(GatheredUnit::new(plan, model, unit, is_kept(unit.name)));
            unreduced.push(unreduced_bytes(plan, model, unit));
        }
        Self {
            gathered: gathered_bytes(model, &gathered),
            unreduced: peak_unreduced_bytes(model, &unreduced),
            backward: match model.runtime {
                Runtime::Torch => 0,
                Runtime::Candle => 2 * tally.largest_grad_bytes,
            },
            activations: activation_bytes(model, &gathered),
        }
    }

    /// Returns the sum of all categories.
    pub(super) fn sum(&self) -> u128 {
        self.gathered + self.unreduced + self.backward + self.activations
    }

    /// Converts to 64 bits, or returns an error if a category needs more.
    pub(super) fn fit(self) -> Result<StepPeak<u64>> {
        Ok(StepPeak {
            gathered: fit(self.gathered, "the bytes gathered at the same time")?,
            unreduced: fit(self.unreduced, "the bytes of a unit's gradients")?,
            backward: fit(self.backward, "the bytes of a parameter's gradients")?,
            activations: fit(self.activations, "the bytes of activations")?,
        })
    }
}

/// The gathered parameters of a unit.
#[derive(Clone, Copy, Debug)]
struct GatheredUnit {
    bytes: u128,
    /// Whether any parameter is transferred.
    is_sent: bool,
    is_kept: bool,
}

impl GatheredUnit {
    fn new(plan: &ShardingPlan, model: &CostModel, unit: &UnitTally<'_>, is_kept: bool) -> Self {
        let bytes = match model.runtime {
            Runtime::Torch => sent_bytes(plan, &unit.gathered),
            Runtime::Candle => unit.gathered.payload_bytes + unit.replicated_bytes,
        };
        Self { bytes, is_sent: !unit.gathered.parameters.is_empty(), is_kept }
    }
}

/// Returns the peak of gathered parameters: all kept units, and the largest run of other units that
/// prefetching gathers at the same time.
fn gathered_bytes(model: &CostModel, units: &[GatheredUnit]) -> u128 {
    let mut kept_bytes = 0;
    let mut other_bytes = Vec::new();
    for unit in units {
        // A unit without parameters to gather is not prefetched.
        if unit.is_kept {
            kept_bytes += unit.bytes;
        } else if unit.is_sent || unit.bytes > 0 {
            other_bytes.push(unit.bytes);
        }
    }
    let run = index(model.n_prefetched().saturating_add(1).min(other_bytes.len() as u64)).max(1);
    let largest_run = other_bytes.windows(run).map(|run| run.iter().sum()).fold(0, u128::max);
    kept_bytes + largest_run
}

/// Returns the peak of unreduced gradients: one unit, and the previous unit if candle's runtime
/// reduces it at the same time.
fn peak_unreduced_bytes(model: &CostModel, units: &[u128]) -> u128 {
    let overlaps = model.runtime == Runtime::Candle && model.n_prefetched() > 0;
    let run = if overlaps { units.len().clamp(1, 2) } else { 1 };
    units.windows(run).map(|units| units.iter().sum()).fold(0, u128::max)
}

/// Returns the unreduced gradients of a unit, in bytes. With an optimizer in the backward pass they
/// include a rank's part of the reduced gradients, which no other field counts.
fn unreduced_bytes(plan: &ShardingPlan, model: &CostModel, unit: &UnitTally<'_>) -> u128 {
    let unreduced = match model.runtime {
        Runtime::Torch => sent_bytes(plan, &unit.reduced),
        Runtime::Candle => unit.reduced.payload_bytes + unit.copies.payload_bytes,
    };
    if !model.optimizer_in_backward {
        return unreduced;
    }
    unreduced + unit.reduced.sum_of_largest_parts(plan).bytes() + unit.copies.payload_bytes
}

/// Returns the bytes of PyTorch's buffer. In a group of one it sends nothing and has no buffer.
fn sent_bytes(plan: &ShardingPlan, buffer: &CallBuffer) -> u128 {
    if plan.shard_group() == WorldSize::ONE { 0 } else { buffer.bytes() }
}

/// Returns the peak of activations, in bytes: stored inputs of units, and graphs.
fn activation_bytes(model: &CostModel, units: &[GatheredUnit]) -> u128 {
    let Some(activations) = model.activations else { return 0 };
    let n_freed = match model.runtime {
        Runtime::Torch => 0,
        Runtime::Candle => units.iter().filter(|unit| !unit.is_kept).count(),
    };
    let n_recomputed = n_freed - index(model.kept_graphs.min(n_freed as u64));
    // One recomputed graph exists at a time.
    let n_graphs = units.len() - n_recomputed + n_recomputed.min(1);
    n_recomputed as u128 * u128::from(activations.input_bytes)
        + n_graphs as u128 * u128::from(activations.unit_bytes)
}
