//! The signals that stop a run after its current step.

use std::sync::{Arc, atomic::AtomicBool};
#[cfg(unix)]
use std::{
    thread,
    time::{Duration, Instant},
};

#[cfg(unix)]
use signal_hook::{consts::SIGHUP, iterator::Signals, low_level};
use signal_hook::{
    consts::{SIGINT, SIGTERM},
    flag,
};

#[cfg(unix)]
use crate::error;

/// Returns a flag that is set by Ctrl-C, by the SIGTERM of a scheduler, and when the terminal of the
/// program is closed.
///
/// A second Ctrl-C ends the program at once. A second SIGTERM does not: a scheduler that sends SIGTERM
/// to all processes of a job reaches each rank twice, directly and through its launcher, and the
/// checkpoint would be lost. For the same reason, a SIGINT right after the first one does not count as
/// a second Ctrl-C.
pub(crate) fn flag() -> Arc<AtomicBool> {
    let stop = Arc::new(AtomicBool::new(false));
    // If a handler cannot be installed, its signal ends the program at once, as by default.
    for signal in signals() {
        drop(flag::register(signal, Arc::clone(&stop)));
    }
    #[cfg(unix)]
    if let Ok(interrupts) = Signals::new([SIGINT]) {
        // If the thread cannot be started, a second Ctrl-C does nothing, and SIGKILL still works.
        drop(thread::Builder::new().spawn(move || end_when_asked_again(interrupts)));
    }
    stop
}

/// Within this time after the first SIGINT, another SIGINT is the same request on another path: a
/// launcher in the same process group forwards its own signals, and so does `timeout`. A person who
/// presses Ctrl-C again, because the program still runs, takes longer.
#[cfg(unix)]
const SAME_REQUEST: Duration = Duration::from_secs(1);

#[cfg(unix)]
fn end_when_asked_again(mut interrupts: Signals) {
    let mut first = None;
    for _ in interrupts.forever() {
        if is_asked_again(&mut first, Instant::now()) {
            low_level::exit(error::INTERRUPTED.into());
        }
    }
}

/// Returns true if a SIGINT at this time is a second request. Records the time of the first SIGINT,
/// for which it returns false.
#[cfg(unix)]
fn is_asked_again(first: &mut Option<Instant>, now: Instant) -> bool {
    match *first {
        None => {
            *first = Some(now);
            false
        }
        Some(first) => now.duration_since(first) >= SAME_REQUEST,
    }
}

/// Returns the signals that ask a program to end. SIGHUP is left out if the program ignores it.
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

/// Returns true if the program ignores SIGHUP, as under `nohup`. Only Linux reports it: on other
/// systems the result is false.
#[cfg(unix)]
fn survives_its_terminal() -> bool {
    std::fs::read_to_string("/proc/self/status").is_ok_and(|status| is_ignored(&status, SIGHUP))
}

/// Returns true if a process with this `/proc/PID/status` ignores a signal.
#[cfg(unix)]
fn is_ignored(status: &str, signal: i32) -> bool {
    let digits = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = digits.and_then(|digits| u64::from_str_radix(digits.trim(), 16).ok());
    mask.is_some_and(|mask| mask >> (signal - 1) & 1 == 1)
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;

    #[test]
    fn an_interrupt_that_comes_by_two_ways_is_one() {
        let start = Instant::now();
        let mut first = None;
        let mut is_asked_again = |millis| {
            let now = start + Duration::from_millis(millis);
            super::is_asked_again(&mut first, now)
        };
        assert!(!is_asked_again(0) && !is_asked_again(0) && !is_asked_again(999));
        assert!(is_asked_again(1000));
    }

    #[test]
    fn a_mask_tells_which_signals_are_ignored() {
        let status = "Name:\tx\nSigIgn:\t0000000000001001\nSigCgt:\t0000000000000002\n";
        assert!(is_ignored(status, SIGHUP) && is_ignored(status, 13));
        assert!(!is_ignored(status, SIGINT));
        assert!(!is_ignored("", SIGHUP));
    }
}
