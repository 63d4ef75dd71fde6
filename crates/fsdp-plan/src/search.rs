//! A search for the fastest plan within a memory budget.

use core_types::WorldSize;
use serde::Serialize;

use crate::{
    cost::{CostModel, Links, PlanCost, max_kept_units},
    error::{Error, Result},
    param::ParameterInfo,
    plan::ShardingPlan,
    strategy::{Full, Hsdp, Layout, ShardingStrategy},
};

/// A search for the plan with the least communication time that fits the memory of each device.
///
/// It tries the dim-0 layout and the row-ragged layout with every size of the shard group that
/// divides the world, from pure data parallelism (a group of one) to full sharding. It then keeps
/// as many of the last units gathered between forward and backward pass as fit, because the
/// backward pass needs those first. A plan fits if its [`PlanCost::peak_bytes`] are within the
/// budget.
///
/// # Determinism
///
/// Ties are broken by less memory, then the smaller group, then the earlier layout.
///
/// # Examples
///
/// ```
/// use core_types::WorldSize;
/// use fsdp_plan::{
///     ElemType, ParameterInfo,
///     cost::CostModel,
///     search::Search,
/// };
///
/// let parameters: Vec<_> = (0..4)
///     .map(|block| ParameterInfo::new(format!("h.{block}.w"), [1024, 1024], ElemType::F32))
///     .collect::<Result<_, _>>()?;
/// let search = |world_size, budget_bytes| -> Result<_, fsdp_plan::Error> {
///     let world_size = WorldSize::new(world_size)?;
///     Search { world_size, budget_bytes, model: CostModel::default() }.run(&parameters)
/// };
/// // Weights, gradients and Adam's moments take 64 MiB. Each device of two nodes of eight has 48.
/// let found = search(16, 48 << 20)?;
/// assert_eq!(found.plan.shard_group().as_u64(), 8); // parameters are gathered within a node
/// assert!(found.plan.keeps_gathered("h.0")); // and only once a step
/// assert_eq!(found.missing_bytes, 0);
///
/// // Also in a group of four: 16 MiB of state, 8 gathered, 4 not yet reduced.
/// assert_eq!(search(4, 20 << 20)?.missing_bytes, (8 << 20) + 4 * 4);
/// # Ok::<(), fsdp_plan::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[expect(clippy::exhaustive_structs, reason = "a search needs all of these")]
pub struct Search {
    /// Number of devices.
    pub world_size: WorldSize,
    /// Memory of a device for parameters, gradients and optimizer state: without activations and
    /// driver overhead.
    pub budget_bytes: u64,
    /// Cost model; [`Links::H100`] apply to a model without links.
    pub model: CostModel,
}

/// A plan and its cost.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct PlanCandidate {
    /// Plan.
    pub plan: ShardingPlan,
    /// Cost of the plan.
    pub cost: PlanCost,
    /// Bytes above the budget on the device with the largest peak; 0 if the plan fits.
    pub missing_bytes: u64,
}

impl Search {
    /// Finds the fastest plan that fits, or else the plan with the smallest peak memory.
    ///
    /// # Complexity
    ///
    /// One plan and one cost for each layout and divisor of the world size, plus two costs for each
    /// plan that fits.
    ///
    /// # Errors
    ///
    /// The error of the last layout if no layout can be planned; [`Error::TotalTooLarge`] if the
    /// missing bytes exceed 64 bits.
    pub fn run(&self, parameters: &[ParameterInfo]) -> Result<PlanCandidate> {
        let mut best: Option<PlanCandidate> = None;
        // If no layout can be planned, the error of the last layout replaces this one.
        let mut error = Error::NoParameters;
        let world = self.world_size.as_u64();
        for group in (1..=world).filter(|group| world.is_multiple_of(*group)) {
            for layout in [Layout::Dim0, Layout::ROWS] {
                let strategy = Hsdp::new(Full::new(layout), world / group);
                let plan = strategy.plan(parameters, self.world_size);
                match plan.and_then(|plan| self.candidate(plan)) {
                    Ok(candidate) => {
                        let candidate = self.keep_units(candidate)?;
                        if best.as_ref().is_none_or(|best| is_better(&candidate, best)) {
                            best = Some(candidate);
                        }
                    }
                    Err(failure) => error = failure,
                }
            }
        }
        best.ok_or(error)
    }

    /// Computes the cost of a plan.
    fn candidate(&self, plan: ShardingPlan) -> Result<PlanCandidate> {
        let cost = plan.cost(&self.model())?;
        let missing = cost.peak_bytes().saturating_sub(self.budget_bytes.into());
        let missing_bytes = u64::try_from(missing)
            .map_err(|_| Error::TotalTooLarge { what: "the missing bytes of a device" })?;
        Ok(PlanCandidate { plan, cost, missing_bytes })
    }

    fn model(&self) -> CostModel {
        CostModel { links: self.model.links.or(Some(Links::H100)), ..self.model }
    }

    /// Keeps as many of the last units gathered as fit.
    fn keep_units(&self, candidate: PlanCandidate) -> Result<PlanCandidate> {
        if candidate.missing_bytes > 0 {
            return Ok(candidate);
        }
        let n_kept = max_kept_units(&candidate.plan, &self.model(), self.budget_bytes);
        if n_kept == 0 {
            return Ok(candidate);
        }
        let plan = candidate.plan;
        let units: Vec<String> =
            plan.units().into_iter().rev().take(n_kept).map(str::to_owned).collect();
        self.candidate(plan.with_kept_units(units)?)
    }
}

/// Returns true if `candidate` is better than `best`: it misses fewer bytes, or else is faster, or
/// else needs less memory.
fn is_better(candidate: &PlanCandidate, best: &PlanCandidate) -> bool {
    let key = |candidate: &PlanCandidate| {
        #[expect(
            clippy::expect_used,
            reason = "`Search::model` adds links to a model without them"
        )]
        let seconds = candidate.cost.step_seconds.expect("a search has links");
        (candidate.missing_bytes, seconds, candidate.cost.peak_bytes())
    };
    key(candidate) < key(best)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::elem::ElemType;

    #[test]
    fn equally_fast_plans_rank_by_memory() {
        // A single rank sends nothing, so both plans take no time. Adam counts steps once per tensor, and a flat unit
        // is one tensor.
        let parameters =
            ["a", "b"].map(|name| ParameterInfo::new(name, [4], ElemType::F32).unwrap());
        let world_size = WorldSize::ONE;
        let search = Search { world_size, budget_bytes: 1 << 20, model: CostModel::default() };
        let [dim0, flat] = [Layout::Dim0, Layout::Flat].map(|layout| {
            search.candidate(Full::new(layout).plan(&parameters, world_size).unwrap()).unwrap()
        });
        assert!(is_better(&flat, &dim0) && !is_better(&dim0, &flat));
    }
}
