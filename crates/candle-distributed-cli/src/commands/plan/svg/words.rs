//! Numbers and names as a drawing shows them.

use candle_distributed::{
    plan::cost::PlanCost,
    types::human::{HumanBytes, HumanCount},
};

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

/// The name of a unit, in at most `n_chars` characters: without its first components, or cut if
/// that is not enough.
///
/// The root unit has no name and is shown as `(root)`.
pub(super) fn unit_name(unit: &str, n_chars: usize) -> String {
    let name = printable(unit);
    let len = name.chars().count();
    if name.is_empty() {
        return String::from("(root)");
    }
    if len <= n_chars {
        return name;
    }
    let room = n_chars.saturating_sub(1);
    let components =
        name.chars().zip(1..len).filter(|&(char, _)| char == '.').map(|(_, start)| start);
    let start = components.into_iter().find(|start| len - start <= room).unwrap_or(len - room);
    format!("…{}", name.chars().skip(start).collect::<String>())
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
        for (n_chars, name) in
            [(14, "model.layers.3"), (13, "…layers.3"), (8, "…3"), (2, "…3"), (1, "…")]
        {
            assert_eq!(unit_name("model.layers.3", n_chars), name);
        }
        assert_eq!(unit_name("abcdefgh", 4), "…fgh");
        assert_eq!(unit_name("", 3), "(root)");
        assert_eq!(unit_name("a\n\u{ffff}ö", 20), "a\\n\\u{ffff}ö");
    }
}
