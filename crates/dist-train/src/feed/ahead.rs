//! The queue between the threads that make batches and the thread that takes them.
//!
//! Each batch has its own channel, and the queue holds the channels in batch order, so the order of
//! completion does not matter.

use std::{
    collections::VecDeque,
    fmt,
    iter::{Fuse, FusedIterator},
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    sync::{
        Arc,
        mpsc::{self, Receiver},
    },
    thread,
};

use rayon::ThreadPool;

/// The batches of a [`feed`](crate::feed), in order.
///
/// An error or a panic of the function appears in place of its batch, in the thread that takes the
/// batches. Dropping the iterator cancels the batches that no thread has started.
#[must_use = "iterators are lazy and do nothing unless consumed"]
pub struct Feeding<I: Iterator, F, T> {
    inputs: Fuse<I>,
    f: Arc<F>,
    /// Token of the consumer; jobs check that it still exists before they start.
    taker: Arc<()>,
    /// Worker threads; `None` if the consumer makes the batches.
    pool: Option<ThreadPool>,
    depth: usize,
    /// Receivers of batches that are ready or in progress, in order.
    ahead: VecDeque<Receiver<thread::Result<T>>>,
}

impl<I: Iterator, F, T> Feeding<I, F, T> {
    pub(super) fn new(inputs: I, f: F, pool: Option<ThreadPool>, depth: usize) -> Self {
        let inputs = inputs.fuse();
        Self { inputs, f: Arc::new(f), taker: Arc::new(()), pool, depth, ahead: VecDeque::new() }
    }
}

impl<I, F, T> Iterator for Feeding<I, F, T>
where
    I: Iterator<Item: Send + 'static>,
    F: Fn(I::Item) -> T + Send + Sync + 'static,
    T: Send + 'static,
{
    type Item = T;

    fn next(&mut self) -> Option<T> {
        let Some(pool) = &self.pool else { return self.inputs.next().map(&*self.f) };
        let start = |item| start_job(pool, &self.f, &self.taker, item);
        let n_missing = self.depth - self.ahead.len();
        self.ahead.extend(self.inputs.by_ref().take(n_missing).map(start));
        let next = self.ahead.pop_front()?;
        // Refills the queue before waiting, so that the threads stay busy during the step of this
        // batch.
        self.ahead.extend(self.inputs.next().map(start));
        #[expect(
            clippy::expect_used,
            reason = "a job is skipped only after the consumer is dropped"
        )]
        let result = next.recv().expect("the job runs while the consumer exists");
        Some(result.unwrap_or_else(|panic| resume_unwind(panic)))
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        let (least, most) = self.inputs.size_hint();
        let ahead = self.ahead.len();
        (least.saturating_add(ahead), most.and_then(|most| most.checked_add(ahead)))
    }
}

impl<I, F, T> ExactSizeIterator for Feeding<I, F, T>
where
    I: ExactSizeIterator<Item: Send + 'static>,
    F: Fn(I::Item) -> T + Send + Sync + 'static,
    T: Send + 'static,
{
}

impl<I, F, T> FusedIterator for Feeding<I, F, T>
where
    I: Iterator<Item: Send + 'static>,
    F: Fn(I::Item) -> T + Send + Sync + 'static,
    T: Send + 'static,
{
}

/// Runs `f(item)` on a thread of the pool, unless the consumer is dropped before. Returns the
/// receiver of the result.
fn start_job<A, F, T>(
    pool: &ThreadPool,
    f: &Arc<F>,
    taker: &Arc<()>,
    item: A,
) -> Receiver<thread::Result<T>>
where
    A: Send + 'static,
    F: Fn(A) -> T + Send + Sync + 'static,
    T: Send + 'static,
{
    let (sender, receiver) = mpsc::sync_channel(1);
    let f = Arc::clone(f);
    let taker = Arc::downgrade(taker);
    pool.spawn_fifo(move || {
        if taker.strong_count() == 0 {
            return;
        }
        let result = catch_unwind(AssertUnwindSafe(|| f(item)));
        // The function is dropped before the last batch is sent, so that the consumer is then the
        // only owner of the captured values.
        drop(f);
        // Sending fails if the consumer is gone, which is fine.
        drop(sender.send(result));
    });
    receiver
}

impl<I: Iterator, F, T> fmt::Debug for Feeding<I, F, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Feeding")
            .field("depth", &self.depth)
            .field("ahead", &self.ahead.len())
            .finish_non_exhaustive()
    }
}
