//! Waiting for another thread, first by giving way, then asleep; locks; and panics caught.

use std::{
    any::Any,
    mem,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Mutex, MutexGuard, PoisonError},
    thread,
    time::{Duration, Instant},
};

/// How long a waiting thread gives way before it sleeps: longer than the wake-up costs that a
/// sleeping thread would have to wait for. (A fifth of it was too short: two threads that do 3 µs of
/// work each between two meetings slept in turns, and took 19 µs for each.)
///
/// A time, and not a number of attempts: one takes 0.1 µs where nobody else wants the core, and many
/// where somebody does, who then loses half of it to a thread that has nothing to do.
const PATIENCE: Duration = Duration::from_micros(50);

/// Waits until `ready`, or until `deadline` has passed; returns whether it became ready.
///
/// The thread that makes it ready must [`unpark`](thread::Thread::unpark) this one afterwards: a
/// permit that was given before `park` makes it return at once, so no wake-up is lost.
pub(crate) fn until(deadline: Option<Instant>, ready: impl Fn() -> bool) -> bool {
    if soon(&ready) {
        return true;
    }
    while !ready() {
        match deadline.map(|deadline| deadline.saturating_duration_since(Instant::now())) {
            None => thread::park(),
            Some(left) if left.is_zero() => return ready(),
            Some(left) => thread::park_timeout(left),
        }
    }
    true
}

/// Waits for a while until `ready`, without sleeping; returns whether it became ready.
pub(crate) fn soon(ready: impl Fn() -> bool) -> bool {
    if ready() {
        return true;
    }
    let start = Instant::now();
    while start.elapsed() < PATIENCE {
        // Not a spin: with more slots than cores the thread that is waited for may need this one's.
        thread::yield_now();
        if ready() {
            return true;
        }
    }
    false
}

/// Locks a mutex, even if a thread has panicked under it: what lies under the locks of this crate is
/// whole between any two statements.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs a function that may panic, and returns its result or the message of its panic.
pub(crate) fn catch<T>(run: impl FnOnce() -> T) -> Result<T, String> {
    // Whatever a panic leaves half done is owned by the replica and dropped with it.
    catch_unwind(AssertUnwindSafe(run)).map_err(|payload| {
        let message = panic_message(&*payload);
        discard(payload);
        message
    })
}

/// Drops what a panic was raised with, which may panic in turn: outside of `catch_unwind` that
/// would end the program.
fn discard(payload: Box<dyn Any + Send>) {
    if let Err(again) = catch_unwind(AssertUnwindSafe(|| drop(payload))) {
        // That one may panic as well, and so on: it is left where it is.
        mem::forget(again);
    }
}

fn panic_message(payload: &(dyn Any + Send)) -> String {
    if let Some(text) = payload.downcast_ref::<&str>() {
        (*text).to_owned()
    } else if let Some(text) = payload.downcast_ref::<String>() {
        text.clone()
    } else {
        // `std::panic::panic_any` takes anything.
        "no message".to_owned()
    }
}
