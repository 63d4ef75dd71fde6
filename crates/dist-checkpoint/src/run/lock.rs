//! The lock that lets one group of processes write to a checkpoint folder.
//!
//! The first process of the mesh locks a file in the folder for as long as it lives; the system
//! releases the lock however it ends. A second file names that process. Other processes of the mesh
//! may outlive it, so all of them write under names that no later group has: each group has a
//! *writer id*. Readers need no lock.

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
    disk::{At, between_calls, check_file, create_folder},
    error::{Error, Result},
    run::index::json_error,
};

/// The file that is locked; it is empty, and stays.
const LOCK: &str = "lock";
/// The file that names the owner of the lock: some systems let nobody read a locked file.
const OWNER: &str = "holder.json";

/// The lock that this process holds, if any; clones share it.
#[derive(Clone, Debug, Default)]
pub(super) struct SharedLock(Arc<Mutex<Option<WriterLock>>>);

impl SharedLock {
    /// Returns the lock of a folder, which is taken by the first call. Every process of the mesh calls
    /// this.
    ///
    /// # Errors
    ///
    /// [`Error::Locked`], [`Error::Lost`], [`Error::Io`]; all
    /// processes fail if one does.
    pub(super) fn take(&self, mesh: &DeviceMesh, folder: &Path) -> Result<WriterLock> {
        // Held for as long as it takes: a second thread must not find its own process's lock.
        let mut shared = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(lock) = &*shared {
            mesh.all_ok(lock.check())?;
            return Ok(lock.clone());
        }
        let drawn = random_number();
        let held = if mesh.is_first_process() {
            FolderLock::take(folder, drawn).map(Some)
        } else {
            Ok(None)
        };
        let held = mesh.all_ok(held)?;
        // Every process draws one, and that of the first counts.
        let numbers = mesh.gather_numbers(&vec![[drawn]; mesh.local_slots().len()])?;
        let [writer_id] = numbers[0];
        let lock = WriterLock { writer_id, held: held.map(Arc::new) };
        Ok(shared.insert(lock).clone())
    }
}

/// The right to write into a folder.
#[derive(Clone, Debug)]
pub(super) struct WriterLock {
    /// The id of the group of processes that has it: a random number, which the first process draws.
    pub(super) writer_id: u64,
    /// The locked folder, in the first process.
    held: Option<Arc<FolderLock>>,
}

impl WriterLock {
    /// Checks that no other process has taken the folder, as one may where there are no locks, or
    /// after the folder was removed.
    fn check(&self) -> Result<()> {
        match &self.held {
            Some(held) if !held.is_named() => Err(Error::Lost { path: held.folder.clone() }),
            _ => Ok(()),
        }
    }

    /// Logs a warning about a checkpoint, unless it has been logged before: each checkpoint that is
    /// saved would say again what lies beside it. For the first process, which alone removes what is
    /// not to be kept.
    #[expect(clippy::expect_used, reason = "says why it cannot fail")]
    pub(super) fn warn_once(&self, path: &Path, what: fmt::Arguments<'_>) {
        let held = self.held.as_ref().expect("the first process holds the folder");
        let mut warned = held.warned.lock().unwrap_or_else(PoisonError::into_inner);
        if warned.insert(path.to_owned()) {
            tracing::warn!("{what}");
        }
    }

    /// Returns true if no other process can be writing the files of a group: it is this group, or the
    /// lock shows that there is no other.
    pub(super) fn is_over(&self, writer_id: Option<u64>) -> bool {
        let is_locked = self.held.as_ref().is_some_and(|held| held.lock.is_some());
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
    /// The checkpoints that a warning was about.
    warned: Mutex<BTreeSet<PathBuf>>,
}

impl FolderLock {
    fn take(folder: &Path, writer_id: u64) -> Result<Self> {
        create_folder(folder)?;
        let path = folder.join(LOCK);
        let file = open_lock(&path).at(&path)?;
        let lock = if is_locked(folder, file.try_lock())? { Some(file) } else { None };
        if lock.is_some() {
            remove_partial_files(folder);
        }
        LockOwner::new(writer_id).write(folder)?;
        Ok(Self { folder: folder.to_owned(), writer_id, lock, warned: Mutex::default() })
    }

