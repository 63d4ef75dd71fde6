//! A network that threads do not have.

use std::{
    num::NonZeroU64,
    sync::Mutex,
    thread,
    time::{Duration, Instant},
};

use crate::{
    device::to_device::n_bytes,
    engine::{Work, layout::RunLayout},
    sync::lock,
};

/// One slot's way to the others, on which everything takes its time, one after the other.
#[derive(Debug)]
pub(super) struct Wire {
    bytes_per_second: NonZeroU64,
    free_at: Mutex<Instant>,
}

impl Wire {
    pub(super) fn new(bytes_per_second: NonZeroU64) -> Self {
        Self { bytes_per_second, free_at: Mutex::new(Instant::now()) }
    }

    /// When what is handed in now has arrived.
    pub(super) fn arrival(&self, work: &Work) -> Instant {
        self.arrival_of(bytes(work), Instant::now())
    }

    fn arrival_of(&self, bytes: usize, now: Instant) -> Instant {
        let nanos = bytes as u128 * 1_000_000_000 / u128::from(self.bytes_per_second.get());
        let takes = Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX));
        let mut free_at = lock(&self.free_at);
        *free_at = now.max(*free_at) + takes;
        *free_at
    }
}

pub(super) fn wait_until(arrival: Instant) {
    thread::sleep(arrival.saturating_duration_since(Instant::now()));
}

/// What one member receives of what is gathered, or sends of what is summed: all but its own part,
/// which is taken to be small.
fn bytes(work: &Work) -> usize {
    match work {
        Work::Gather { layout, .. } => layout_bytes(layout),
        Work::Reduce { list, .. } => list.iter().map(n_bytes).sum(),
    }
}

fn layout_bytes(layout: &RunLayout) -> usize {
    let tensors = layout.tensors().iter();
    tensors.map(|(shape, dtype)| shape.elem_count() * dtype.size_in_bytes()).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_thing_after_the_other_takes_its_time() {
        let wire = Wire::new(NonZeroU64::new(1000).unwrap());
        let start = Instant::now() + Duration::from_secs(1);
        let millis = |bytes, after| {
            let now = start + Duration::from_millis(after);
            wire.arrival_of(bytes, now).duration_since(start).as_millis()
        };
        assert_eq!(millis(20, 0), 20);
        assert_eq!(millis(30, 5), 50, "it waits for what came before");
        assert_eq!(millis(1, 70), 71, "the wire was free");
    }
}
