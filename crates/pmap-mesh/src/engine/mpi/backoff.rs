//! The backoff of a waiting rank: it polls while data arrive, then sleeps between polls.

use std::time::{Duration, Instant};

use crate::engine::processes::waiting;

/// Time without progress after which a rank with transfers in flight sleeps between polls. It is
/// longer than a chunk takes, unless the sender of the chunk computes instead of polling.
const STALL_TIME: Duration = Duration::from_millis(2);
/// The sleep between polls of stalled transfers. It is short, because one poll can move only the
/// content of the shared memory, about 100 µs of transfer.
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
    /// Combines the progress of this poll with the progress of the next one.
    pub(super) fn then(self, next: Self) -> Self {
        Self { has_moved: self.has_moved | next.has_moved, is_moving: next.is_moving }
    }
}

/// The backoff of one wait, up to its deadline.
pub(super) struct WaitBackoff {
    deadline: Duration,
    start: Option<Instant>,
    /// The time of the last pause after progress, or of the first pause.
    quiet_since: Option<Instant>,
    /// The slot that was found absent at the last pause, because its process had left.
    pub(super) absent: Option<usize>,
}

impl WaitBackoff {
    pub(super) fn new(deadline: Duration) -> Self {
        Self { deadline, start: None, quiet_since: None, absent: None }
    }

    /// Yields or sleeps, depending on the time since the last progress. Then checks the deadline.
    pub(super) fn pause(&mut self, progress: TransferProgress) -> PauseOutcome {
        let now = Instant::now();
        if progress.has_moved {
            self.quiet_since = Some(now);
        }
        let quiet = now - *self.quiet_since.get_or_insert(now);
        let sleep = sleep_duration(quiet, progress.is_moving);
        waiting::pause(sleep);
        match sleep {
            _ if now - *self.start.get_or_insert(now) > self.deadline => PauseOutcome::Over,
            Some(_) => PauseOutcome::Long,
            None => PauseOutcome::Short,
        }
    }
}

/// The outcome of a pause in a wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PauseOutcome {
    /// The thread has yielded.
    Short,
    /// The thread has slept.
    Long,
    /// The deadline has passed.
    Over,
}

/// Returns how long to sleep after a time without progress, or `None` to keep polling.
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
