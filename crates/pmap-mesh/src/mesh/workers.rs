//! One persistent worker per slot, on which its replica runs.
//!
//! # Synchronization
//!
//! There are two kinds of locks: `dispatch`, one per mesh, and the queue of each mailbox, which is
//! taken under `dispatch` when a job is handed out, and alone when the worker takes its part or the
//! caller takes it back. None is held while a job runs. The counters beside them are looked at
//! without a lock by threads that wait ([`sync::until`]); each is changed before the thread that
//! waits is unparked.
//!
//! # What a job borrows
//!
//! A call returns when all parts of its job have ended, or were taken back before they began. If
//! the job owns what it uses, the call may also return without those that do not end
//! ([`Workers::run`]); if it borrows, they end the process instead ([`Workers::run_scoped`]).

use std::{
    cell::Cell,
    collections::VecDeque,
    fmt, mem,
    panic::Location,
    process,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
        mpsc,
    },
    thread::{self, JoinHandle, Thread},
    time::{Duration, Instant},
};

use core_affinity::CoreId;
use rayon::{ThreadPoolBuildError, ThreadPoolBuilder};

use crate::{
    ending,
    error::{CollectiveError, Error, MeshError, ReplicaError, Result},
    sync::{self, catch, lock},
};

/// How long replicas that have learned of the end of their call are given to return from it: some
/// thousand times what it takes to wake them, since others may need the cores.
const GRACE: Duration = Duration::from_millis(100);

/// What the workers of a mesh do at the same time: the replicas of one call.
pub(crate) trait Job: Send + Sync {
    /// Does the part of the n-th slot of this process.
    fn run(&self, local_index: usize);

    /// Whether a slot has waited for another one for as long as it may: the others are then given
    /// no more time than it takes to notice.
    fn is_late(&self) -> bool;

    /// Ends what the slots do together, since these ones have not ended this long after another
    /// one; returns why.
    fn time_out(&self, stuck: &[usize], after: Duration) -> Error;
}

/// The workers of a mesh: for each slot a thread that waits for jobs, in a thread pool of its own.
///
/// candle's kernels look for the pool they are called in and stay there: replicas that shared the
/// global pool would queue behind each other's matrix products.
#[derive(Debug)]
pub(crate) struct Workers {
    slots: Vec<Slot>,
    /// Held while a job is handed out: all slots must see jobs in the same order, or collectives of
    /// two calls would wait for each other.
    dispatch: Mutex<Dispatch>,
    /// How long a slot that has begun a job is waited for when another one has ended it; for ever
    /// without.
    deadline: Option<Duration>,
}

/// The worker of a slot.
#[derive(Debug)]
struct Slot {
    mailbox: Arc<TaskQueue>,
    /// All threads of its pool.
    threads: Vec<JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct Dispatch {
    /// How many jobs were handed out: each has a part for every slot.
    n_jobs: u64,
    /// Those that were given up, oldest first; some may have ended since.
    given_up: VecDeque<GivenUp>,
}

/// A job whose caller has returned, though a slot is still busy with it.
#[derive(Debug)]
struct GivenUp {
    number: u64,
    call: &'static Location<'static>,
}

/// Why a job has not ended.
struct Stuck {
    /// The slots that have not ended their part.
    slots: Vec<usize>,
    /// How long a slot was waited for.
    after: Duration,
    /// Whether some of them have begun it; from the others it was taken back.
    is_running: bool,
    /// One that has not begun it since it is busy with an earlier call, which was given up.
    behind: Option<Blocker>,
}

/// What keeps a slot from beginning a job: a call that was given up, and has not returned there.
#[derive(Clone, Copy)]
struct Blocker {
    slot: usize,
    call: &'static Location<'static>,
}

impl From<Blocker> for ReplicaError {
    fn from(Blocker { slot, call }: Blocker) -> Self {
        Self::Stuck { slot, call }
    }
}

/// A job that has been handed out.
struct SubmittedJob {
    /// How many were handed out up to this one.
    number: u64,
    pending: Arc<Pending>,
}

thread_local! {
    /// Whether this thread belongs to a mesh.
    static IN_MESH: Cell<bool> = const { Cell::new(false) };
}

impl Workers {
    /// Starts `count` workers that share the machine's cores, each bound to its own if `pin`.
    pub(crate) fn start(
        count: usize,
        pin: bool,
        deadline: Option<Duration>,
    ) -> Result<Self, MeshError> {
        let cores = Cores::new(count, pin);
        let mut workers =
            Self { slots: Vec::with_capacity(count), dispatch: Mutex::default(), deadline };
        for slot in 0..count {
            // If one cannot be started, dropping `workers` ends those before it.
            let started = Slot::start(slot, &cores);
            workers.slots.push(started.map_err(|cause| MeshError::Worker { slot, cause })?);
        }
        Ok(workers)
    }

