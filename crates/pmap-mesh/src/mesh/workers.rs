//! One persistent worker per slot, which runs the slot's replicas.
//!
//! # Synchronization
//!
//! There are two kinds of locks: `dispatch`, one per mesh, and the queue of each worker. A thread
//! that submits a job takes the queues' locks under `dispatch`; a worker that takes a task, or a
//! caller that cancels one, takes only the queue's. A caller whose turn does not come takes the
//! locks of all queues, in the order of slots. No lock is held while a job runs. Waiting
//! threads read the atomic counters without a lock ([`sync::wait_until`]); each counter changes
//! before the waiting thread is unparked.
//!
//! # Jobs that borrow
//!
//! A call returns when all tasks of its job have ended or were cancelled before they began. If the
//! job owns its data, the call may also return while a task runs on after the deadline
//! ([`Workers::run`]). If the job borrows, such a task ends the process instead
//! ([`Workers::run_scoped`]).

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
    error::{CollectiveError, Error, MeshError, ReplicaError, Result},
    exit,
    sync::{self, catch, lock},
};

/// Time for replicas to return after their call has failed: some thousand times as long as waking
/// them takes, since other threads may occupy the cores.
const GRACE: Duration = Duration::from_millis(100);

/// The concurrent work of a mesh's workers: the replicas of one call.
pub(crate) trait WorkerJob: Send + Sync {
    /// Runs the task of this process's slot number `local_index`.
    fn run(&self, local_index: usize);

    /// Returns true if a slot's wait for another slot has passed the deadline. The other slots then
    /// get only the time to notice it.
    fn deadline_passed(&self) -> bool;

    /// Fails the job because the slots `stuck` have not ended within `limit` of another slot's end.
    /// Returns the error.
    fn time_out(&self, stuck: &[usize], limit: Duration) -> Error;
}

/// The workers of a mesh: for each slot a thread that waits for jobs, in a separate thread pool.
///
/// candle's kernels run in the pool of the thread that calls them. In the shared global pool,
/// replicas would queue for each other's matrix products.
#[derive(Debug)]
pub(crate) struct Workers {
    slots: Vec<SlotWorker>,
    /// Locked while a job is submitted: all slots must get jobs in the same order, or collectives
    /// of two calls would wait for each other.
    dispatch: Mutex<DispatchState>,
    /// Time limit for a slot that has begun a job, counted from the end of the first slot; `None`
    /// for no limit.
    deadline: Option<Duration>,
}

/// The worker of one slot.
#[derive(Debug)]
struct SlotWorker {
    queue: Arc<TaskQueue>,
    /// All threads of the slot's pool.
    threads: Vec<JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct DispatchState {
    /// The number of submitted jobs. Each has a task for every slot.
    n_jobs: u64,
    /// The jobs that timed out, oldest first. Some may have ended since.
    timed_out: VecDeque<TimedOutJob>,
}

/// A job that timed out: its caller has returned, but a slot may still run it.
#[derive(Debug)]
struct TimedOutJob {
    number: u64,
    call: &'static Location<'static>,
}

/// Why a job has not ended.
enum UnfinishedJob {
    /// No slot has begun the job, because of an earlier call. All its tasks were cancelled.
    NotBegun(Blocker),
    /// Some slots missed the deadline.
    TimedOut {
        /// The slots with an unfinished task.
        slots: Vec<usize>,
        /// The time limit that they missed.
        limit: Duration,
        /// Whether a task of the job is still running. All others were cancelled.
        is_running: bool,
        /// An earlier call that kept a slot from beginning the job.
        blocker: Option<Blocker>,
    },
}

/// An earlier call that has run in a slot for longer than the deadline, and so keeps a later job
/// from beginning there.
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

/// A submitted job.
struct SubmittedJob {
    /// The number of jobs submitted so far, including this one.
    number: u64,
    countdown: Arc<TaskCountdown>,
}

thread_local! {
    /// Whether this thread belongs to a mesh.
    static IN_MESH: Cell<bool> = const { Cell::new(false) };
}

impl Workers {
    /// Starts `count` workers that share the machine's cores, each bound to its cores if `pin`.
    pub(crate) fn start(
        count: usize,
        pin: bool,
        deadline: Option<Duration>,
    ) -> Result<Self, MeshError> {
        let cores = CoreAllocation::new(count, pin);
        let mut workers =
            Self { slots: Vec::with_capacity(count), dispatch: Mutex::default(), deadline };
        for slot in 0..count {
            // If a worker cannot be started, dropping `workers` ends the earlier ones.
            let started = SlotWorker::start(slot, &cores);
            workers.slots.push(started.map_err(|cause| MeshError::Worker { slot, cause })?);
        }
        Ok(workers)
    }

