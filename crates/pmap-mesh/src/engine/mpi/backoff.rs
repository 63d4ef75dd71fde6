//! Backoff of a waiting rank: poll while data arrive, then sleep.

use std::time::{Duration, Instant};

use crate::engine::processes::waiting;

/// Idle time before a rank with transfers in flight sleeps. Each poll advances the transfers,
/// unless their senders compute. A chunk takes less time than this.
const STALL_TIME: Duration = Duration::from_millis(2);
/// The sleep between polls then: one poll of shared memory moves its whole content, about 100 µs of
/// transfer.
const STALLED_SLEEP: Duration = Duration::from_micros(50);

/// Progress of a process's messages.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct TransferProgress {
    /// Whether a message has been sent or received since the last poll.
    pub(super) has_moved: bool,
    /// Whether data are in flight.
    pub(super) is_moving: bool,
}

impl TransferProgress {
    /// Combines the progress of two polls.
    pub(super) fn then(self, next: Self) -> Self {
        Self { has_moved: self.has_moved | next.has_moved, is_moving: next.is_moving }
    }
}

/// The backoff of one wait, up to its deadline.
pub(super) struct WaitBackoff {
    deadline: Duration,
    start: Option<Instant>,
    /// The last poll with progress, or the first poll.
    quiet_since: Option<Instant>,
    /// The slot of a process that had left at the last pause.
    pub(super) absent: Option<usize>,
}

impl WaitBackoff {
    pub(super) fn new(deadline: Duration) -> Self {
        Self { deadline, start: None, quiet_since: None, absent: None }
    }

    /// Yields or sleeps.
    pub(super) fn pause(&mut self, progress: TransferProgress) -> PauseOutcome {
        let now = Instant::now();
        if progress.has_moved {
            self.quiet_since = Some(now);
        }
        let quiet = now - *self.quiet_since.get_or_insert(now);
        let nap = sleep_duration(quiet, progress.is_moving);
        waiting::pause(nap);
        match nap {
            _ if now - *self.start.get_or_insert(now) > self.deadline => PauseOutcome::Over,
            Some(_) => PauseOutcome::Long,
            None => PauseOutcome::Short,
        }
    }
}

/// A pause in a wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PauseOutcome {
    /// The thread has yielded.
    Short,
    /// The thread has slept.
    Long,
    /// The deadline has passed.
    Over,
}

/// Returns how long to sleep after a quiet time, or `None` to keep polling.
fn sleep_duration(quiet: Duration, is_moving: bool) -> Option<Duration> {
    if is_moving {
        (quiet > STALL_TIME).then_some(STALLED_SLEEP)
    } else {
        waiting::sleep_duration(quiet)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stalled_transfer_sleeps_later_and_shorter() {
        let millis = Duration::from_millis;
        assert_eq!(
            [sleep_duration(millis(2), true), sleep_duration(millis(3), true)],
            [None, Some(STALLED_SLEEP)]
        );
        assert!(sleep_duration(millis(2), false) > Some(STALLED_SLEEP));
    }

    #[test]
    fn progress_restarts_the_quiet_time() {
        let mut backoff = WaitBackoff::new(Duration::from_secs(1));
        let quiet = TransferProgress { has_moved: false, is_moving: true };
        assert_eq!(backoff.pause(quiet), PauseOutcome::Short);
        let first = backoff.quiet_since;
        assert_eq!((backoff.pause(quiet), backoff.quiet_since), (PauseOutcome::Short, first));
        assert_eq!(
            backoff.pause(TransferProgress { has_moved: true, ..quiet }),
            PauseOutcome::Short
        );
        assert!(backoff.quiet_since > first);
    }

    #[test]
    fn backoff_ends_at_the_deadline() {
        let mut backoff = WaitBackoff::new(Duration::ZERO);
        let moving = TransferProgress { has_moved: true, is_moving: true };
        assert_eq!(
            [backoff.pause(moving), backoff.pause(moving)],
            [PauseOutcome::Short, PauseOutcome::Over]
        );
    }
}
