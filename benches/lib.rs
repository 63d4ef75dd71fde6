//! What benches that train say of their process. This package exists for its benches.

use std::fs;

use candle_distributed::train;

/// Processor time of this process, in seconds; its clock ticks a hundred times a second. 0 where the
/// system does not say.
#[must_use]
pub fn processor_seconds() -> f64 {
    let stat = fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let after_name = stat.rsplit(')').next().unwrap_or_default();
    let ticks: Vec<f64> =
        after_name.split_whitespace().skip(11).take(2).filter_map(|n| n.parse().ok()).collect();
    ticks.iter().sum::<f64>() / 100.0
}

/// The most memory that this process has had, in MiB. 0 where the system does not say.
#[must_use]
pub fn peak_mib() -> u64 {
    train::peak_bytes().unwrap_or(0) / (1 << 20)
}
