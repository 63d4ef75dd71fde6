//! A process's membership in an MPI program, from its first call to its last.

use std::{
    fmt, mem,
    sync::{
        Arc, Mutex, Weak,
        mpsc::{self, RecvTimeoutError},
    },
    thread::{self, JoinHandle, ThreadId},
    time::Duration,
};

use ferrompi::{Communicator, Request, Source, ThreadLevel};

use super::backoff::{TransferProgress, WaitBackoff};
#[cfg(feature = "nccl")]
use crate::grid::PROCESS_DEADLINE;
use crate::{
    engine::processes,
    error::{Error, ProcessError, Result},
    sync::lock,
};

/// The tag of what a process that has no mesh any more tells the others, on the communicator of all.
const FAREWELL: i32 = 1;

/// This process's membership in the MPI program: initialized once, finalized when the last clone is
/// dropped.
///
/// `ferrompi::Mpi` must stay on the thread that made it, so a thread of its own holds it;
/// communicators may go anywhere.
pub(crate) struct Session {
    pub(super) world: Arc<Communicator>,
    /// The thread that calls functions of meshes, once one has. Locked while a mesh is made, which
    /// takes calls to MPI too.
    caller: Mutex<Option<ThreadId>>,
    /// The communicators of meshes that are gone: a mesh may be dropped by any thread at any time, and
    /// to free them is a call to MPI.
    unused: Mutex<Vec<Communicator>>,
    release: Option<mpsc::Sender<()>>,
    holder: Option<JoinHandle<()>>,
}

impl Session {
    /// [`start_within`](Self::start_within) the time that meshes of several processes have.
    #[cfg(feature = "nccl")]
    pub(crate) fn start() -> Result<Arc<Self>> {
        Self::start_within(PROCESS_DEADLINE)
    }

    /// This process's session: the one that meshes already use, or a new one, which can be had
    /// once, when all processes have come, for which it waits for so long.
    pub(crate) fn start_within(deadline: Duration) -> Result<Arc<Self>> {
        static CURRENT: Mutex<Weak<Session>> = Mutex::new(Weak::new());
        let mut current = lock(&CURRENT);
        if let Some(session) = current.upgrade() {
            return Ok(session);
        }
        let session = Self::init(deadline)?;
        *current = Arc::downgrade(&session);
        Ok(session)
    }

    fn init(deadline: Duration) -> Result<Arc<Self>> {
        let (started, start) = mpsc::sync_channel(1);
        let (release, released) = mpsc::channel::<()>();
        let hold = move || match ferrompi::Mpi::init_thread(ThreadLevel::Serialized) {
            Ok(mpi) if mpi.thread_level() >= ThreadLevel::Serialized => {
                drop(started.send(Ok(mpi.world())));
                // Returns when the session is dropped: an error, since nothing is ever sent.
                let _ = released.recv();
            }
            Ok(mpi) => drop(started.send(Err(format!(
                "calls from worker threads need level Serialized, this library grants {:?}",
                mpi.thread_level()
            )))),
            Err(error) => drop(started.send(Err(error.to_string()))),
        };
        let holder = thread::Builder::new()
            .name("mpi".into())
            .spawn(hold)
            .map_err(|error| failed(error.to_string()))?;
        let world = match start.recv_timeout(deadline) {
            Ok(world) => world.map_err(failed)?,
            // Its thread stays behind in MPI, which cannot be left from there.
            Err(RecvTimeoutError::Timeout) => {
                return Err(failed(format!(
                    "after {deadline:?} not all processes have come to make a mesh; one may have ended before"
                )));
            }
            Err(RecvTimeoutError::Disconnected) => {
                return Err(failed("the thread that starts it has panicked".into()));
            }
        };
        let session = Self {
            world: Arc::new(world),
            caller: Mutex::default(),
            unused: Mutex::default(),
            release: Some(release),
            holder: Some(holder),
        };
        session.end_with_panics();
        Ok(Arc::new(session))
    }

    /// This process's slot.
    pub(crate) fn rank(&self) -> usize {
        index(self.world.rank())
    }

    pub(crate) fn size(&self) -> usize {
        index(self.world.size())
    }

    /// Refuses a call of a function of any mesh from a second thread: MPI has begun with support for
    /// one at a time.
    pub(super) fn check_caller(&self) -> Result<(), ProcessError> {
        let current = thread::current().id();
        if *lock(&self.caller).get_or_insert(current) == current {
            Ok(())
        } else {
            Err(other_thread())
        }
    }

