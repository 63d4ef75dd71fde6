//! Text of the differences between two plans.

use core_types::human::Printable;

use super::text;
use crate::{plan::PlannedParameter, report::PlanDiff};

/// Returns a line per difference.
pub(super) fn lines(diff: &PlanDiff<'_>) -> Vec<String> {
    let mut lines = Vec::new();
    for (name, old, new) in &diff.plan {
        lines.push(format!("{name}: {} → {}", Printable(old), Printable(new)));
    }
    for parameter in &diff.removed {
        lines.push(format!("- {}", describe(parameter)));
    }
    for parameter in &diff.added {
        lines.push(format!("+ {}", describe(parameter)));
    }
    for (old, new) in &diff.changed {
        lines.push(describe_change(old, new));
    }
    lines
}

/// Describes a changed parameter: its cuts, or all properties if more than the cut has changed.
fn describe_change(old: &PlannedParameter, new: &PlannedParameter) -> String {
    let name = Printable(new.info().name());
    if old.info() == new.info() {
        return format!("~ {name}: {} → {}", text::cut_text(old.cut()), text::cut_text(new.cut()));
    }
    format!("~ {name}: {} → {}", properties(old), properties(new))
}

fn describe(parameter: &PlannedParameter) -> String {
    format!("{}: {}", Printable(parameter.info().name()), properties(parameter))
}

/// Describes shape, dtype, unit and cut of a parameter.
fn properties(parameter: &PlannedParameter) -> String {
    let info = parameter.info();
    let unit = if info.unit().is_empty() {
        String::new()
    } else {
        format!(" in {}", Printable(info.unit()))
    };
    let frozen = if info.requires_grad() { "" } else { " frozen" };
    format!(
        "{:?} {}{unit}{frozen}, {}",
        info.shape(),
        info.dtype(),
        text::cut_text(parameter.cut())
    )
}
