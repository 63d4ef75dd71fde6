//! How the processes of a mesh over NCCL find each other: rank 0 calls, each of the others answers
//! who it is, and rank 0 leaves ids where the others look for them.
//!
//! An answer repeats a number of the call, and what rank 0 leaves repeats a number of each answer,
//! so that nobody takes what an earlier start has left for that of a process which is there. A
//! process that cannot take part says so, and all of them end.

use std::{
    ffi::OsString,
    fmt::Display,
    fs::{self, OpenOptions},
    io::{self, ErrorKind, Write},
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use core_types::{Placement, Rank, files::AtomicFile};
use serde::{Deserialize, Serialize, de::DeserializeOwned};

use super::peers::{Peer, refuse_shared, token};
#[cfg(feature = "mpi")]
use crate::engine::mpi::Session;
use crate::error::{Error, ProcessError, Result};

/// The id of a communicator, which NCCL makes and reads.
pub(super) type Id = [u8; 128];

/// The ids of the communicators of a mesh.
pub(super) type Ids = [Id; 2];

/// The version of what the files hold.
const VERSION: u32 = 1;

/// How long to wait before looking again: not noticed beside the seconds that NCCL takes to start,
/// and easy on a shared file system.
const LOOK: Duration = Duration::from_millis(20);

/// How long rank 0 waits at most until all have read that they cannot be a mesh: they look for it
/// many times a second.
const READ_TIME: Duration = Duration::from_secs(10);

/// Where the processes of a mesh over NCCL find each other before they can talk.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum NcclStore {
    /// A file that all processes see, on a file system that their machines share, and that does not
    /// exist yet.
    ///
    /// Each rank makes a file of this name with its rank behind it, `name.3`, and rank 0, when it
    /// has read them all, the file itself; each removes its own when all have joined. Put something
    /// into the name that no other run has, such as the id of the job: files that an earlier run
    /// has left are refused.
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
    /// The files that are this process's to remove.
    _own_files: Vec<OwnFile>,
    #[cfg(feature = "mpi")]
    pub(super) session: Option<std::sync::Arc<Session>>,
}

impl NcclStore {
    /// The ids that rank 0 makes, if all processes can take part, of which this one is `peer`, or
    /// cannot for this reason.
    pub(super) fn bootstrap(
        &self,
        place: Placement,
        peer: std::result::Result<Peer, String>,
        within: Duration,
        make: impl FnOnce() -> Result<Ids>,
    ) -> Result<Bootstrap> {
        match self {
            Self::File(path) => {
                let files = Files { path, place, start: Instant::now(), within };
                if place.rank() == Rank::ZERO { files.lead(peer, make) } else { files.follow(peer) }
            }
            #[cfg(feature = "mpi")]
            Self::Mpi => by_mpi(place, peer, make),
        }
    }
}

/// What a file holds.
#[derive(Serialize, Deserialize)]
struct Record<T> {
    version: u32,
    world_size: u64,
    contents: T,
}

/// What each rank but the first says.
#[derive(Serialize, Deserialize)]
struct Answer {
    /// The number of the call that it answers.
    call: u64,
    peer: std::result::Result<Peer, String>,
}

/// What rank 0 says when all have answered.
#[derive(Serialize, Deserialize)]
struct Roll {
    /// One after the other.
    ids: Vec<u8>,
    /// By rank.
    peers: Vec<Peer>,
}

/// The files of a mesh's start, as one process sees them.
struct Files<'a> {
    path: &'a Path,
    place: Placement,
    start: Instant,
    within: Duration,
}

