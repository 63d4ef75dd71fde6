//! Cutting lengths that candle counts in `usize`.

use std::ops::Range;

use core_types::{Placement, split};

/// The items of one part of `total`; none if there is no such part.
#[allow(clippy::cast_possible_truncation, reason = "a part of a usize fits one")]
pub(crate) fn balanced(total: usize, part: usize, parts: usize) -> Range<usize> {
    let place = Placement::new(part as u64, parts as u64);
    let range = place.map_or(0..0, |place| split::balanced(total as u64, place));
    range.start as usize..range.end as usize
}
