//! The table of ranks: the memory of each, with a bar of the total.

use super::{
    columns,
    text::{bar, with_separators},
};
use crate::cost::RankCost;

/// Up to this many ranks have a line each; in larger worlds neighbors share lines.
const MAX_LINES: usize = 16;

pub(super) fn table(ranks: &[RankCost]) -> String {
    let largest = most_bytes(ranks);
    let mut rows: Vec<_> =
        lines(ranks).into_iter().map(|neighbors| line(neighbors, largest)).collect();
    rows.push(sums(ranks));
    columns(
        &["rank", "owned bytes", "stored", "gradients", "optimizer", "total", "peak", ""],
        0..7,
        rows,
    )
}

/// Groups the ranks that share a line: neighbors with equal memory, or else groups of equal size.
fn lines(ranks: &[RankCost]) -> Vec<&[RankCost]> {
    if ranks.len() <= MAX_LINES {
        return ranks.chunks(1).collect();
    }
    let equal: Vec<_> = ranks.chunk_by(|left, right| bytes(left) == bytes(right)).collect();
    if equal.len() <= MAX_LINES {
        return equal;
    }
    ranks.chunks(ranks.len().div_ceil(MAX_LINES)).collect()
}

/// Returns the line for neighboring ranks, with the maximum of each column.
fn line(neighbors: &[RankCost], largest: u128) -> Vec<String> {
    let first = &neighbors[0];
    let last = &neighbors[neighbors.len() - 1];
    let name = if neighbors.len() == 1 {
        first.rank.to_string()
    } else {
        format!("{}–{}", first.rank, last.rank)
    };
    let mut maxima = [0; 6];
    for rank in neighbors {
        maxima = combine_columns(maxima, bytes(rank), u128::max);
    }
    let prefix = if neighbors.iter().all(|rank| bytes(rank) == maxima) { "" } else { "≤ " };
    let numbers = maxima.map(|bytes| format!("{prefix}{}", with_separators(bytes)));
    [vec![name], numbers.to_vec(), vec![bar(most_bytes(neighbors), largest)]].concat()
}

#[expect(clippy::expect_used, reason = "a world has at least one rank, and so has each line")]
fn most_bytes(ranks: &[RankCost]) -> u128 {
    ranks.iter().map(RankCost::total_bytes).max().expect("at least one rank")
}

fn sums(ranks: &[RankCost]) -> Vec<String> {
    let mut sums = [0; 6];
    for rank in ranks {
        sums = combine_columns(sums, bytes(rank), |sum, bytes| sum + bytes);
    }
    [vec![String::from("all")], sums.map(with_separators).to_vec()].concat()
}

/// Combines two rows column by column.
fn combine_columns(
    left: [u128; 6],
    right: [u128; 6],
    combine: impl Fn(u128, u128) -> u128,
) -> [u128; 6] {
    std::array::from_fn(|column| combine(left[column], right[column]))
}

/// Returns the numbers of a rank in the order of the columns.
fn bytes(rank: &RankCost) -> [u128; 6] {
    let RankCost { param_bytes, storage_bytes, grad_bytes, optimizer_bytes, .. } = *rank;
    let [owned, stored, grad, optimizer] =
        [param_bytes, storage_bytes, grad_bytes, optimizer_bytes].map(u128::from);
    [owned, stored, grad, optimizer, rank.total_bytes(), rank.peak_bytes()]
}