impl Files<'_> {
    /// What rank 0 does.
    fn lead(
        &self,
        peer: std::result::Result<Peer, String>,
        make: impl FnOnce() -> Result<Ids>,
    ) -> Result<Bootstrap> {
        // Claimed first: this tells whether the file is another mesh's.
        let file = OwnFile::claim(self.path)?;
        let call = token();
        let call_file = OwnFile::claim(&self.of_rank(0))?;
        self.fill(&call_file, call)?;
        let answers: Vec<_> = (1..self.world_size()).map(|rank| self.answer(rank, call)).collect();
        // Those that have come read what becomes of the start; then they remove their answers.
        let came = (1..).zip(&answers).filter(|(_, answer)| answer.is_ok());
        let came: Vec<PathBuf> = came.map(|(rank, _)| self.of_rank(rank)).collect();
        match all_of(peer, answers).and_then(|peers| Ok((make()?, peers))) {
            Ok((ids, peers)) => {
                self.fill(&file, Ok::<_, String>(Roll { ids: ids.concat(), peers }))?;
                Ok(Bootstrap {
                    ids,
                    _own_files: vec![file, call_file],
                    #[cfg(feature = "mpi")]
                    session: None,
                })
            }
            Err(error) => {
                self.fill(&file, Err::<Roll, _>(error.to_string()))?;
                wait_for_readers(&came, READ_TIME);
                Err(error)
            }
        }
    }

    /// What the process of a rank has answered to that call, in time.
    fn answer(&self, rank: u64, call: u64) -> Result<std::result::Result<Peer, String>> {
        let path = self.of_rank(rank);
        let answer: Answer = self.read(&path, || Ok(()))?;
        if answer.call == call { Ok(answer.peer) } else { Err(stale(&path)) }
    }

    /// What the other ranks do.
    fn follow(&self, peer: std::result::Result<Peer, String>) -> Result<Bootstrap> {
        // Claimed first: this tells whether there is a place for it.
        let own_file = OwnFile::claim(&self.of_rank(self.place.rank().as_u64()))?;
        let call: u64 = self.read(&self.of_rank(0), || Ok(()))?;
        self.fill(&own_file, Answer { call, peer: peer.clone() })?;
        let rank_0_is_there = || match self.path.try_exists() {
            Ok(false) => Err(nccl("rank 0 has ended while the others joined it")),
            _ => Ok(()),
        };
        let roll: std::result::Result<Roll, String> = self.read(self.path, rank_0_is_there)?;
        // What went wrong here is known better here.
        let peer = peer.map_err(nccl)?;
        let Roll { ids, peers } = roll.map_err(|reason| ProcessError::Peer { slot: 0, reason })?;
        if peers.get(self.place.rank().as_usize()) != Some(&peer) {
            return Err(stale(self.path));
        }
        Ok(Bootstrap {
            ids: ids_of(&ids).ok_or_else(|| stale(self.path))?,
            _own_files: vec![own_file],
            #[cfg(feature = "mpi")]
            session: None,
        })
    }

    fn world_size(&self) -> u64 {
        self.place.world_size().as_u64()
    }

    /// The file in which a rank says who it is.
    fn of_rank(&self, rank: u64) -> PathBuf {
        let mut name = OsString::from(self.path);
        name.push(format!(".{rank}"));
        PathBuf::from(name)
    }

    fn fill(&self, file: &OwnFile, contents: impl Serialize) -> Result<()> {
        let record = Record { version: VERSION, world_size: self.world_size(), contents };
        let bytes = serde_json::to_vec(&record).map_err(io::Error::from);
        bytes.and_then(|bytes| file.fill(&bytes)).map_err(|cause| store(&file.0, cause))
    }

    /// The contents of a file, as soon as there are any, unless that is given up first.
    fn read<T: DeserializeOwned>(&self, path: &Path, go_on: impl Fn() -> Result<()>) -> Result<T> {
        loop {
            match fs::read(path) {
                Ok(bytes) if !bytes.is_empty() => {
                    let contents = contents(&bytes, self.world_size());
                    return contents.map_err(|cause| store(path, cause));
                }
                Err(error) if error.kind() != ErrorKind::NotFound => {
                    return Err(store(path, error));
                }
                _ => go_on()?,
            }
            if self.start.elapsed() >= self.within {
                let why = format!("nobody has written it within {:?}", self.within);
                return Err(store(path, io::Error::new(ErrorKind::TimedOut, why)));
            }
            thread::sleep(LOOK);
        }
    }
}