    /// Rejects a call inside a replica, whose worker would wait for itself.
    pub(crate) fn check_not_nested() -> Result<(), ReplicaError> {
        if IN_MESH.get() { Err(ReplicaError::Nested) } else { Ok(()) }
    }

    /// Runs a job on all workers in parallel. Returns when all have ended it, or when the deadline
    /// has passed.
    ///
    /// # Errors
    ///
    /// [`ReplicaError::Stuck`] while a worker runs a job that timed out, and the error of
    /// [`WorkerJob::time_out`] if this job times out.
    pub(crate) fn run<J: WorkerJob + 'static>(
        &self,
        job: &Arc<J>,
        call: &'static Location<'static>,
    ) -> Result<()> {
        let shared: Arc<dyn WorkerJob> = Arc::<J>::clone(job);
        let submitted = self.submit(&shared, call)?;
        self.wait(&submitted, &**job).map_err(|stuck| {
            if matches!(stuck, UnfinishedJob::TimedOut { is_running: true, .. }) {
                let timed_out = TimedOutJob { number: submitted.number, call };
                lock(&self.dispatch).timed_out.push_back(timed_out);
            }
            stuck.error(&**job)
        })
    }

    /// Runs a job that may borrow, and returns when all workers that have begun it have ended it. A
    /// worker that misses the deadline, and does not return [`GRACE`] after the job has failed,
    /// ends the process.
    ///
    /// # Errors
    ///
    /// The errors of [`run`](Self::run).
    pub(crate) fn run_scoped<J: WorkerJob>(
        &self,
        job: &Arc<J>,
        call: &'static Location<'static>,
    ) -> Result<()> {
        let borrowing: Arc<dyn WorkerJob + '_> = Arc::<J>::clone(job);
        #[expect(unsafe_code, reason = "a type cannot say that a thread waits for others")]
        // SAFETY: Only the lifetime changes, and no clone of this `Arc` is used after the end of
        // the borrow. Only the workers get clones. Each clone is dropped before its task counts as
        // ended, either by the worker or by this thread when it cancels the task. This function
        // does not end before all tasks have: it returns only after `wait` has found that none is
        // left, and otherwise ends the process; on a panic, `AbortIfDropped` ends the process while
        // `submit` runs, and later `_all` waits for the tasks. `job` outlives this function, so no
        // worker drops the last clone, and with it the data that the job owns.
        let job_of_workers: Arc<dyn WorkerJob> =
            unsafe { mem::transmute::<Arc<dyn WorkerJob + '_>, Arc<dyn WorkerJob>>(borrowing) };
        let submitted = self.submit(&job_of_workers, call)?;
        let _all = WaitForAll(&submitted.countdown);
        self.wait(&submitted, &**job).map_err(|stuck| {
            let error = stuck.error(&**job);
            // A replica that sees the failure in a collective returns now, and one that was about
            // to return has.
            let grace = Instant::now() + GRACE;
            if !sync::wait_until(Some(grace), || submitted.countdown.all_ended()) {
                exit::exit_with(&format!("{error}; {NO_RETURN}"), || process::exit(1));
            }
            error
        })
    }

    /// Submits a job to all workers.
    fn submit(
        &self,
        job: &Arc<dyn WorkerJob>,
        call: &'static Location<'static>,
    ) -> Result<SubmittedJob> {
        let countdown = Arc::new(TaskCountdown {
            total: self.slots.len(),
            remaining: AtomicUsize::new(self.slots.len()),
            caller: thread::current(),
        });
        let mut dispatch = lock(&self.dispatch);
        self.check_not_stuck(&mut dispatch)?;
        // From here on workers may run the job, and no thread waits for them yet.
        let handing_out = AbortIfDropped;
        dispatch.n_jobs += 1;
        for slot in &self.slots {
            let task = SlotTask { job: Arc::clone(job), countdown: Arc::clone(&countdown) };
            slot.queue.push(QueuedTask { call, task: Some(task) });
        }
        mem::forget(handing_out);
        Ok(SubmittedJob { number: dispatch.n_jobs, countdown })
    }

    fn check_not_stuck(&self, dispatch: &mut DispatchState) -> Result<(), ReplicaError> {
        dispatch.timed_out.retain(|job| self.unfinished_slots(job.number).next().is_some());
        match self.find_blocker(dispatch, dispatch.n_jobs) {
            None => Ok(()),
            Some(blocker) => Err(blocker.into()),
        }
    }

    /// Returns a slot that still runs a timed-out job among the first `number` jobs.
    fn find_blocker(&self, dispatch: &DispatchState, number: u64) -> Option<Blocker> {
        for job in dispatch.timed_out.iter().filter(|job| job.number <= number) {
            if let Some(slot) = self.unfinished_slots(job.number).next() {
                return Some(Blocker { slot, call: job.call });
            }
        }
        None
    }

    /// Returns the slots that have not ended their tasks of the first `number` jobs.
    fn unfinished_slots(&self, number: u64) -> impl Iterator<Item = usize> {
        // Only the number counts; it publishes no other data.
        let slots = self.slots.iter().enumerate();
        slots
            .filter(move |(_, slot)| slot.queue.n_ended.load(Ordering::Relaxed) < number)
            .map(|(index, _)| index)
    }

    /// Waits until all workers have ended a job; fails if some miss the deadline.
    ///
    /// The time limit of a slot starts when the slot begins the job, so that an earlier call of
    /// another thread does not use it up. But if that earlier call takes longer than the deadline,
    /// this job never begins: it could be the call that a replica of the earlier one waits for.
    fn wait(&self, submitted: &SubmittedJob, job: &dyn WorkerJob) -> Result<(), UnfinishedJob> {
        let countdown = &submitted.countdown;
        let Some(deadline) = self.deadline else {
            sync::wait_until(None, || countdown.all_ended());
            return Ok(());
        };
        if let Some(blocker) = self.wait_for_turn(submitted, deadline) {
            return Err(UnfinishedJob::NotBegun(blocker));
        }
        // Replicas wait for each other at most until the deadline, so either one of them ends or
        // all compute.
        sync::wait_until(None, || countdown.any_ended());
        let deadline_passed = job.deadline_passed();
        let limit = if deadline_passed { GRACE } else { deadline };
        let start = Instant::now();
        loop {
            // There is no deadline if it overflows.
            let next_check = self.next_check(submitted.number, start, limit);
            if sync::wait_until(next_check, || countdown.all_ended()) {
                return Ok(());
            }
            let slots: Vec<usize> = self.unfinished_slots(submitted.number).collect();
            let blocker = self.find_blocker(&lock(&self.dispatch), submitted.number - 1);
            let spent: Vec<_> =
                slots.iter().map(|&slot| self.time_spent(slot, submitted.number, start)).collect();
            if has_timed_out(&spent, limit, deadline_passed || blocker.is_some()) {
                return Err(self.cancel(countdown, slots, deadline, blocker));
            }
        }
    }

    /// Waits until a slot has begun a job. If an earlier call meanwhile runs for longer than the
    /// deadline, cancels the job and returns that call.
    fn wait_for_turn(&self, submitted: &SubmittedJob, deadline: Duration) -> Option<Blocker> {
        let start = Instant::now();
        let mut next_check = start.checked_add(deadline);
        while !sync::wait_until(next_check, || submitted.countdown.any_ended()) {
            if self.slots.iter().any(|slot| slot.queue.started_at(submitted.number).is_some()) {
                return None;
            }
            if let Some(blocker) = self.find_overdue(start, deadline)
                && self.cancel_unbegun(submitted)
            {
                return Some(blocker);
            }
            // Neither the end nor the start of a task of another call wakes this thread, so poll.
            next_check = Some(Instant::now() + GRACE);
        }
        None
    }

    /// Returns a slot that has run one call for at least `limit` since `start`.
    fn find_overdue(&self, start: Instant, limit: Duration) -> Option<Blocker> {
        self.slots.iter().enumerate().find_map(|(slot, worker)| {
            let BegunTask { at, call } = worker.queue.running()?;
            (at.max(start).elapsed() >= limit).then_some(Blocker { slot, call })
        })
    }

    /// Cancels a job in all slots, unless a slot has begun it. Returns true if it was cancelled.
    fn cancel_unbegun(&self, submitted: &SubmittedJob) -> bool {
        // With all locks at once, no slot begins the job while it is cancelled in others.
        let mut queues: Vec<_> = self.slots.iter().map(|slot| lock(&slot.queue.tasks)).collect();
        if queues.iter().any(|queue| queue.n_begun >= submitted.number) {
            return false;
        }
        let tasks: Vec<_> =
            queues.iter_mut().filter_map(|queue| queue.take(&submitted.countdown)).collect();
        // Release the locks before dropping the job's data.
        drop(queues);
        for task in tasks {
            task.release().count_down();
        }
        true
    }

    /// Returns when to check again whether unfinished slots have used up their time. `start` is
    /// when the first slot ended job `number`.
    fn next_check(&self, number: u64, start: Instant, limit: Duration) -> Option<Instant> {
        let mut earliest = None;
        for slot in self.unfinished_slots(number) {
            let check = match self.slots[slot].queue.started_at(number) {
                Some(started) => started.max(start).checked_add(limit),
                // An earlier call blocks the slot. Its time-out does not wake this thread, so poll.
                None => start.checked_add(limit).map(|end| end.max(Instant::now() + GRACE)),
            };
            earliest = [earliest, check].into_iter().flatten().min();
        }
        earliest
    }

    /// Returns how long a slot has run job `number` since `start`, or `None` if it has not begun.
    fn time_spent(&self, slot: usize, number: u64, start: Instant) -> Option<Duration> {
        let started = self.slots[slot].queue.started_at(number)?;
        Some(started.max(start).elapsed())
    }

    /// Cancels a job in the slots that have not begun it. `slots` are all slots that have not ended
    /// it.
    fn cancel(
        &self,
        countdown: &Arc<TaskCountdown>,
        slots: Vec<usize>,
        limit: Duration,
        blocker: Option<Blocker>,
    ) -> UnfinishedJob {
        let mut is_running = false;
        for &slot in &slots {
            is_running |= !self.slots[slot].queue.cancel(countdown);
        }
        UnfinishedJob::TimedOut { slots, limit, is_running, blocker }
    }
}

/// Returns true if a job has timed out, given the time that each unfinished slot has spent on it,
/// or `None` if the slot has not begun it. If no slot has begun it, the job has timed out if
/// `is_in_vain`: it cannot succeed any more.
fn has_timed_out(spent: &[Option<Duration>], limit: Duration, is_in_vain: bool) -> bool {
    match spent.iter().flatten().max() {
        Some(longest) => *longest >= limit,
        None => is_in_vain && !spent.is_empty(),
    }
}

impl UnfinishedJob {
    /// Returns the error of the whole call.
    fn error(self, job: &dyn WorkerJob) -> Error {
        let (slots, limit, is_running, blocker) = match self {
            Self::NotBegun(blocker) => return ReplicaError::from(blocker).into(),
            Self::TimedOut { slots, limit, is_running, blocker } => {
                (slots, limit, is_running, blocker)
            }
        };
        let failure = job.time_out(&slots, limit);
        match (&failure, blocker) {
            // The job waited for the slot that is busy with an earlier call.
            (Error::Collective(CollectiveError::Deadline { .. }), Some(blocker)) if !is_running => {
                ReplicaError::from(blocker).into()
            }
            _ => failure,
        }
    }
}

/// Why a process ends instead of returning the error of a replica that borrows.
const NO_RETURN: &str = "the process ends, since what the function borrows may be used as long as \
                         a replica runs";

impl Drop for Workers {
    /// Ends all threads and joins them, unless one of them drops the mesh. Threads of stuck slots
    /// are not joined; they end when their replica returns.
    fn drop(&mut self) {
        let n_jobs = lock(&self.dispatch).n_jobs;
        let stuck: Vec<usize> = self.unfinished_slots(n_jobs).collect();
        self.slots.iter().for_each(|slot| slot.queue.close());
        for (index, slot) in self.slots.drain(..).enumerate() {
            if !IN_MESH.get() && !stuck.contains(&index) {
                slot.join();
            }
        }
    }
}

impl SlotWorker {
    /// Starts the thread pool of a slot. Its first job runs as long as the mesh exists, and the
    /// pool lives as long as this job; kernels called in it use the pool's other threads.
    #[expect(clippy::expect_used, reason = "a new pool runs its first job")]
    fn start(index: usize, cores: &CoreAllocation) -> Result<Self, ThreadPoolBuildError> {
        let mut threads = Vec::new();
        let pool = ThreadPoolBuilder::new()
            .num_threads(cores.threads_per_slot)
            .spawn_handler(|thread| {
                let name = format!("mesh-{index}.{}", thread.index());
                let core = cores.core_for(index, thread.index());
                threads.push(thread::Builder::new().name(name).spawn(move || {
                    // If the system rejects the core, the thread runs unbound, which is only
                    // slower.
                    core.map(core_affinity::set_for_current);
                    IN_MESH.set(true);
                    thread.run();
                })?);
                Ok(())
            })
            .build()?;
        let (started, worker) = mpsc::sync_channel(1);
        pool.spawn(move || {
            let queue = Arc::new(TaskQueue::new(thread::current()));
            started.send(Arc::clone(&queue)).expect("the mesh waits for it");
            queue.serve(index);
        });
        let queue = worker.recv().expect("a worker starts with its queue");
        Ok(Self { queue, threads })
    }