    /// Refuses a call inside a mesh, whose worker would wait for itself.
    pub(crate) fn refuse_nesting() -> Result<(), ReplicaError> {
        if IN_MESH.get() { Err(ReplicaError::Nested) } else { Ok(()) }
    }

    /// Runs a job on all workers at once, and returns when all have ended it, or when the deadline
    /// has passed.
    ///
    /// # Errors
    ///
    /// [`ReplicaError::Stuck`] while a worker is busy with a job that was given up, and what
    /// [`Job::time_out`] returns if this one is.
    pub(crate) fn run<J: Job + 'static>(
        &self,
        job: &Arc<J>,
        call: &'static Location<'static>,
    ) -> Result<()> {
        let job_of_workers: Arc<dyn Job> = Arc::<J>::clone(job);
        let posted = self.post(&job_of_workers)?;
        self.wait(&posted, &**job).map_err(|stuck| {
            if stuck.is_running {
                let given_up = GivenUp { number: posted.number, call };
                lock(&self.dispatch).given_up.push_back(given_up);
            }
            stuck.error(&**job)
        })
    }

    /// Runs a job that may borrow: returns when all workers that have begun it have ended it. If
    /// one of these has not when the deadline has passed, and neither does when all have learned
    /// that the job has failed, it ends the process.
    ///
    /// # Errors
    ///
    /// As [`run`](Self::run).
    pub(crate) fn run_scoped<J: Job>(
        &self,
        job: &Arc<J>,
        _: &'static Location<'static>,
    ) -> Result<()> {
        let borrowing: Arc<dyn Job + '_> = Arc::<J>::clone(job);
        #[expect(unsafe_code, reason = "a type cannot say that a thread waits for others")]
        // SAFETY: Only the lifetime changes, and no clone of this `Arc` is used when what it
        // borrows may be gone. Clones are given to the workers alone, and each is dropped before
        // its part counts as ended, by the worker or by this thread, which takes it back. This
        // function is not left before all have: neither by returning, since then `wait` has found
        // that none is left, or the process ends; nor by a panic, since `AbortIfDropped` ends the
        // process while `post` hands the job out, and `_all` waits after that. `job` outlives this
        // function, so that no worker drops the last clone, and with it what the job owns.
        let job_of_workers: Arc<dyn Job> =
            unsafe { mem::transmute::<Arc<dyn Job + '_>, Arc<dyn Job>>(borrowing) };
        let posted = self.post(&job_of_workers)?;
        let _all = WaitForAll(&posted.pending);
        self.wait(&posted, &**job).map_err(|stuck| {
            let error = stuck.error(&**job);
            // Who has learned of it in a collective returns, and who was about to return has.
            let grace = Instant::now() + GRACE;
            if !sync::until(Some(grace), || posted.pending.all_have_ended()) {
                ending::end(&format!("{error}; {NO_RETURN}"), || process::exit(1));
            }
            error
        })
    }

    /// Hands a job out to all workers.
    fn post(&self, job: &Arc<dyn Job>) -> Result<SubmittedJob> {
        let pending = Arc::new(Pending {
            of: self.slots.len(),
            left: AtomicUsize::new(self.slots.len()),
            caller: thread::current(),
        });
        let mut dispatch = lock(&self.dispatch);
        self.refuse_if_stuck(&mut dispatch)?;
        // From here on workers may run the job, and nobody waits for them yet.
        let handing_out = AbortIfDropped;
        dispatch.n_jobs += 1;
        for slot in &self.slots {
            let part = Part { job: Arc::clone(job), pending: Arc::clone(&pending) };
            slot.mailbox.post(Task(Some(part)));
        }
        mem::forget(handing_out);
        Ok(SubmittedJob { number: dispatch.n_jobs, pending })
    }

    fn refuse_if_stuck(&self, dispatch: &mut Dispatch) -> Result<(), ReplicaError> {
        dispatch.given_up.retain(|job| self.stuck(job.number).next().is_some());
        match self.behind(dispatch, dispatch.n_jobs) {
            None => Ok(()),
            Some(behind) => Err(behind.into()),
        }
    }

    /// A slot that is busy with one of the first `number` jobs though that was given up.
    fn behind(&self, dispatch: &Dispatch, number: u64) -> Option<Blocker> {
        let mut given_up = dispatch.given_up.iter().filter(|job| job.number <= number);
        given_up.find_map(|&GivenUp { number, call }| {
            self.stuck(number).next().map(|slot| Blocker { slot, call })
        })
    }

    /// The slots that have not ended their parts of the first `number` jobs.
    fn stuck(&self, number: u64) -> impl Iterator<Item = usize> {
        // Only the number counts: nothing that a job wrote is read under it.
        let ended = |slot: &Slot| slot.mailbox.n_ended.load(Ordering::Relaxed);
        (0..self.slots.len()).filter(move |&slot| ended(&self.slots[slot]) < number)
    }

    /// Waits until all workers have ended a job; fails with those that have not in time.
    ///
    /// The time of a slot counts from when it has begun the job: what an earlier call took, of
    /// another thread, is that call's. But if that call is given up, this one does not begin.
    fn wait(&self, posted: &SubmittedJob, job: &dyn Job) -> Result<(), Stuck> {
        let pending = &posted.pending;
        let Some(after) = self.deadline else {
            sync::until(None, || pending.all_have_ended());
            return Ok(());
        };
        // Replicas wait for each other only until the deadline: one of them ends, or all compute.
        sync::until(None, || pending.one_has_ended());
        let is_late = job.is_late();
        let patience = if is_late { GRACE } else { after };
        let start = Instant::now();
        loop {
            // A deadline beyond all time is none.
            let look = self.next_look(posted.number, start, patience);
            if sync::until(look, || pending.all_have_ended()) {
                return Ok(());
            }
            let slots: Vec<usize> = self.stuck(posted.number).collect();
            let behind = self.behind(&lock(&self.dispatch), posted.number - 1);
            let begun =
                slots.iter().map(|&slot| self.slots[slot].mailbox.started_at(posted.number));
            let spent: Vec<_> =
                begun.map(|begun| begun.map(|begun| begun.max(start).elapsed())).collect();
            if is_over(&spent, patience, is_late || behind.is_some()) {
                return Err(self.cancel(pending, slots, after, behind));
            }
        }
    }

    /// When to look whether slots that have not ended job `number` have had their time, if one of
    /// them ends it at all; `start` is when the first one has ended it.
    fn next_look(&self, number: u64, start: Instant, patience: Duration) -> Option<Instant> {
        let over = |slot: usize| match self.slots[slot].mailbox.started_at(number) {
            Some(begun) => begun.max(start).checked_add(patience),
            // It is behind an earlier call, of which we are not told when it is given up.
            None => start.checked_add(patience).map(|over| over.max(Instant::now() + GRACE)),
        };
        self.stuck(number).filter_map(over).min()
    }

    /// Takes a job back from those of these slots that have not begun it, all that have not ended
    /// it.
    fn cancel(
        &self,
        pending: &Arc<Pending>,
        slots: Vec<usize>,
        after: Duration,
        behind: Option<Blocker>,
    ) -> Stuck {
        let mut is_running = false;
        for &slot in &slots {
            is_running |= !self.slots[slot].mailbox.cancel(pending);
        }
        Stuck { slots, after, is_running, behind }
    }
}

/// Whether slots that have not ended a job have had their time, given how long each has had it, if
/// it has begun it. Where all others wait to begin, that is so if there is no more use in it.
fn is_over(spent: &[Option<Duration>], patience: Duration, is_in_vain: bool) -> bool {
    let mut begun = spent.iter().flatten();
    match begun.clone().next() {
        Some(_) => begun.any(|spent| *spent >= patience),
        None => is_in_vain && !spent.is_empty(),
    }
}

impl Stuck {
    /// What the call fails with, which ends for all of its slots.
    fn error(&self, job: &dyn Job) -> Error {
        match (job.time_out(&self.slots, self.after), self.behind) {
            // It did not get from the busy slot what it waited for.
            (Error::Collective(CollectiveError::Deadline { .. }), Some(behind))
                if !self.is_running =>
            {
                ReplicaError::from(behind).into()
            }
            (failure, _) => failure,
        }
    }
}

/// Why a process ends that could go on if its replicas borrowed nothing.
const NO_RETURN: &str = "the process ends, since what the function borrows may be used as long as \
                         a replica runs";

impl Drop for Workers {
    /// Ends all threads, and waits for them unless it is one of them that dropped the mesh; not for
    /// those that are stuck, which end when their replica returns.
    fn drop(&mut self) {
        let n_jobs = lock(&self.dispatch).n_jobs;
        let stuck: Vec<usize> = self.stuck(n_jobs).collect();
        self.slots.iter().for_each(|slot| slot.mailbox.close());
        for (index, slot) in self.slots.drain(..).enumerate() {
            if !IN_MESH.get() && !stuck.contains(&index) {
                slot.join();
            }
        }
    }
}

impl Slot {
    /// Starts the thread pool of a slot, whose first job lasts as long as the mesh, and the pool as
    /// long as its job; kernels called in it find the pool's other threads.
    #[expect(clippy::expect_used, reason = "a pool that was built runs what it is given")]
    fn start(index: usize, cores: &Cores) -> Result<Self, ThreadPoolBuildError> {
        let mut threads = Vec::new();
        let pool = ThreadPoolBuilder::new()
            .num_threads(cores.threads_per_slot)
            .spawn_handler(|thread| {
                let name = format!("mesh-{index}.{}", thread.index());
                let core = cores.of(index, thread.index());
                let start = move || {
                    // Where the system refuses, the thread runs unbound, which is only slower.
                    core.map(core_affinity::set_for_current);
                    IN_MESH.set(true);
                    thread.run();
                };
                threads.push(thread::Builder::new().name(name).spawn(start)?);
                Ok(())
            })
            .build()?;
        let (started, worker) = mpsc::sync_channel(1);
        pool.spawn(move || {
            let mailbox = Arc::new(TaskQueue::new(thread::current()));
            started.send(Arc::clone(&mailbox)).expect("the mesh waits for it");
            mailbox.serve(index);
        });
        let mailbox = worker.recv().expect("a worker starts with its mailbox");
        Ok(Self { mailbox, threads })
    }

