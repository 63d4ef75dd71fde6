//! Waiting for another thread (yield first, then sleep), locks, and caught panics.

use std::{
    any::Any,
    mem,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Mutex, MutexGuard, PoisonError},
    thread,
    time::{Duration, Instant},
};

/// Time for which a waiting thread yields before it sleeps: longer than the wake-up of a sleeping
/// thread takes. (A fifth of it was too short: two threads with 3 µs of work between two rendezvous
/// took turns sleeping, and each rendezvous took 19 µs.)
///
/// This is a time and not a number of attempts, because an attempt takes 0.1 µs on an idle core and
/// far longer on a busy one, where yielding costs the busy thread half of its time.
const YIELD_TIME: Duration = Duration::from_micros(50);

/// Waits until `ready` returns true or `deadline` has passed. Returns true if it became ready.
///
/// The thread that makes it ready must [`unpark`](thread::Thread::unpark) this one afterwards. If
/// it does so before this thread parks, `park` returns at once, so no wake-up is lost.
pub(crate) fn wait_until(deadline: Option<Instant>, ready: impl Fn() -> bool) -> bool {
    if yield_until(&ready) {
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

/// Yields for a short time until `ready` returns true. Returns true if it became ready.
pub(crate) fn yield_until(ready: impl Fn() -> bool) -> bool {
    if ready() {
        return true;
    }
    let start = Instant::now();
    while start.elapsed() < YIELD_TIME {
        // Yield instead of spinning: with more slots than cores the awaited thread may need this
        // core.
        thread::yield_now();
        if ready() {
            return true;
        }
    }
    false
}

/// Locks a mutex even if it is poisoned: no panic can leave the data under a lock of this crate
/// half-changed.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs a function and returns its result, or the message if it panics.
pub(crate) fn catch<T>(run: impl FnOnce() -> T) -> Result<T, String> {
    // The replica owns any half-changed state and drops it.
    catch_unwind(AssertUnwindSafe(run)).map_err(|payload| {
        let message = panic_message(&*payload);
        drop_payload(payload);
        message
    })
}

/// Drops a panic's payload, whose destructor may panic too: outside of `catch_unwind` that would
/// end the program.
fn drop_payload(payload: Box<dyn Any + Send>) {
    if let Err(second) = catch_unwind(AssertUnwindSafe(|| drop(payload))) {
        // The second payload may panic as well, so it is leaked.
        mem::forget(second);
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
