//! The cheapest plan that fits a budget of memory.

use core_types::WorldSize;
use serde::Serialize;

use crate::{
    cost::{CostModel, Links, PlanCost, max_kept_units},
    error::{Error, ParameterError, Result},
    param::ParameterInfo,
    plan::ShardingPlan,
    strategy::{Full, Hsdp, Layout, ShardingStrategy},
};

/// A search for the plan whose collectives take the least time, among those that fit into the
/// memory of each device.
///
/// It tries every layout of a list with every size of the shard group that divides the world, from
/// pure data parallelism (a group of one) to full sharding, and keeps as many of the last units
/// gathered between forward and backward pass as there is room for: those are needed again first.
/// Whether a plan fits is decided by [`PlanCost::peak_bytes`].
///
/// # Determinism
///
/// Of plans that take equally long the one with less memory wins, then the smaller group, then the
/// layout that comes first.
///
/// # Examples
///
/// ```
/// use core_types::WorldSize;
/// use fsdp_plan::{
///     ElemType, ParameterInfo,
///     search::{Outcome, Search},
/// };
///
/// let parameters: Vec<_> = (0..4)
///     .map(|block| ParameterInfo::new(format!("h.{block}.w"), [1024, 1024], ElemType::F32))
///     .collect::<Result<_, _>>()?;
/// // Weights, gradients and Adam's moments take 64 MiB. Each device of two nodes of eight has 48.
/// let search = Search::new(WorldSize::new(16)?, 48 << 20);
/// let Outcome::Fits(found) = search.run(&parameters)? else { panic!("it fits") };
/// assert_eq!(found.plan.shard_group().as_u64(), 8); // parameters are gathered within a node
/// assert!(found.plan.keeps_gathered("h.0")); // and only once a step
///
/// let Outcome::Missing { bytes, .. } =
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

/// What a [`Search`] finds.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Outcome {
    /// The cheapest plan that fits.
    Fits(Candidate),
    /// Nothing fits.
    Missing {
        /// The plan that needs the least memory.
        smallest: Candidate,
        /// What the device that holds the most lacks.
        bytes: u64,
    },
}

impl Outcome {
    /// The plan that fits, or else the one that needs the least memory.
    pub fn into_candidate(self) -> Candidate {
        match self {
            Self::Fits(candidate) | Self::Missing { smallest: candidate, .. } => candidate,
        }
    }
}

/// A plan and its cost.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Candidate {
    /// The plan.
    pub plan: ShardingPlan,
    /// What it costs.
    pub cost: PlanCost,
}

impl Search {
    /// Searches for `world_size` devices on which `budget_bytes` each are left for parameters,
    /// gradients and optimizer: what a device has, less activations and what its drivers take.
    pub fn new(world_size: WorldSize, budget_bytes: u64) -> Self {
        let model = CostModel::default().with_links(Links::H100);
        Self { world_size, budget_bytes, model }
    }

    /// Sets what plans cost. Default: that of [`CostModel`] over [`Links::H100`], which are also
    /// taken for a model without links.
    #[must_use]
    pub fn with_model(mut self, model: CostModel) -> Self {
        self.model = if model.links().is_some() { model } else { model.with_links(Links::H100) };
        self
    }

    /// Finds the cheapest plan that fits.
    ///
    /// # Complexity
    ///
    /// One plan and one cost for each layout and divisor of the world size, and two more costs for
    /// each that fits.
    ///
    /// # Errors
    ///
    /// What stands in the way of every plan: the error of the last layout, if none of them can be
    /// planned; [`Error::TotalTooLarge`] if the bytes that a
    /// device lacks do not fit into 64 bits.
    pub fn run(&self, parameters: &[ParameterInfo]) -> Result<Outcome> {
        let mut found: Option<Candidate> = None;
        let mut smallest: Option<Candidate> = None;
        // Replaced if no plan is found, since there are layouts to try.
        let mut error = Error::Parameters(ParameterError::Empty);
        let world = self.world_size.as_u64();
        for group in (1..=world).filter(|group| world.is_multiple_of(*group)) {
            for layout in [Layout::Dim0, Layout::ROWS] {
                match self.candidate(parameters, layout, world / group) {
                    Ok(candidate) if self.fits(&candidate) => {
                        keep(&mut found, self.keep_units(candidate)?, rank_by_time);
                    }
                    Ok(candidate) => keep(&mut smallest, candidate, rank_by_memory),
                    Err(failure) => error = failure,
                }
            }
        }
        match (found, smallest) {
            (Some(candidate), _) => Ok(Outcome::Fits(candidate)),
            (None, Some(smallest)) => {
                let missing = smallest.cost.peak_bytes() - u128::from(self.budget_bytes);
                let too_large = |_| Error::TotalTooLarge { what: "the bytes that a device lacks" };
                let bytes = u64::try_from(missing).map_err(too_large)?;
                Ok(Outcome::Missing { smallest, bytes })
            }
            (None, None) => Err(error),
        }
    }

    fn candidate(
        &self,
        parameters: &[ParameterInfo],
        layout: Layout,
        replicas: u64,
    ) -> Result<Candidate> {
        let plan = Hsdp::new(Full::new(layout), replicas).plan(parameters, self.world_size)?;
        let cost = plan.cost(&self.model)?;
        Ok(Candidate { plan, cost })
    }

    fn fits(&self, candidate: &Candidate) -> bool {
        candidate.cost.peak_bytes() <= self.budget_bytes.into()
    }

    /// Keeps as many of the last units gathered as fit.
    fn keep_units(&self, candidate: Candidate) -> Result<Candidate> {
        let n_kept = max_kept_units(&candidate.plan, &self.model, self.budget_bytes);
        if n_kept == 0 {
            return Ok(candidate);
        }
        let plan = candidate.plan;
        let units: Vec<String> =
            plan.units().into_iter().rev().take(n_kept).map(str::to_owned).collect();
        let plan = plan.with_kept_units(units)?;
        let cost = plan.cost(&self.model)?;
        Ok(Candidate { plan, cost })
    }
}

/// Replaces `best` by a candidate that ranks before it.
fn keep(
    best: &mut Option<Candidate>,
    candidate: Candidate,
    is_before: fn(&Candidate, &Candidate) -> bool,
) {
    if best.as_ref().is_none_or(|best| is_before(&candidate, best)) {
        *best = Some(candidate);
    }
}

fn rank_by_time(candidate: &Candidate, best: &Candidate) -> bool {
    #[expect(clippy::expect_used, reason = "`with_model` adds links to a model without")]
    let seconds = |of: &Candidate| of.cost.step_seconds.expect("a search has links");
    let key = |of: &Candidate| (seconds(of), of.cost.peak_bytes());
    key(candidate) < key(best)
}

fn rank_by_memory(candidate: &Candidate, best: &Candidate) -> bool {
    candidate.cost.peak_bytes() < best.cost.peak_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::elem::ElemType;

    #[test]
    fn equally_fast_plans_are_ranked_by_memory() {
        // A single rank sends nothing. Adam counts steps once per tensor, and a flat unit is one tensor.
        let parameters =
            ["a", "b"].map(|name| ParameterInfo::new(name, [4], ElemType::F32).unwrap());
        let search = Search::new(WorldSize::ONE, 1 << 20);
        let [dim0, flat] = [Layout::Dim0, Layout::Flat]
            .map(|layout| search.candidate(&parameters, layout, 1).unwrap());
        assert!(rank_by_time(&flat, &dim0) && !rank_by_time(&dim0, &flat));
    }
}
