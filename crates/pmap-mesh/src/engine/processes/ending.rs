//! How a process ends itself, when others wait for it where nothing but the end of the program
//! reaches them.

use std::{
    error::Error as _,
    io::Write,
    iter, process,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::Duration,
};

use crate::error::Error;

/// How long an orderly end may take before the process ends by force.
const STOP_TIME: Duration = Duration::from_secs(10);

/// Says why, and ends this process by `stop`; in bounded time, whatever that does.
pub(crate) fn end(rank: usize, why: &str, stop: impl FnOnce()) -> ! {
    static ENDING: AtomicBool = AtomicBool::new(false);
    if ENDING.swap(true, Ordering::AcqRel) {
        // Another thread is at it; this one must not go on.
        loop {
            thread::park();
        }
    }
    // One write, so that lines of several ranks do not mix; who cannot be told need not be.
    drop(std::io::stderr().write_all(format!("rank {rank}: {why}\n").as_bytes()));
    let late = thread::Builder::new().spawn(|| {
        thread::sleep(STOP_TIME);
        process::abort();
    });
    drop(late);
    stop();
    process::abort()
}

/// An error in words, with what caused it.
pub(crate) fn with_causes(error: &Error) -> String {
    let causes = iter::successors(error.source(), |&cause| cause.source());
    let chain: Vec<String> =
        iter::once(error.to_string()).chain(causes.map(ToString::to_string)).collect();
    chain.join(": ")
}
