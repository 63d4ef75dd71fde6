//! Rows filled with sequences.

mod best_fit;
mod in_order;
mod minimum_slack;
mod segments;

pub(crate) use in_order::OpenRows;
pub use segments::Segments;

use crate::{limits::Row, sort::histogram::Histogram};

/// Rows that hold all sequences.
#[derive(Debug)]
pub(crate) struct Rows {
    /// The row of each sequence, from the longest to the shortest.
    pub(crate) row_of: Vec<u32>,
    /// The room that is left in each row.
    pub(crate) left: Vec<Row>,
}

/// Assigns all sequences to rows, best-fit decreasing.
pub(crate) fn best_fit(histogram: &Histogram, empty: Row) -> Rows {
    best_fit::assign(histogram, empty)
}

/// Assigns all sequences to rows, by the search that needs the fewest; those of best fit if no
/// search needs fewer.
pub(crate) fn minimum_slack(histogram: &Histogram, empty: Row) -> Rows {
    let mut fewest = best_fit(histogram, empty);
    for max_steps in minimum_slack::MAX_STEPS {
        let rows = minimum_slack::search(histogram, empty, max_steps);
        if rows.left.len() < fewest.left.len() {
            fewest = rows;
        }
    }
    fewest
}
