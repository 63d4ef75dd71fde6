//! A process's membership in an MPI program, from its first call to its last.

use std::{
    fmt,
    sync::{Arc, Mutex, Weak, mpsc},
    thread::{self, JoinHandle},
};

use ferrompi::{Communicator, ThreadLevel};

use crate::{
    engine::processes,
    error::{Error, ProcessError, Result},
    sync::lock,
};

/// This process's membership in the MPI program: initialized once, finalized when the last clone is
/// dropped.
///
/// `ferrompi::Mpi` must stay on the thread that made it, so a thread of its own holds it;
/// communicators may go anywhere.
pub(crate) struct Session {
    pub(super) world: Arc<Communicator>,
    release: Option<mpsc::Sender<()>>,
    holder: Option<JoinHandle<()>>,
}

impl Session {
    /// This process's session: the one that meshes already use, or a new one, which can be had
    /// once.
    pub(crate) fn start() -> Result<Arc<Self>> {
        static CURRENT: Mutex<Weak<Session>> = Mutex::new(Weak::new());
        let mut current = lock(&CURRENT);
        if let Some(session) = current.upgrade() {
            return Ok(session);
        }
        let session = Self::init()?;
        *current = Arc::downgrade(&session);
        Ok(session)
    }

    fn init() -> Result<Arc<Self>> {
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
        let world = start.recv().map_err(|error| failed(error.to_string()))?.map_err(failed)?;
        let session = Self { world: Arc::new(world), release: Some(release), holder: Some(holder) };
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

fn failed(reason: String) -> Error {
    ProcessError::Mpi { reason }.into()
}

/// A rank, or a number of them, that MPI counts.
#[expect(clippy::expect_used, reason = "MPI counts ranks from 0")]
fn index(rank: i32) -> usize {
    usize::try_from(rank).expect("a rank is not negative")
}
