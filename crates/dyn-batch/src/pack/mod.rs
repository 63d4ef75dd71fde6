//! Packing of sequences into rows.

mod best_fit;
mod in_order;
mod minimum_slack;

pub(crate) use in_order::OpenRows;

use crate::{
    lengths::histogram::{LengthHistogram, LengthRun},
    limits::{BatchLimits, RowSpace},
};

/// The rows of all sequences.
#[derive(Debug)]
pub(crate) struct PackedRows {
    /// Row of each sequence, from the longest to the shortest.
    pub(crate) row_of: Vec<u32>,
    /// Free space of each row.
    pub(crate) free_space: Vec<RowSpace>,
}

/// Assigns sequences to rows by best-fit decreasing.
pub(crate) fn best_fit(histogram: &LengthHistogram, limits: &BatchLimits) -> PackedRows {
    best_fit::assign(histogram, limits)
}

/// Assigns sequences to rows by the search that needs the fewest rows, or by best fit if no search
/// needs fewer. Searching stops at the lower bound, or when the choices are used up.
pub(crate) fn minimum_slack(histogram: &LengthHistogram, limits: &BatchLimits) -> PackedRows {
    let empty = limits.empty_row();
    let mut fewest = best_fit(histogram, limits);
    let bound = lower_bound(histogram, empty);
    let mut choices =
        minimum_slack::CHOICES + minimum_slack::CHOICES_PER_SEQUENCE * histogram.count();
    for max_steps in minimum_slack::MAX_STEPS {
        if fewest.free_space.len() as u128 <= bound {
            break;
        }
        match minimum_slack::search(histogram, empty, max_steps, &mut choices) {
            Some(rows) if rows.free_space.len() < fewest.free_space.len() => fewest = rows,
            Some(_) => {}
            None => break,
        }
    }
    fewest
}

/// Returns a lower bound of the number of rows, from the totals of tokens and of sequences.
fn lower_bound(histogram: &LengthHistogram, empty: RowSpace) -> u128 {
    let mut tokens = 0;
    for &LengthRun { length, count } in histogram.runs() {
        tokens += u128::from(length) * u128::from(count);
    }
    let by_count = histogram.count().div_ceil(empty.sequences);
    tokens.div_ceil(empty.tokens.into()).max(by_count.into())
}
