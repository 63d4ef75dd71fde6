//! How a rank waits: awake while something moves, then asleep.

use std::{
    thread,
    time::{Duration, Instant},
};

/// How long a member that waits for others to come stays awake: about as long as they take if they
/// do the same work. One that comes later has it slept, an eighth of the time that nothing has come,
/// so that the wait becomes longer by no more than that.
const AWAKE: Duration = Duration::from_micros(200);
/// The longest sleep.
const NAP: Duration = Duration::from_millis(1);
/// How long nothing arrives of data on their way before a member sleeps: it carries them on whenever
/// it looks, unless those who send them compute. A piece takes less.
const STALLED: Duration = Duration::from_millis(2);
/// The sleep meanwhile: a look at shared memory moves as much as it holds, some 100 µs' worth.
const SHORT_NAP: Duration = Duration::from_micros(50);

/// What the messages of a process do.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Motion {
    /// Whether one has arrived, here or there, since the last look.
    pub(super) has_moved: bool,
    /// Whether data are on their way.
    pub(super) is_moving: bool,
}

impl Motion {
    /// What they have done after two looks.
    pub(super) fn then(self, next: Self) -> Self {
        Self { has_moved: self.has_moved | next.has_moved, is_moving: next.is_moving }
    }
}

/// How long a wait lasts, and what its thread does meanwhile.
pub(super) struct Patience {
    deadline: Duration,
    start: Option<Instant>,
    /// The last look at which something had arrived, or the first one.
    quiet_since: Option<Instant>,
    /// The slot of a process that has left, as was seen in the last pause.
    pub(super) absent: Option<usize>,
}

impl Patience {
    pub(super) fn new(deadline: Duration) -> Self {
        Self { deadline, start: None, quiet_since: None, absent: None }
    }

    /// Gives way, or sleeps.
    pub(super) fn pause(&mut self, motion: Motion) -> Pause {
        let now = Instant::now();
        if motion.has_moved {
            self.quiet_since = Some(now);
        }
        let quiet = now - *self.quiet_since.get_or_insert(now);
        let nap = nap(quiet, motion.is_moving);
        match nap {
            Some(nap) => thread::sleep(nap),
            None => thread::yield_now(),
        }
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
fn nap(quiet: Duration, is_moving: bool) -> Option<Duration> {
    if is_moving {
        (quiet > STALLED).then_some(SHORT_NAP)
    } else {
        (quiet > AWAKE).then(|| NAP.min(quiet / 8))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_waits_sleeps_the_longer_the_longer_nothing_comes() {
        let micros = Duration::from_micros;
        let naps = |quiet| [nap(micros(quiet), false), nap(micros(quiet), true)];
        assert_eq!(naps(200), [None, None]);
        assert_eq!(naps(400), [Some(micros(50)), None]);
        assert_eq!(naps(4000), [Some(micros(500)), Some(micros(50))]);
        assert_eq!(naps(10_000_000), [Some(NAP), Some(micros(50))]);
    }

    #[test]
    fn what_arrives_is_followed_awake() {
        let mut patience = Patience::new(Duration::from_secs(1));
        let quiet = Motion { has_moved: false, is_moving: true };
        assert_eq!(patience.pause(quiet), Pause::Short);
        let first = patience.quiet_since;
        assert_eq!((patience.pause(quiet), patience.quiet_since), (Pause::Short, first));
        assert_eq!(patience.pause(Motion { has_moved: true, ..quiet }), Pause::Short);
        assert!(patience.quiet_since > first);
    }

    #[test]
    fn patience_ends_with_its_deadline_though_messages_arrive() {
        let mut patience = Patience::new(Duration::ZERO);
        let moving = Motion { has_moved: true, is_moving: true };
        assert_eq!([patience.pause(moving), patience.pause(moving)], [Pause::Short, Pause::Over]);
    }
}
