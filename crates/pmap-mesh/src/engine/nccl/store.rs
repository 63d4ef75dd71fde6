//! How the processes of a mesh over NCCL find each other: each says who it is, and rank 0 leaves ids
//! where the others look for them.

use std::{
    ffi::OsString,
    fs::{self, OpenOptions},
    io::{self, ErrorKind},
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use core_types::{Placement, Rank};

use super::peers::Peer;
#[cfg(feature = "mpi")]
use crate::engine::mpi::Session;
use crate::error::{ProcessError, Result};

/// The id of a communicator, which NCCL makes and reads.
pub(super) type Id = [u8; 128];

/// The ids of the communicators of a mesh.
pub(super) type Ids = [Id; 2];

/// What a file of ours begins with.
const MAGIC: [u8; 8] = *b"nccl-id2";
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
    /// Each rank but the first makes a file of this name with its rank behind it, `name.3`, and rank
    /// 0, when it has read them all, the file itself; each removes its own when all have joined.
    /// Put something into the name that no other run has, such as the id of the job: files that an
    /// earlier run has left are refused.
    File(PathBuf),
    /// The MPI program that these processes are, if `mpirun` or `srun` has started them as one.
    ///
    /// It lasts as long as the mesh does, and a failure ends it.
    #[cfg(feature = "mpi")]
    Mpi,
}

/// What all processes of a mesh know, until they have joined.
#[derive(Debug)]
pub(super) struct Bootstrap {
    pub(super) ids: Ids,
    /// The processes, by rank.
    pub(super) peers: Vec<Peer>,
    /// The file that is this process's to remove.
    _own_file: Option<OwnFile>,
    /// On rank 0 the files of the others, who remove them when they have read its own.
    of_others: Vec<PathBuf>,
    #[cfg(feature = "mpi")]
    pub(super) session: Option<std::sync::Arc<Session>>,
}

impl Bootstrap {
    /// Waits until all have read what rank 0 has written, before it is removed: who joins has read it,
    /// this is for when nobody will.
    pub(super) fn wait_for_readers(&self, within: Duration) {
        let start = Instant::now();
        while self.of_others.iter().any(|path| path.exists()) && start.elapsed() < within {
            thread::sleep(LOOK);
        }
    }
}

impl NcclStore {
    /// The ids that rank 0 makes, and all processes, of which this one is `peer`.
    pub(super) fn bootstrap(
        &self,
        place: Placement,
        peer: &Peer,
        within: Duration,
        make: impl FnOnce() -> Result<Ids>,
    ) -> Result<Bootstrap> {
        match self {
            Self::File(path) => by_file(path, place, peer, within, make),
            #[cfg(feature = "mpi")]
            Self::Mpi => by_mpi(place, peer, make),
        }
    }
}

fn by_file(
    path: &Path,
    place: Placement,
    peer: &Peer,
    within: Duration,
    make: impl FnOnce() -> Result<Ids>,
) -> Result<Bootstrap> {
    let store = |path: &Path, cause| ProcessError::Store { path: path.to_owned(), cause };
    let world_size = place.world_size().as_u64();
    let start = Instant::now();
    let read = |path: &Path, n_bytes| {
        read(path, world_size, n_bytes, start, within).map_err(|cause| store(path, cause))
    };
    let mut of_others = Vec::new();
    let (own_file, record) = if place.rank() == Rank::ZERO {
        let mut record = make()?.concat();
        // Claimed first: this tells whether the file is another mesh's.
        let own_file = OwnFile::claim(path).map_err(|cause| store(path, cause))?;
        record.extend(peer.to_bytes());
        of_others.extend((1..world_size).map(|rank| of_rank(path, rank)));
        for of_other in &of_others {
            record.extend(read(of_other, Peer::BYTES)?);
        }
        own_file.fill(world_size, &record).map_err(|cause| store(path, cause))?;
        (own_file, record)
    } else {
        let own_path = of_rank(path, place.rank().as_u64());
        let own_file = OwnFile::claim(&own_path)
            .and_then(|own_file| own_file.fill(world_size, &peer.to_bytes()).map(|()| own_file))
            .map_err(|cause| store(&own_path, cause))?;
        let n_bytes = size_of::<Ids>() + place.world_size().as_usize() * Peer::BYTES;
        (own_file, read(path, n_bytes)?)
    };
    let (ids, peers) = record.split_at(size_of::<Ids>());
    Ok(Bootstrap {
        ids: ids_of(ids),
        peers: peers.as_chunks().0.iter().map(Peer::from_bytes).collect(),
        _own_file: Some(own_file),
        of_others,
        #[cfg(feature = "mpi")]
        session: None,
    })
}

