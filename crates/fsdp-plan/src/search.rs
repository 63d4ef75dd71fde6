//! A search for the fastest plan within a memory budget.

use core_types::WorldSize;
use serde::Serialize;

use crate::{
    cost::{CostModel, Links, PlanCost, max_kept_units},
    error::{Error, ParameterError, Result},
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
///     search::{Search, SearchOutcome},
/// };
///
/// let parameters: Vec<_> = (0..4)
///     .map(|block| ParameterInfo::new(format!("h.{block}.w"), [1024, 1024], ElemType::F32))
///     .collect::<Result<_, _>>()?;
/// // Weights, gradients and Adam's moments take 64 MiB. Each device of two nodes of eight has 48.
/// let search = Search::new(WorldSize::new(16)?, 48 << 20);
/// let SearchOutcome::Fits(found) = search.run(&parameters)? else { panic!("it fits") };
/// assert_eq!(found.plan.shard_group().as_u64(), 8); // parameters are gathered within a node
/// assert!(found.plan.keeps_gathered("h.0")); // and only once a step
///
/// let SearchOutcome::Missing { bytes, .. } =
///     Search::new(WorldSize::new(4)?, 20 << 20).run(&parameters)?
/// else {
///     panic!()
/// };
/// // Also in a group of four: 16 MiB of state, 8 gathered, 4 not yet reduced.
/// assert_eq!(bytes, (8 << 20) + 4 * 4);
/// # Ok::<(), fsdp_plan::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Search {
    world_size: WorldSize,
    budget_bytes: u64,
    model: CostModel,
}

/// The result of a [`Search`].
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum SearchOutcome {
    /// The fastest plan that fits.
    Fits(PlanCandidate),
    /// No plan fits.
    Missing {
        /// Plan with the smallest peak memory.
        smallest: PlanCandidate,
        /// Missing bytes on the device with the largest peak.
        bytes: u64,
    },
}

impl SearchOutcome {
    /// Returns the plan that fits, or else the plan with the smallest peak memory.
    #[doc(hidden)]
    pub fn into_candidate(self) -> PlanCandidate {
        match self {
            Self::Fits(candidate) | Self::Missing { smallest: candidate, .. } => candidate,
        }
    }
}

/// A plan and its cost.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct PlanCandidate {
    /// Plan.
    pub plan: ShardingPlan,
    /// Cost of the plan.
    pub cost: PlanCost,
}

impl Search {
    /// Creates a search for `world_size` devices with `budget_bytes` each for parameters, gradients
    /// and optimizer state: the memory of a device minus activations and driver overhead.
    pub fn new(world_size: WorldSize, budget_bytes: u64) -> Self {
        let model = CostModel { links: Some(Links::H100), ..CostModel::default() };
        Self { world_size, budget_bytes, model }
    }

    /// Sets the cost model. Default: [`CostModel::default`] with [`Links::H100`], which also apply
    /// to a model without links.
    #[must_use]
    pub fn with_model(mut self, model: CostModel) -> Self {
        self.model = CostModel { links: model.links.or(Some(Links::H100)), ..model };
        self
    }

    /// Finds the fastest plan that fits.
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
    pub fn run(&self, parameters: &[ParameterInfo]) -> Result<SearchOutcome> {
        let mut found: Option<PlanCandidate> = None;
        let mut smallest: Option<PlanCandidate> = None;
        // If no layout can be planned, the error of the last layout replaces this one.
        let mut error = Error::Parameters(ParameterError::Empty);
        let world = self.world_size.as_u64();
        for group in (1..=world).filter(|group| world.is_multiple_of(*group)) {
            for layout in [Layout::Dim0, Layout::ROWS] {
                match self.candidate(parameters, layout, world / group) {
                    Ok(candidate) if self.fits(&candidate) => {
                        keep_best(&mut found, self.keep_units(candidate)?, is_faster);
                    }
                    Ok(candidate) => keep_best(&mut smallest, candidate, is_smaller),
                    Err(failure) => error = failure,
                }
            }
        }
        match (found, smallest) {
            (Some(candidate), _) => Ok(SearchOutcome::Fits(candidate)),
            (None, Some(smallest)) => {
                let missing = smallest.cost.peak_bytes() - u128::from(self.budget_bytes);
                let bytes = u64::try_from(missing)
                    .map_err(|_| Error::TotalTooLarge { what: "the missing bytes of a device" })?;
                Ok(SearchOutcome::Missing { smallest, bytes })
            }
            (None, None) => Err(error),
        }
    }

    /// Plans and costs one candidate.
    fn candidate(
        &self,
        parameters: &[ParameterInfo],
        layout: Layout,
        replicas: u64,
    ) -> Result<PlanCandidate> {
        let plan = Hsdp::new(Full::new(layout), replicas).plan(parameters, self.world_size)?;
        let cost = plan.cost(&self.model)?;
        Ok(PlanCandidate { plan, cost })
    }

    /// Returns true if a candidate is within the budget.
    fn fits(&self, candidate: &PlanCandidate) -> bool {
        candidate.cost.peak_bytes() <= self.budget_bytes.into()
    }

    /// Keeps as many of the last units gathered as fit.
    fn keep_units(&self, candidate: PlanCandidate) -> Result<PlanCandidate> {
        let n_kept = max_kept_units(&candidate.plan, &self.model, self.budget_bytes);
        if n_kept == 0 {
            return Ok(candidate);
        }
        let plan = candidate.plan;
        let units: Vec<String> =
            plan.units().into_iter().rev().take(n_kept).map(str::to_owned).collect();
        let plan = plan.with_kept_units(units)?;
        let cost = plan.cost(&self.model)?;
        Ok(PlanCandidate { plan, cost })
    }
}

/// Replaces `best` by `candidate` if there is no best candidate yet, or if `is_better` returns
/// true.
fn keep_best(
    best: &mut Option<PlanCandidate>,
    candidate: PlanCandidate,
    is_better: fn(&PlanCandidate, &PlanCandidate) -> bool,
) {
    if best.as_ref().is_none_or(|best| is_better(&candidate, best)) {
        *best = Some(candidate);
    }
}

/// Returns true if `candidate` is faster than `best`, or as fast with less memory.
fn is_faster(candidate: &PlanCandidate, best: &PlanCandidate) -> bool {
    time_and_memory(candidate) < time_and_memory(best)
}

fn time_and_memory(candidate: &PlanCandidate) -> (f64, u128) {
    #[expect(clippy::expect_used, reason = "`with_model` adds links to a model without them")]
    let seconds = candidate.cost.step_seconds.expect("a search has links");
    (seconds, candidate.cost.peak_bytes())
}

/// Returns true if `candidate` needs less memory than `best`.
fn is_smaller(candidate: &PlanCandidate, best: &PlanCandidate) -> bool {
    candidate.cost.peak_bytes() < best.cost.peak_bytes()
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
        let search = Search::new(WorldSize::ONE, 1 << 20);
        let [dim0, flat] = [Layout::Dim0, Layout::Flat]
            .map(|layout| search.candidate(&parameters, layout, 1).unwrap());
        assert!(is_faster(&flat, &dim0) && !is_faster(&dim0, &flat));
    }
}