    fn join(self) {
        for thread in self.threads {
            // What a thread panicked with was printed by the panic hook.
            drop(thread.join());
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

/// The parts of a job that have not ended, and who waits for them.
struct Pending {
    /// How many parts there are.
    of: usize,
    left: AtomicUsize,
    caller: Thread,
}

impl Pending {
    fn one_has_ended(&self) -> bool {
        // Pairs with the release in `count_down`: the failure that the part noted is seen.
        self.left.load(Ordering::Acquire) < self.of
    }

    fn all_have_ended(&self) -> bool {
        // Pairs with the release in `count_down`: what the parts wrote is seen after this.
        self.left.load(Ordering::Acquire) == 0
    }

    /// Notes the end of a part; the first one and the last one are what the caller waits for.
    fn count_down(&self) {
        // Releases what this part wrote and, for the last one, acquires what the others did.
        let left = self.left.fetch_sub(1, Ordering::AcqRel);
        if left == self.of || left == 1 {
            self.caller.unpark();
        }
    }
}

/// Ends the process if a panic leaves a job with some of its workers: no memory for a task, say.
struct AbortIfDropped;

impl Drop for AbortIfDropped {
    fn drop(&mut self) {
        process::abort();
    }
}

/// When it is dropped, all parts of a job have ended.
struct WaitForAll<'a>(&'a Pending);

impl Drop for WaitForAll<'_> {
    fn drop(&mut self) {
        sync::until(None, || self.0.all_have_ended());
    }
}

/// What a worker is to do next; nothing if the caller has taken it back.
struct Task(Option<Part>);

/// A worker's part of a job.
struct Part {
    job: Arc<dyn Job>,
    pending: Arc<Pending>,
}

impl Part {
    /// Drops the job; returns what its end is then to be counted in, since what the job borrows may
    /// be gone as soon as it is.
    fn release(self) -> Arc<Pending> {
        let Self { job, pending } = self;
        // What it owns may panic when it is dropped; that was printed by the panic hook.
        drop(catch(|| drop(job)));
        pending
    }
}

/// Where a worker finds its tasks.
#[derive(Debug)]
struct TaskQueue {
    tasks: Mutex<Tasks>,
    /// How many tasks there are, to be read without the lock: never more than lie in the queue, so
    /// that a worker that reads another number than 0 finds a task.
    count: AtomicUsize,
    /// How many tasks have ended.
    n_ended: AtomicU64,
    /// Whether the mesh ends; no task is posted afterwards.
    closed: AtomicBool,
    worker: Thread,
}

#[derive(Default)]
struct Tasks {
    /// Those that have not begun, oldest first.
    queue: VecDeque<Task>,
    /// How many have begun: the last of them is the job of that number.
    n_begun: u64,
    /// When the last one has.
    last_begun: Option<Instant>,
}

impl fmt::Debug for Tasks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tasks")
            .field("queued", &self.queue.len())
            .field("last_begun", &self.last_begun)
            .finish_non_exhaustive()
    }
}

