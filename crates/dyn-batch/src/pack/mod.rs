//! Rows filled with sequences.

mod best_fit;
mod in_order;
mod minimum_slack;
mod segments;

pub(crate) use in_order::OpenRows;
pub use segments::Segments;

use crate::{config::Packing, sort::histogram::Histogram};

/// The room in a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Row {
    pub(crate) tokens: u64,
    pub(crate) sequences: u64,
}

/// Rows that hold all sequences.
#[derive(Debug)]
pub(crate) struct Rows {
    /// The row of each sequence, from the longest to the shortest.
    pub(crate) row_of: Vec<u32>,
    /// The room that is left in each row.
    pub(crate) left: Vec<Row>,
}

/// Assigns all sequences to rows, each of which is empty before.
pub(crate) fn assign(histogram: &Histogram, row: Row, packing: Packing) -> Rows {
    let best_fit = best_fit::assign(histogram, row);
    let minimum_slack = match packing {
        Packing::MinimumSlack => minimum_slack::assign(histogram, row),
        _ => None,
    };
    minimum_slack.filter(|rows| rows.left.len() < best_fit.left.len()).unwrap_or(best_fit)
}