    fn join(self) {
        for thread in self.threads {
            // The panic hook has printed the panic of the thread.
            drop(thread.join());
        }
    }
}

/// The division of the machine's cores among the slots.
struct CoreAllocation {
    slots: usize,
    threads_per_slot: usize,
    /// The cores to bind threads to; empty if threads are not bound, or the system does not list
    /// its cores.
    pins: Vec<CoreId>,
}

impl CoreAllocation {
    fn new(slots: usize, pin: bool) -> Self {
        // If the core count is unknown, one is valid on every machine.
        let cores = thread::available_parallelism().map_or(1, usize::from);
        let pins = if pin { core_affinity::get_core_ids() } else { None };
        Self {
            slots,
            threads_per_slot: (cores / slots).max(1),
            pins: pins.into_iter().flatten().collect(),
        }
    }

    /// Returns the core of one thread. Threads of a slot get adjacent cores, and if there are more
    /// slots than cores, slots are spread evenly.
    fn core_for(&self, slot: usize, thread: usize) -> Option<CoreId> {
        let n_pins = self.pins.len();
        let core = if self.slots > n_pins {
            slot * n_pins / self.slots
        } else {
            slot * self.threads_per_slot + thread
        };
        self.pins.get(core).copied()
    }
}

/// The unfinished tasks of a job, and the thread that waits for them.
struct TaskCountdown {
    /// The number of tasks.
    total: usize,
    remaining: AtomicUsize,
    caller: Thread,
}

impl TaskCountdown {
    fn any_ended(&self) -> bool {
        // Pairs with the release in `count_down`: this thread then sees the failure that the task
        // recorded.
        self.remaining.load(Ordering::Acquire) < self.total
    }

