//! Waiting for another thread, first by giving way, then asleep; and locks.

use std::{
    sync::{Mutex, MutexGuard, PoisonError},
    thread,
    time::Instant,
};

/// How often a waiting thread gives way before it sleeps: some 30 µs, longer than the wake-up costs
/// that a sleeping thread would have to wait for. (A third of it was too short where giving way
/// takes 0.1 µs: two threads that do 3 µs of work each between two meetings slept in turns, and took
/// 19 µs for each.)
const YIELDS: u32 = 300;

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
    for _ in 0..YIELDS {
        if ready() {
            return true;
        }
        // Not a spin: with more slots than cores the thread that is waited for may need this one's.
        thread::yield_now();
    }
    false
}

/// Locks a mutex, even if a thread has panicked under it: what lies under the locks of this crate is
/// whole between any two statements.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
