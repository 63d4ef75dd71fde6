//! The table of ranks: what each holds, with a bar for all of it.

use super::{
    columns,
    text::{bar, grouped},
};
use crate::RankCost;

/// Up to so many ranks each have a line; of more, neighbors that hold equally much share one.
const MAX_LINES: usize = 16;

pub(super) fn table(ranks: &[RankCost]) -> String {
    let largest = ranks.iter().map(RankCost::total_bytes).max().unwrap_or(0);
    let alike = |left: &RankCost, right: &RankCost| ranks.len() > MAX_LINES && bytes(left) == bytes(right);
    let mut rows: Vec<_> = ranks.chunk_by(alike).map(|alike| line(alike, largest)).collect();
    rows.push(sums(ranks));
    columns(&["rank", "owned bytes", "stored", "gradients", "optimizer", "total", ""], 0..6, rows)
}

/// The line for neighbors that hold equally much: what each of them holds.
fn line(alike: &[RankCost], largest: u128) -> Vec<String> {
    let ([first, ..], [.., last]) = (alike, alike) else { return Vec::new() };
    let name = if alike.len() == 1 { first.rank.to_string() } else { format!("{}–{}", first.rank, last.rank) };
    [vec![name], bytes(first).map(grouped).to_vec(), vec![bar(first.total_bytes(), largest)]].concat()
}

fn sums(ranks: &[RankCost]) -> Vec<String> {
    let sums = ranks.iter().map(bytes).fold([0; 5], |mut sums, bytes| {
        sums.iter_mut().zip(bytes).for_each(|(sum, bytes)| *sum += bytes);
        sums
    });
    [vec![String::from("all")], sums.map(grouped).to_vec()].concat()
}

/// The columns of the table.
fn bytes(rank: &RankCost) -> [u128; 5] {
    let RankCost { param_bytes, storage_bytes, grad_bytes, optimizer_bytes, .. } = *rank;
    let [owned, stored, grad, optimizer] = [param_bytes, storage_bytes, grad_bytes, optimizer_bytes].map(u128::from);
    [owned, stored, grad, optimizer, rank.total_bytes()]
}
