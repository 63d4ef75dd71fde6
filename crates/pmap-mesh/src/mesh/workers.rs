//! One persistent worker per slot, on which its replica runs.
//!
//! # Synchronization
//!
//! There are two kinds of locks: `dispatch`, one per mesh, and the queue of each mailbox, which is
//! taken under `dispatch` when jobs are handed out and by the worker alone when it takes one. None
//! is held while a job runs. The counters beside them are looked at without a lock by threads that
//! wait ([`sync::until`]); each is changed before the thread that waits is unparked.

use std::{
    any::Any,
    cell::Cell,
    collections::VecDeque,
    fmt, mem,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
        mpsc,
    },
    thread::{self, JoinHandle, Thread},
};

use core_affinity::CoreId;
use rayon::{ThreadPoolBuildError, ThreadPoolBuilder};

use crate::{
    error::{MeshError, ReplicaError, Result},
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
    pub(crate) fn start(count: usize, pin: bool) -> Result<Self, MeshError> {
        let cores = Cores::new(count, pin);
        let mut workers = Self {
            mailboxes: Vec::with_capacity(count),
            threads: Vec::new(),
            dispatch: Mutex::default(),
        };
        for slot in 0..count {
            // If one cannot be started, dropping `workers` ends those before it.
            workers.start_slot(slot, &cores).map_err(|cause| MeshError::Worker { slot, cause })?;
        }
        Ok(workers)
    }

    /// Starts the thread pool of a slot, whose first job lasts as long as the mesh, and the pool as
    /// long as its job; kernels called in it find the pool's other threads.
    #[expect(clippy::expect_used, reason = "a pool that was built runs what it is given")]
    fn start_slot(&mut self, slot: usize, cores: &Cores) -> Result<(), ThreadPoolBuildError> {
        let pool = ThreadPoolBuilder::new()
            .num_threads(cores.threads_per_slot)
            .spawn_handler(|thread| {
                let name = format!("mesh-{slot}.{}", thread.index());
                let core = cores.of(slot, thread.index());
                let start = move || {
                    // Where the system refuses, the thread runs unbound, which is only slower.
                    core.map(core_affinity::set_for_current);
                    IN_MESH.set(true);
                    thread.run();
                };
                self.threads.push(thread::Builder::new().name(name).spawn(start)?);
                Ok(())
            })
            .build()?;
        let (started, worker) = mpsc::sync_channel(1);
        pool.spawn(move || {
            let mailbox = Arc::new(Mailbox::new(thread::current()));
            started.send(Arc::clone(&mailbox)).expect("the mesh waits for it");
            mailbox.serve();
        });
        self.mailboxes.push(worker.recv().expect("a worker starts with its mailbox"));
        Ok(())
    }

    /// Refuses a call inside a mesh, whose worker would wait for itself.
    pub(crate) fn refuse_nesting() -> Result<(), ReplicaError> {
        if IN_MESH.get() { Err(ReplicaError::Nested) } else { Ok(()) }
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
        let dispatch = lock(&self.dispatch);
        self.mailboxes.iter().zip(jobs).for_each(|(mailbox, job)| mailbox.post(job));
        drop(dispatch);
        // Pairs with the release in `counted`: what the jobs wrote is seen after this.
        sync::until(None, || pending.jobs.load(Ordering::Acquire) == 0);
    }
}

impl Drop for Workers {
    /// Ends all threads, and waits for them unless it is one of them that dropped the mesh.
    fn drop(&mut self) {
        self.mailboxes.iter().for_each(|mailbox| mailbox.close());
        for thread in self.threads.drain(..) {
            if !IN_MESH.get() {
                // What a thread panicked with was printed by the panic hook.
                drop(thread.join());
            }
        }
    }
}

/// How the cores of the machine are divided among the slots.
struct Cores {
    slots: usize,
    threads_per_slot: usize,
    /// What threads are bound to; none if they are not to be, or the system does not say.
    pins: Vec<CoreId>,
}

impl Cores {
    fn new(slots: usize, pin: bool) -> Self {
        // Where the system does not say how many there are, one is right on every machine.
        let cores = thread::available_parallelism().map_or(1, usize::from);
        let pins = if pin { core_affinity::get_core_ids() } else { None };
        Self {
            slots,
            threads_per_slot: (cores / slots).max(1),
            pins: pins.into_iter().flatten().collect(),
        }
    }

    /// The core of one thread: a slot's threads side by side, and slots spread evenly where there
    /// are more than cores.
    fn of(&self, slot: usize, thread: usize) -> Option<CoreId> {
        let n_pins = self.pins.len();
        let core = if self.slots > n_pins {
            slot * n_pins / self.slots
        } else {
            slot * self.threads_per_slot + thread
        };
        self.pins.get(core).copied()
    }
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
            // Releases what this job wrote and, for the last one, acquires what the others did.
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
    /// How many jobs there are, to be read without the lock: never more than lie in the queue, so
    /// that a worker that reads another number than 0 finds a job.
    count: AtomicUsize,
    /// Whether the mesh ends; no job is posted afterwards.
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

    /// The next job, waited for; `None` if the mailbox is closed and empty.
    fn next(&self) -> Option<Job> {
        // Pair with the changes in `post` and `close`. The job itself comes through the lock.
        sync::until(None, || {
            self.count.load(Ordering::Acquire) > 0 || self.closed.load(Ordering::Acquire)
        });
        let job = lock(&self.jobs).0.pop_front()?;
        self.count.fetch_sub(1, Ordering::AcqRel);
        Some(job)
    }

    fn post(&self, job: Job) {
        lock(&self.jobs).0.push_back(job);
        // After the job is there, before the worker is woken.
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
    catch_unwind(AssertUnwindSafe(run)).map_err(|payload| {
        let message = panic_message(&*payload);
        discard(payload);
        message
    })
}

/// Drops what a panic was raised with, which may panic in turn: outside of `catch_unwind` that would
/// end the program.
fn discard(payload: Box<dyn Any + Send>) {
    if let Err(again) = catch_unwind(AssertUnwindSafe(|| drop(payload))) {
        // That one may panic as well, and so on: it is left where it is.
        mem::forget(again);
    }
}

fn panic_message(payload: &(dyn Any + Send)) -> String {
    if let Some(text) = payload.downcast_ref::<&str>() {
        (*text).to_owned()
    } else if let Some(text) = payload.downcast_ref::<String>() {
        text.clone()
    } else {
        // `std::panic::panic_any` takes anything.
        "no message".to_owned()
    }
}
