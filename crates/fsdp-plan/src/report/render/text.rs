//! Text forms of numbers and cuts.

use core_types::human::HumanCount;

use crate::cut::Cut;

/// Width of the longest bar.
const BAR_WIDTH: u128 = 20;

/// Formats a number with separators: `16,060,522,496`.
pub(super) fn with_separators(number: u128) -> String {
    HumanCount(number).to_string()
}

/// Formats a number with its noun: `1 rank`, `8 ranks`.
pub(super) fn with_noun(number: u128, noun: &str) -> String {
    HumanCount(number).with_noun(noun)
}

/// Draws a bar for `part` on the scale of `largest`, rounded.
pub(super) fn bar(part: u128, largest: u128) -> String {
    if largest == 0 {
        return String::new();
    }
    let width = (part * BAR_WIDTH + largest / 2) / largest;
    (0..width).map(|_| '█').collect()
}

/// Describes a cut in a few words.
pub(super) fn cut_text(cut: Cut) -> String {
    match cut {
        Cut::Dim0 => String::from("along dim 0"),
        Cut::Flat { offset, unit_numel } => flat("flat", offset, unit_numel),
        Cut::FlatAligned { offset, unit_numel } => flat("flat and aligned", offset, unit_numel),
        Cut::Ragged { offset, unit_bytes, granule, .. } => {
            let granule = with_noun(granule.into(), "byte");
            format!(
                "ragged at granules of {granule}, from byte {} of {}",
                with_separators(offset.into()),
                with_separators(unit_bytes.into())
            )
        }
        Cut::Wrapped { offset, total_bytes } => {
            format!(
                "wrapped, from byte {} of {}",
                with_separators(offset.into()),
                with_separators(total_bytes.into())
            )
        }
        Cut::Whole { owner } => format!("whole on {owner}"),
        Cut::Replicated => String::from("a copy on every rank"),
        Cut::Tied => String::from("tied, stored under another name"),
    }
}

fn flat(how: &str, offset: u64, unit_numel: u64) -> String {
    format!(
        "{how}, from element {} of {}",
        with_separators(offset.into()),
        with_separators(unit_numel.into())
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bars_are_rounded() {
        let width = |part, largest| bar(part, largest).chars().count();
        assert_eq!([width(0, 0), width(1, 100), width(3, 100), width(100, 100)], [0, 0, 1, 20]);
    }
}
