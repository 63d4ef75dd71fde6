//! How a rank waits: awake while something moves, then asleep.

use std::time::{Duration, Instant};

use crate::engine::processes::waiting;

/// Idle time before a rank with transfers in flight sleeps. Each look carries the transfers on, unless
/// their senders compute. A piece takes less.
const STALLED: Duration = Duration::from_millis(2);
/// The sleep meanwhile: a look at shared memory moves as much as it holds, some 100 µs' worth.
const SHORT_NAP: Duration = Duration::from_micros(50);

/// What the messages of a process do.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct TransferProgress {
    /// Whether one has arrived, here or there, since the last look.
    pub(super) has_moved: bool,
    /// Whether data are on their way.
    pub(super) is_moving: bool,
}

impl TransferProgress {
    /// What they have done after two looks.
    pub(super) fn then(self, next: Self) -> Self {
        Self { has_moved: self.has_moved | next.has_moved, is_moving: next.is_moving }
    }
}

/// How long a wait lasts, and what its thread does meanwhile.
pub(super) struct WaitBackoff {
    deadline: Duration,
    start: Option<Instant>,
    /// The last look at which something had arrived, or the first one.
    quiet_since: Option<Instant>,
    /// The slot of a process that has left, as was seen in the last pause.
    pub(super) absent: Option<usize>,
}

impl WaitBackoff {
    pub(super) fn new(deadline: Duration) -> Self {
        Self { deadline, start: None, quiet_since: None, absent: None }
    }

    /// Gives way, or sleeps.
    pub(super) fn pause(&mut self, motion: TransferProgress) -> Pause {
        let now = Instant::now();
        if motion.has_moved {
            self.quiet_since = Some(now);
        }
        let quiet = now - *self.quiet_since.get_or_insert(now);
        let nap = sleep_duration(quiet, motion.is_moving);
        waiting::pause(nap);
        match nap {
            _ if now - *self.start.get_or_insert(now) > self.deadline => Pause::Over,
            Some(_) => Pause::Long,
            None => Pause::Short,
        }
    }
}

/// A pause in a wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Pause {
    /// Others were given way to.
    Short,
    /// The thread has slept.
    Long,
    /// It was the last one: the time is over.
    Over,
}

/// How long to sleep when nothing has arrived for so long.
fn sleep_duration(quiet: Duration, is_moving: bool) -> Option<Duration> {
    if is_moving { (quiet > STALLED).then_some(SHORT_NAP) } else { waiting::sleep_duration(quiet) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_waits_for_data_on_their_way_sleeps_later_and_shorter() {
        let millis = Duration::from_millis;
        assert_eq!(
            [sleep_duration(millis(2), true), sleep_duration(millis(3), true)],
            [None, Some(SHORT_NAP)]
        );
        assert!(sleep_duration(millis(2), false) > Some(SHORT_NAP));
    }

    #[test]
    fn what_arrives_is_followed_awake() {
        let mut patience = WaitBackoff::new(Duration::from_secs(1));
        let quiet = TransferProgress { has_moved: false, is_moving: true };
        assert_eq!(patience.pause(quiet), Pause::Short);
        let first = patience.quiet_since;
        assert_eq!((patience.pause(quiet), patience.quiet_since), (Pause::Short, first));
        assert_eq!(patience.pause(TransferProgress { has_moved: true, ..quiet }), Pause::Short);
        assert!(patience.quiet_since > first);
    }

    #[test]
    fn patience_ends_with_its_deadline_though_messages_arrive() {
        let mut patience = WaitBackoff::new(Duration::ZERO);
        let moving = TransferProgress { has_moved: true, is_moving: true };
        assert_eq!([patience.pause(moving), patience.pause(moving)], [Pause::Short, Pause::Over]);
    }
}