impl TaskQueue {
    fn new(worker: Thread) -> Self {
        Self {
            tasks: Mutex::default(),
            count: AtomicUsize::new(0),
            n_ended: AtomicU64::new(0),
            closed: AtomicBool::new(false),
            worker,
        }
    }

    /// Does tasks as they come, until the mailbox is closed.
    fn serve(&self, local_index: usize) {
        while let Some(Task(part)) = self.next() {
            // What was taken back has been counted by who took it.
            let pending = part.map(|part| {
                part.job.run(local_index);
                part.release()
            });
            self.n_ended.fetch_add(1, Ordering::Relaxed);
            if let Some(pending) = pending {
                pending.count_down();
            }
        }
    }

    /// The next task, waited for; `None` if the mailbox is closed and empty.
    fn next(&self) -> Option<Task> {
        // Pair with the changes in `post` and `close`. The task itself comes through the lock.
        sync::until(None, || {
            self.count.load(Ordering::Acquire) > 0 || self.closed.load(Ordering::Acquire)
        });
        let mut tasks = lock(&self.tasks);
        let task = tasks.queue.pop_front()?;
        tasks.n_begun += 1;
        tasks.last_begun = Some(Instant::now());
        self.count.fetch_sub(1, Ordering::AcqRel);
        Some(task)
    }