/// The file in which a rank says who it is.
fn of_rank(path: &Path, rank: u64) -> PathBuf {
    let mut name = OsString::from(path);
    name.push(format!(".{rank}"));
    PathBuf::from(name)
}

#[expect(clippy::expect_used, reason = "the length of records is checked")]
fn ids_of(bytes: &[u8]) -> Ids {
    let ids: &[Id] = bytes.as_chunks().0;
    ids.try_into().expect("a record begins with all ids")
}

#[cfg(feature = "mpi")]
fn by_mpi(place: Placement, this: &Peer, make: impl FnOnce() -> Result<Ids>) -> Result<Bootstrap> {
    let session = Session::start()?;
    let own_rank = session.rank();
    let size = session.size();
    if own_rank != place.rank().as_usize() || size != place.world_size().as_usize() {
        // The others wait for the ids.
        session.end(&format!("this process is rank {own_rank} of {size}, not {place}"));
    }
    let mut ids = [0; size_of::<Ids>()];
    if place.rank() == Rank::ZERO {
        match make() {
            Ok(new) => ids.copy_from_slice(&new.concat()),
            Err(error) => session.end(&error.to_string()),
        }
    }
    session.broadcast(&mut ids, 0)?;
    let mut peers = Vec::new();
    for rank in 0..size {
        let mut bytes = this.to_bytes();
        session.broadcast(&mut bytes, rank)?;
        peers.push(Peer::from_bytes(&bytes));
    }
    Ok(Bootstrap {
        ids: ids_of(&ids),
        peers,
        _own_file: None,
        of_others: Vec::new(),
        session: Some(session),
    })
}

/// A file that this process has made, which is removed when this is dropped.
#[derive(Debug)]
struct OwnFile(PathBuf);

impl OwnFile {
    /// Makes the file, which must not exist: empty, and so not taken for what it is to hold.
    fn claim(path: &Path) -> io::Result<Self> {
        let used = |error: io::Error| match error.kind() {
            ErrorKind::AlreadyExists => {
                io::Error::new(error.kind(), "the file exists; every mesh needs one of its own")
            }
            _ => error,
        };
        OpenOptions::new().write(true).create_new(true).open(path).map_err(used)?;
        Ok(Self(path.to_owned()))
    }

    /// Writes what the others look for; nobody sees half of it.
    fn fill(&self, world_size: u64, contents: &[u8]) -> io::Result<()> {
        let mut partial = OsString::from(&self.0);
        partial.push(".partial");
        fs::write(&partial, record(world_size, contents))?;
        fs::rename(&partial, &self.0)
    }
}

impl Drop for OwnFile {
    fn drop(&mut self) {
        // What stays is refused by the next process that is to make it.
        drop(fs::remove_file(&self.0));
    }
}

fn record(world_size: u64, contents: &[u8]) -> Vec<u8> {
    [&MAGIC[..], &world_size.to_le_bytes(), contents].concat()
}

/// The contents of a file, as soon as there are any.
fn read(
    path: &Path,
    world_size: u64,
    n_bytes: usize,
    start: Instant,
    within: Duration,
) -> io::Result<Vec<u8>> {
    loop {
        match fs::read(path) {
            Ok(bytes) if !bytes.is_empty() => return contents(&bytes, world_size, n_bytes),
            Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
            _ if start.elapsed() >= within => {
                return Err(io::Error::new(
                    ErrorKind::TimedOut,
                    format!("nobody has written it within {within:?}"),
                ));
            }
            _ => thread::sleep(LOOK),
        }
    }
}