    fn all_ended(&self) -> bool {
        // Pairs with the release in `count_down`: this thread then sees everything that the tasks
        // wrote.
        self.remaining.load(Ordering::Acquire) == 0
    }

    /// Records the end of a task, and wakes the caller for the first and for the last one.
    fn count_down(&self) {
        // Releases this task's writes; the last task also acquires the writes of the others.
        let remaining = self.remaining.fetch_sub(1, Ordering::AcqRel);
        if remaining == self.total || remaining == 1 {
            self.caller.unpark();
        }
    }
}

/// Ends the process if a panic leaves a job submitted to only some of its workers, for example when
/// a task cannot be allocated.
struct AbortIfDropped;

impl Drop for AbortIfDropped {
    fn drop(&mut self) {
        process::abort();
    }
}

/// Waits on drop until all tasks of a job have ended.
struct WaitForAll<'a>(&'a TaskCountdown);

impl Drop for WaitForAll<'_> {
    fn drop(&mut self) {
        sync::wait_until(None, || self.0.all_ended());
    }
}

/// The next work of a worker.
struct QueuedTask {
    /// The source location of the call.
    call: &'static Location<'static>,
    /// The task; `None` if the caller cancelled it.
    task: Option<SlotTask>,
}

/// A slot's share of a job.
struct SlotTask {
    job: Arc<dyn WorkerJob>,
    countdown: Arc<TaskCountdown>,
}

