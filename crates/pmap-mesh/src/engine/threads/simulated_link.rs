//! A simulated network between threads.

use std::{
    num::NonZeroU64,
    sync::Mutex,
    thread,
    time::{Duration, Instant},
};

use crate::{
    device::to_device::n_bytes,
    engine::{ListRequest, layout::RunLayout},
    sync::lock,
};

/// The simulated link of one slot, which transfers one collective at a time.
#[derive(Debug)]
pub(super) struct SimulatedLink {
    bytes_per_second: NonZeroU64,
    /// The end of the last reserved transfer.
    free_at: Mutex<Instant>,
}

impl SimulatedLink {
    pub(super) fn new(bytes_per_second: NonZeroU64) -> Self {
        Self { bytes_per_second, free_at: Mutex::new(Instant::now()) }
    }

    /// Reserves the link for a collective, and returns the time at which the collective arrives.
    pub(super) fn reserve(&self, work: &ListRequest) -> Instant {
        self.reserve_bytes(transferred_bytes(work), Instant::now())
    }

    fn reserve_bytes(&self, bytes: usize, now: Instant) -> Instant {
        let nanos = bytes as u128 * 1_000_000_000 / u128::from(self.bytes_per_second.get());
        let duration = Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX));
        let mut free_at = lock(&self.free_at);
        *free_at = now.max(*free_at) + duration;
        *free_at
    }
}

pub(super) fn sleep_until(arrival: Instant) {
    thread::sleep(arrival.saturating_duration_since(Instant::now()));
}

/// Returns the number of bytes that one member receives in a gather or sends in a reduction. The
/// member's own part is included.
fn transferred_bytes(work: &ListRequest) -> usize {
    match work {
        ListRequest::Gather { layout, .. } => layout_bytes(layout),
        ListRequest::Reduce { list, .. } => list.iter().map(n_bytes).sum(),
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
    fn transfers_queue_on_the_link() {
        let link = SimulatedLink::new(NonZeroU64::new(1000).unwrap());
        let start = Instant::now() + Duration::from_secs(1);
        let millis = |bytes, after| {
            let now = start + Duration::from_millis(after);
            link.reserve_bytes(bytes, now).duration_since(start).as_millis()
        };
        assert_eq!(millis(20, 0), 20);
        assert_eq!(millis(30, 5), 50, "waits for the transfer before");
        assert_eq!(millis(1, 70), 71, "the link was free");
    }
}