fn contents(bytes: &[u8], world_size: u64, n_bytes: usize) -> io::Result<Vec<u8>> {
    let wrong = |why: String| Err(io::Error::new(ErrorKind::InvalidData, why));
    let Some(of_world) = bytes.strip_prefix(&MAGIC) else {
        return wrong("the file is no part of a mesh's start, or of another version's".into());
    };
    match of_world.strip_prefix(&world_size.to_le_bytes()) {
        Some(contents) if contents.len() == n_bytes => Ok(contents.to_vec()),
        Some(contents) => wrong(format!("{} bytes for the {n_bytes} expected", contents.len())),
        None => wrong(format!("the file is not of a world of {world_size}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{engine::nccl::peers::tests::peer, error::Error};

    const IDS: Ids = [[7; 128], [8; 128]];
    const SOON: Duration = Duration::from_millis(100);

    fn join(path: &Path, rank: u8, within: Duration) -> Result<Bootstrap> {
        let place = Placement::new(u64::from(rank), 2).unwrap();
        let peer = peer(rank, "here");
        NcclStore::File(path.to_owned()).bootstrap(place, &peer, within, || Ok(IDS))
    }

    fn kind_of(outcome: Result<Bootstrap>) -> ErrorKind {
        match outcome {
            Err(Error::Process(ProcessError::Store { cause, .. })) => cause.kind(),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn all_get_the_ids_that_rank_0_has_made_and_know_each_other() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("id");
        let late = Duration::from_mins(1);
        thread::scope(|scope| {
            let other = scope.spawn(|| join(&path, 1, late).unwrap());
            let own = join(&path, 0, late).unwrap();
            // Kept until the other has read what this one has written.
            for bootstrap in &[own, other.join().unwrap()] {
                assert_eq!(bootstrap.ids, IDS);
                assert_eq!(bootstrap.peers, [peer(0, "here"), peer(1, "here")]);
            }
        });
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 0, "each removes what it has made");
    }

    #[test]
    fn rank_0_leaves_its_file_until_the_others_have_read_it() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("id");
        let late = Duration::from_mins(1);
        thread::scope(|scope| {
            let first = scope.spawn(|| join(&path, 0, late).unwrap().wait_for_readers(late));
            // Whenever it comes, it finds what it looks for.
            assert_eq!(join(&path, 1, late).unwrap().ids, IDS);
            first.join().unwrap();
        });
        fs::write(of_rank(&path, 1), "one that does not come").unwrap();
        let bootstrap = Bootstrap {
            ids: IDS,
            peers: Vec::new(),
            _own_file: None,
            of_others: vec![of_rank(&path, 1)],
            #[cfg(feature = "mpi")]
            session: None,
        };
        bootstrap.wait_for_readers(SOON);
    }

    #[test]
    fn files_of_another_run_are_refused_and_left() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("id");
        for (rank, path_of_rank) in [(0, path.clone()), (1, of_rank(&path, 1))] {
            fs::write(&path_of_rank, "an old one").unwrap();
            assert_eq!(kind_of(join(&path, rank, SOON)), ErrorKind::AlreadyExists);
            assert_eq!(fs::read(&path_of_rank).unwrap(), b"an old one");
            fs::remove_file(&path_of_rank).unwrap();
        }
    }

    #[test]
    fn all_wait_until_their_deadline() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("id");
        for rank in [0, 1] {
            assert_eq!(kind_of(join(&path, rank, SOON)), ErrorKind::TimedOut);
        }
        // Rank 0 has begun, and not ended.
        fs::write(&path, "").unwrap();
        assert_eq!(kind_of(join(&path, 1, SOON)), ErrorKind::TimedOut);
    }

    #[test]
    fn what_is_no_record_of_this_world_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("id");
        let peers = [peer(4, "there").to_bytes(), peer(5, "there").to_bytes()].concat();
        let good = [IDS.concat(), peers].concat();
        let long = [&good[..], &[0]].concat();
        for bytes in [record(3, &good), b"something else".to_vec(), record(2, &long)] {
            fs::write(&path, bytes).unwrap();
            assert_eq!(kind_of(join(&path, 1, SOON)), ErrorKind::InvalidData);
        }
        fs::write(&path, record(2, &good)).unwrap();
        let bootstrap = join(&path, 1, SOON).unwrap();
        assert_eq!(bootstrap.ids, IDS);
        assert_eq!(bootstrap.peers, [peer(4, "there"), peer(5, "there")]);
    }

    #[test]
    fn a_folder_that_is_not_there_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        for rank in [0, 1] {
            let outcome = join(&folder.path().join("nowhere/id"), rank, SOON);
            assert_eq!(kind_of(outcome), ErrorKind::NotFound);
        }
    }
}