impl SlotTask {
    /// Drops the job and returns its counter. The job must be gone before it is counted as ended,
    /// since the caller may then free the data that it borrows.
    fn release(self) -> Arc<TaskCountdown> {
        let Self { job, countdown } = self;
        // Dropping the job's data may panic; the panic hook has printed that.
        drop(catch(|| drop(job)));
        countdown
    }
}

/// The queue of one worker's tasks.
#[derive(Debug)]
struct TaskQueue {
    tasks: Mutex<QueueState>,
    /// The number of queued tasks, readable without the lock. It is never more than the queue's
    /// length, so a worker that reads a positive count finds a task.
    count: AtomicUsize,
    /// The number of tasks that have ended.
    n_ended: AtomicU64,
    /// Whether the mesh is being dropped; no task is queued afterwards.
    closed: AtomicBool,
    worker: Thread,
}

#[derive(Default)]
struct QueueState {
    /// The tasks that have not begun, oldest first.
    queue: VecDeque<QueuedTask>,
    /// The number of tasks that have begun. The latest of them belongs to the job of that number.
    n_begun: u64,
    /// The latest task that has begun.
    last_begun: Option<BegunTask>,
}

/// The start of a task.
#[derive(Clone, Copy, Debug)]
struct BegunTask {
    at: Instant,
    /// The source location of the call.
    call: &'static Location<'static>,
}

