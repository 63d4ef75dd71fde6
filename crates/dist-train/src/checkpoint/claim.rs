//! One run, one group of processes: who writes into a folder of checkpoints has claimed it.
//!
//! The first process of the mesh locks a file in the folder for as long as it lives; the system
//! releases the lock however it ends. A second file says which process that is. Other processes of
//! the mesh may outlive it, so all of them write under a name that no later group has: that of
//! their *incarnation*. Readers claim nothing.

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

use pmap_mesh::DeviceMesh;
use serde::{Deserialize, Serialize};

use crate::{
    checkpoint::{
        disk::{At, check_file},
        index::json_error,
        is_first,
    },
    error::{Result, checkpoint::CheckpointError},
    processes::{agreed, gather_numbers},
};

/// The file that is locked; it is empty, and stays.
const LOCK: &str = "lock";
/// Which process has locked it. A file of its own, because some systems let nobody read what is
/// locked.
const HOLDER: &str = "holder.json";

/// What this process has claimed, if it has; clones share it.
#[derive(Clone, Debug, Default)]
pub(super) struct Claims(Arc<Mutex<Option<Claim>>>);

impl Claims {
    /// The claim to a folder, taken unless this was called before. Every process of the mesh calls
    /// it.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::Locked`], [`CheckpointError::Lost`], [`CheckpointError::Io`]; all
    /// processes fail if one does.
    pub(super) fn take(&self, mesh: &DeviceMesh, folder: &Path) -> Result<Claim> {
        // Held for as long as it takes: a second thread must not find its own process's lock.
        let mut claimed = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(claim) = &*claimed {
            agreed(mesh, claim.check())?;
            return Ok(claim.clone());
        }
        let drawn = random_number();
        let held = if is_first(mesh) { Held::take(folder, drawn).map(Some) } else { Ok(None) };
        let held = agreed(mesh, held)?;
        // Every process draws one, and that of the first counts.
        let numbers = gather_numbers(mesh, &vec![[drawn]; mesh.local_slots().len()])?;
        let [incarnation] = numbers[0];
        let claim = Claim { incarnation, held: held.map(Arc::new) };
        Ok(claimed.insert(claim).clone())
    }
}

/// The right to write into a folder.
#[derive(Clone, Debug)]
pub(super) struct Claim {
    /// The group of processes that has it: a random number, which the first process draws.
    pub(super) incarnation: u64,
    /// In the first process, what it holds.
    held: Option<Arc<Held>>,
}