/// The processes, by rank: rank 0, and what the others have answered.
fn all_of(
    rank_0: std::result::Result<Peer, String>,
    answers: Vec<Result<std::result::Result<Peer, String>>>,
) -> Result<Vec<Peer>> {
    let mut peers = vec![rank_0.map_err(|reason| nccl(format!("rank 0: {reason}")))?];
    for (rank, answer) in (1..).zip(answers) {
        peers.push(answer?.map_err(|reason| nccl(format!("rank {rank}: {reason}")))?);
    }
    refuse_shared(&peers).map_err(nccl)?;
    Ok(peers)
}

/// Waits until all have read what rank 0 has written, before it is removed: who joins has read it,
/// this is for when nobody will.
fn wait_for_readers(answers: &[PathBuf], within: Duration) {
    let start = Instant::now();
    while answers.iter().any(|path| path.exists()) && start.elapsed() < within {
        thread::sleep(LOOK);
    }
}

fn contents<T: DeserializeOwned>(bytes: &[u8], expected: u64) -> io::Result<T> {
    let no_part = |error: serde_json::Error| {
        invalid(format!("the file is no part of a mesh's start, or of another version's: {error}"))
    };
    let Record { version, world_size, contents } =
        serde_json::from_slice::<Record<serde_json::Value>>(bytes).map_err(no_part)?;
    if version != VERSION {
        return Err(invalid(format!("the file is of version {version}, not {VERSION}")));
    }
    if world_size != expected {
        return Err(invalid(format!("the file is of a world of {world_size}, not {expected}")));
    }
    serde_json::from_value(contents).map_err(no_part)
}

fn invalid(why: String) -> io::Error {
    io::Error::new(ErrorKind::InvalidData, why)
}

fn stale(path: &Path) -> Error {
    let why = "an earlier start has left the file; remove it";
    store(path, io::Error::new(ErrorKind::AlreadyExists, why))
}

fn store(path: &Path, cause: io::Error) -> Error {
    ProcessError::Store { path: path.to_owned(), cause }.into()
}

fn nccl(reason: impl Display) -> Error {
    ProcessError::Nccl { reason: reason.to_string() }.into()
}

/// The ids in these bytes, if there are as many.
fn ids_of(bytes: &[u8]) -> Option<Ids> {
    let (ids, rest): (&[Id], _) = bytes.as_chunks();
    ids.try_into().ok().filter(|_| rest.is_empty())
}

#[cfg(feature = "mpi")]
#[expect(clippy::expect_used, reason = "what a process says of itself can be written")]
fn by_mpi(
    place: Placement,
    peer: std::result::Result<Peer, String>,
    make: impl FnOnce() -> Result<Ids>,
) -> Result<Bootstrap> {
    let session = Session::start()?;
    let own_rank = session.rank();
    let size = session.size();
    // Who cannot take part ends all: the others wait for the ids, and for who this process is.
    if own_rank != place.rank().as_usize() || size != place.world_size().as_usize() {
        session.end(&format!("this process is rank {own_rank} of {size}, not {place}"));
    }
    let peer = peer.unwrap_or_else(|reason| session.end(&reason));
    let own_bytes = serde_json::to_vec(&peer).expect("numbers and a name have a form in JSON");
    let mut ids = [[0; size_of::<Id>()]; 2];
    if place.rank() == Rank::ZERO {
        ids = make().unwrap_or_else(|error| session.end(&error.to_string()));
    }
    for id in &mut ids {
        session.broadcast(id, 0)?;
    }
    let mut peers = Vec::new();
    for rank in 0..size {
        let bytes = broadcast(&session, own_bytes.clone(), rank)?;
        peers.push(serde_json::from_slice(&bytes).map_err(nccl)?);
    }
    refuse_shared(&peers).map_err(nccl)?;
    Ok(Bootstrap { ids, _own_files: Vec::new(), session: Some(session) })
}

