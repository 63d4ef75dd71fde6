//! The iterator over prefetched results.
//!
//! Each result has its own channel, and the queue holds the channels in order, so the order of
//! completion does not matter.

use std::{
    collections::VecDeque,
    fmt,
    iter::{Fuse, FusedIterator},
    sync::Arc,
};

use crate::queue::pool::{PendingResult, WorkerPool};

/// The results of [`prefetch`](crate::prefetch()), in order.
///
/// A panic of the function is raised in place of its result, in the thread that takes the results.
/// Dropping the iterator cancels the results that no thread has begun, and waits for the others.
#[must_use = "iterators are lazy and do nothing unless consumed"]
pub struct PrefetchIter<I: Iterator, F, T> {
    items: Fuse<I>,
    f: Arc<F>,
    /// Worker threads; `None` if the taker makes the results.
    pool: Option<WorkerPool>,
    depth: usize,
    /// Results that are ready or in progress, in order.
    pending: VecDeque<PendingResult<T>>,
}

impl<I: Iterator, F, T> PrefetchIter<I, F, T> {
    pub(super) fn new(items: I, f: F, pool: Option<WorkerPool>, depth: usize) -> Self {
        Self { items: items.fuse(), f: Arc::new(f), pool, depth, pending: VecDeque::new() }
    }
}

impl<I, F, T> Iterator for PrefetchIter<I, F, T>
where
    I: Iterator<Item: Send + 'static>,
    F: Fn(I::Item) -> T + Send + Sync + 'static,
    T: Send + 'static,
{
    type Item = T;

    fn next(&mut self) -> Option<T> {
        let Some(pool) = &self.pool else { return self.items.next().map(&*self.f) };
        let f = &self.f;
        let start = |item| {
            let f = Arc::clone(f);
            pool.submit(move || f(item))
        };
        let n_missing = self.depth - self.pending.len();
        self.pending.extend(self.items.by_ref().take(n_missing).map(start));
        let next = self.pending.pop_front()?;
        // Refills the queue before waiting, so that the threads stay busy while the result is used.
        self.pending.extend(self.items.next().map(start));
        #[expect(clippy::expect_used, reason = "jobs are dropped only with this iterator")]
        Some(next.wait(None).expect("each job sends its result"))
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        let (least, most) = self.items.size_hint();
        let n_pending = self.pending.len();
        (least.saturating_add(n_pending), most.and_then(|most| most.checked_add(n_pending)))
    }
}

impl<I, F, T> ExactSizeIterator for PrefetchIter<I, F, T>
where
    I: ExactSizeIterator<Item: Send + 'static>,
    F: Fn(I::Item) -> T + Send + Sync + 'static,
    T: Send + 'static,
{
}

impl<I, F, T> FusedIterator for PrefetchIter<I, F, T>
where
    I: Iterator<Item: Send + 'static>,
    F: Fn(I::Item) -> T + Send + Sync + 'static,
    T: Send + 'static,
{
}

impl<I: Iterator, F, T> fmt::Debug for PrefetchIter<I, F, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PrefetchIter")
            .field("depth", &self.depth)
            .field("pending", &self.pending.len())
            .finish_non_exhaustive()
    }
}