impl Claim {
    /// Checks that no other process has taken the folder, as one may where there are no locks, or
    /// after the folder was removed.
    fn check(&self) -> Result<()> {
        match &self.held {
            Some(held) if !held.is_named() => {
                Err(CheckpointError::Lost { path: held.folder.clone() }.into())
            }
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

    /// Whether nobody can be writing what an incarnation left: it is this one, or the lock says
    /// that there is no other.
    pub(super) fn is_over(&self, incarnation: Option<u64>) -> bool {
        let is_locked = self.held.as_ref().is_some_and(|held| held.lock.is_some());
        is_locked || incarnation == Some(self.incarnation)
    }
}

/// What the first process holds.
#[derive(Debug)]
struct Held {
    folder: PathBuf,
    incarnation: u64,
    /// Nothing on a file system without locks.
    lock: Option<File>,
    /// The checkpoints that a warning was about.
    warned: Mutex<BTreeSet<PathBuf>>,
}

impl Held {
    fn take(folder: &Path, incarnation: u64) -> Result<Self> {
        fs::create_dir_all(folder).at(folder)?;
        let path = folder.join(LOCK);
        let file = open_lock(&path).at(&path)?;
        let lock = if is_locked(folder, file.try_lock())? { Some(file) } else { None };
        if lock.is_some() {
            remove_new_holders(folder);
        }
        Holder::here(incarnation).write(folder)?;
        Ok(Self { folder: folder.to_owned(), incarnation, lock, warned: Mutex::default() })
    }

    /// Whether the folder still says that this is its holder.
    fn is_named(&self) -> bool {
        Holder::read(&self.folder).is_some_and(|holder| holder.incarnation == self.incarnation)
    }
}

impl Drop for Held {
    /// Before the lock is released. A file that stays, since it cannot be removed or the process
    /// was killed, does no harm: the next process that gets the lock replaces it.
    fn drop(&mut self) {
        if self.is_named() {
            drop(fs::remove_file(self.folder.join(HOLDER)));
        }
    }
}

/// Opens the file that is locked, and makes it if it is missing.
fn open_lock(path: &Path) -> io::Result<File> {
    // Somebody may have planted a link in its place. A new file is not made where a link leads, and
    // what is there is not truncated: the file is for its name alone.
    match File::create_new(path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            check_file(path)?;
            File::options().write(true).open(path)
        }
        made => made,
    }
}

/// Whether a file is locked now; it is not where there are no locks.
fn is_locked(folder: &Path, tried: Result<(), TryLockError>) -> Result<bool, CheckpointError> {
    match tried {
        Ok(()) => Ok(true),
        Err(TryLockError::WouldBlock) => {
            let path = folder.to_owned();
            let holder = Holder::read(folder).as_ref().map(Holder::to_string);
            let holder = holder.unwrap_or_else(|| "another process".to_owned());
            Err(CheckpointError::Locked { path, holder })
        }
        Err(TryLockError::Error(cause)) => {
            warn_without_lock(folder, &cause);
            Ok(false)
        }
    }
}

/// Removes what processes have left that were killed while they claimed the folder. What cannot be
/// removed harms nobody.
fn remove_new_holders(folder: &Path) {
    let Ok(entries) = fs::read_dir(folder) else { return };
    for entry in entries.flatten() {
        if entry.file_name().to_str().is_some_and(is_new_holder) {
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

/// Which process has claimed a folder.
#[derive(Debug, Serialize, Deserialize)]
struct Holder {
    incarnation: u64,
    pid: u32,
    host: String,
    /// When it claimed the folder.
    since: String,
}

/// The name of [`HOLDER`] until it is written.
fn new_holder(incarnation: u64) -> String {
    format!("holder.{incarnation:016x}.json")
}

/// Whether this is such a name.
fn is_new_holder(name: &str) -> bool {
    let digits = name.strip_prefix("holder.").and_then(|rest| rest.strip_suffix(".json"));
    let incarnation = digits.and_then(|digits| u64::from_str_radix(digits, 16).ok());
    incarnation.is_some_and(|incarnation| new_holder(incarnation) == name)
}

/// A number that no other process draws.
fn random_number() -> u64 {
    // The keys of a `RandomState` are the system's random numbers.
    RandomState::new().hash_one(process::id())
}

impl Holder {
    fn here(incarnation: u64) -> Self {
        let now = humantime::format_rfc3339_seconds(SystemTime::now());
        Self {
            incarnation,
            pid: process::id(),
            host: gethostname::gethostname().to_string_lossy().into_owned(),
            since: now.to_string(),
        }
    }

    fn write(&self, folder: &Path) -> Result<()> {
        let path = folder.join(HOLDER);
        let text = serde_json::to_vec_pretty(self).map_err(|cause| json_error(&path, cause))?;
        // Not written in its place, where somebody may have planted a link to another file.
        let new = folder.join(new_holder(self.incarnation));
        let mut file = File::create_new(&new).at(&new)?;
        let written = file.write_all(&text).and_then(|()| fs::rename(&new, &path)).at(&path);
        if written.is_err() {
            drop(fs::remove_file(&new));
        }
        written
    }

    /// Who has claimed a folder, if a file says so.
    fn read(folder: &Path) -> Option<Self> {
        let path = folder.join(HOLDER);
        check_file(&path).ok()?;
        serde_json::from_slice(&fs::read(path).ok()?).ok()
    }
}

impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { pid, host, since, .. } = self;
        write!(f, "process {pid} on host {host} since {since}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_system_without_locks_is_passed() {
        let folder = tempfile::tempdir().unwrap();
        let cause = io::Error::from(io::ErrorKind::Unsupported);
        assert!(!is_locked(folder.path(), Err(TryLockError::Error(cause))).unwrap());
        let refused = is_locked(folder.path(), Err(TryLockError::WouldBlock)).unwrap_err();
        assert!(refused.to_string().ends_with("is being trained by another process"), "{refused}");
    }

    #[test]
    fn only_who_has_the_lock_knows_that_others_have_ended() {
        let folder = tempfile::tempdir().unwrap();
        let incarnation = 7;
        let mut held = Held::take(folder.path(), incarnation).unwrap();
        let others = [Some(incarnation ^ 1), None];
        let lock = held.lock.take();
        let claim = Claim { incarnation, held: Some(Arc::new(held)) };
        assert!(claim.is_over(Some(incarnation)));
        assert!(others.iter().all(|&other| !claim.is_over(other)));

        let warned = Mutex::default();
        let held = Held { folder: folder.path().to_owned(), incarnation, lock, warned };
        let claim = Claim { incarnation, held: Some(Arc::new(held)) };
        assert!(others.iter().all(|&other| claim.is_over(other)));
    }

    #[test]
    fn every_incarnation_has_another_number() {
        assert_ne!(random_number(), random_number());
    }

    #[test]
    fn what_was_left_of_a_claim_is_removed_by_the_next_one() {
        let folder = tempfile::tempdir().unwrap();
        let left = new_holder(0xcafe);
        for name in [&left, "holder.cafe.json", "holder.json.json", "notes.json"] {
            fs::write(folder.path().join(name), "{}").unwrap();
        }
        let held = Held::take(folder.path(), 7).unwrap();
        assert!(held.is_named() && !folder.path().join(left).exists());
        for name in ["holder.cafe.json", "holder.json.json", "notes.json"] {
            assert!(folder.path().join(name).exists(), "{name} is not ours");
        }
    }
}
