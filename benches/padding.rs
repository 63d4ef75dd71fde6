//! Padding and waiting of the batcher: figures, not times, and the same on every machine.

#![allow(clippy::print_stdout, reason = "the tables are the result")]

use benches::is_test;
use integration_tests::{
    lengths,
    padding::{repeated_pair_share, tables},
};

/// Number of sequences in each stream that is cut by windows.
const STREAM: u64 = 1_000_000;

fn main() {
    let n = if is_test() { 20_000 } else { STREAM };
    for (name, table) in tables(n) {
        println!("{name}\n{table}\n");
    }
    let share = repeated_pair_share(&lengths::WEB.draw(n), 128, 16_384);
    // A short epoch has fewer windows, so more pairs repeat.
    assert!(n < STREAM || share <= 0.005, "a share of {share} of the pairs repeats");
    println!(
        "pairs of sequences that share a batch again in the next epoch, {n} web lengths: {:.3}%",
        100.0 * share
    );
}