    /// Returns true if the folder still names this as the owner of its lock.
    fn is_named(&self) -> bool {
        LockOwner::read(&self.folder).is_some_and(|owner| owner.writer_id == self.writer_id)
    }
}

impl Drop for FolderLock {
    /// Before the lock is released. A file that stays, since it cannot be removed or the process
    /// was killed, does no harm: the next process that gets the lock replaces it.
    fn drop(&mut self) {
        if self.is_named() {
            drop(fs::remove_file(self.folder.join(OWNER)));
        }
    }
}

/// Opens the file that is locked, and makes it if it is missing.
fn open_lock(path: &Path) -> io::Result<File> {
    // Somebody may have planted a link in its place. A new file is not made where a link leads, and
    // what is there is not truncated: the file is for its name alone.
    between_calls();
    match File::create_new(path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            check_file(path)?;
            File::options().write(true).open(path)
        }
        made => made,
    }
}

/// Returns true if a file is locked now; false on a file system without locks.
fn is_locked(folder: &Path, tried: Result<(), TryLockError>) -> Result<bool, Error> {
    match tried {
        Ok(()) => Ok(true),
        Err(TryLockError::WouldBlock) => {
            let path = folder.to_owned();
            let holder = LockOwner::read(folder).as_ref().map(LockOwner::to_string);
            let holder = holder.unwrap_or_else(|| "another process".to_owned());
            Err(Error::Locked { path, holder })
        }
        Err(TryLockError::Error(cause)) => {
            warn_without_lock(folder, &cause);
            Ok(false)
        }
    }
}

/// Removes the files of processes that were killed while they took the lock. A file that cannot be
/// removed harms nobody.
fn remove_partial_files(folder: &Path) {
    let Ok(entries) = fs::read_dir(folder) else { return };
    for entry in entries.flatten() {
        // Nobody else writes here: the folder is locked.
        if is_partial(entry.file_name()) {
            drop(fs::remove_file(entry.path()));
        }
    }
}

/// A run must not end because its file system has no locks.
fn warn_without_lock(folder: &Path, cause: &io::Error) {
    tracing::warn!(
        "{} cannot be locked: {cause}. Nothing but its checkpoints tells a second run that this \
         one is under way",
        folder.display()
    );
}

/// The process that has locked a folder.
#[derive(Debug, Serialize, Deserialize)]
struct LockOwner {
    writer_id: u64,
    pid: u32,
    host: String,
    /// The time at which it did.
    since: String,
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
            since: now.to_string(),
        }
    }

    fn write(&self, folder: &Path) -> Result<()> {
        let path = folder.join(OWNER);
        let text = serde_json::to_vec_pretty(self).map_err(|cause| json_error(&path, cause))?;
        // Somebody may have planted a link in its place.
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
        let Self { pid, host, since, .. } = self;
        write!(f, "process {pid} on host {host} since {since}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_system_without_locks_is_accepted() {
        let folder = tempfile::tempdir().unwrap();
        let cause = io::Error::from(io::ErrorKind::Unsupported);
        assert!(!is_locked(folder.path(), Err(TryLockError::Error(cause))).unwrap());
        let refused = is_locked(folder.path(), Err(TryLockError::WouldBlock)).unwrap_err();
        assert!(refused.to_string().ends_with("is being trained by another process"), "{refused}");
    }

    #[test]
    fn only_the_owner_of_a_lock_ends_others() {
        let folder = tempfile::tempdir().unwrap();
        let writer_id = 7;
        let mut held = FolderLock::take(folder.path(), writer_id).unwrap();
        let others = [Some(writer_id ^ 1), None];
        let file = held.lock.take();
        let lock = WriterLock { writer_id, held: Some(Arc::new(held)) };
        assert!(lock.is_over(Some(writer_id)));
        assert!(others.iter().all(|&other| !lock.is_over(other)));

        let warned = Mutex::default();
        let held = FolderLock { folder: folder.path().to_owned(), writer_id, lock: file, warned };
        let lock = WriterLock { writer_id, held: Some(Arc::new(held)) };
        assert!(others.iter().all(|&other| lock.is_over(other)));
    }

    #[test]
    fn writer_ids_differ() {
        assert_ne!(random_number(), random_number());
    }

    #[test]
    fn the_next_owner_removes_partial_files() {
        let folder = tempfile::tempdir().unwrap();
        let left = ".000000000000cafe.partial";
        for name in [left, ".cafe.partial", "notes.partial"] {
            fs::write(folder.path().join(name), "{}").unwrap();
        }
        let held = FolderLock::take(folder.path(), 7).unwrap();
        assert!(held.is_named() && !folder.path().join(left).exists());
        for name in [".cafe.partial", "notes.partial"] {
            assert!(folder.path().join(name).exists(), "{name} is not ours");
        }
    }
}
