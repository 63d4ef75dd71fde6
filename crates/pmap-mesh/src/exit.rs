//! Termination of this process, in bounded time, when its peers wait for it and only the end of the
//! program can release them.

use std::{
    io::Write,
    process,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::Duration,
};

/// Time limit for an orderly exit, after which the process aborts: several times the time in which
/// `MPI_Abort` reaches all ranks.
const STOP_TIMEOUT: Duration = Duration::from_secs(10);

/// Prints one line and ends this process by calling `stop`, or aborts after [`STOP_TIMEOUT`].
pub(crate) fn exit_with(reason: &str, stop: impl FnOnce()) -> ! {
    // Exactly one thread sees `false`. The swap publishes no other data.
    static EXITING: AtomicBool = AtomicBool::new(false);
    if EXITING.swap(true, Ordering::AcqRel) {
        // Another thread ends the process; this one must not interfere.
        loop {
            thread::park();
        }
    }
    // Start the watchdog before the first call that may block, such as a write to a full pipe.
    let watchdog = thread::Builder::new().spawn(|| {
        thread::sleep(STOP_TIMEOUT);
        process::abort();
    });
    // Without a watchdog the exit may take longer, and there is no caller to report that to.
    drop(watchdog);
    // One write keeps the lines of several ranks apart. A closed pipe loses only the message.
    drop(std::io::stderr().write_all(format!("{reason}\n").as_bytes()));
    stop();
    process::abort()
}
