//! Rendezvous of a mesh's processes over NCCL: rank 0 publishes a call, each other rank replies
//! with its description, and rank 0 publishes the ids of the communicators.
//!
//! An answer repeats the number of the call, and the final record repeats the token of each answer,
//! so that a process never takes files of an earlier start for a running process. A process that
//! cannot take part publishes its error, and all of them fail.

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

use super::peers::{PeerInfo, check_distinct_gpus, token};
#[cfg(feature = "mpi")]
use crate::engine::mpi::MpiSession;
use crate::error::{Error, ProcessError, Result};

/// The id of a communicator, created and read by NCCL.
pub(super) type CommId = [u8; 128];

/// The ids of the communicators of a mesh.
pub(super) type CommIds = [CommId; 2];

/// The version of the files' format.
const VERSION: u32 = 1;

/// The interval between two looks for a file: short compared to the seconds that NCCL takes to
/// start, and easy on a shared file system.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Time limit for rank 0 to wait until all have read its error; they look many times a second.
const READ_TIME: Duration = Duration::from_secs(10);

/// The place where the processes of a mesh over NCCL find each other.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum NcclStore {
    /// A file that does not exist yet, on a file system that all machines share.
    ///
    /// Each rank creates a file of this name with its rank appended, `name.3`. When rank 0 has read
    /// them all, it writes the file itself. Each rank removes its file when all have joined. Make
    /// the name unique, for example with the id of the job: files of an earlier run are rejected.
    File(PathBuf),
    /// The MPI program of these processes, if `mpirun` or `srun` has started them as one.
    ///
    /// It lasts as long as the mesh, and a failure ends it.
    #[cfg(feature = "mpi")]
    Mpi,
}

/// The shared facts of a mesh's start, kept until all processes have joined.
#[derive(Debug)]
pub(super) struct MeshBootstrap {
    pub(super) ids: CommIds,
    /// The files to remove on drop.
    _own_files: Vec<OwnFile>,
    #[cfg(feature = "mpi")]
    pub(super) session: Option<std::sync::Arc<MpiSession>>,
}

impl NcclStore {
    /// Returns the ids that rank 0 creates, if all processes can take part. `peer` describes this
    /// process, or has the reason reason it cannot take part.
    pub(super) fn bootstrap(
        &self,
        place: Placement,
        peer: std::result::Result<PeerInfo, String>,
        timeout: Duration,
        make: impl FnOnce() -> Result<CommIds>,
    ) -> Result<MeshBootstrap> {
        match self {
            Self::File(path) => {
                let files = StoreFiles { path, place, start: Instant::now(), timeout };
                if place.rank() == Rank::ZERO {
                    files.run_rank_0(peer, make)
                } else {
                    files.run_other_rank(peer)
                }
            }
            #[cfg(feature = "mpi")]
            Self::Mpi => bootstrap_by_mpi(place, peer, make),
        }
    }
}

/// The contents of a file.
#[derive(Serialize, Deserialize)]
struct FileRecord<T> {
    version: u32,
    world_size: u64,
    contents: T,
}

/// The answer of each rank but the first.
#[derive(Serialize, Deserialize)]
struct StoreReply {
    /// The number of the call.
    call: u64,
    peer: std::result::Result<PeerInfo, String>,
}

/// The final record of rank 0.
#[derive(Serialize, Deserialize)]
struct FinalRecord {
    /// The ids, concatenated.
    ids: Vec<u8>,
    /// The processes, by rank.
    peers: Vec<PeerInfo>,
}

/// The files of a mesh's start, as seen by one process.
struct StoreFiles<'a> {
    path: &'a Path,
    place: Placement,
    start: Instant,
    timeout: Duration,
}

