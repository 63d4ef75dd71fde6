//! The lock that lets one group of processes write to a checkpoint folder.
//!
//! The first process of the mesh locks a file in the folder as long as it lives; the system
//! releases the lock however the process ends. A second file names that process. Other processes of
//! the mesh may outlive it, so all of them write under names that no later group uses: each group
//! has a *writer id*. Readers need no lock.

use std::{
    collections::BTreeSet,
    fmt,
    fs::{self, File, TryLockError},
    hash::{BuildHasher, RandomState},
    io::{self, Write},
    path::{Path, PathBuf},
    process,
    sync::{Arc, Mutex, PoisonError},
    time::SystemTime,
};

use core_types::files::{AtomicFile, is_partial};
use pmap_mesh::DeviceMesh;
use serde::{Deserialize, Serialize};

use crate::{
    disk::{AtPath, between_calls, check_file, create_folder},
    error::{Error, Result},
    run::index::json_error,
};

/// The locked file. It is empty, and is never removed.
const LOCK: &str = "lock";
/// The file that names the lock's owner: on some systems a locked file cannot be read.
const OWNER: &str = "holder.json";

/// The lock of this process, if any, shared by clones.
#[derive(Clone, Debug, Default)]
pub(super) struct SharedLock(Arc<Mutex<Option<WriterLock>>>);

impl SharedLock {
    /// Takes the lock of a folder on the first call, and returns it. Every process of the mesh
    /// calls this.
    ///
    /// # Errors
    ///
    /// [`Error::Locked`], [`Error::Lost`], [`Error::Io`]; all processes fail if one does.
    pub(super) fn take(&self, mesh: &DeviceMesh, folder: &Path) -> Result<WriterLock> {
        // Hold the mutex until the end. Otherwise a second thread of this process could try to lock
        // the file while the first thread holds its lock.
        let mut shared = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(lock) = &*shared {
            mesh.all_ok(lock.check())?;
            return Ok(lock.clone());
        }
        let own_number = random_number();
        let folder_lock = if mesh.is_first_process() {
            FolderLock::take(folder, own_number).map(Some)
        } else {
            Ok(None)
        };
        let folder_lock = mesh.all_ok(folder_lock)?;
        // Every process draws a number; the number of the first process is used.
        let numbers = mesh.gather_numbers(&vec![[own_number]; mesh.local_slots().len()])?;
        let [writer_id] = numbers[0];
        let lock = WriterLock { writer_id, folder_lock: folder_lock.map(Arc::new) };
        Ok(shared.insert(lock).clone())
    }
}

/// The permission to write to a folder.
#[derive(Clone, Debug)]
pub(super) struct WriterLock {
    /// The id of the owning group of processes: a random number of its first process.
    pub(super) writer_id: u64,
    /// The locked folder, in the first process.
    folder_lock: Option<Arc<FolderLock>>,
}

impl WriterLock {
    /// Checks that no other process has taken over the folder, which is possible without file locks
    /// or after the folder was removed.
    fn check(&self) -> Result<()> {
        match &self.folder_lock {
            Some(folder_lock) if !folder_lock.names_this_group() => {
                Err(Error::Lost { path: folder_lock.folder.clone() })
            }
            _ => Ok(()),
        }
    }

    /// Logs a warning about a checkpoint, once: otherwise every save would repeat it. Only the
    /// first process calls this, since no other process removes checkpoints.
    #[expect(clippy::expect_used, reason = "the message says why it cannot fail")]
    pub(super) fn warn_once(&self, path: &Path, warning: fmt::Arguments<'_>) {
        let folder_lock = self.folder_lock.as_ref().expect("the first process holds the folder");
        let mut warned = folder_lock.warned.lock().unwrap_or_else(PoisonError::into_inner);
        if warned.insert(path.to_owned()) {
            tracing::warn!("{warning}");
        }
    }

    /// Returns true if no process of the group `writer_id` can still be writing another checkpoint:
    /// it is this group, or the file lock proves that no other group exists.
    pub(super) fn has_ended(&self, writer_id: Option<u64>) -> bool {
        let is_locked =
            self.folder_lock.as_ref().is_some_and(|folder_lock| folder_lock.lock.is_some());
        is_locked || writer_id == Some(self.writer_id)
    }
}

/// A folder that the first process has locked.
#[derive(Debug)]
struct FolderLock {
    folder: PathBuf,
    writer_id: u64,
    /// `None` on a file system without locks.
    lock: Option<File>,
    /// The checkpoints with a logged warning.
    warned: Mutex<BTreeSet<PathBuf>>,
}

impl FolderLock {
    fn take(folder: &Path, writer_id: u64) -> Result<Self> {
        create_folder(folder)?;
        let path = folder.join(LOCK);
        let file = open_lock(&path).at(&path)?;
        let lock = if check_lock_attempt(folder, file.try_lock())? { Some(file) } else { None };
        if lock.is_some() {
            remove_partial_files(folder);
        }
        LockOwner::new(writer_id).write(folder)?;
        Ok(Self { folder: folder.to_owned(), writer_id, lock, warned: Mutex::default() })
    }

    /// Returns true if the folder still names this group as the owner of its lock.
    fn names_this_group(&self) -> bool {
        LockOwner::read(&self.folder).is_some_and(|owner| owner.writer_id == self.writer_id)
    }
}

impl Drop for FolderLock {
    /// Removes the owner file before the lock is released. A leftover file, from a failed removal
    /// or a killed process, does no harm: the next owner replaces it.
    fn drop(&mut self) {
        if self.names_this_group() {
            drop(fs::remove_file(self.folder.join(OWNER)));
        }
    }
}

