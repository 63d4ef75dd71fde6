//! Row minima of totally monotone matrices.

use std::ops::Range;

/// Passes each row to `report`, with the column of the least cost among its `candidates` and that
/// cost; ties go to the first column.
///
/// Every row must have a candidate, and neither bound of the candidates may decrease from row to
/// row. The matrix must be totally monotone: no later row has its minimum in an earlier column. The
/// middle row then halves the columns for the rows on both sides, so n rows and m columns take
/// O((n + m) log n) evaluations. (The algorithm of Aggarwal et al., "Geometric applications of a
/// matrix-searching algorithm", 1987, avoids the logarithm.)
pub(crate) fn row_minima<C: Ord>(
    rows: Range<usize>,
    columns: Range<usize>,
    candidates: &impl Fn(usize) -> Range<usize>,
    cost: &impl Fn(usize, usize) -> C,
    report: &mut impl FnMut(usize, usize, C),
) {
    if rows.is_empty() {
        return;
    }
    let row = rows.start.midpoint(rows.end);
    let Range { start, end } = candidates(row);
    let open_columns = start.max(columns.start)..end.min(columns.end);
    let costs = open_columns.map(|column| (cost(row, column), column));
    #[expect(clippy::expect_used, reason = "required of callers, and preserved by monotonicity")]
    let (least, column) = costs.min().expect("every row has a candidate");
    report(row, column, least);
    row_minima(rows.start..row, columns.start..column + 1, candidates, cost, report);
    row_minima(row + 1..rows.end, column..columns.end, candidates, cost, report);
}