    fn post(&self, task: Task) {
        lock(&self.tasks).queue.push_back(task);
        // After the task is there, before the worker is woken.
        self.count.fetch_add(1, Ordering::AcqRel);
        self.worker.unpark();
    }

    /// When this worker has begun a job that it has not ended; none if it has not begun it.
    fn started_at(&self, number: u64) -> Option<Instant> {
        let tasks = lock(&self.tasks);
        tasks.last_begun.filter(|_| tasks.n_begun >= number)
    }

    /// Takes back a part, if it has not begun; returns whether it had not.
    fn cancel(&self, pending: &Arc<Pending>) -> bool {
        let mut tasks = lock(&self.tasks);
        let is_its = |part: &mut Part| Arc::ptr_eq(&part.pending, pending);
        // The task stays, and is counted when its turn comes: those behind it keep their numbers.
        let part = tasks.queue.iter_mut().find_map(|Task(part)| part.take_if(is_its));
        // What the job owns is dropped without the lock.
        drop(tasks);
        match part {
            None => false,
            Some(part) => {
                part.release().count_down();
                true
            }
        }
    }

    fn close(&self) {
        self.closed.store(true, Ordering::Release);
        self.worker.unpark();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Adds one to each of what it borrows.
    struct Add<'a>(&'a [AtomicUsize]);

    impl Job for Add<'_> {
        fn run(&self, local_index: usize) {
            // Not at once: the other slot, and the caller, may be done by then.
            thread::yield_now();
            self.0[local_index].fetch_add(1, Ordering::Relaxed);
        }

        fn is_late(&self) -> bool {
            false
        }

