//! What differs between two plans.

use serde::Serialize;

use crate::plan::{PlannedParameter, ShardingPlan};

/// What differs between two plans of the same or of another version of a model.
///
/// [`Display`](std::fmt::Display) gives one line for each difference, and no line if there is none.
///
/// # Examples
///
/// ```
/// use core_types::WorldSize;
/// use fsdp_plan::{
///     ElemType, ParameterInfo,
///     report::PlanDiff,
///     strategy::{Full, LayerWise, ShardingStrategy},
/// };
///
/// let parameters = [ParameterInfo::new("fc.weight", [10, 4], ElemType::F32)?];
/// let old = Full::default().plan(&parameters, WorldSize::new(4)?)?;
/// let new = LayerWise::default().plan(&parameters, WorldSize::new(2)?)?;
/// assert_eq!(
///     PlanDiff::new(&old, &new).to_string(),
///     "strategy: full → layer-wise\nworld size: 4 → 2\n~ fc.weight: along dim 0 → whole on 0"
/// );
/// assert!(PlanDiff::new(&old, &old).is_empty());
/// # Ok::<(), fsdp_plan::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct PlanDiff<'a> {
    /// Properties of the whole plan that differ: what, before, after.
    pub plan: Vec<(&'static str, String, String)>,
    /// Parameters that only the old plan has, in its order.
    pub removed: Vec<&'a PlannedParameter>,
    /// Parameters that only the new plan has, in its order.
    pub added: Vec<&'a PlannedParameter>,
    /// Parameters that differ in anything, before and after, in the order of the new plan.
    pub changed: Vec<(&'a PlannedParameter, &'a PlannedParameter)>,
}

impl<'a> PlanDiff<'a> {
    /// Compares `old` with `new`.
    pub fn new(old: &'a ShardingPlan, new: &'a ShardingPlan) -> Self {
        let find = |plan: &'a ShardingPlan, parameter: &PlannedParameter| {
            plan.index_of(parameter.info().name()).map(|position| &plan.parameters()[position])
        };
        let pairs = new.parameters().iter().filter_map(|after| Some((find(old, after)?, after)));
        Self {
            plan: properties(old).into_iter().zip(properties(new)).filter_map(differing).collect(),
            removed: old.parameters().iter().filter(|before| find(new, before).is_none()).collect(),
            added: new.parameters().iter().filter(|after| find(old, after).is_none()).collect(),
            changed: pairs.filter(|(before, after)| before != after).collect(),
        }
    }

    /// Whether nothing differs but, at most, the order of the parameters.
    pub fn is_empty(&self) -> bool {
        self.plan.is_empty()
            && self.removed.is_empty()
            && self.added.is_empty()
            && self.changed.is_empty()
    }
}

fn properties(plan: &ShardingPlan) -> [(&'static str, String); 5] {
    let kept_units: Vec<_> =
        plan.units().into_iter().filter(|unit| plan.keeps_gathered(unit)).collect();
    [
        ("strategy", plan.strategy().to_owned()),
        ("world size", plan.world_size().to_string()),
        ("replicas", plan.replicas().to_string()),
        ("kept units", kept_units.join(", ")),
        ("shares", if plan.is_resized() { String::from("resized") } else { String::from("equal") }),
    ]
}

type Property = (&'static str, String);

fn differing((before, after): (Property, Property)) -> Option<(&'static str, String, String)> {
    (before != after).then_some((before.0, before.1, after.1))
}
