//! A process's membership in an MPI program, from its first call to its last.

use std::{
    fmt, mem,
    sync::{
        Arc, Mutex, Weak,
        mpsc::{self, Receiver, RecvTimeoutError, SyncSender},
    },
    thread::{self, JoinHandle, ThreadId},
    time::Duration,
};

use ferrompi::{Communicator, Request, Source, ThreadLevel};

use super::backoff::{TransferProgress, WaitBackoff};
use crate::{
    engine::processes,
    error::{Error, ProcessError, Result},
    sync::lock,
};

/// The tag of the message that announces the drop of a process's last mesh, on the world
/// communicator.
const LEAVE_TAG: i32 = 1;

/// This process's membership in the MPI program. MPI is initialized once, and finalized when the
/// session is dropped.
///
/// `ferrompi::Mpi` must stay on the thread that created it, so a separate thread owns it.
/// Communicators may be used on any thread.
pub(crate) struct MpiSession {
    pub(super) world: Arc<Communicator>,
    /// The thread that calls functions of meshes; `None` before the first call. Locked while a mesh
    /// is built, since building calls MPI too.
    caller: Mutex<Option<ThreadId>>,
    /// The communicators of dropped meshes. They are freed later, because freeing calls MPI, and
    /// any thread may drop a mesh at any time.
    unused: Mutex<Vec<Communicator>>,
    /// The channel that is closed to let `owner` finalize MPI.
    release_sender: Option<mpsc::Sender<()>>,
    owner: Option<JoinHandle<()>>,
}

impl MpiSession {
    /// Returns this process's session. If there is none yet, initializes MPI, which is possible
    /// only once, and waits until all processes have started or `deadline` has passed.
    pub(crate) fn start_within(deadline: Duration) -> Result<Arc<Self>> {
        static CURRENT: Mutex<Weak<MpiSession>> = Mutex::new(Weak::new());
        let mut current = lock(&CURRENT);
        if let Some(session) = current.upgrade() {
            return Ok(session);
        }
        let session = Self::init(deadline)?;
        *current = Arc::downgrade(&session);
        Ok(session)
    }

    fn init(deadline: Duration) -> Result<Arc<Self>> {
        let (world_sender, world_receiver) = mpsc::sync_channel(1);
        let (release_sender, release_receiver) = mpsc::channel();
        let owner = thread::Builder::new()
            .name("mpi".into())
            .spawn(move || own_mpi(&world_sender, &release_receiver))
            .map_err(|error| mpi_error(error.to_string()))?;
        let world = match world_receiver.recv_timeout(deadline) {
            Ok(world) => world.map_err(mpi_error)?,
            // The new thread is not joined, because a call of MPI cannot be interrupted.
            Err(RecvTimeoutError::Timeout) => {
                return Err(mpi_error(format!(
                    "after {deadline:?} not all processes have started a mesh; one may have ended before"
                )));
            }
            Err(RecvTimeoutError::Disconnected) => {
                return Err(mpi_error("the thread that starts it has panicked".into()));
            }
        };
        let session = Self {
            world: Arc::new(world),
            caller: Mutex::default(),
            unused: Mutex::default(),
            release_sender: Some(release_sender),
            owner: Some(owner),
        };
        session.exit_on_panic();
        Ok(Arc::new(session))
    }

    /// Returns this process's rank in the MPI program, which is its slot in the mesh.
    pub(crate) fn rank(&self) -> usize {
        from_mpi(self.world.rank())
    }

    pub(crate) fn size(&self) -> usize {
        from_mpi(self.world.size())
    }

    /// Rejects calls of mesh functions from a second thread, since MPI is initialized for calls
    /// from one thread at a time.
    pub(super) fn check_caller(&self) -> Result<(), ProcessError> {
        let current = thread::current().id();
        if *lock(&self.caller).get_or_insert(current) == current {
            Ok(())
        } else {
            Err(wrong_thread())
        }
    }

    /// Calls `f`, which may call MPI for a new mesh, while no other thread can call MPI. Frees the
    /// communicators of dropped meshes before.
    ///
    /// # Errors
    ///
    /// [`ProcessError::WrongThread`] if another thread calls functions of meshes, and the errors of
    /// `f`.
    pub(super) fn with_exclusive_mpi<T>(&self, f: impl FnOnce() -> Result<T>) -> Result<T> {
        let caller = lock(&self.caller);
        if caller.is_some_and(|caller| caller != thread::current().id()) {
            return Err(wrong_thread().into());
        }
        lock(&self.unused).clear();
        f()
    }

