//! The queue between the threads that make batches and the one that takes them.
//!
//! Each batch has a channel of its own, and the channels stand in the order of the batches: whichever
//! is finished first, the next one to be taken is known.

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
/// An error that the function returns comes where its batch would have come, and so does a panic of
/// the function, in the thread that takes the batches. When it is dropped, what no thread has begun
/// is not made any more.
#[must_use = "iterators are lazy and do nothing unless consumed"]
pub struct Feeding<I: Iterator, F, T> {
    batches: Fuse<I>,
    f: Arc<F>,
    /// Jobs look whether it is still there before they begin.
    taker: Arc<()>,
    /// `None`: whoever takes a batch makes it.
    pool: Option<ThreadPool>,
    depth: usize,
    /// What is ready or in the making, the next one first.
    ahead: VecDeque<Receiver<thread::Result<T>>>,
}

impl<I: Iterator, F, T> Feeding<I, F, T> {
    pub(super) fn new(batches: I, f: F, pool: Option<ThreadPool>, depth: usize) -> Self {
        let batches = batches.fuse();
        Self { batches, f: Arc::new(f), taker: Arc::new(()), pool, depth, ahead: VecDeque::new() }
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
        let Some(pool) = &self.pool else { return self.batches.next().map(&*self.f) };
        let begun = |item| make(pool, &self.f, &self.taker, item);
        let missing = self.depth - self.ahead.len();
        self.ahead.extend(self.batches.by_ref().take(missing).map(begun));
        let next = self.ahead.pop_front()?;
        // The threads go on while the step of this batch runs.
        self.ahead.extend(self.batches.next().map(begun));
        #[expect(clippy::expect_used, reason = "a job is dropped unrun only after the taker")]
        let made = next.recv().expect("the job of a batch that is taken is run");
        Some(made.unwrap_or_else(|panic| resume_unwind(panic)))
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        let (least, most) = self.batches.size_hint();
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

/// Has a thread of the pool apply `f` to `item`, unless the taker is gone by then.
fn make<A, F, T>(
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
        let made = catch_unwind(AssertUnwindSafe(|| f(item)));
        // Before the last batch arrives: what the function has captured is then the taker's alone.
        drop(f);
        // Nobody may want it any more.
        drop(sender.send(made));
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