impl QueueState {
    /// Removes a task that has not begun. An empty task stays in the queue, so that later tasks keep
    /// their numbers.
    fn take(&mut self, countdown: &Arc<TaskCountdown>) -> Option<SlotTask> {
        self.queue
            .iter_mut()
            .find_map(|queued| queued.task.take_if(|task| Arc::ptr_eq(&task.countdown, countdown)))
    }
}

impl fmt::Debug for QueueState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("QueueState")
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

    /// Runs tasks as they arrive, until the queue is closed.
    fn serve(&self, local_index: usize) {
        while let Some(QueuedTask { task, .. }) = self.next() {
            // `cancel` has already counted a cancelled task.
            let countdown = task.map(|task| {
                task.job.run(local_index);
                task.release()
            });
            self.n_ended.fetch_add(1, Ordering::Relaxed);
            if let Some(countdown) = countdown {
                countdown.count_down();
            }
        }
    }

    /// Waits for the next task; returns `None` once the queue is closed and empty.
    fn next(&self) -> Option<QueuedTask> {
        // These loads pair with the stores in `push` and `close`. The lock publishes the task
        // itself.
        sync::wait_until(None, || {
            self.count.load(Ordering::Acquire) > 0 || self.closed.load(Ordering::Acquire)
        });
        let mut tasks = lock(&self.tasks);
        let task = tasks.queue.pop_front()?;
        tasks.n_begun += 1;
        tasks.last_begun = Some(BegunTask { at: Instant::now(), call: task.call });
        self.count.fetch_sub(1, Ordering::AcqRel);
        Some(task)
    }

    fn push(&self, task: QueuedTask) {
        lock(&self.tasks).queue.push_back(task);
        // Count the task after queueing it and before waking the worker.
        self.count.fetch_add(1, Ordering::AcqRel);
        self.worker.unpark();
    }

    /// Returns when this worker began job `number`, or `None` if it has not begun it.
    fn started_at(&self, number: u64) -> Option<Instant> {
        let tasks = lock(&self.tasks);
        tasks.last_begun.filter(|_| tasks.n_begun >= number).map(|begun| begun.at)
    }

    /// Returns the task that this worker runs, or `None` if it runs none.
    fn running(&self) -> Option<BegunTask> {
        let tasks = lock(&self.tasks);
        // A worker counts a task as begun under the lock, and as ended without it.
        tasks.last_begun.filter(|_| self.n_ended.load(Ordering::Relaxed) < tasks.n_begun)
    }

    /// Cancels a task if it has not begun. Returns true if it was cancelled.
    fn cancel(&self, countdown: &Arc<TaskCountdown>) -> bool {
        // The lock is released before the job's data is dropped.
        let task = lock(&self.tasks).take(countdown);
        match task {
            None => false,
            Some(task) => {
                task.release().count_down();
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

    /// Adds one to each borrowed number.
    struct Add<'a>(&'a [AtomicUsize]);

    impl WorkerJob for Add<'_> {
        fn run(&self, local_index: usize) {
            // Yield, so that the other slot and the caller can run ahead.
            thread::yield_now();
            self.0[local_index].fetch_add(1, Ordering::Relaxed);
        }

        fn deadline_passed(&self) -> bool {
            false
        }

        fn time_out(&self, _: &[usize], _: Duration) -> Error {
            unreachable!("there is no deadline")
        }
    }

    #[test]
    fn scoped_job_is_dropped_after_run() {
        let workers = Workers::start(2, false, None).unwrap();
        for _ in 0..3 {
            let mut counts = vec![AtomicUsize::new(0), AtomicUsize::new(0)];
            let job = Arc::new(Add(&counts));
            workers.run_scoped(&job, Location::caller()).unwrap();
            // No worker holds a clone.
            assert!(Arc::try_unwrap(job).is_ok());
            assert_eq!(counts.iter_mut().map(|n| *n.get_mut()).collect::<Vec<_>>(), [1, 1]);
        }
    }

    /// A job in which slot 1 returns only after the time-out.
    #[derive(Default)]
    struct Late {
        is_timed_out: AtomicBool,
    }

    impl WorkerJob for Late {
        fn run(&self, local_index: usize) {
            while local_index == 1 && !self.is_timed_out.load(Ordering::Acquire) {
                thread::yield_now();
            }
        }

        fn deadline_passed(&self) -> bool {
            false
        }

        fn time_out(&self, stuck: &[usize], _: Duration) -> Error {
            assert_eq!(stuck, [1]);
            self.is_timed_out.store(true, Ordering::Release);
            ReplicaError::Nested.into()
        }
    }

    #[test]
    fn scoped_job_may_end_during_time_out() {
        let workers = Workers::start(2, false, Some(Duration::ZERO)).unwrap();
        let outcome = workers.run_scoped(&Arc::new(Late::default()), Location::caller());
        assert!(matches!(outcome, Err(Error::Replica(ReplicaError::Nested))));
        // No slot is busy.
        assert!(workers.check_not_stuck(&mut lock(&workers.dispatch)).is_ok());
    }

    #[test]
    fn time_limit_counts_only_started_slots() {
        let limit = Duration::from_secs(5);
        let [short, long] = [4, 5].map(|seconds| Some(Duration::from_secs(seconds)));
        for is_in_vain in [false, true] {
            assert!(has_timed_out(&[None, short, long], limit, is_in_vain));
            assert!(!has_timed_out(&[None, short], limit, is_in_vain));
            assert!(!has_timed_out(&[], limit, is_in_vain));
            assert_eq!(has_timed_out(&[None, None], limit, is_in_vain), is_in_vain);
        }
    }

    #[test]
    fn timed_out_job_blocks_later_jobs() {
        let workers = Workers::start(1, false, None).unwrap();
        // None of the three jobs has ended.
        let mut dispatch = lock(&workers.dispatch);
        dispatch.n_jobs = 3;
        assert!(workers.check_not_stuck(&mut dispatch).is_ok());
        let call = Location::caller();
        dispatch.timed_out.push_back(TimedOutJob { number: 2, call });
        assert!(workers.find_blocker(&dispatch, 1).is_none());
        assert_eq!(workers.find_blocker(&dispatch, 2).unwrap().call, call);
        let refused = workers.check_not_stuck(&mut dispatch);
        assert!(matches!(refused, Err(ReplicaError::Stuck { slot: 0, .. })));
        workers.slots[0].queue.n_ended.store(2, Ordering::Relaxed);
        assert!(workers.check_not_stuck(&mut dispatch).is_ok());
        // Let the drop wait for no job.
        dispatch.n_jobs = 0;
    }

    #[test]
    fn only_a_running_task_is_overdue() {
        let workers = Workers::start(1, false, None).unwrap();
        let (queue, start) = (&workers.slots[0].queue, Instant::now());
        assert!(workers.find_overdue(start, Duration::ZERO).is_none());
        let call = Location::caller();
        *lock(&queue.tasks) = QueueState {
            n_begun: 1,
            last_begun: Some(BegunTask { at: start, call }),
            ..QueueState::default()
        };
        assert_eq!(workers.find_overdue(start, Duration::ZERO).unwrap().call, call);
        assert!(workers.find_overdue(start, Duration::from_hours(1)).is_none());
        queue.n_ended.store(1, Ordering::Relaxed);
        assert!(workers.find_overdue(start, Duration::ZERO).is_none());
    }

    #[test]
    fn begun_job_keeps_its_turn() {
        let workers = Workers::start(2, false, None).unwrap();
        let job: Arc<dyn WorkerJob> = Arc::new(Add(&TWO_COUNTS));
        let submitted = workers.submit(&job, Location::caller()).unwrap();
        sync::wait_until(Some(Instant::now() + Duration::from_mins(1)), || {
            submitted.countdown.all_ended()
        });
        assert!(!workers.cancel_unbegun(&submitted));
        assert!(TWO_COUNTS.iter().all(|count| count.load(Ordering::Relaxed) == 1));
    }

    static TWO_COUNTS: [AtomicUsize; 2] = [AtomicUsize::new(0), AtomicUsize::new(0)];

    static COUNTS: [AtomicUsize; 1] = [AtomicUsize::new(0)];

    /// Submits a task of a job of one slot; returns its counter.
    fn push_task(queue: &TaskQueue, job: &Arc<dyn WorkerJob>) -> Arc<TaskCountdown> {
        let caller = thread::current();
        let countdown =
            Arc::new(TaskCountdown { total: 1, remaining: AtomicUsize::new(1), caller });
        let task = SlotTask { job: Arc::clone(job), countdown: Arc::clone(&countdown) };
        queue.push(QueuedTask { call: Location::caller(), task: Some(task) });
        countdown
    }

    #[test]
    fn task_is_cancellable_until_it_begins() {
        let queue = TaskQueue::new(thread::current());
        let job: Arc<dyn WorkerJob> = Arc::new(Add(&COUNTS));
        let first = push_task(&queue, &job);
        let second = push_task(&queue, &job);
        assert!(queue.started_at(1).is_none());
        let _running = queue.next().unwrap();
        assert!(queue.started_at(1).is_some() && queue.started_at(2).is_none());

        assert!(!queue.cancel(&first));
        assert!(queue.cancel(&second));
        assert!(second.all_ended() && !first.all_ended());
        // One clone is here, the other in the task that has begun.
        assert_eq!(Arc::strong_count(&job), 2);
        // The cancelled task still takes its turn.
        assert!(queue.next().unwrap().task.is_none());
        assert!(!queue.cancel(&second));
    }
}