    /// Makes what a mesh needs of MPI, while no thread calls a function of another mesh.
    ///
    /// # Errors
    ///
    /// [`ProcessError::OtherThread`] if another thread calls functions, and those of `make`.
    pub(super) fn while_nobody_calls<T>(&self, make: impl FnOnce() -> Result<T>) -> Result<T> {
        let caller = lock(&self.caller);
        if caller.is_some_and(|caller| caller != thread::current().id()) {
            return Err(other_thread().into());
        }
        lock(&self.unused).clear();
        make()
    }

    /// Keeps communicators until nobody can be in MPI.
    pub(super) fn discard(&self, communicators: impl IntoIterator<Item = Communicator>) {
        lock(&self.unused).extend(communicators);
    }

    /// Whether a process has dropped its last mesh: it will come to no collective any more.
    pub(super) fn has_left(&self, rank: usize) -> ferrompi::Result<bool> {
        let message = self.world.iprobe::<u8>(Source::Rank(rank_of(rank)), FAREWELL)?;
        Ok(message.is_some())
    }

    /// Tells the others that this process comes to no collective any more, and waits until none of
    /// them does: MPI does not end before.
    fn take_leave(&self) -> ferrompi::Result<()> {
        let own = self.rank();
        let mut places = vec![0_u8; self.size()];
        ferrompi::scope(|scope| {
            let mut requests: Vec<Request<'_>> = Vec::new();
            for (rank, place) in places.chunks_mut(1).enumerate().filter(|(rank, _)| *rank != own) {
                requests.push(self.world.irecv(scope, place, rank_of(rank), FAREWELL)?);
            }
            for rank in (0..self.size()).filter(|&rank| rank != own) {
                requests.push(self.world.isend(scope, &[1_u8], rank_of(rank), FAREWELL)?);
            }
            // For ever, as MPI's own end does: another rank may have much to do without a mesh.
            let mut patience = WaitBackoff::new(Duration::MAX);
            while !requests.is_empty() {
                let mut left = Vec::new();
                for mut request in mem::take(&mut requests) {
                    if request.test()?.is_none() {
                        left.push(request);
                    }
                }
                requests = left;
                patience.pause(TransferProgress::default());
            }
            Ok(())
        })
    }

    /// Fills `bytes` on all processes with those of a rank.
    #[cfg(feature = "nccl")]
    #[expect(clippy::expect_used, reason = "MPI counts its ranks in 32 bits")]
    pub(crate) fn broadcast(&self, bytes: &mut [u8], from: usize) -> Result<()> {
        let from = i32::try_from(from).expect("a rank of the program");
        self.world.broadcast(bytes, from).map_err(|error| failed(error.to_string()))
    }

    /// Says why, and ends all processes.
    #[cfg(feature = "nccl")]
    pub(crate) fn end(&self, why: &str) -> ! {
        end(&self.world, why)
    }

    /// Makes a panic anywhere in this process the end of all: a rank that unwinds would wait for
    /// the others when it finalizes MPI, and they for it.
    fn end_with_panics(&self) {
        let world = Arc::clone(&self.world);
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            before(info);
            if !ferrompi::Mpi::is_finalized() {
                end(&world, &format!("panicked: {info}"));
            }
        }));
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        lock(&self.unused).clear();
        if let Err(error) = self.take_leave() {
            end(&self.world, &error.to_string());
        }
        drop(self.release.take());
        if let Some(holder) = self.holder.take() {
            drop(holder.join());
        }
    }
}

impl fmt::Debug for Session {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Session")
            .field("rank", &self.rank())
            .field("size", &self.size())
            .finish_non_exhaustive()
    }
}

/// Says why, and ends all processes.
pub(super) fn end(world: &Communicator, why: &str) -> ! {
    processes::end(index(world.rank()), why, || world.abort(1))
}

fn other_thread() -> ProcessError {
    let name = thread::current().name().unwrap_or("without a name").to_owned();
    ProcessError::OtherThread { name }
}

fn failed(reason: String) -> Error {
    ProcessError::Mpi { reason }.into()
}

/// A rank as MPI counts it.
#[expect(clippy::expect_used, reason = "a mesh has fewer slots than 32 bits count")]
pub(super) fn rank_of(rank: usize) -> i32 {
    i32::try_from(rank).expect("ranks are below the number of slots")
}

/// A rank, or a number of them, that MPI counts.
#[expect(clippy::expect_used, reason = "MPI counts ranks from 0")]
fn index(rank: i32) -> usize {
    usize::try_from(rank).expect("a rank is not negative")
}
