//! How a thread waits for what cannot wake it: a message of another process, or a device.

use std::{thread, time::Duration};

/// How long it stays awake: about as long as a message takes whose sender is there, or as members
/// of a group need to come if they do the same work.
const AWAKE: Duration = Duration::from_micros(200);
/// The longest sleep.
const NAP: Duration = Duration::from_millis(1);

/// How long to sleep when nothing has come for so long, if at all: an eighth of it, so that the
/// wait becomes longer by no more than that.
pub(crate) fn sleep_duration(quiet: Duration) -> Option<Duration> {
    (quiet > AWAKE).then(|| NAP.min(quiet / 8))
}

/// Sleeps for that long, or gives way to other threads.
pub(crate) fn pause(nap: Option<Duration>) {
    match nap {
        Some(nap) => thread::sleep(nap),
        None => thread::yield_now(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_waits_sleeps_the_longer_the_longer_nothing_comes() {
        let naps = [200, 400, 4000, 10_000_000]
            .map(|micros| sleep_duration(Duration::from_micros(micros)));
        let micros = |micros| Some(Duration::from_micros(micros));
        assert_eq!(naps, [None, micros(50), micros(500), Some(NAP)]);
    }
}
