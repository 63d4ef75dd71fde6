//! A file that gets its name when it is whole.

use std::{
    fs::{self, File, Metadata},
    io::{self, ErrorKind, Seek, SeekFrom, Write},
    path::{Path, PathBuf},
};

use super::{
    partial_name::create_beside,
    sync::{between_calls, folder_of, rename, sync_folder},
};

/// A file that is written beside its target, and replaces it in one step.
///
/// Dropped without [`persist`](Self::persist), it is removed, and the target stays as it was.
///
/// # Examples
///
/// ```
/// use std::io::Write;
///
/// use core_types::files::AtomicFile;
///
/// # let folder = core_types::files::AtomicFolder::new(std::env::temp_dir().join("example"))?;
/// let path = folder.path().join("report.html");
/// let mut file = AtomicFile::new(&path)?;
/// file.write_all(b"<html>")?;
/// drop(file); // something failed on the way
/// assert!(!path.exists());
/// # Ok::<(), std::io::Error>(())
/// ```
#[derive(Debug)]
#[must_use = "dropped without `persist`, it is removed"]
pub struct AtomicFile {
    file: File,
    path: PathBuf,
    target: PathBuf,
}

impl AtomicFile {
    /// Makes an empty file beside `target`, which need not exist.
    ///
    /// Where `target` is a link, the file that it leads to is replaced, and the link stays. The file
    /// keeps its permissions and, where the system allows it, its owner and group.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::InvalidInput`] if there is something that is no file, and what the system
    /// returns.
    pub fn new(target: impl AsRef<Path>) -> io::Result<Self> {
        let target = resolve_links(target.as_ref())?;
        let known = match fs::metadata(&target) {
            Ok(known) if !known.is_file() => {
                return Err(io::Error::new(ErrorKind::InvalidInput, "this is not a file"));
            }
            Err(error) if error.kind() == ErrorKind::NotFound => None,
            known => Some(known?),
        };
        let atomic = Self::replacing(target)?;
        if let Some(known) = known {
            // The owner first, as another owner takes some permissions away.
            keep_owner(&atomic.file, &known)?;
            atomic.file.set_permissions(known.permissions())?;
        }
        Ok(atomic)
    }

    /// Like [`new`](Self::new), for a name that somebody else may have put something under: a link or
    /// a pipe at `target` is replaced itself, and nothing of it is kept.
    ///
    /// # Errors
    ///
    /// What the system returns.
    ///
    /// # Examples
    ///
    /// ```
    /// # #[cfg(unix)] {
    /// use std::{fs, os::unix::fs::symlink};
    ///
    /// use core_types::files::AtomicFile;
    ///
    /// # let folder = core_types::files::AtomicFolder::new(std::env::temp_dir().join("example"))?;
    /// let [precious, lock] = ["precious", "lock"].map(|name| folder.path().join(name));
    /// fs::write(&precious, "kept")?;
    /// symlink(&precious, &lock)?;
    /// AtomicFile::replacing(&lock)?.persist()?;
    /// assert_eq!(fs::read_to_string(&precious)?, "kept");
    /// assert_eq!(fs::read_to_string(&lock)?, "");
    /// # }
    /// # Ok::<(), std::io::Error>(())
    /// ```
    pub fn replacing(target: impl AsRef<Path>) -> io::Result<Self> {
        let target = target.as_ref().to_path_buf();
        let (file, path) = create_beside(&target, |path| File::create_new(path))?;
        between_calls(&path);
        Ok(Self { file, path, target })
    }

    /// Returns the path of the file until it is persisted.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the open file, to be written at any position.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Syncs the file, renames it to its target, and syncs the folder.
    ///
    /// # Errors
    ///
    /// What the system returns. The target is then as it was, unless only its folder could not be
    /// synced.
    pub fn persist(self) -> io::Result<()> {
        self.sync()?;
        rename(&self.path, &self.target)
    }

