//! One persistent worker per device, on which its replica runs.

use std::{
    any::Any,
    cell::Cell,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::mpsc,
    thread,
};

use crate::error::{Error, Result};

/// The private thread pools of a mesh, one per device.
///
/// A replica runs on a thread of its own pool, and candle's kernels, which look for the pool they are called in, stay
/// there too: replicas that shared the global pool would queue behind each other's matrix products.
#[derive(Debug)]
pub(crate) struct Workers(Vec<rayon::ThreadPool>);

/// What a replica leaves behind: its result, or the payload of its panic.
type Outcome<T> = thread::Result<T>;

thread_local! {
    /// Whether this thread is running a replica.
    static IN_REPLICA: Cell<bool> = const { Cell::new(false) };
}

impl Workers {
    /// Starts `count` workers that share the machine's cores.
    pub(crate) fn start(count: usize) -> Result<Self> {
        let cores = thread::available_parallelism().map_or(1, usize::from);
        let threads = (cores / count).max(1);
        let start = |index| {
            rayon::ThreadPoolBuilder::new()
                .num_threads(threads)
                .thread_name(move |thread| format!("mesh-{index}.{thread}"))
                .build()
                .map_err(|source| Error::Worker { index, source })
        };
        (0..count).map(start).collect::<Result<_>>().map(Self)
    }

    /// Refuses to go on inside a replica, whose worker would wait for itself.
    pub(crate) fn refuse_nesting() -> Result<()> {
        if IN_REPLICA.get() { Err(Error::Nested) } else { Ok(()) }
    }

    /// Runs the n-th job on the n-th worker, all at once, and returns their outcomes in that order.
    pub(crate) fn run<T: Send + 'static>(
        &self,
        jobs: impl IntoIterator<Item = impl FnOnce() -> T + Send + 'static>,
    ) -> Vec<Outcome<T>> {
        let spawn = |(pool, job): (&rayon::ThreadPool, _)| {
            let (sender, outcome) = mpsc::sync_channel(1);
            // The caller waits for every outcome, so a send can only fail if the caller is gone.
            pool.spawn(move || drop(sender.send(as_replica(job))));
            outcome
        };
        let outcomes: Vec<_> = self.0.iter().zip(jobs).map(spawn).collect();
        outcomes.into_iter().map(|outcome| outcome.recv().unwrap_or_else(|lost| Err(Box::new(lost)))).collect()
    }
}

/// Runs `job`, catching its panic.
fn as_replica<T>(job: impl FnOnce() -> T) -> Outcome<T> {
    // A replica that waits for rayon may be lent to another job, and must find the mark again when that is done.
    let outer = IN_REPLICA.replace(true);
    // Whatever a panic leaves half done is owned by the job and dropped with it.
    let outcome = catch_unwind(AssertUnwindSafe(job));
    IN_REPLICA.set(outer);
    outcome
}

/// The text of a panic's payload.
pub(crate) fn panic_message(payload: &(dyn Any + Send)) -> String {
    let text = payload.downcast_ref::<&str>().map(ToString::to_string);
    text.or_else(|| payload.downcast_ref::<String>().cloned()).unwrap_or_else(|| "no message".into())
}