        fn time_out(&self, _: &[usize], _: Duration) -> Error {
            unreachable!("there is no deadline")
        }
    }

    #[test]
    fn a_job_that_borrows_is_gone_when_it_has_run() {
        let workers = Workers::start(2, false, None).unwrap();
        for _ in 0..3 {
            let mut counts = vec![AtomicUsize::new(0), AtomicUsize::new(0)];
            let job = Arc::new(Add(&counts));
            workers.run_scoped(&job, Location::caller()).unwrap();
            // No worker holds it.
            assert!(Arc::try_unwrap(job).is_ok());
            assert_eq!(counts.iter_mut().map(|n| *n.get_mut()).collect::<Vec<_>>(), [1, 1]);
        }
    }

    /// Slot 1 returns when the caller has given it up.
    #[derive(Default)]
    struct Late {
        is_given_up: AtomicBool,
    }

    impl Job for Late {
        fn run(&self, local_index: usize) {
            while local_index == 1 && !self.is_given_up.load(Ordering::Acquire) {
                thread::yield_now();
            }
        }

        fn is_late(&self) -> bool {
            false
        }

        fn time_out(&self, stuck: &[usize], _: Duration) -> Error {
            assert_eq!(stuck, [1]);
            self.is_given_up.store(true, Ordering::Release);
            ReplicaError::Nested.into()
        }
    }

    #[test]
    fn a_scoped_job_that_ends_when_it_is_given_up_ends_no_process() {
        let workers = Workers::start(2, false, Some(Duration::ZERO)).unwrap();
        let outcome = workers.run_scoped(&Arc::new(Late::default()), Location::caller());
        assert!(matches!(outcome, Err(Error::Replica(ReplicaError::Nested))));
        // Nobody is busy with it.
        assert!(workers.refuse_if_stuck(&mut lock(&workers.dispatch)).is_ok());
    }

    #[test]
    fn a_slot_has_its_time_from_when_it_has_begun() {
        let patience = Duration::from_secs(5);
        let [short, long] = [4, 5].map(|seconds| Some(Duration::from_secs(seconds)));
        for is_in_vain in [false, true] {
            assert!(is_over(&[None, short, long], patience, is_in_vain));
            assert!(!is_over(&[None, short], patience, is_in_vain));
            assert!(!is_over(&[], patience, is_in_vain));
            assert_eq!(is_over(&[None, None], patience, is_in_vain), is_in_vain);
        }
    }

    #[test]
    fn a_job_is_behind_one_that_was_given_up_before_it_and_not_behind_a_slow_one() {
        let workers = Workers::start(1, false, None).unwrap();
        // None of the three has ended.
        let mut dispatch = lock(&workers.dispatch);
        dispatch.n_jobs = 3;
        assert!(workers.refuse_if_stuck(&mut dispatch).is_ok());
        let call = Location::caller();
        dispatch.given_up.push_back(GivenUp { number: 2, call });
        assert!(workers.behind(&dispatch, 1).is_none());
        assert_eq!(workers.behind(&dispatch, 2).unwrap().call, call);
        let refused = workers.refuse_if_stuck(&mut dispatch);
        assert!(matches!(refused, Err(ReplicaError::Stuck { slot: 0, .. })));
        workers.slots[0].mailbox.n_ended.store(2, Ordering::Relaxed);
        assert!(workers.refuse_if_stuck(&mut dispatch).is_ok());
        // So that dropping them waits for nobody.
        dispatch.n_jobs = 0;
    }

    static COUNTS: [AtomicUsize; 1] = [AtomicUsize::new(0)];

    /// Posts a part of a job of one slot; returns what its end is counted in.
    fn post(mailbox: &TaskQueue, job: &Arc<dyn Job>) -> Arc<Pending> {
        let caller = thread::current();
        let pending = Arc::new(Pending { of: 1, left: AtomicUsize::new(1), caller });
        let part = Part { job: Arc::clone(job), pending: Arc::clone(&pending) };
        mailbox.post(Task(Some(part)));
        pending
    }

    #[test]
    fn a_part_is_taken_back_until_it_begins_and_its_job_is_let_go() {
        let mailbox = TaskQueue::new(thread::current());
        let job: Arc<dyn Job> = Arc::new(Add(&COUNTS));
        let first = post(&mailbox, &job);
        let second = post(&mailbox, &job);
        assert!(mailbox.started_at(1).is_none());
        let _begun = mailbox.next().unwrap();
        assert!(mailbox.started_at(1).is_some() && mailbox.started_at(2).is_none());

        assert!(!mailbox.cancel(&first));
        assert!(mailbox.cancel(&second));
        assert!(second.all_have_ended() && !first.all_have_ended());
        // Here, and in the part that has begun.
        assert_eq!(Arc::strong_count(&job), 2);
        // Its turn comes all the same.
        assert!(mailbox.next().unwrap().0.is_none());
        assert!(!mailbox.cancel(&second));
    }
}
