//! What benches share: their length in tests, and for training steps a mesh and a line of results.

#![allow(clippy::print_stdout, reason = "the line is the result")]

use std::{env, error, fs, time::Instant};

#[cfg(feature = "mpi")]
use candle_core::Device;
#[cfg(feature = "mpi")]
use candle_distributed::types::LaunchEnv;
use candle_distributed::{
    mesh::{DeviceMesh, init_threads, keep_freed_memory},
    train,
};

/// A result of a bench.
pub type Outcome<T> = Result<T, Box<dyn error::Error>>;

/// Returns true unless `cargo bench` started this program. Tests run each bench once, on small inputs.
#[must_use]
pub fn is_test() -> bool {
    !env::args().any(|arg| arg == "--bench")
}

/// Returns `n` items for a bench, a hundredth of them in a test.
#[must_use]
pub fn n_items(n: u64) -> u64 {
    if is_test() { n / 100 } else { n }
}

/// Returns a mesh of `slots` virtual CPU devices, which share the cores. With the feature `mpi`, a
/// launcher starts one process for each slot.
///
/// # Errors
///
/// The errors of opening a mesh.
pub fn open_mesh(slots: usize) -> Outcome<DeviceMesh> {
    keep_freed_memory();
    init_threads(slots)?;
    let mesh = DeviceMesh::builder().axis(DeviceMesh::AXIS, slots);
    #[cfg(feature = "mpi")]
    if LaunchEnv::from_env()?.is_some() {
        return Ok(mesh.mpi(Device::Cpu)?);
    }
    Ok(mesh.cpu()?)
}

/// Runs training steps and prints a line: minimum and median time of a step after a quarter of the
/// steps, processor time per step, peak memory, the part of it above `base_mib`, and the losses of the
/// first two steps and the last. The memory of several processes is their sum.
///
/// # Errors
///
/// The errors of a step, and of summing over processes.
///
/// # Panics
///
/// Panics if the loss did not fall.
pub fn time_steps(
    name: &str,
    mesh: &DeviceMesh,
    base_mib: u64,
    n_steps: usize,
    mut step: impl FnMut() -> Outcome<f64>,
) -> Outcome<()> {
    let (mut times, mut losses) = (Vec::new(), Vec::new());
    let warm_up = n_steps / 4;
    let mut processor = 0.0;
    for number in 0..n_steps {
        if number == warm_up {
            processor = processor_seconds();
        }
        let start = Instant::now();
        losses.push(step()?);
        times.push(start.elapsed().as_secs_f64() * 1e3);
    }
    let processor = (processor_seconds() - processor) / (n_steps - warm_up) as f64 * 1e3;
    let mut times = times.split_off(warm_up);
    times.sort_by(f64::total_cmp);
    let memory = [peak_mib(), peak_mib() - base_mib];
    let n_slots = mesh.devices().len();
    // The slots of a process return the same numbers.
    let all = mesh.gather_numbers(&vec![memory; n_slots])?;
    let sum = |index: usize| all.iter().step_by(n_slots).map(|memory| memory[index]).sum::<u64>();
    if !mesh.is_first_process() {
        return Ok(());
    }
    let last = losses[losses.len() - 1];
    println!(
        "{name}: {:.1} / {:.1} ms, {processor:.0} ms of processor, {} MiB, {} above the start, \
         losses {:?}",
        times[0],
        times[times.len() / 2],
        sum(0),
        sum(1),
        [losses[0], losses[1], last],
    );
    assert!(last < losses[0], "the loss did not fall");
    Ok(())
}

/// Returns the processor time of this process in seconds, in steps of 10 ms; 0 if unavailable.
fn processor_seconds() -> f64 {
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