    /// Stores communicators, to free them when no thread can be in MPI.
    pub(super) fn free_later(&self, communicators: impl IntoIterator<Item = Communicator>) {
        lock(&self.unused).extend(communicators);
    }

    /// Returns true if the process of a rank has dropped its last mesh, so that it runs no more
    /// collectives.
    pub(super) fn has_left(&self, rank: usize) -> ferrompi::Result<bool> {
        let message = self.world.iprobe::<u8>(Source::Rank(to_mpi_rank(rank)), LEAVE_TAG)?;
        Ok(message.is_some())
    }

    /// Announces to all other processes that this process runs no more collectives, and waits for
    /// their announcements: only then can MPI be finalized.
    fn announce_leave(&self) -> ferrompi::Result<()> {
        let own = self.rank();
        let mut received = vec![0_u8; self.size()];
        ferrompi::scope(|scope| {
            let mut requests: Vec<Request<'_>> = Vec::new();
            let spans = received.chunks_mut(1).enumerate();
            for (rank, span) in spans.filter(|(rank, _)| *rank != own) {
                requests.push(self.world.irecv(scope, span, to_mpi_rank(rank), LEAVE_TAG)?);
            }
            for rank in (0..self.size()).filter(|&rank| rank != own) {
                requests.push(self.world.isend(scope, &[1_u8], to_mpi_rank(rank), LEAVE_TAG)?);
            }
            // MPI's finalization has no deadline either: another rank may work for long before it
            // drops its mesh.
            let mut backoff = WaitBackoff::new(Duration::MAX);
            while !requests.is_empty() {
                let mut unfinished = Vec::new();
                for mut request in mem::take(&mut requests) {
                    if request.test()?.is_none() {
                        unfinished.push(request);
                    }
                }
                requests = unfinished;
                backoff.pause(TransferProgress::default());
            }
            Ok(())
        })
    }

    /// Installs a panic hook that ends all processes. Without the hook, an unwinding rank would
    /// wait for the other ranks in MPI's finalization while they wait for a message of this rank.
    fn exit_on_panic(&self) {
        let world = Arc::clone(&self.world);
        let previous = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            previous(info);
            if !ferrompi::Mpi::is_finalized() {
                exit_all(&world, &format!("panicked: {info}"));
            }
        }));
    }
}

impl Drop for MpiSession {
    fn drop(&mut self) {
        lock(&self.unused).clear();
        if let Err(error) = self.announce_leave() {
            exit_all(&self.world, &error.to_string());
        }
        drop(self.release_sender.take());
        if let Some(owner) = self.owner.take() {
            drop(owner.join());
        }
    }
}

impl fmt::Debug for MpiSession {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MpiSession")
            .field("rank", &self.rank())
            .field("size", &self.size())
            .finish_non_exhaustive()
    }
}

/// Initializes MPI, sends the world communicator or the reason of the failure, and finalizes MPI on
/// the same thread when the session is dropped.
fn own_mpi(
    world_sender: &SyncSender<Result<Communicator, String>>,
    release_receiver: &Receiver<()>,
) {
    match ferrompi::Mpi::init_thread(ThreadLevel::Serialized) {
        Ok(mpi) if mpi.thread_level() >= ThreadLevel::Serialized => {
            drop(world_sender.send(Ok(mpi.world())));
            // Nothing is ever sent: `recv` returns an error when the session is dropped.
            let _ = release_receiver.recv();
        }
        Ok(mpi) => drop(world_sender.send(Err(format!(
            "calls from worker threads need level Serialized, this library grants {:?}",
            mpi.thread_level()
        )))),
        Err(error) => drop(world_sender.send(Err(error.to_string()))),
    }
}

/// Prints the reason and ends all processes.
pub(super) fn exit_all(world: &Communicator, reason: &str) -> ! {
    processes::exit_process(from_mpi(world.rank()), reason, || world.abort(1))
}

fn wrong_thread() -> ProcessError {
    let name = thread::current().name().unwrap_or("without a name").to_owned();
    ProcessError::WrongThread { name }
}

fn mpi_error(reason: String) -> Error {
    ProcessError::Mpi { reason }.into()
}

/// Converts a rank to MPI's type.
#[expect(clippy::expect_used, reason = "a mesh has fewer than 2^31 slots")]
pub(super) fn to_mpi_rank(rank: usize) -> i32 {
    i32::try_from(rank).expect("ranks are below the number of slots")
}

/// Converts a rank or a count from MPI's type.
#[expect(clippy::expect_used, reason = "MPI counts ranks from 0")]
fn from_mpi(rank: i32) -> usize {
    usize::try_from(rank).expect("a rank is not negative")
}
