//! Balanced splits of `usize` lengths.

use std::ops::Range;

use core_types::{Placement, split};

/// Returns the items of part number `part` of `parts`. Sizes differ by at most one.
///
/// # Panics
///
/// If `part` is not below `parts`.
#[expect(clippy::cast_possible_truncation, reason = "the bounds of a part are at most `total`")]
#[expect(clippy::expect_used, reason = "parts are the ranks of a group or the slots of a mesh")]
pub(crate) fn balanced(total: usize, part: usize, parts: usize) -> Range<usize> {
    let place = Placement::new(part as u64, parts as u64).expect("the part is one of the parts");
    let Range { start, end } = split::balanced(total as u64, place);
    start as usize..end as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_parts_are_larger() {
        assert_eq!([0, 1, 2].map(|part| balanced(8, part, 3)), [0..3, 3..6, 6..8]);
        assert_eq!([0, 1, 2].map(|part| balanced(1, part, 3)), [0..1, 1..1, 1..1]);
    }
}
