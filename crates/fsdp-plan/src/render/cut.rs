//! Cuts in words.

use super::text::{counted, grouped};
use crate::cut::Cut;

/// What a cut does, in a few words.
pub(super) fn words(cut: Cut) -> String {
    match cut {
        Cut::Dim0 => String::from("along dim 0"),
        Cut::Flat { offset, unit_numel } => flat("flat", offset, unit_numel),
        Cut::FlatAligned { offset, unit_numel } => flat("flat and aligned", offset, unit_numel),
        Cut::Ragged { offset, unit_bytes, granule, .. } => {
            let granule = counted(granule.into(), "byte");
            format!(
                "ragged at granules of {granule}, from byte {} of {}",
                grouped(offset.into()),
                grouped(unit_bytes.into())
            )
        }
        Cut::Wrapped { offset, total_bytes } => {
            format!(
                "wrapped, from byte {} of {}",
                grouped(offset.into()),
                grouped(total_bytes.into())
            )
        }
        Cut::Whole { owner } => format!("whole on {owner}"),
        Cut::Replicated => String::from("a copy on every rank"),
        Cut::Tied => String::from("tied, so that nothing is held under this name"),
    }
}

fn flat(how: &str, offset: u64, unit_numel: u64) -> String {
    format!("{how}, from element {} of {}", grouped(offset.into()), grouped(unit_numel.into()))
}
