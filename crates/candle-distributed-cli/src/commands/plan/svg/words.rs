//! Numbers and names as a drawing shows them.

use candle_distributed::{
    plan::cost::PlanCost,
    types::human::{HumanBytes, HumanCount},
};

use crate::picture::text_width;

/// What the rank that holds the most needs, and whether every rank fits in `budget`.
pub(super) fn verdict(cost: &PlanCost, budget: Option<u64>) -> String {
    let has_activations = cost.ranks.iter().any(|rank| rank.activation_bytes > 0);
    let but = if has_activations { "" } else { ", activations not counted" };
    let most = format!("at most {} per rank at the peak{but}", HumanBytes(cost.peak_bytes()));
    let Some(budget) = budget else { return most };
    match cost.ranks.iter().filter(|rank| rank.peak_bytes() > budget.into()).count() {
        0 => format!("{most}: every rank fits in {}", HumanBytes(budget.into())),
        n_over => {
            let [n_over, n_ranks] =
                [n_over, cost.ranks.len()].map(|number| HumanCount(number as u128));
            let [limit, missing] =
                [u128::from(budget), cost.peak_bytes() - u128::from(budget)].map(HumanBytes);
            format!(
                "{most}: {n_over} of {n_ranks} ranks above the limit of {limit}, by up to {missing}"
            )
        }
    }
}

/// The name of a unit, in at most `room` pixels if it can be: without its first components, or cut
/// if that is not enough.
///
/// The root unit has no name and is shown as `(root)`.
pub(super) fn unit_name(unit: &str, room: i32) -> String {
    /// More letters than there is ever room for.
    const MOST: usize = 64;

    let name = printable(unit);
    if name.is_empty() {
        return String::from("(root)");
    }
    if fits(&name, room) {
        return name;
    }
    let components = name.match_indices('.').map(|(dot, _)| dot + 1);
    let letters = name.char_indices().rev().take(MOST).map(|(start, _)| start);
    let letters: Vec<usize> = letters.collect();
    let starts = components.filter(|start| *start < name.len()).chain(letters.into_iter().rev());
    let mut endings = starts.map(|start| format!("…{}", &name[start..]));
    endings.find(|ending| fits(ending, room)).unwrap_or_else(|| String::from("…"))
}

/// Whether `text` has room in about `width` pixels.
pub(super) fn fits(text: &str, width: i32) -> bool {
    text_width(text) <= width
}

/// The text with characters escaped that break a line or that XML forbids.
fn printable(text: &str) -> String {
    let shown = |char: char| match char {
        char if char.is_control() || matches!(char, '\u{fffe}' | '\u{ffff}') => {
            char.escape_default().to_string()
        }
        char => char.to_string(),
    };
    text.chars().map(shown).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_names_lose_their_first_components() {
        for (room, name) in
            [(112, "model.layers.3"), (80, "…layers.3"), (30, "…3"), (22, "…3"), (14, "…")]
        {
            assert_eq!(unit_name("model.layers.3", room), name);
        }
        assert_eq!(unit_name("abcdefgh", 36), "…fgh");
        assert_eq!(unit_name("a.", 12), "…");
        assert_eq!(unit_name("", 3), "(root)");
        assert_eq!(unit_name("a\n\u{ffff}ö", 200), "a\\n\\u{ffff}ö");
        assert_eq!(unit_name(&"é".repeat(300), 62), "…éééééé");
    }
}
