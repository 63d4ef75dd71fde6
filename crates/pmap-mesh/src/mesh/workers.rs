//! One persistent worker per slot, on which its replica runs.

use std::{
    any::Any,
    cell::Cell,
    collections::VecDeque,
    fmt,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
        mpsc,
    },
    thread::{self, JoinHandle, Thread},
};

use crate::{
    error::{Error, Result},
    sync::{self, lock},
};

/// The workers of a mesh: for each slot a thread that waits for jobs, in a thread pool of its own.
///
/// candle's kernels look for the pool they are called in and stay there: replicas that shared the
/// global pool would queue behind each other's matrix products.
#[derive(Debug)]
pub(crate) struct Workers {
    mailboxes: Vec<Arc<Mailbox>>,
    threads: Vec<JoinHandle<()>>,
    /// Held while jobs are handed out: all slots must see calls in the same order, or collectives
    /// of two calls would wait for each other.
    dispatch: Mutex<()>,
}

type Job = Box<dyn FnOnce() + Send>;

thread_local! {
    /// Whether this thread belongs to a mesh.
    static IN_MESH: Cell<bool> = const { Cell::new(false) };
}

impl Workers {
    /// Starts `count` workers that share the machine's cores, each bound to its own if `pin`.
    pub(crate) fn start(count: usize, pin: bool) -> Result<Self> {
        let cores = thread::available_parallelism().map_or(1, usize::from);
        let threads_per_slot = (cores / count).max(1);
        let pins = if pin { core_affinity::get_core_ids().unwrap_or_default() } else { Vec::new() };
        let mut workers = Self {
            mailboxes: Vec::with_capacity(count),
            threads: Vec::new(),
            dispatch: Mutex::default(),
        };
        for slot in 0..count {
            let pool = rayon::ThreadPoolBuilder::new()
                .num_threads(threads_per_slot)
                .spawn_handler(|thread| {
                    let core = pins
                        .get(core_of(slot, thread.index(), count, threads_per_slot, pins.len()))
                        .copied();
                    let name = format!("mesh-{slot}.{}", thread.index());
                    let start = move || {
                        core.map(core_affinity::set_for_current);
                        IN_MESH.set(true);
                        thread.run();
                    };
                    workers.threads.push(thread::Builder::new().name(name).spawn(start)?);
                    Ok(())
                })
                .build()
                .map_err(|source| Error::Worker { index: slot, source })?;
            // The pool's first job lasts as long as the mesh, and the pool as long as its job;
            // kernels called in it find the pool's other threads.
            let (started, worker) = mpsc::sync_channel(1);
            pool.spawn(move || {
                let mailbox = Arc::new(Mailbox::new(thread::current()));
                drop(started.send(Arc::clone(&mailbox)));
                mailbox.serve();
            });
            workers.mailboxes.extend(worker.recv());
        }
        Ok(workers)
    }

    /// Refuses to go on inside a mesh, whose worker would wait for itself.
    pub(crate) fn refuse_nesting() -> Result<()> {
        if IN_MESH.get() { Err(Error::Nested) } else { Ok(()) }
    }

    /// Runs the n-th job on the n-th worker, all at once, and returns when all have ended.
    ///
    /// Jobs must not panic.
    pub(crate) fn run(&self, jobs: impl IntoIterator<Item = impl FnOnce() + Send + 'static>) {
        let pending = Arc::new(Pending {
            jobs: AtomicUsize::new(self.mailboxes.len()),
            caller: thread::current(),
        });
        let jobs: Vec<Job> =
            jobs.into_iter().map(|job| Pending::counted(Arc::clone(&pending), job)).collect();
        let order = lock(&self.dispatch);
        self.mailboxes.iter().zip(jobs).for_each(|(mailbox, job)| mailbox.post(job));
        drop(order);
        sync::until(None, || pending.jobs.load(Ordering::Acquire) == 0);
    }
}

impl Drop for Workers {
    /// Ends all threads, and waits for them unless it is one of them that dropped the mesh.
    fn drop(&mut self) {
        self.mailboxes.iter().for_each(|mailbox| mailbox.close());
        for thread in self.threads.drain(..) {
            if !IN_MESH.get() {
                // A thread that panicked has told so already.
                drop(thread.join());
            }
        }
    }
}

/// The core of one thread: a slot's threads side by side, and slots spread evenly where there are
/// more than cores.
fn core_of(
    slot: usize,
    thread: usize,
    slots: usize,
    threads_per_slot: usize,
    cores: usize,
) -> usize {
    if slots > cores { slot * cores / slots } else { slot * threads_per_slot + thread }
}

/// The jobs of a call that have not ended, and who waits for them.
struct Pending {
    jobs: AtomicUsize,
    caller: Thread,
}

impl Pending {
    /// `job`, counted down when it has ended.
    fn counted(pending: Arc<Self>, job: impl FnOnce() + Send + 'static) -> Job {
        Box::new(move || {
            job();
            if pending.jobs.fetch_sub(1, Ordering::AcqRel) == 1 {
                pending.caller.unpark();
            }
        })
    }
}

/// Where a worker finds its jobs.
#[derive(Debug)]
struct Mailbox {
    jobs: Mutex<Jobs>,
    /// How many there are, to be read without the lock.
    count: AtomicUsize,
    closed: AtomicBool,
    worker: Thread,
}

#[derive(Default)]
struct Jobs(VecDeque<Job>);

impl fmt::Debug for Jobs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} jobs", self.0.len())
    }
}

impl Mailbox {
    fn new(worker: Thread) -> Self {
        Self {
            jobs: Mutex::default(),
            count: AtomicUsize::new(0),
            closed: AtomicBool::new(false),
            worker,
        }
    }

    /// Runs jobs as they come, until the mailbox is closed.
    fn serve(&self) {
        while let Some(job) = self.next() {
            job();
        }
    }

    fn next(&self) -> Option<Job> {
        sync::until(None, || {
            self.count.load(Ordering::Acquire) > 0 || self.closed.load(Ordering::Acquire)
        });
        let job = lock(&self.jobs).0.pop_front()?;
        self.count.fetch_sub(1, Ordering::AcqRel);
        Some(job)
    }

    fn post(&self, job: Job) {
        lock(&self.jobs).0.push_back(job);
        self.count.fetch_add(1, Ordering::AcqRel);
        self.worker.unpark();
    }

    fn close(&self) {
        self.closed.store(true, Ordering::Release);
        self.worker.unpark();
    }
}

/// Runs what a replica does; its panic becomes its message.
pub(crate) fn catch<T>(run: impl FnOnce() -> T) -> Result<T, String> {
    // Whatever a panic leaves half done is owned by the replica and dropped with it.
    catch_unwind(AssertUnwindSafe(run)).map_err(|payload| panic_message(&*payload))
}

fn panic_message(payload: &(dyn Any + Send)) -> String {
    let text = payload.downcast_ref::<&str>().map(ToString::to_string);
    text.or_else(|| payload.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "no message".into())
}