impl StoreFiles<'_> {
    /// Runs the part of rank 0.
    fn run_rank_0(
        &self,
        peer: std::result::Result<PeerInfo, String>,
        make: impl FnOnce() -> Result<CommIds>,
    ) -> Result<MeshBootstrap> {
        // Create this file first: it fails if another mesh uses the name.
        let file = OwnFile::claim(self.path)?;
        let call = token();
        let call_file = OwnFile::claim(&self.rank_path(0))?;
        self.fill(&call_file, call)?;
        let replies: Vec<_> =
            (1..self.world_size()).map(|rank| self.read_reply(rank, call)).collect();
        // Ranks that answered will read the outcome, and then remove their replies.
        let came = (1..).zip(&replies).filter(|(_, answer)| answer.is_ok());
        let came: Vec<PathBuf> = came.map(|(rank, _)| self.rank_path(rank)).collect();
        match collect_peers(peer, replies).and_then(|peers| Ok((make()?, peers))) {
            Ok((ids, peers)) => {
                self.fill(&file, Ok::<_, String>(FinalRecord { ids: ids.concat(), peers }))?;
                Ok(MeshBootstrap {
                    ids,
                    _own_files: vec![file, call_file],
                    #[cfg(feature = "mpi")]
                    session: None,
                })
            }
            Err(error) => {
                self.fill(&file, Err::<FinalRecord, _>(error.to_string()))?;
                wait_for_readers(&came, READ_TIME);
                Err(error)
            }
        }
    }

    /// Returns the answer of a rank to this call, within the time limit.
    fn read_reply(&self, rank: u64, call: u64) -> Result<std::result::Result<PeerInfo, String>> {
        let path = self.rank_path(rank);
        let answer: StoreReply = self.read(&path, || Ok(()))?;
        if answer.call == call { Ok(answer.peer) } else { Err(stale(&path)) }
    }

    /// Runs the part of the other ranks.
    fn run_other_rank(&self, peer: std::result::Result<PeerInfo, String>) -> Result<MeshBootstrap> {
        // Create this file first: it fails if an earlier run left one.
        let own_file = OwnFile::claim(&self.rank_path(self.place.rank().as_u64()))?;
        let call: u64 = self.read(&self.rank_path(0), || Ok(()))?;
        self.fill(&own_file, StoreReply { call, peer: peer.clone() })?;
        let roll: std::result::Result<FinalRecord, String> =
            self.read(self.path, || match self.path.try_exists() {
                Ok(false) => Err(nccl("rank 0 has ended while the others joined it")),
                _ => Ok(()),
            })?;
        // The local error is more precise.
        let peer = peer.map_err(nccl)?;
        let FinalRecord { ids, peers } =
            roll.map_err(|reason| ProcessError::Peer { slot: 0, reason })?;
        if peers.get(self.place.rank().as_usize()) != Some(&peer) {
            return Err(stale(self.path));
        }
        Ok(MeshBootstrap {
            ids: parse_ids(&ids).ok_or_else(|| stale(self.path))?,
            _own_files: vec![own_file],
            #[cfg(feature = "mpi")]
            session: None,
        })
    }

    fn world_size(&self) -> u64 {
        self.place.world_size().as_u64()
    }

    /// Returns the path of a rank's file.
    fn rank_path(&self, rank: u64) -> PathBuf {
        let mut name = OsString::from(self.path);
        name.push(format!(".{rank}"));
        PathBuf::from(name)
    }

    fn fill(&self, file: &OwnFile, contents: impl Serialize) -> Result<()> {
        let record = FileRecord { version: VERSION, world_size: self.world_size(), contents };
        let bytes = serde_json::to_vec(&record).map_err(io::Error::from);
        bytes.and_then(|bytes| file.fill(&bytes)).map_err(|cause| store(&file.0, cause))
    }

    /// Waits for the contents of a file; `go_on` may return an error to stop the wait.
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
            if self.start.elapsed() >= self.timeout {
                let reason = format!("nobody has written it within {:?}", self.timeout);
                return Err(store(path, io::Error::new(ErrorKind::TimedOut, reason)));
            }
            thread::sleep(POLL_INTERVAL);
        }
    }
}

/// Returns the processes by rank, given rank 0 and the replies of the others.
fn collect_peers(
    rank_0: std::result::Result<PeerInfo, String>,
    replies: Vec<Result<std::result::Result<PeerInfo, String>>>,
) -> Result<Vec<PeerInfo>> {
    let mut peers = vec![rank_0.map_err(|reason| nccl(format!("rank 0: {reason}")))?];
    for (rank, answer) in (1..).zip(replies) {
        peers.push(answer?.map_err(|reason| nccl(format!("rank {rank}: {reason}")))?);
    }
    check_distinct_gpus(&peers).map_err(nccl)?;
    Ok(peers)
}

/// Waits until all have read the error of rank 0, before its file is removed. (A rank that has
/// joined has read the file.)
fn wait_for_readers(replies: &[PathBuf], timeout: Duration) {
    let start = Instant::now();
    while replies.iter().any(|path| path.exists()) && start.elapsed() < timeout {
        thread::sleep(POLL_INTERVAL);
    }
}

fn contents<T: DeserializeOwned>(bytes: &[u8], expected: u64) -> io::Result<T> {
    let no_part = |error: serde_json::Error| {
        invalid(format!("the file is no part of a mesh's start, or of another version's: {error}"))
    };
    let FileRecord { version, world_size, contents } =
        serde_json::from_slice::<FileRecord<serde_json::Value>>(bytes).map_err(no_part)?;
    if version != VERSION {
        return Err(invalid(format!("the file is of version {version}, not {VERSION}")));
    }
    if world_size != expected {
        return Err(invalid(format!("the file is of a world of {world_size}, not {expected}")));
    }
    serde_json::from_value(contents).map_err(no_part)
}

