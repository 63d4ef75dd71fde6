//! The table of ranks: what each holds, with a bar for all of it.

use super::{
    columns,
    text::{bar, grouped},
};
use crate::cost::RankCost;

/// Up to so many ranks each have a line; of more, neighbors share one.
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

/// The ranks that share a line: those that hold equally much, or where that makes too many lines,
/// equally many.
fn lines(ranks: &[RankCost]) -> Vec<&[RankCost]> {
    let alike =
        |left: &RankCost, right: &RankCost| ranks.len() > MAX_LINES && bytes(left) == bytes(right);
    let lines: Vec<_> = ranks.chunk_by(alike).collect();
    if lines.len() > MAX_LINES {
        ranks.chunks(ranks.len().div_ceil(MAX_LINES)).collect()
    } else {
        lines
    }
}

/// The line for neighbors: the most that one of them holds.
fn line(neighbors: &[RankCost], largest: u128) -> Vec<String> {
    let first = &neighbors[0];
    let last = &neighbors[neighbors.len() - 1];
    let name = if neighbors.len() == 1 {
        first.rank.to_string()
    } else {
        format!("{}–{}", first.rank, last.rank)
    };
    let most = neighbors.iter().map(bytes).fold([0; 6], |most, bytes| zip(most, bytes, u128::max));
    let all_alike = neighbors.iter().all(|rank| bytes(rank) == most);
    let number = |bytes| if all_alike { grouped(bytes) } else { format!("≤ {}", grouped(bytes)) };
    [vec![name], most.map(number).to_vec(), vec![bar(most_bytes(neighbors), largest)]].concat()
}

#[expect(clippy::expect_used, reason = "a world has a rank, and so has each line")]
fn most_bytes(ranks: &[RankCost]) -> u128 {
    ranks.iter().map(RankCost::total_bytes).max().expect("at least one rank")
}

fn sums(ranks: &[RankCost]) -> Vec<String> {
    let sums = ranks
        .iter()
        .map(bytes)
        .fold([0; 6], |sums, bytes| zip(sums, bytes, |sum, bytes| sum + bytes));
    [vec![String::from("all")], sums.map(grouped).to_vec()].concat()
}

fn zip(left: [u128; 6], right: [u128; 6], join: impl Fn(u128, u128) -> u128) -> [u128; 6] {
    let mut joined = left;
    joined.iter_mut().zip(right).for_each(|(left, right)| *left = join(*left, right));
    joined
}

/// The columns of the table.
fn bytes(rank: &RankCost) -> [u128; 6] {
    let RankCost { param_bytes, storage_bytes, grad_bytes, optimizer_bytes, .. } = *rank;
    let [owned, stored, grad, optimizer] =
        [param_bytes, storage_bytes, grad_bytes, optimizer_bytes].map(u128::from);
    [owned, stored, grad, optimizer, rank.total_bytes(), rank.peak_bytes()]
}
