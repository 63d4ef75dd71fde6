//! Rendezvous of a mesh's processes over NCCL: rank 0 publishes a call, each other rank replies
//! with its description, and rank 0 publishes the ids of the communicators.
//!
//! A reply repeats the number of the call, and the final record repeats the description in each
//! reply, so that no process takes the files of an earlier start for those of a running process. A
//! process that cannot take part publishes its error, and then all processes fail.

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
use crate::error::{Error, ProcessError, Result};

/// The id of a communicator, created and read by NCCL.
pub(super) type CommId = [u8; 128];

/// The ids of the communicators of a mesh.
pub(super) type CommIds = [CommId; 2];

/// The published value of a process, or the reason why the process cannot take part.
type Report<T> = std::result::Result<T, String>;

/// The version of the files' format.
const VERSION: u32 = 1;

/// The interval between two checks for a file: short compared to the seconds that NCCL takes to
/// start, and long enough to spare a shared file system.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Time limit for rank 0 to wait until all ranks have read its error. Each rank checks for it many
/// times a second.
const READ_TIME: Duration = Duration::from_secs(10);

/// The result of a rendezvous, kept until all processes have joined the communicators.
#[derive(Debug)]
pub(super) struct MeshBootstrap {
    pub(super) ids: CommIds,
    /// The files to remove on drop.
    _own_files: Vec<OwnFile>,
}

/// Returns the ids that rank 0 creates with `make`, if all processes can take part. `own` is the
/// description of this process, or the reason why it cannot take part. The processes find each
/// other through files named after `path`.
pub(super) fn bootstrap(
    path: &Path,
    place: Placement,
    own: Report<PeerInfo>,
    timeout: Duration,
    make: impl FnOnce() -> Result<CommIds>,
) -> Result<MeshBootstrap> {
    let files = StoreFiles { path, place, start: Instant::now(), timeout };
    if place.rank() == Rank::ZERO { files.run_rank_0(own, make) } else { files.run_other_rank(own) }
}

/// A file of the rendezvous, with its contents.
#[derive(Serialize, Deserialize)]
struct FileRecord<T> {
    version: u32,
    world_size: u64,
    contents: T,
}

/// The reply of each rank except rank 0.
#[derive(Serialize, Deserialize)]
struct StoreReply {
    /// The number of the call that it answers.
    call: u64,
    peer: Report<PeerInfo>,
}

/// The final record of rank 0.
#[derive(Serialize, Deserialize)]
struct FinalRecord {
    /// The ids, concatenated.
    ids: Vec<u8>,
    /// The processes, by rank.
    peers: Vec<PeerInfo>,
}