fn invalid(reason: String) -> io::Error {
    io::Error::new(ErrorKind::InvalidData, reason)
}

fn stale(path: &Path) -> Error {
    let reason = "an earlier start has left the file; remove it";
    store(path, io::Error::new(ErrorKind::AlreadyExists, reason))
}

fn store(path: &Path, cause: io::Error) -> Error {
    ProcessError::Store { path: path.to_owned(), cause }.into()
}

fn nccl(reason: impl Display) -> Error {
    ProcessError::Nccl { reason: reason.to_string() }.into()
}

/// Returns the ids in these bytes, if the length is right.
fn parse_ids(bytes: &[u8]) -> Option<CommIds> {
    let (ids, rest): (&[CommId], _) = bytes.as_chunks();
    ids.try_into().ok().filter(|_| rest.is_empty())
}

#[cfg(feature = "mpi")]
#[expect(clippy::expect_used, reason = "the description of a process is valid JSON")]
fn bootstrap_by_mpi(
    place: Placement,
    peer: std::result::Result<PeerInfo, String>,
    make: impl FnOnce() -> Result<CommIds>,
) -> Result<MeshBootstrap> {
    let session = MpiSession::start()?;
    let own_rank = session.rank();
    let size = session.size();
    // A process that cannot take part ends the program: the others wait for the ids and for its
    // description.
    if own_rank != place.rank().as_usize() || size != place.world_size().as_usize() {
        session.exit_all(&format!("this process is rank {own_rank} of {size}, not {place}"));
    }
    let peer = peer.unwrap_or_else(|reason| session.exit_all(&reason));
    let own_bytes = serde_json::to_vec(&peer).expect("numbers and a name have a form in JSON");
    let mut ids = [[0; size_of::<CommId>()]; 2];
    if place.rank() == Rank::ZERO {
        ids = make().unwrap_or_else(|error| session.exit_all(&error.to_string()));
    }
    for id in &mut ids {
        session.broadcast(id, 0)?;
    }
    let mut peers = Vec::new();
    for rank in 0..size {
        let bytes = broadcast(&session, own_bytes.clone(), rank)?;
        peers.push(serde_json::from_slice(&bytes).map_err(nccl)?);
    }
    check_distinct_gpus(&peers).map_err(nccl)?;
    Ok(MeshBootstrap { ids, _own_files: Vec::new(), session: Some(session) })
}

/// Broadcasts the bytes of a rank; the other ranks do not know their length.
#[cfg(feature = "mpi")]
#[expect(clippy::expect_used, reason = "who a process is takes less than 2^64 bytes")]
fn broadcast(session: &MpiSession, mut bytes: Vec<u8>, from: usize) -> Result<Vec<u8>> {
    let mut len = (bytes.len() as u64).to_le_bytes();
    session.broadcast(&mut len, from)?;
    bytes.resize(usize::try_from(u64::from_le_bytes(len)).expect("a length in memory"), 0);
    session.broadcast(&mut bytes, from)?;
    Ok(bytes)
}

/// A file that this process has created, and removes on drop.
#[derive(Debug)]
struct OwnFile(PathBuf);

impl OwnFile {
    /// Creates the file, which must not exist. Readers ignore an empty file.
    fn claim(path: &Path) -> Result<Self> {
        let made = OpenOptions::new().write(true).create_new(true).open(path);
        made.map_err(|error| match error.kind() {
            ErrorKind::AlreadyExists => {
                io::Error::new(error.kind(), "the file exists; every mesh needs one of its own")
            }
            _ => error,
        })
        .map_err(|cause| store(path, cause))?;
        Ok(Self(path.to_owned()))
    }

    /// Replaces the empty file atomically, since other processes poll it.
    fn fill(&self, bytes: &[u8]) -> io::Result<()> {
        let mut file = AtomicFile::replacing(&self.0)?;
        file.write_all(bytes)?;
        file.persist()
    }
}

