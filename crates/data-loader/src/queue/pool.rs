//! Threads that run jobs.

use std::{
    collections::VecDeque,
    fmt, io,
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        mpsc::{self, Receiver, RecvTimeoutError},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use crate::error::{Error, Result};

type Job = Box<dyn FnOnce() + Send>;

/// Threads that run jobs in the order of their submission.
///
/// Dropping the pool drops all jobs that have not begun, and waits for the threads.
pub(crate) struct WorkerPool {
    shared: Arc<SharedQueue>,
    threads: Vec<JoinHandle<()>>,
    /// Maximum time to wait for a thread that hangs in its job.
    patience: Duration,
}

#[derive(Default)]
struct SharedQueue {
    queue: Mutex<JobQueue>,
    /// Wakes workers after a job was added or the queue was closed.
    changed: Condvar,
    /// Wakes the owner after a worker has ended.
    ended: Condvar,
}

#[derive(Default)]
struct JobQueue {
    jobs: VecDeque<Job>,
    is_closed: bool,
    n_threads: usize,
}

impl WorkerPool {
    /// Starts threads, or returns `None` if there are none: the caller does the work.
    pub(crate) fn start(threads: usize, patience: Duration) -> Result<Option<Self>> {
        let mut pool = Self { shared: Arc::default(), threads: Vec::new(), patience };
        for number in 0..threads {
            pool.start_thread(number).map_err(|cause| Error::Threads { threads, cause })?;
        }
        Ok((threads > 0).then_some(pool))
    }

    fn start_thread(&mut self, number: usize) -> io::Result<()> {
        let shared = Arc::clone(&self.shared);
        let thread = thread::Builder::new().name(format!("data-loader-{number}"));
        self.threads.push(thread.spawn(move || shared.work())?);
        self.shared.lock().n_threads += 1;
        Ok(())
    }

    /// Runs `f` on a thread.
    pub(crate) fn submit<T: Send + 'static>(
        &self,
        f: impl FnOnce() -> T + Send + 'static,
    ) -> PendingResult<T> {
        let (sender, receiver) = mpsc::sync_channel(1);
        let job: Job = Box::new(move || {
            // `f` is dropped in here, before its result is sent, so that the receiver of the last
            // result is the only owner of the data that all the functions shared.
            let result = catch_unwind(AssertUnwindSafe(f));
            // Sending fails if the receiver was dropped.
            drop(sender.send(result));
        });
        self.shared.lock().jobs.push_back(job);
        self.shared.changed.notify_one();
        PendingResult { receiver }
    }

    /// Drops all jobs that have not begun.
    pub(crate) fn clear(&self) {
        let jobs = std::mem::take(&mut self.shared.lock().jobs);
        // Dropping may run code of the user, so it happens without the lock.
        drop(jobs);
    }
}

impl SharedQueue {
    fn lock(&self) -> MutexGuard<'_, JobQueue> {
        // No code of users runs under this lock, so the queue is consistent after a panic.
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until all threads have ended, or returns false at the limit.
    fn wait_for_end(&self, limit: Duration) -> bool {
        let ended = self.ended.wait_timeout_while(self.lock(), limit, |queue| queue.n_threads > 0);
        ended.unwrap_or_else(PoisonError::into_inner).0.n_threads == 0
    }

    fn work(&self) {
        while let Some(job) = self.next_job() {
            job();
        }
        self.lock().n_threads -= 1;
        self.ended.notify_all();
    }

    /// Waits for a job, or returns `None` after the queue was closed.
    fn next_job(&self) -> Option<Job> {
        let mut queue = self.lock();
        while queue.jobs.is_empty() && !queue.is_closed {
            queue = self.changed.wait(queue).unwrap_or_else(PoisonError::into_inner);
        }
        queue.jobs.pop_front()
    }
}

impl Drop for WorkerPool {
    fn drop(&mut self) {
        self.shared.lock().is_closed = true;
        self.clear();
        self.shared.changed.notify_all();
        let is_complete = self.shared.wait_for_end(self.patience);
        for thread in self.threads.drain(..) {
            // A thread that hangs is left behind; it ends when its job does.
            if is_complete || thread.is_finished() {
                drop(thread.join());
            }
        }
    }
}

impl fmt::Debug for WorkerPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WorkerPool").field("threads", &self.threads.len()).finish_non_exhaustive()
    }
}

/// The result of a job, which may not have begun.
#[derive(Debug)]
pub(crate) struct PendingResult<T> {
    receiver: Receiver<thread::Result<T>>,
}

impl<T> PendingResult<T> {
    /// Waits for the result, and raises a panic of the job in this thread. Returns `None` if it is
    /// not ready in time.
    pub(crate) fn wait(&self, limit: Duration) -> Option<T> {
        #[expect(clippy::expect_used, reason = "the message says why it cannot fail")]
        let result = match self.receiver.recv_timeout(limit) {
            Err(RecvTimeoutError::Timeout) => return None,
            received => received.expect("a job sends its result or its panic"),
        };
        Some(result.unwrap_or_else(|panic| resume_unwind(panic)))
    }
}
