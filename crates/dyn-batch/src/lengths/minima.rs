//! The smallest entry of each row of a totally monotone matrix.

use std::ops::Range;

/// Finds for each of `rows` the column with the least cost among its `candidates`, the first one of
/// equals.
///
/// Every row must have a candidate, and neither bound of them may fall from a row to the next. The
/// matrix must be totally monotone: no later row has its least entry in an earlier column. Then the
/// row in the middle halves the columns for the rows on both sides of it, so that n rows and m
/// columns take O((n + m) log n) looks (Aggarwal et al., "Geometric applications of a
/// matrix-searching algorithm", 1987, whose own algorithm saves the logarithm).
pub(crate) fn row_minima<C: Ord>(
    rows: Range<usize>,
    columns: Range<usize>,
    candidates: &impl Fn(usize) -> Range<usize>,
    cost: &impl Fn(usize, usize) -> C,
    found: &mut impl FnMut(usize, usize, C),
) {
    if rows.is_empty() {
        return;
    }
    let row = rows.start.midpoint(rows.end);
    let Range { start, end } = candidates(row);
    let open = start.max(columns.start)..end.min(columns.end);
    let costs = open.map(|column| (cost(row, column), column));
    #[expect(clippy::expect_used, reason = "the caller's part, and monotonicity keeps it true")]
    let (least, column) = costs.min().expect("every row has a candidate");
    found(row, column, least);
    row_minima(rows.start..row, columns.start..column + 1, candidates, cost, found);
    row_minima(row + 1..rows.end, column..columns.end, candidates, cost, found);
}
