//! Processor time and peak memory of a bench, for the benches that train.

use std::fs;

use candle_distributed::train;

/// Returns the processor time of this process in seconds, in steps of 10 ms; 0 if unavailable.
#[must_use]
pub fn processor_seconds() -> f64 {
    let stat = fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let after_name = stat.rsplit(')').next().unwrap_or_default();
    let ticks: Vec<f64> =
        after_name.split_whitespace().skip(11).take(2).filter_map(|n| n.parse().ok()).collect();
    ticks.iter().sum::<f64>() / 100.0
}

/// Returns the peak memory of this process in MiB, or 0 if unavailable.
#[must_use]
pub fn peak_mib() -> u64 {
    train::peak_bytes().unwrap_or(0) / (1 << 20)
}
