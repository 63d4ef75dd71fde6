//! Rows filled with sequences.

mod best_fit;
mod in_order;
mod minimum_slack;

pub(crate) use in_order::OpenRows;

use crate::{
    lengths::histogram::{Histogram, Run},
    limits::Row,
};

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
/// search needs fewer. Searches end with the first that needs as few as there can be, or when their
/// choices are used up.
pub(crate) fn minimum_slack(histogram: &Histogram, empty: Row) -> Rows {
    let mut fewest = best_fit(histogram, empty);
    let bound = lower_bound(histogram, empty);
    let of_sequences = minimum_slack::CHOICES_PER_SEQUENCE * histogram.count();
    let mut choices = minimum_slack::CHOICES + of_sequences;
    for max_steps in minimum_slack::MAX_STEPS {
        if fewest.left.len() as u128 <= bound {
            break;
        }
        match minimum_slack::search(histogram, empty, max_steps, &mut choices) {
            Some(rows) if rows.left.len() < fewest.left.len() => fewest = rows,
            Some(_) => {}
            None => break,
        }
    }
    fewest
}

/// How many rows there are if none has room left for tokens, or for sequences: nobody needs fewer.
fn lower_bound(histogram: &Histogram, empty: Row) -> u128 {
    let of_run = |run: &Run| u128::from(run.length) * u128::from(run.count);
    let tokens: u128 = histogram.runs().iter().map(of_run).sum();
    let by_count = histogram.count().div_ceil(empty.sequences);
    tokens.div_ceil(empty.tokens.into()).max(by_count.into())
}
