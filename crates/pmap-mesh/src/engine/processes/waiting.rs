//! The backoff of a thread that polls for an event that cannot wake it: a message from another
//! process, or the end of work on a device.

use std::{thread, time::Duration};

/// Time to poll before the first sleep: about the latency of a message from a ready sender, or the
/// skew of group members that do the same work.
const POLL_TIME: Duration = Duration::from_micros(200);
/// The longest sleep.
const LONGEST_SLEEP: Duration = Duration::from_millis(1);

/// Returns how long to sleep after the time `quiet` without an event, or `None` to keep polling.
/// The sleep is an eighth of this time, so that it lengthens a wait by at most an eighth.
pub(crate) fn sleep_duration(quiet: Duration) -> Option<Duration> {
    (quiet > POLL_TIME).then(|| LONGEST_SLEEP.min(quiet / 8))
}

/// Sleeps for a duration; yields if it is `None`.
pub(crate) fn pause(duration: Option<Duration>) {
    match duration {
        Some(duration) => thread::sleep(duration),
        None => thread::yield_now(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sleep_grows_with_quiet_time() {
        let sleeps = [200, 400, 4000, 10_000_000]
            .map(|micros| sleep_duration(Duration::from_micros(micros)));
        let micros = |micros| Some(Duration::from_micros(micros));
        assert_eq!(sleeps, [None, micros(50), micros(500), Some(LONGEST_SLEEP)]);
    }
}