    /// Like [`persist`](Self::persist), where there must be no file yet: of several programs that make
    /// it at once, one succeeds.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::AlreadyExists`] if the target exists, and what the system returns.
    ///
    /// # Examples
    ///
    /// ```
    /// use std::io::ErrorKind;
    ///
    /// use core_types::files::AtomicFile;
    ///
    /// # let folder = core_types::files::AtomicFolder::new(std::env::temp_dir().join("example"))?;
    /// let path = folder.path().join("run.json");
    /// AtomicFile::new(&path)?.persist_new()?;
    /// let error = AtomicFile::new(&path)?.persist_new().unwrap_err();
    /// assert_eq!(error.kind(), ErrorKind::AlreadyExists);
    /// # Ok::<(), std::io::Error>(())
    /// ```
    pub fn persist_new(self) -> io::Result<()> {
        self.sync()?;
        self.publish_new(&self.target)
    }

    /// Syncs the file to disk.
    pub(super) fn sync(&self) -> io::Result<()> {
        self.file.sync_all()?;
        between_calls(&self.path);
        Ok(())
    }

    /// Gives the file, which is synced, a name that does not exist.
    pub(super) fn publish_new(&self, target: &Path) -> io::Result<()> {
        // A second name is made only if it is free; a renamed file would replace another.
        match fs::hard_link(&self.path, target) {
            Err(error) if error.kind() == ErrorKind::AlreadyExists => return Err(error),
            Ok(()) => {}
            // Some file systems have no second names. An empty file takes the name there; who reads
            // it before it is replaced finds it empty.
            Err(_) => {
                File::create_new(target)?;
                between_calls(target);
                fs::rename(&self.path, target)?;
            }
        }
        between_calls(target);
        sync_folder(folder_of(target))
    }
}

impl Write for AtomicFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        between_calls(&self.path);
        self.file.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

impl Seek for AtomicFile {
    fn seek(&mut self, position: SeekFrom) -> io::Result<u64> {
        self.file.seek(position)
    }
}

impl Drop for AtomicFile {
    fn drop(&mut self) {
        // Renamed, it is gone already. What cannot be removed harms nobody.
        drop(fs::remove_file(&self.path));
    }
}

/// Returns the path without the links that it is; nothing need exist at their end.
fn resolve_links(path: &Path) -> io::Result<PathBuf> {
    /// As many as Linux follows.
    const MAX_LINKS: usize = 40;
    let mut target = path.to_path_buf();
    for _ in 0..MAX_LINKS {
        // What cannot be read as a link is none.
        let Ok(next) = fs::read_link(&target) else { return Ok(target) };
        target.pop();
        target.push(next);
    }
    Err(io::Error::other("too many links"))
}

/// Gives a file the owner and the group of another one, as far as the system allows: mostly root
/// alone may give files away.
#[cfg(unix)]
fn keep_owner(file: &File, known: &Metadata) -> io::Result<()> {
    use std::os::unix::fs::{MetadataExt, fchown};

    let made = file.metadata()?;
    let owner = (made.uid() != known.uid()).then_some(known.uid());
    let group = (made.gid() != known.gid()).then_some(known.gid());
    // One by one: who may not give a file away may give it to a group.
    for (owner, group) in [(owner, None), (None, group)] {
        match fchown(file, owner, group) {
            // It is not ours to give, or this file system knows no owners.
            Err(error) if is_refused(&error) => {}
            changed => changed?,
        }
    }
    Ok(())
}

#[cfg(unix)]
fn is_refused(error: &io::Error) -> bool {
    use ErrorKind::{InvalidInput, PermissionDenied, Unsupported};

    matches!(error.kind(), PermissionDenied | InvalidInput | Unsupported)
}

#[cfg(not(unix))]
#[expect(clippy::unnecessary_wraps, reason = "as on other systems")]
fn keep_owner(_: &File, _: &Metadata) -> io::Result<()> {
    Ok(())
}
