//! How a process ends itself: when others wait for it where nothing but the end of the program
//! reaches them, or when a thread uses what it would have to take away.

use std::{
    io::Write,
    process,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::Duration,
};

/// How long an orderly end may take before the process ends by force: some times what `MPI_Abort`
/// takes to tell all ranks.
const STOP_TIME: Duration = Duration::from_secs(10);

/// Says why, in one line, and ends this process by `stop`; in bounded time, whatever that does.
pub(crate) fn end(why: &str, stop: impl FnOnce()) -> ! {
    // Only the swap counts, of which one thread sees `false`: nothing is read or written under it.
    static ENDING: AtomicBool = AtomicBool::new(false);
    if ENDING.swap(true, Ordering::AcqRel) {
        // Another thread ends the process; this one must do nothing more.
        loop {
            thread::park();
        }
    }
    // Before the first thing that may block: a pipe that nobody reads is full at some time.
    let watchdog = thread::Builder::new().spawn(|| {
        thread::sleep(STOP_TIME);
        process::abort();
    });
    // Without a watchdog the end may take longer; there is nobody left to be told.
    drop(watchdog);
    // One write, so that lines of several ranks do not mix. If nobody reads it, nothing is lost.
    drop(std::io::stderr().write_all(format!("{why}\n").as_bytes()));
    stop();
    process::abort()
}
