//! How little padding is left, and how much the ranks wait: figures, not times. They are the same
//! on every machine.

#![allow(clippy::print_stdout, reason = "its tables are its result")]

use integration_tests::{
    lengths,
    padding::{pairs_met_again, tables},
};

/// The length of the streams that are cut by windows.
const STREAM: u64 = 1_000_000;

fn main() {
    // `cargo test --benches` only wants to know whether it runs.
    let n = if std::env::args().any(|arg| arg == "--test") { 20_000 } else { STREAM };
    for (name, table) in tables(n) {
        println!("{name}\n{table}\n");
    }
    let share = pairs_met_again(&lengths::WEB.draw(n), 128, 16_384);
    // A smaller epoch has fewer windows, whose sequences meet more often.
    assert!(n < STREAM || share <= 0.005, "{share} of the pairs meet again");
    println!(
        "pairs of sequences that share a batch again in the next epoch, {n} web lengths: {:.3}%",
        100.0 * share
    );
}
