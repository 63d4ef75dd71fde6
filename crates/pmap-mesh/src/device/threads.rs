//! The number of threads that candle's kernels use.
//!
//! candle has two thread pools, which all slots of a process share. Only environment variables set
//! their sizes. candle reads `RAYON_NUM_THREADS` at every matrix product; if the variable is unset,
//! candle reads the machine's list of processors, which takes 20 µs. It reads `CANDLE_NUM_THREADS`
//! once, at the first large elementwise operation. This second pool serves one slot at a time; if
//! its size is 1, candle does not use it, and each slot computes in its own thread. A thread of this
//! pool spins after each operation, up to `CANDLE_BARRIER_POOL_SPIN_LIMIT` times, and takes a core from
//! kernels in the first pool meanwhile.

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

/// The environment variables that set the sizes of candle's thread pools.
pub const THREAD_VARIABLES: [&str; 2] = ["RAYON_NUM_THREADS", "CANDLE_NUM_THREADS"];

/// The environment variable with the number of times that an idle thread of candle's elementwise pool
/// spins before it sleeps.
const SPIN_VARIABLE: &str = "CANDLE_BARRIER_POOL_SPIN_LIMIT";

/// The limit that [`init_threads`] sets; a thread reaches it within tens of microseconds. With candle's
/// own limit, 25,000, a training step of fused operations on one slot with two cores takes 5 % longer (an
/// AMD EPYC), and a step of candle's operations equally long.
const SPIN_LIMIT: &str = "1000";

/// Gives each of `slots` slots on this machine's processor an equal share of the cores, at least
/// one core. Call this function in the first line of `main`.
///
/// Without this call, candle lets the kernels of every slot use all cores, and slots wait for each
/// other: a training step on two virtual devices takes up to 2.3 times as long. For a mesh in one
/// process, `slots` is the size of the mesh. For a mesh of several processes, it is the number of
/// processes that a launcher starts on this machine. A program that computes only on GPUs does not
/// need this call.
///
/// candle takes its thread counts from environment variables, so this function sets each of
/// [`THREAD_VARIABLES`] that is unset; a value set by the user stays. If it sets one of them, it also
/// sets `CANDLE_BARRIER_POOL_SPIN_LIMIT` to 1000, unless that is set, so that candle's idle threads
/// leave the cores to other kernels. Setting a variable is sound only while no other thread can read
/// the environment, so the call fails if there is another thread. Threads are counted on Linux,
/// Android, macOS, iOS, FreeBSD and AIX. On Windows threads are not counted, because the environment
/// may be changed at any time. On other systems the call fails: set the variables before the program
/// starts.
///
/// # Errors
///
/// [`MeshError::Size`] if `slots` is 0. If a variable is unset, [`MeshError::Threads`] if the process
/// has a second thread (a test, which runs in parallel with others, or a program in which candle has
/// started its pools), or if threads cannot be counted.
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
///     assert!(std::env::var_os("CANDLE_BARRIER_POOL_SPIN_LIMIT").is_some());
///     Ok(())
/// }
/// ```
pub fn init_threads(slots: usize) -> Result<()> {
    if slots == 0 {
        return Err(MeshError::Size { count: 0, max: MAX_DEVICES }.into());
    }
    // If the number of cores is unknown, use 1, which is valid on every machine.
    let cores = thread::available_parallelism().map_or(1, usize::from);
    let share = (cores / slots).max(1).to_string();
    let values = missing_values(&share, |name| env::var_os(name).is_some());
    if values.is_empty() {
        return Ok(());
    }
    check_single_thread()?;
    for (name, value) in values {
        #[expect(unsafe_code, reason = "candle has no other setting for its thread counts")]
        // SAFETY: The check above found no other thread in this process, so no thread can start one
        // or read the environment here. On Windows any thread may set variables.
        unsafe {
            env::set_var(name, value);
        }
    }
    Ok(())
}

/// Returns the variables to set, and their values: none if the user has set both thread counts.
fn missing_values(share: &str, is_set: impl Fn(&str) -> bool) -> Vec<(&'static str, &str)> {
    if THREAD_VARIABLES.into_iter().all(&is_set) {
        return Vec::new();
    }
    let all = THREAD_VARIABLES.map(|name| (name, share)).into_iter();
    all.chain([(SPIN_VARIABLE, SPIN_LIMIT)]).filter(|(name, _)| !is_set(name)).collect()
}

/// Rejects a process that has a second thread, or whose threads cannot be counted.
fn check_single_thread() -> Result<(), MeshError> {
    if cfg!(windows) {
        return Ok(());
    }
    match num_threads::num_threads().map(usize::from) {
        Some(1) => Ok(()),
        Some(threads) => Err(threads_error(&format!(
            "while the process has {threads} threads: call `init_threads` in the first line of `main`, or"
        ))),
        None => Err(threads_error("safely on this system:")),
    }
}

fn threads_error(reason: &str) -> MeshError {
    let [rayon, candle] = THREAD_VARIABLES;
    MeshError::Threads { reason: format!("{reason} set {rayon} and {candle}") }
}

/// Returns true if the slots of a process compete for threads, given the devices of the process and
/// the number of slots in the mesh.
///
/// Returns true only for a mesh in one process. Several processes have separate pools and may
/// compete for cores, but only the launcher knows how many of them run on this machine.
pub(crate) fn compete_for_threads(devices: &[Device], slots: usize) -> bool {
    slots > 1 && devices.len() == slots && devices.iter().all(Device::is_cpu)
}

/// Warns once, on standard error, that `slots` slots on one processor will wait for each other,
/// unless both [`THREAD_VARIABLES`] are set.
pub(crate) fn warn_unless_threads_are_set(slots: usize) {
    static ONCE: Once = Once::new();
    if THREAD_VARIABLES.into_iter().all(|name| env::var_os(name).is_some()) {
        return;
    }
    ONCE.call_once(|| {
        let [rayon, candle] = THREAD_VARIABLES;
        // If standard error is closed, only the warning is lost.
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
    fn values_of_the_user_stay() {
        let [rayon, candle] = THREAD_VARIABLES;
        let spin = (SPIN_VARIABLE, SPIN_LIMIT);
        let missing = |set: &[&str]| missing_values("3", |name| set.contains(&name));
        assert_eq!(missing(&[]), [(rayon, "3"), (candle, "3"), spin]);
        assert_eq!(missing(&[rayon]), [(candle, "3"), spin]);
        assert_eq!(missing(&[candle, SPIN_VARIABLE]), [(rayon, "3")]);
        assert_eq!(missing(&[rayon, candle]), []);
    }

    #[test]
    fn slots_of_one_process_compete() {
        let two = [Device::Cpu, Device::Cpu];
        assert!(compete_for_threads(&two, 2));
        assert!(!compete_for_threads(&two[..1], 1));
        assert!(!compete_for_threads(&two[..1], 2));
        assert!(!compete_for_threads(&two, 4));
    }
}
