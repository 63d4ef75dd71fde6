//! Differences between two plans.

use serde::Serialize;

use crate::plan::{PlannedParameter, ShardingPlan};

/// The differences between two plans, possibly of two versions of a model.
///
/// [`Display`](std::fmt::Display) writes one line per difference. Another order of the parameters is
/// none.
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
/// assert_eq!(PlanDiff::new(&old, &old).to_string(), "the plans are the same");
/// # Ok::<(), fsdp_plan::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct PlanDiff<'a> {
    /// Differing properties of the plans: name, old value, new value.
    pub plan: Vec<(&'static str, String, String)>,
    /// Parameters of the old plan alone, in its order.
    pub removed: Vec<&'a PlannedParameter>,
    /// Parameters of the new plan alone, in its order.
    pub added: Vec<&'a PlannedParameter>,
    /// Changed parameters, old and new, in the order of the new plan.
    pub changed: Vec<(&'a PlannedParameter, &'a PlannedParameter)>,
}

impl<'a> PlanDiff<'a> {
    /// Compares `old` with `new`.
    pub fn new(old: &'a ShardingPlan, new: &'a ShardingPlan) -> Self {
        let mut diff = Self {
            plan: changed_properties(old, new),
            removed: Vec::new(),
            added: Vec::new(),
            changed: Vec::new(),
        };
        for old_parameter in old.parameters() {
            if find(new, old_parameter).is_none() {
                diff.removed.push(old_parameter);
            }
        }
        for new_parameter in new.parameters() {
            match find(old, new_parameter) {
                None => diff.added.push(new_parameter),
                Some(same) if same == new_parameter => {}
                Some(old_parameter) => diff.changed.push((old_parameter, new_parameter)),
            }
        }
        diff
    }
}

/// Returns the parameter of `plan` with the name of `parameter`.
fn find<'a>(plan: &'a ShardingPlan, parameter: &PlannedParameter) -> Option<&'a PlannedParameter> {
    let index = plan.index_of(parameter.info().name())?;
    Some(&plan.parameters()[index])
}

fn changed_properties(
    old: &ShardingPlan,
    new: &ShardingPlan,
) -> Vec<(&'static str, String, String)> {
    let mut changed = Vec::new();
    for ((name, old_value), (_, new_value)) in properties(old).into_iter().zip(properties(new)) {
        if old_value != new_value {
            changed.push((name, old_value, new_value));
        }
    }
    changed
}

fn properties(plan: &ShardingPlan) -> [(&'static str, String); 4] {
    let kept_units: Vec<_> =
        plan.units().into_iter().filter(|unit| plan.keeps_gathered(unit)).collect();
    [
        ("strategy", plan.strategy().to_owned()),
        ("world size", plan.world_size().to_string()),
        ("replicas", plan.replicas().to_string()),
        ("kept units", kept_units.join(", ")),
    ]
}
