//! How the processes of a mesh over NCCL find each other: rank 0 leaves an id where the others look
//! for it.

use std::{
    ffi::OsString,
    fs::{self, OpenOptions},
    io::{self, ErrorKind},
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use core_types::{Placement, Rank};

#[cfg(feature = "mpi")]
use crate::engine::mpi::Session;
use crate::error::{ProcessError, Result};

/// The id of a communicator, which NCCL makes and reads.
pub(super) type Id = [u8; 128];

/// What a file of ours begins with.
const MAGIC: [u8; 8] = *b"nccl-id1";
const RECORD_BYTES: usize = MAGIC.len() + size_of::<u64>() + size_of::<Id>();
/// How long to wait before looking again: not noticed beside the seconds that NCCL takes to start,
/// and easy on a shared file system.
const LOOK: Duration = Duration::from_millis(20);

/// Where the processes of a mesh over NCCL find each other before they can talk.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum NcclStore {
    /// A file that all processes see, on a file system that their machines share, and that does not
    /// exist yet.
    ///
    /// Rank 0 makes it, and removes it when all have joined. Put something into the name that no
    /// other run has, such as the id of the job: rank 0 refuses a file that an earlier run has
    /// left, but the others cannot tell.
    File(PathBuf),
    /// The MPI program that these processes are, if `mpirun` or `srun` has started them as one.
    ///
    /// It lasts as long as the mesh does, and a failure ends it.
    #[cfg(feature = "mpi")]
    Mpi,
}

/// An id that all processes of a mesh have, until they have joined.
#[derive(Debug)]
pub(super) struct Bootstrap {
    pub(super) id: Id,
    /// The file, if it is this process's to remove.
    _id_file: Option<IdFile>,
    #[cfg(feature = "mpi")]
    pub(super) session: Option<std::sync::Arc<Session>>,
}

impl NcclStore {
    /// The id that rank 0 makes.
    pub(super) fn bootstrap(
        &self,
        place: Placement,
        within: Duration,
        make: impl FnOnce() -> Result<Id>,
    ) -> Result<Bootstrap> {
        match self {
            Self::File(path) => {
                let (id, id_file) = by_file(path, place, within, make)?;
                Ok(Bootstrap {
                    id,
                    _id_file: id_file,
                    #[cfg(feature = "mpi")]
                    session: None,
                })
            }
            #[cfg(feature = "mpi")]
            Self::Mpi => {
                let session = Session::start()?;
                let id = by_mpi(&session, place, make)?;
                Ok(Bootstrap { id, _id_file: None, session: Some(session) })
            }
        }
    }
}

fn by_file(
    path: &Path,
    place: Placement,
    within: Duration,
    make: impl FnOnce() -> Result<Id>,
) -> Result<(Id, Option<IdFile>)> {
    let store = |cause| ProcessError::Store { path: path.to_owned(), cause };
    let world_size = place.world_size().as_u64();
    if place.rank() == Rank::ZERO {
        let id = make()?;
        let id_file = IdFile::new(path, world_size, &id).map_err(store)?;
        Ok((id, Some(id_file)))
    } else {
        Ok((read(path, world_size, within).map_err(store)?, None))
    }
}

#[cfg(feature = "mpi")]
fn by_mpi(session: &Session, place: Placement, make: impl FnOnce() -> Result<Id>) -> Result<Id> {
    let rank = session.rank();
    let size = session.size();
    if rank != place.rank().as_usize() || size != place.world_size().as_usize() {
        // The others wait for the id.
        session.end(&format!("this process is rank {rank} of {size}, not {place}"));
    }
    let mut id = [0; size_of::<Id>()];
    if place.rank() == Rank::ZERO {
        match make() {
            Ok(made) => id = made,
            Err(error) => session.end(&error.to_string()),
        }
    }
    session.broadcast(&mut id)?;
    Ok(id)
}

/// A file with an id, which is removed when this is dropped.
#[derive(Debug)]
struct IdFile(PathBuf);