/// Opens the lock file, and creates it if it is missing.
fn open_lock(path: &Path) -> io::Result<File> {
    // An attacker may have planted a link here. `create_new` does not follow links, and an existing
    // file is not truncated.
    between_calls();
    match File::create_new(path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            check_file(path)?;
            File::options().write(true).open(path)
        }
        opened => opened,
    }
}

/// Returns true if the attempt to lock a file succeeded, false on a file system without locks.
///
/// # Errors
///
/// [`Error::Locked`] if another process has the lock.
fn check_lock_attempt(folder: &Path, attempt: Result<(), TryLockError>) -> Result<bool, Error> {
    match attempt {
        Ok(()) => Ok(true),
        Err(TryLockError::WouldBlock) => {
            let path = folder.to_owned();
            let holder = match LockOwner::read(folder) {
                Some(owner) => owner.to_string(),
                None => "another process".to_owned(),
            };
            Err(Error::Locked { path, holder })
        }
        Err(TryLockError::Error(cause)) => {
            warn_without_lock(folder, &cause);
            Ok(false)
        }
    }
}

/// Removes partial files of processes that were killed while taking the lock. A leftover file does
/// no harm.
fn remove_partial_files(folder: &Path) {
    let Ok(entries) = fs::read_dir(folder) else { return };
    for entry in entries.flatten() {
        // The folder is locked, so no other process writes here.
        if is_partial(entry.file_name()) {
            drop(fs::remove_file(entry.path()));
        }
    }
}

/// Warns that the file system has no locks. This must not end the run.
fn warn_without_lock(folder: &Path, cause: &io::Error) {
    tracing::warn!(
        "{} cannot be locked: {cause}. A second run in this folder could notice this one only by \
         its checkpoints",
        folder.display()
    );
}

/// The process that has locked a folder.
#[derive(Debug, Serialize, Deserialize)]
struct LockOwner {
    writer_id: u64,
    pid: u32,
    host: String,
    /// The time of the lock.
    #[serde(rename = "since")]
    locked_at: String,
}

/// Returns a number that no other process draws.
fn random_number() -> u64 {
    // The keys of a `RandomState` are the system's random numbers.
    RandomState::new().hash_one(process::id())
}

impl LockOwner {
    fn new(writer_id: u64) -> Self {
        let now = humantime::format_rfc3339_seconds(SystemTime::now());
        Self {
            writer_id,
            pid: process::id(),
            host: gethostname::gethostname().to_string_lossy().into_owned(),
            locked_at: now.to_string(),
        }
    }

    fn write(&self, folder: &Path) -> Result<()> {
        let path = folder.join(OWNER);
        let text = serde_json::to_vec_pretty(self).map_err(|cause| json_error(&path, cause))?;
        // An attacker may have planted a link here, so replace the file instead of opening it.
        let mut file = AtomicFile::replacing(&path).at(&path)?;
        between_calls();
        file.write_all(&text).at(&path)?;
        between_calls();
        file.persist().at(&path)
    }

    /// Reads the owner of a folder's lock, if a file names one.
    fn read(folder: &Path) -> Option<Self> {
        let path = folder.join(OWNER);
        check_file(&path).ok()?;
        serde_json::from_slice(&fs::read(path).ok()?).ok()
    }
}

impl fmt::Display for LockOwner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { pid, host, locked_at, .. } = self;
        write!(f, "process {pid} on host {host} since {locked_at}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn file_system_without_locks_is_accepted() {
        let folder = tempfile::tempdir().unwrap();
        let cause = io::Error::from(io::ErrorKind::Unsupported);
        assert!(!check_lock_attempt(folder.path(), Err(TryLockError::Error(cause))).unwrap());
        let rejected =
            check_lock_attempt(folder.path(), Err(TryLockError::WouldBlock)).unwrap_err();
        assert!(
            rejected.to_string().ends_with("is being trained by another process"),
            "{rejected}"
        );
    }

    #[test]
    fn only_a_file_lock_ends_other_groups() {
        let folder = tempfile::tempdir().unwrap();
        let writer_id = 7;
        let mut folder_lock = FolderLock::take(folder.path(), writer_id).unwrap();
        let others = [Some(writer_id ^ 1), None];
        let file = folder_lock.lock.take();
        let lock = WriterLock { writer_id, folder_lock: Some(Arc::new(folder_lock)) };
        assert!(lock.has_ended(Some(writer_id)));
        assert!(others.iter().all(|&other| !lock.has_ended(other)));

        let warned = Mutex::default();
        let folder_lock =
            FolderLock { folder: folder.path().to_owned(), writer_id, lock: file, warned };
        let lock = WriterLock { writer_id, folder_lock: Some(Arc::new(folder_lock)) };
        assert!(others.iter().all(|&other| lock.has_ended(other)));
    }

    #[test]
    fn writer_ids_differ() {
        assert_ne!(random_number(), random_number());
    }

    #[test]
    fn next_owner_removes_partial_files() {
        let folder = tempfile::tempdir().unwrap();
        let left = ".000000000000cafe.partial";
        for name in [left, ".cafe.partial", "notes.partial"] {
            fs::write(folder.path().join(name), "{}").unwrap();
        }
        let folder_lock = FolderLock::take(folder.path(), 7).unwrap();
        assert!(folder_lock.names_this_group() && !folder.path().join(left).exists());
        for name in [".cafe.partial", "notes.partial"] {
            assert!(folder.path().join(name).exists(), "{name} is not ours");
        }
    }
}
