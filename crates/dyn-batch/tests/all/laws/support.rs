//! Inputs and sums shared by several laws.

use dyn_batch::Cost;

/// Returns every list of up to `max_len` lengths from `alphabet`.
pub(crate) fn all_lengths(alphabet: &[u64], max_len: usize) -> Vec<Vec<u64>> {
    let mut all = vec![Vec::new()];
    let mut n_shorter = 0;
    for _ in 0..max_len {
        let append = |lengths: &Vec<u64>| {
            alphabet.iter().map(|&last| [lengths.as_slice(), &[last]].concat()).collect()
        };
        let longer: Vec<Vec<_>> = all[n_shorter..].iter().map(append).collect();
        n_shorter = all.len();
        all.extend(longer.concat());
    }
    all
}

/// Returns the cost of a sequence of this length.
pub(crate) fn cost_of(length: u64, cost: Cost) -> u64 {
    cost.per_sequence + cost.per_token * length + cost.per_token_squared * length * length
}
