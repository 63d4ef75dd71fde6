//! How many threads candle's kernels use.

use std::{env, thread};

/// The environment variables that set the number of threads of candle.
pub(crate) const VARIABLES: [&str; 2] = ["RAYON_NUM_THREADS", "CANDLE_NUM_THREADS"];

/// The number of cores that this process may use, one if the system does not say.
pub(crate) fn cores() -> usize {
    thread::available_parallelism().map_or(1, usize::from)
}

/// Gives each of `devices` virtual devices its share of the cores, unless the user has set it.
///
/// By default candle lets every kernel of every replica spread over all cores, and replicas then
/// wait for each other: with two of them on two cores a training step takes up to four times as
/// long.
///
/// Call it from the main thread before any other thread exists and before candle is first used,
/// which reads these variables.
pub(crate) fn share_cores(devices: usize) {
    let share = (cores() / devices).max(1).to_string();
    for name in VARIABLES {
        if env::var_os(name).is_none() {
            #[expect(unsafe_code, reason = "candle has no other setting for it")]
            // SAFETY: there is no other thread that could read the environment meanwhile.
            unsafe {
                env::set_var(name, &share);
            }
        }
    }
}