impl Drop for OwnFile {
    fn drop(&mut self) {
        // The next process that creates it reports a leftover.
        drop(fs::remove_file(&self.0));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::nccl::peers::tests::peer;

    const IDS: CommIds = [[7; 128], [8; 128]];
    const SOON: Duration = Duration::from_millis(100);
    const LATE: Duration = Duration::from_mins(1);

    fn join_as(
        path: &Path,
        rank: u8,
        peer: std::result::Result<PeerInfo, String>,
        timeout: Duration,
    ) -> Result<CommIds> {
        let place = Placement::new(u64::from(rank), 2).unwrap();
        let store = NcclStore::File(path.to_owned());
        store.bootstrap(place, peer, timeout, || Ok(IDS)).map(|bootstrap| bootstrap.ids)
    }

    fn join(path: &Path, rank: u8, timeout: Duration) -> Result<CommIds> {
        join_as(path, rank, Ok(peer(rank, "here")), timeout)
    }

    fn kind_of(outcome: Result<CommIds>) -> ErrorKind {
        match outcome {
            Err(Error::Process(ProcessError::Store { cause, .. })) => cause.kind(),
            other => panic!("{other:?}"),
        }
    }

    /// Returns the outcomes of both ranks, which run concurrently.
    fn both(
        path: &Path,
        rank_0: std::result::Result<PeerInfo, String>,
        rank_1: std::result::Result<PeerInfo, String>,
    ) -> [Result<CommIds>; 2] {
        thread::scope(|scope| {
            let other = scope.spawn(|| join_as(path, 1, rank_1, LATE));
            [join_as(path, 0, rank_0, LATE), other.join().unwrap()]
        })
    }

    fn write<T: Serialize>(path: &Path, world_size: u64, contents: T) {
        let record = FileRecord { version: VERSION, world_size, contents };
        fs::write(path, serde_json::to_vec(&record).unwrap()).unwrap();
    }

    #[test]
    fn rank_0_ids_reach_every_rank() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("id");
        let store = NcclStore::File(path.clone());
        let start = |rank: u8| {
            let place = Placement::new(u64::from(rank), 2).unwrap();
            store.bootstrap(place, Ok(peer(rank, "here")), LATE, || Ok(IDS)).unwrap()
        };
        thread::scope(|scope| {
            let other = scope.spawn(|| start(1));
            // Keep it until the other rank has read the files of this one.
            let own = start(0);
            assert_eq!([own.ids, other.join().unwrap().ids], [IDS, IDS]);
        });
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 0, "each process removes its files");
    }

    #[test]
    fn failing_process_fails_all_ranks() {
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
    fn files_of_another_run_are_rejected() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("id");
        let rank_path = |rank: u64| folder.path().join(format!("id.{rank}"));
        for stale in [path.clone(), rank_path(0)] {
            fs::write(&stale, "an old one").unwrap();
            assert_eq!(kind_of(join(&path, 0, SOON)), ErrorKind::AlreadyExists);
            assert_eq!(fs::read(&stale).unwrap(), b"an old one");
            fs::remove_file(&stale).unwrap();
        }
        fs::write(rank_path(1), "an old one").unwrap();
        assert_eq!(kind_of(join(&path, 1, SOON)), ErrorKind::AlreadyExists);
    }

    #[test]
    fn reply_to_an_earlier_call_is_stale() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("id");
        write(&folder.path().join("id.1"), 2, StoreReply { call: 5, peer: Ok(peer(1, "here")) });
        assert_eq!(kind_of(join(&path, 0, LATE)), ErrorKind::AlreadyExists);
    }

    #[test]
    fn ids_of_an_earlier_start_are_stale() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("id");
        write(&folder.path().join("id.0"), 2, 5);
        let peers = vec![peer(0, "here"), peer(1, "here")];
        let roll = FinalRecord { ids: IDS.concat(), peers };
        write(&path, 2, Ok::<_, String>(roll));
        assert_eq!(kind_of(join(&path, 1, LATE)), ErrorKind::AlreadyExists);
    }

    #[test]
    fn waits_end_at_deadline_or_without_rank_0() {
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
    fn invalid_records_are_rejected() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("id");
        let rank_0 = folder.path().join("id.0");
        let refused = || kind_of(join(&path, 1, SOON)) == ErrorKind::InvalidData;
        fs::write(&rank_0, "something else").unwrap();
        assert!(refused());
        write(&rank_0, 3, 5);
        assert!(refused());
        write(&rank_0, 2, "five");
        assert!(refused());
        let record = FileRecord { version: VERSION + 1, world_size: 2, contents: 5 };
        fs::write(&rank_0, serde_json::to_vec(&record).unwrap()).unwrap();
        assert!(refused());
    }

    #[test]
    fn ids_need_the_exact_length() {
        assert_eq!(parse_ids(&IDS.concat()), Some(IDS));
        assert_eq!(parse_ids(&IDS.concat()[1..]), None);
        assert_eq!(parse_ids(&[&IDS.concat()[..], &[0]].concat()), None);
        assert_eq!(parse_ids(&IDS[0]), None);
    }

    #[test]
    fn missing_folder_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("nowhere/id");
        for rank in [0, 1] {
            assert_eq!(kind_of(join(&path, rank, SOON)), ErrorKind::NotFound);
        }
    }
}
