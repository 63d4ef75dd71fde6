//! The differences of two plans, line by line.

use core_types::human::Printable;

use super::text;
use crate::{plan::PlannedParameter, report::PlanDiff};

pub(super) fn lines(diff: &PlanDiff<'_>) -> Vec<String> {
    let plan = diff.plan.iter().map(|(what, before, after)| {
        let [before, after] = [before, after].map(|value| Printable(value).to_string());
        format!("{what}: {before} → {after}")
    });
    let removed = diff.removed.iter().map(|parameter| format!("- {}", described(parameter)));
    let added = diff.added.iter().map(|parameter| format!("+ {}", described(parameter)));
    plan.chain(removed).chain(added).chain(diff.changed.iter().map(changed)).collect()
}

fn changed((before, after): &(&PlannedParameter, &PlannedParameter)) -> String {
    let name = Printable(after.info().name());
    if before.info() == after.info() {
        return format!(
            "~ {name}: {} → {}",
            text::cut_words(before.cut()),
            text::cut_words(after.cut())
        );
    }
    format!("~ {name}: {} → {}", properties(before), properties(after))
}

fn described(parameter: &PlannedParameter) -> String {
    format!("{}: {}", Printable(parameter.info().name()), properties(parameter))
}

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
        text::cut_words(parameter.cut())
    )
}
