//! The signals that stop a run in order.

use std::sync::{Arc, atomic::AtomicBool};

#[cfg(unix)]
use signal_hook::consts::SIGHUP;
use signal_hook::{
    consts::{SIGINT, SIGTERM},
    flag,
};

use crate::error;

/// A flag that is set by Ctrl-C, by a scheduler, and by the end of the terminal that the program
/// was started in.
///
/// A second Ctrl-C ends the program at once, but no other signal does: whoever sends SIGTERM to all
/// processes of a job reaches the ranks twice, once directly and once by way of their launcher, and
/// the checkpoint would be lost.
pub(crate) fn flag() -> Arc<AtomicBool> {
    let stop = Arc::new(AtomicBool::new(false));
    let interrupted = Arc::new(AtomicBool::new(false));
    // Without a handler the signal ends the program at once, as it would any other. This one comes
    // before the one that sets its flag, so the first signal does not find it set.
    drop(flag::register_conditional_shutdown(
        SIGINT,
        error::INTERRUPTED.into(),
        Arc::clone(&interrupted),
    ));
    drop(flag::register(SIGINT, interrupted));
    for signal in signals() {
        drop(flag::register(signal, Arc::clone(&stop)));
    }
    stop
}

/// The signals that ask a program to end, but for those that it was started to ignore.
#[cfg(unix)]
pub(crate) fn signals() -> Vec<i32> {
    let mut signals = vec![SIGINT, SIGTERM];
    signals.extend((!survives_its_terminal()).then_some(SIGHUP));
    signals
}

#[cfg(not(unix))]
pub(crate) fn signals() -> Vec<i32> {
    vec![SIGINT, SIGTERM]
}

/// Whether the program was started by `nohup`, which has it ignore the end of its terminal. Only
/// Linux says so.
#[cfg(unix)]
fn survives_its_terminal() -> bool {
    std::fs::read_to_string("/proc/self/status").is_ok_and(|status| is_ignored(&status, SIGHUP))
}

/// Whether a process with this `/proc/PID/status` ignores a signal.
#[cfg(unix)]
fn is_ignored(status: &str, signal: i32) -> bool {
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = ignored.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    mask.is_some_and(|mask| mask >> (signal - 1) & 1 == 1)
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;

    #[test]
    fn a_mask_tells_which_signals_are_ignored() {
        let status = "Name:\tx\nSigIgn:\t0000000000001001\nSigCgt:\t0000000000000002\n";
        assert!(is_ignored(status, SIGHUP) && is_ignored(status, 13));
        assert!(!is_ignored(status, SIGINT));
        assert!(!is_ignored("", SIGHUP));
    }
}