/// One process's access to the files of a rendezvous.
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
        own: Report<PeerInfo>,
        make: impl FnOnce() -> Result<CommIds>,
    ) -> Result<MeshBootstrap> {
        // Create this file first, which fails if another mesh uses the name.
        let file = OwnFile::claim(self.path)?;
        let call = token();
        let call_file = OwnFile::claim(&self.rank_path(0))?;
        self.fill(&call_file, call)?;
        let replies: Vec<_> =
            (1..self.world_size()).map(|rank| self.read_reply(rank, call)).collect();
        // A rank that has replied reads the outcome, and then removes its reply.
        let mut reply_paths = Vec::new();
        for (rank, reply) in (1..).zip(&replies) {
            if reply.is_ok() {
                reply_paths.push(self.rank_path(rank));
            }
        }
        match collect_peers(own, replies).and_then(|peers| Ok((make()?, peers))) {
            Ok((ids, peers)) => {
                let record = FinalRecord { ids: ids.concat(), peers };
                self.fill(&file, Report::Ok(record))?;
                Ok(MeshBootstrap { ids, _own_files: vec![file, call_file] })
            }
            Err(error) => {
                self.fill(&file, Report::<FinalRecord>::Err(error.to_string()))?;
                wait_for_readers(&reply_paths, READ_TIME);
                Err(error)
            }
        }
    }

    /// Waits for the reply of a rank to this call, up to the time limit.
    fn read_reply(&self, rank: u64, call: u64) -> Result<Report<PeerInfo>> {
        let path = self.rank_path(rank);
        let reply: StoreReply = self.read(&path, || Ok(()))?;
        if reply.call == call { Ok(reply.peer) } else { Err(stale_error(&path)) }
    }

    /// Runs the part of a rank other than 0.
    fn run_other_rank(&self, own: Report<PeerInfo>) -> Result<MeshBootstrap> {
        // Create this file first, which fails if an earlier run left its file.
        let own_file = OwnFile::claim(&self.rank_path(self.place.rank().as_u64()))?;
        let call: u64 = self.read(&self.rank_path(0), || Ok(()))?;
        self.fill(&own_file, StoreReply { call, peer: own.clone() })?;
        let outcome: Report<FinalRecord> =
            self.read(self.path, || match self.path.try_exists() {
                Ok(false) => Err(nccl_error("rank 0 has ended before all ranks had joined")),
                _ => Ok(()),
            })?;
        // Return the local error first, since it is more precise.
        let own = own.map_err(nccl_error)?;
        let FinalRecord { ids, peers } =
            outcome.map_err(|reason| ProcessError::Peer { slot: 0, reason })?;
        if peers.get(self.place.rank().as_usize()) != Some(&own) {
            return Err(stale_error(self.path));
        }
        Ok(MeshBootstrap {
            ids: parse_ids(&ids).ok_or_else(|| stale_error(self.path))?,
            _own_files: vec![own_file],
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

    /// Writes the contents of one of this process's files.
    fn fill(&self, file: &OwnFile, contents: impl Serialize) -> Result<()> {
        let record = FileRecord { version: VERSION, world_size: self.world_size(), contents };
        let bytes = serde_json::to_vec(&record).map_err(io::Error::from);
        bytes.and_then(|bytes| file.fill(&bytes)).map_err(|cause| store_error(&file.0, cause))
    }

    /// Waits for the contents of a file, up to the time limit. An error of `check` ends the wait.
    fn read<T: DeserializeOwned>(&self, path: &Path, check: impl Fn() -> Result<()>) -> Result<T> {
        loop {
            match fs::read(path) {
                Ok(bytes) if !bytes.is_empty() => {
                    return parse_contents(&bytes, self.world_size())
                        .map_err(|cause| store_error(path, cause));
                }
                Err(error) if error.kind() != ErrorKind::NotFound => {
                    return Err(store_error(path, error));
                }
                _ => check()?,
            }
            if self.start.elapsed() >= self.timeout {
                let reason = format!("it was not written within {:?}", self.timeout);
                return Err(store_error(path, io::Error::new(ErrorKind::TimedOut, reason)));
            }
            thread::sleep(POLL_INTERVAL);
        }
    }
}

/// Returns the descriptions of all processes, by rank, given rank 0's description and the replies
/// of the other ranks.
fn collect_peers(
    rank_0: Report<PeerInfo>,
    replies: Vec<Result<Report<PeerInfo>>>,
) -> Result<Vec<PeerInfo>> {
    let mut peers = vec![rank_0.map_err(|reason| nccl_error(format!("rank 0: {reason}")))?];
    for (rank, reply) in (1..).zip(replies) {
        peers.push(reply?.map_err(|reason| nccl_error(format!("rank {rank}: {reason}")))?);
    }
    check_distinct_gpus(&peers).map_err(nccl_error)?;
    Ok(peers)
}

/// Waits until all ranks have read the error of rank 0, so that its file can be removed. A rank
/// removes its reply after it has read the file.
fn wait_for_readers(replies: &[PathBuf], timeout: Duration) {
    let start = Instant::now();
    while replies.iter().any(|path| path.exists()) && start.elapsed() < timeout {
        thread::sleep(POLL_INTERVAL);
    }
}

/// Returns the contents of a file of this version and world size.
fn parse_contents<T: DeserializeOwned>(bytes: &[u8], expected: u64) -> io::Result<T> {
    let format_error = |error: serde_json::Error| {
        invalid(format!(
            "the file is not from the start of a mesh, or from another version: {error}"
        ))
    };
    let FileRecord { version, world_size, contents } =
        serde_json::from_slice::<FileRecord<serde_json::Value>>(bytes).map_err(format_error)?;
    if version != VERSION {
        return Err(invalid(format!("the file has version {version}, not {VERSION}")));
    }
    if world_size != expected {
        return Err(invalid(format!("the file is for {world_size} processes, not {expected}")));
    }
    serde_json::from_value(contents).map_err(format_error)
}

fn invalid(reason: String) -> io::Error {
    io::Error::new(ErrorKind::InvalidData, reason)
}

fn stale_error(path: &Path) -> Error {
    let reason = "an earlier start has left the file; remove it";
    store_error(path, io::Error::new(ErrorKind::AlreadyExists, reason))
}

fn store_error(path: &Path, cause: io::Error) -> Error {
    ProcessError::Store { path: path.to_owned(), cause }.into()
}

fn nccl_error(reason: impl Display) -> Error {
    ProcessError::Nccl { reason: reason.to_string() }.into()
}

/// Returns the ids in these bytes, or `None` if the number of bytes is wrong.
fn parse_ids(bytes: &[u8]) -> Option<CommIds> {
    let (ids, rest): (&[CommId], _) = bytes.as_chunks();
    ids.try_into().ok().filter(|_| rest.is_empty())
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
                io::Error::new(error.kind(), "the file exists; every mesh needs a separate file")
            }
            _ => error,
        })
        .map_err(|cause| store_error(path, cause))?;
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
        // If this fails, the next process that creates the file reports it.
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
        bootstrap(path, place, peer, timeout, || Ok(IDS)).map(|bootstrap| bootstrap.ids)
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
        let start = |rank: u8| {
            let place = Placement::new(u64::from(rank), 2).unwrap();
            bootstrap(&path, place, Ok(peer(rank, "here")), LATE, || Ok(IDS)).unwrap()
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