/// The bytes of a rank, of which others do not know how many there are.
#[cfg(feature = "mpi")]
#[expect(clippy::expect_used, reason = "who a process is takes less than 2^64 bytes")]
fn broadcast(session: &Session, mut bytes: Vec<u8>, from: usize) -> Result<Vec<u8>> {
    let mut len = (bytes.len() as u64).to_le_bytes();
    session.broadcast(&mut len, from)?;
    bytes.resize(usize::try_from(u64::from_le_bytes(len)).expect("a length in memory"), 0);
    session.broadcast(&mut bytes, from)?;
    Ok(bytes)
}

/// A file that this process has made, which is removed when this is dropped.
#[derive(Debug)]
struct OwnFile(PathBuf);

impl OwnFile {
    /// Makes the file, which must not exist: empty, and so not taken for what it is to hold.
    fn claim(path: &Path) -> Result<Self> {
        let used = |error: io::Error| match error.kind() {
            ErrorKind::AlreadyExists => {
                io::Error::new(error.kind(), "the file exists; every mesh needs one of its own")
            }
            _ => error,
        };
        let made = OpenOptions::new().write(true).create_new(true).open(path).map_err(used);
        made.map_err(|cause| store(path, cause))?;
        Ok(Self(path.to_owned()))
    }

    /// Replaces the empty file in one step: the others look for it.
    fn fill(&self, bytes: &[u8]) -> io::Result<()> {
        let mut file = AtomicFile::replacing(&self.0)?;
        file.write_all(bytes)?;
        file.persist()
    }
}

