//! A queue of results that are made ahead of time.
//!
//! Each result has its own channel, and the queue holds the channels in order, so the order of
//! completion does not matter.

pub(crate) mod pool;

use std::{collections::VecDeque, iter::Fuse, sync::Arc, time::Duration};

use crate::{
    error::{Error, Result},
    queue::pool::{PendingResult, WorkerPool},
};

/// Applies a function to items on background threads, ahead of the thread that takes the results,
/// like the workers of PyTorch's `DataLoader`.
///
/// The result equals `items.map(f)`, in order, for any number of threads. A
/// [`DataLoader`](crate::DataLoader) also reads samples and can be resumed.
///
/// # Determinism
///
/// As deterministic as `items` and the function. Random numbers in the function must depend on its
/// input and not on a generator shared by threads.
///
/// # Examples
///
/// ```
/// let texts = ["to be", "or not", "to be"];
/// let lengths = data_loader::prefetch([2, 0, 1]).threads(2).map(move |n: usize| texts[n].len())?;
/// assert_eq!(lengths.collect::<Vec<_>>(), [5, 5, 6]);
/// # Ok::<(), data_loader::Error>(())
/// ```
pub fn prefetch<I: IntoIterator>(items: I) -> PrefetchBuilder<I::IntoIter> {
    PrefetchBuilder { items: items.into_iter(), threads: 1, depth: None }
}

/// The settings of [`prefetch`].
#[derive(Clone, Debug)]
#[must_use = "nothing is prefetched before `map`"]
pub struct PrefetchBuilder<I> {
    items: I,
    threads: usize,
    depth: Option<usize>,
}

impl<I: Iterator> PrefetchBuilder<I> {
    /// Sets the number of threads; 1 by default. With 0, the thread that takes a result makes it.
    pub fn threads(self, threads: usize) -> Self {
        Self { threads, ..self }
    }

    /// Sets the maximum number of results that are ready or in progress; two per thread by default.
    /// Reserve memory for one more, the result in use.
    pub fn depth(self, depth: usize) -> Self {
        Self { depth: Some(depth), ..self }
    }

    /// Starts the threads; `f` makes a result of an item.
    ///
    /// The thread that takes the results also advances `items`, so they may borrow.
    ///
    /// # Errors
    ///
    /// [`Error::Setting`] for a depth of 0 although there are threads, and [`Error::Threads`] if
    /// the operating system cannot start the threads.
    pub fn map<T, F>(self, f: F) -> Result<PrefetchIter<I, F, T>>
    where
        I::Item: Send + 'static,
        T: Send + 'static,
        F: Fn(I::Item) -> T + Send + Sync + 'static,
    {
        let Self { items, threads, depth } = self;
        let depth = depth.unwrap_or(threads.saturating_mul(2));
        if threads > 0 && depth == 0 {
            return Err(Error::setting("the number of prefetched results", &depth, "at least 1"));
        }
        let pool = WorkerPool::start(threads, Duration::MAX)?;
        let (items, f, pending) = (items.fuse(), Arc::new(f), VecDeque::new());
        Ok(PrefetchIter { items, f, pool, depth, pending })
    }
}

/// The results of [`prefetch`](crate::prefetch()), in order.
///
/// A panic of the function is raised in place of its result, in the thread that takes the results.
/// Dropping the iterator cancels the results that no thread has begun, and waits for the others.
#[derive(Debug)]
#[must_use = "iterators are lazy and do nothing unless consumed"]
pub struct PrefetchIter<I: Iterator, F, T> {
    items: Fuse<I>,
    f: Arc<F>,
    /// Worker threads; `None` if `next` makes the results.
    pool: Option<WorkerPool>,
    depth: usize,
    /// Results that are ready or in progress, in order.
    pending: VecDeque<PendingResult<T>>,
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
        Some(next.wait(Duration::MAX).expect("each job sends its result"))
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        let (least, most) = self.items.size_hint();
        let n_pending = self.pending.len();
        (least.saturating_add(n_pending), most.and_then(|most| most.checked_add(n_pending)))
    }
}
