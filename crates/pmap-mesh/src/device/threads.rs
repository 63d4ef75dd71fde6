//! How many threads candle's kernels use.
//!
//! candle has two pools that all slots of a process share, and asks the environment alone how large
//! they may be: `RAYON_NUM_THREADS` at every matrix product (without it, it reads the machine's
//! list of processors, which takes 20 µs), and `CANDLE_NUM_THREADS` once, when the first large
//! tensor is worked on element by element. That second pool works for one slot at a time; of one
//! thread, it is none, and each slot works by itself.

use std::{
    env,
    io::{self, Write},
    sync::Once,
    thread,
};

use candle_core::Device;

use crate::{
    error::{MeshError, Result},
    grid::MAX_DEVICES,
};

/// The environment variables that say how many threads candle's kernels use.
pub const THREAD_VARIABLES: [&str; 2] = ["RAYON_NUM_THREADS", "CANDLE_NUM_THREADS"];

/// Gives each of `slots` slots on this machine's processor its share of the cores, at least one;
/// for the first line of `main`.
///
/// Otherwise candle lets the kernels of every slot spread over all cores, and slots wait for each
/// other: a training step on two virtual devices has been seen to take 2.3 times as long. `slots`
/// are those of a mesh of one process, or the processes that a launcher starts on this machine. A
/// program that computes on GPUs only does not need it.
///
/// candle takes its numbers of threads from environment variables, so this sets those of
/// [`THREAD_VARIABLES`] that are not set yet; what the user has set stays. That is sound only as
/// long as no other thread can read the environment: if there is one, it is refused. Threads are
/// counted on Linux, Android, macOS, iOS, FreeBSD and AIX; on Windows they need not be, since its
/// environment may be changed at any time; on other systems it is refused, and the variables must
/// be set before the program starts.
///
/// # Errors
///
/// [`MeshError::Size`] for no slots. If a variable is not set: [`MeshError::ThreadsRun`] if the
/// process has a second thread, such as a test, which runs beside others, or any program in which
/// candle has computed something large; and [`MeshError::ThreadsUnknown`] where they cannot be
/// counted.
///
/// # Examples
///
/// ```standalone_crate
/// use pmap_mesh::DeviceMesh;
///
/// fn main() -> Result<(), Box<dyn std::error::Error>> {
///     pmap_mesh::init_threads(2)?;
///     let mesh = DeviceMesh::cpu(2)?;
///     assert_eq!(mesh.len(), 2);
///     assert!(std::env::var_os("CANDLE_NUM_THREADS").is_some());
///     Ok(())
/// }
/// ```
pub fn init_threads(slots: usize) -> Result<()> {
    if slots == 0 {
        return Err(MeshError::Size { count: 0, max: MAX_DEVICES }.into());
    }
    let unset: Vec<&str> =
        THREAD_VARIABLES.into_iter().filter(|name| env::var_os(name).is_none()).collect();
    if unset.is_empty() {
        return Ok(());
    }
    refuse_other_threads()?;
    // Where the system does not say how many there are, one is right on every machine.
    let cores = thread::available_parallelism().map_or(1, usize::from);
    let share = (cores / slots).max(1).to_string();
    for name in unset {
        #[expect(unsafe_code, reason = "candle has no other setting for it")]
        // SAFETY: This thread is the only one of the process, as was just checked, so nobody starts
        // another one or reads the environment meanwhile. On Windows any thread may.
        unsafe {
            env::set_var(name, &share);
        }
    }
    Ok(())
}

fn refuse_other_threads() -> Result<(), MeshError> {
    if cfg!(windows) {
        return Ok(());
    }
    match num_threads::num_threads().map(usize::from) {
        Some(1) => Ok(()),
        Some(threads) => Err(MeshError::ThreadsRun { threads }),
        None => Err(MeshError::ThreadsUnknown),
    }
}

/// Whether slots of a process with these devices take threads from each other, of a mesh of so
/// many.
///
/// Over several processes each has pools of its own, and how many of them run on this machine only
/// their launcher knows.
pub(crate) fn are_shared(devices: &[Device], slots: usize) -> bool {
    slots > 1 && devices.len() == slots && devices.iter().all(Device::is_cpu)
}

/// Says once, on standard error, that `slots` slots on a processor will wait for each other.
pub(crate) fn warn_if_shared(slots: usize) {
    static ONCE: Once = Once::new();
    if THREAD_VARIABLES.into_iter().all(|name| env::var_os(name).is_some()) {
        return;
    }
    ONCE.call_once(|| {
        let [rayon, candle] = THREAD_VARIABLES;
        // If nobody reads it, nothing is lost.
        drop(writeln!(
            io::stderr(),
            "warning: {slots} slots on one processor share candle's threads and wait for each \
             other, a step may take twice as long: call `pmap_mesh::init_threads({slots})` in the \
             first line of `main`, or set {rayon} and {candle}"
        ));
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_of_one_process_share_threads_and_processes_do_not() {
        let two = [Device::Cpu, Device::Cpu];
        assert!(are_shared(&two, 2));
        assert!(!are_shared(&two[..1], 1));
        assert!(!are_shared(&two[..1], 2));
        assert!(!are_shared(&two, 4));
    }
}