impl IdFile {
    /// Makes the file, which must not exist.
    fn new(path: &Path, world_size: u64, id: &Id) -> io::Result<Self> {
        let used = |error: io::Error| match error.kind() {
            ErrorKind::AlreadyExists => {
                io::Error::new(error.kind(), "the file exists; every mesh needs one of its own")
            }
            _ => error,
        };
        // Empty, and so not taken for an id; this tells who was first.
        OpenOptions::new().write(true).create_new(true).open(path).map_err(used)?;
        let id_file = Self(path.to_owned());
        let mut partial = OsString::from(path);
        partial.push(".partial");
        fs::write(&partial, record(world_size, id))?;
        // Nobody sees half of it.
        fs::rename(&partial, path)?;
        Ok(id_file)
    }
}

impl Drop for IdFile {
    fn drop(&mut self) {
        // What stays is refused by the next rank 0.
        drop(fs::remove_file(&self.0));
    }
}

fn record(world_size: u64, id: &Id) -> Vec<u8> {
    [&MAGIC[..], &world_size.to_le_bytes(), id].concat()
}

/// The id in a file, as soon as there is one.
fn read(path: &Path, world_size: u64, within: Duration) -> io::Result<Id> {
    let start = Instant::now();
    loop {
        match fs::read(path) {
            Ok(bytes) if !bytes.is_empty() => return id_of(&bytes, world_size),
            Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
            _ if start.elapsed() >= within => {
                return Err(io::Error::new(
                    ErrorKind::TimedOut,
                    format!("rank 0 left no id within {within:?}"),
                ));
            }
            _ => thread::sleep(LOOK),
        }
    }
}

fn id_of(bytes: &[u8], world_size: u64) -> io::Result<Id> {
    let wrong = |why: String| Err(io::Error::new(ErrorKind::InvalidData, why));
    match bytes.last_chunk() {
        Some(id) if bytes.len() == RECORD_BYTES && bytes.starts_with(&MAGIC) => {
            if *bytes == *record(world_size, id) {
                Ok(*id)
            } else {
                wrong(format!("the id is not of a world of {world_size}"))
            }
        }
        Some(_) | None => wrong("the file holds no id".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Error;

    const ID: Id = [7; 128];
    const SOON: Duration = Duration::from_millis(100);

    fn join(path: &Path, rank: u64, within: Duration) -> Result<Bootstrap> {
        let place = Placement::new(rank, 2).unwrap();
        NcclStore::File(path.to_owned()).bootstrap(place, within, || Ok(ID))
    }

    fn kind_of(outcome: Result<Bootstrap>) -> ErrorKind {
        match outcome {
            Err(Error::Process(ProcessError::Store { cause, .. })) => cause.kind(),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn all_get_the_id_that_rank_0_has_made() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("id");
        thread::scope(|scope| {
            let other = scope.spawn(|| join(&path, 1, Duration::from_mins(1)).unwrap().id);
            thread::sleep(SOON);
            let id_file = join(&path, 0, SOON).unwrap();
            assert_eq!((id_file.id, other.join().unwrap()), (ID, ID));
        });
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 0, "rank 0 removes what it has written");
    }

    #[test]
    fn rank_0_refuses_the_file_of_another_run_and_leaves_it() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("id");
        fs::write(&path, "an old one").unwrap();
        assert_eq!(kind_of(join(&path, 0, SOON)), ErrorKind::AlreadyExists);
        assert_eq!(fs::read(&path).unwrap(), b"an old one");
    }

    #[test]
    fn the_others_wait_until_their_deadline() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("id");
        assert_eq!(kind_of(join(&path, 1, SOON)), ErrorKind::TimedOut);
        // Rank 0 has begun, and not ended.
        fs::write(&path, "").unwrap();
        assert_eq!(kind_of(join(&path, 1, SOON)), ErrorKind::TimedOut);
    }

    #[test]
    fn what_is_no_id_of_this_world_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("id");
        for bytes in
            [record(3, &ID), b"something else".to_vec(), [record(2, &ID), vec![0]].concat()]
        {
            fs::write(&path, bytes).unwrap();
            assert_eq!(kind_of(join(&path, 1, SOON)), ErrorKind::InvalidData);
        }
        fs::write(&path, record(2, &ID)).unwrap();
        assert_eq!(join(&path, 1, SOON).unwrap().id, ID);
    }

    #[test]
    fn a_folder_that_is_not_there_is_an_error_on_rank_0() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(kind_of(join(&folder.path().join("nowhere/id"), 0, SOON)), ErrorKind::NotFound);
    }
}