impl Drop for OwnFile {
    fn drop(&mut self) {
        // What stays is refused by the next process that is to make it.
        drop(fs::remove_file(&self.0));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::nccl::peers::tests::peer;

    const IDS: Ids = [[7; 128], [8; 128]];
    const SOON: Duration = Duration::from_millis(100);
    const LATE: Duration = Duration::from_mins(1);

    fn join_as(
        path: &Path,
        rank: u8,
        peer: std::result::Result<Peer, String>,
        within: Duration,
    ) -> Result<Ids> {
        let place = Placement::new(u64::from(rank), 2).unwrap();
        let store = NcclStore::File(path.to_owned());
        store.bootstrap(place, peer, within, || Ok(IDS)).map(|bootstrap| bootstrap.ids)
    }

    fn join(path: &Path, rank: u8, within: Duration) -> Result<Ids> {
        join_as(path, rank, Ok(peer(rank, "here")), within)
    }

    fn kind_of(outcome: Result<Ids>) -> ErrorKind {
        match outcome {
            Err(Error::Process(ProcessError::Store { cause, .. })) => cause.kind(),
            other => panic!("{other:?}"),
        }
    }

    /// What both ranks get, of which one may come in whatever order.
    fn both(
        path: &Path,
        of_rank_0: std::result::Result<Peer, String>,
        of_rank_1: std::result::Result<Peer, String>,
    ) -> [Result<Ids>; 2] {
        thread::scope(|scope| {
            let other = scope.spawn(|| join_as(path, 1, of_rank_1, LATE));
            [join_as(path, 0, of_rank_0, LATE), other.join().unwrap()]
        })
    }

    fn write<T: Serialize>(path: &Path, world_size: u64, contents: T) {
        let record = Record { version: VERSION, world_size, contents };
        fs::write(path, serde_json::to_vec(&record).unwrap()).unwrap();
    }

    #[test]
    fn all_get_the_ids_that_rank_0_has_made_and_leave_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("id");
        let store = NcclStore::File(path.clone());
        let start = |rank: u8| {
            let place = Placement::new(u64::from(rank), 2).unwrap();
            store.bootstrap(place, Ok(peer(rank, "here")), LATE, || Ok(IDS)).unwrap()
        };
        thread::scope(|scope| {
            let other = scope.spawn(|| start(1));
            // Kept until the other has read what this one has written.
            let own = start(0);
            assert_eq!([own.ids, other.join().unwrap().ids], [IDS, IDS]);
        });
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 0, "each removes what it has made");
    }

    #[test]
    fn one_that_cannot_take_part_ends_all_with_its_reason() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("id");
        let fails = || Err("no such device".to_owned());
        let [first, second] = both(&path, fails(), Ok(peer(1, "here")));
        assert_eq!(first.unwrap_err().to_string(), "NCCL: rank 0: no such device");
        assert!(second.unwrap_err().to_string().contains("rank 0: no such device"));

        let [first, second] = both(&path, Ok(peer(0, "here")), fails());
        assert_eq!(first.unwrap_err().to_string(), "NCCL: rank 1: no such device");
        assert_eq!(second.unwrap_err().to_string(), "NCCL: no such device");

        let [first, second] = both(&path, Ok(peer(1, "here")), Ok(peer(1, "here")));
        for refused in [first, second] {
            assert!(refused.unwrap_err().to_string().contains("take the same GPU"));
        }
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 0);
    }

    #[test]
    fn files_of_another_run_are_refused_and_left() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("id");
        let of_rank = |rank: u64| folder.path().join(format!("id.{rank}"));
        for stale in [path.clone(), of_rank(0)] {
            fs::write(&stale, "an old one").unwrap();
            assert_eq!(kind_of(join(&path, 0, SOON)), ErrorKind::AlreadyExists);
            assert_eq!(fs::read(&stale).unwrap(), b"an old one");
            fs::remove_file(&stale).unwrap();
        }
        fs::write(of_rank(1), "an old one").unwrap();
        assert_eq!(kind_of(join(&path, 1, SOON)), ErrorKind::AlreadyExists);
    }

    #[test]
    fn an_answer_to_an_earlier_call_is_not_taken_for_a_process() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("id");
        write(&folder.path().join("id.1"), 2, Answer { call: 5, peer: Ok(peer(1, "here")) });
        assert_eq!(kind_of(join(&path, 0, LATE)), ErrorKind::AlreadyExists);
    }

    #[test]
    fn ids_of_an_earlier_start_are_not_taken_for_this_one() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("id");
        write(&folder.path().join("id.0"), 2, 5);
        let peers = vec![peer(0, "here"), peer(1, "here")];
        let roll = Roll { ids: IDS.concat(), peers };
        write(&path, 2, Ok::<_, String>(roll));
        assert_eq!(kind_of(join(&path, 1, LATE)), ErrorKind::AlreadyExists);
    }

    #[test]
    fn all_wait_until_their_deadline_and_no_longer_than_rank_0_is_there() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("id");
        for rank in [0, 1] {
            assert_eq!(kind_of(join(&path, rank, SOON)), ErrorKind::TimedOut);
        }
        write(&folder.path().join("id.0"), 2, 5);
        let text = join(&path, 1, LATE).unwrap_err().to_string();
        assert!(text.contains("rank 0 has ended"), "{text}");
        // Rank 0 has begun, and not ended.
        fs::write(&path, "").unwrap();
        assert_eq!(kind_of(join(&path, 1, SOON)), ErrorKind::TimedOut);
    }

    #[test]
    fn what_is_no_record_of_this_world_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("id");
        let of_rank_0 = folder.path().join("id.0");
        let refused = || kind_of(join(&path, 1, SOON)) == ErrorKind::InvalidData;
        fs::write(&of_rank_0, "something else").unwrap();
        assert!(refused());
        write(&of_rank_0, 3, 5);
        assert!(refused());
        write(&of_rank_0, 2, "five");
        assert!(refused());
        let record = Record { version: VERSION + 1, world_size: 2, contents: 5 };
        fs::write(&of_rank_0, serde_json::to_vec(&record).unwrap()).unwrap();
        assert!(refused());
    }

    #[test]
    fn ids_are_as_many_bytes_as_they_are() {
        assert_eq!(ids_of(&IDS.concat()), Some(IDS));
        assert_eq!(ids_of(&IDS.concat()[1..]), None);
        assert_eq!(ids_of(&[&IDS.concat()[..], &[0]].concat()), None);
        assert_eq!(ids_of(&IDS[0]), None);
    }

    #[test]
    fn a_folder_that_is_not_there_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("nowhere/id");
        for rank in [0, 1] {
            assert_eq!(kind_of(join(&path, rank, SOON)), ErrorKind::NotFound);
        }
    }
}
