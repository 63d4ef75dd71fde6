//! Files that appear under their name when they are complete.

use std::{
    fs::{self, File, Metadata},
    io::{self, ErrorKind, Seek, SeekFrom, Write},
    path::{Path, PathBuf},
};

use super::{
    partial_name::create_beside,
    sync::{between_calls, parent_folder, rename, sync_folder},
};

/// A new file that replaces its target atomically.
///
/// If it is dropped without [`persist`](Self::persist), it is removed, and the target is unchanged.
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
/// drop(file); // for example after an error
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
    /// Creates an empty file in the folder of `target`, which need not exist.
    ///
    /// If `target` is a link, the linked file is replaced, and the link stays. The new file gets
    /// the permissions of the old one and, if the system allows it, its owner and group.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::InvalidInput`] if `target` is not a file, or another I/O error.
    pub fn new(target: impl AsRef<Path>) -> io::Result<Self> {
        let target = resolve_links(target.as_ref())?;
        let old_metadata = match fs::metadata(&target) {
            Ok(metadata) if !metadata.is_file() => {
                return Err(io::Error::new(ErrorKind::InvalidInput, "this is not a file"));
            }
            Err(error) if error.kind() == ErrorKind::NotFound => None,
            result => Some(result?),
        };
        let atomic = Self::replacing(target)?;
        if let Some(metadata) = old_metadata {
            // Set the owner first, because changing the owner clears some permissions.
            copy_owner(&atomic.file, &metadata)?;
            atomic.file.set_permissions(metadata.permissions())?;
        }
        Ok(atomic)
    }

    /// Like [`new`](Self::new), for untrusted folders: a link or a pipe at `target` is itself
    /// replaced, and none of its properties are kept.
    ///
    /// # Errors
    ///
    /// An I/O error.
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

    /// Returns the open file, for writes at any position.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Syncs the file, renames it to its target, and syncs the folder.
    ///
    /// # Errors
    ///
    /// An I/O error. The target is then unchanged, unless only its folder could not be synced.
    pub fn persist(self) -> io::Result<()> {
        self.sync()?;
        rename(&self.path, &self.target)
    }

    /// Like [`persist`](Self::persist), for a target that must not exist: if several programs
    /// persist the same target at once, one succeeds.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::AlreadyExists`] if the target exists, or another I/O error.
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

    /// Publishes the synced file under a name that must not exist.
    pub(super) fn publish_new(&self, target: &Path) -> io::Result<()> {
        // A hard link fails if the name exists; a rename would replace the file.
        match fs::hard_link(&self.path, target) {
            Err(error) if error.kind() == ErrorKind::AlreadyExists => return Err(error),
            Ok(()) => {}
            // Some file systems have no hard links. There, an empty file reserves the name, and a
            // reader may see the empty file before the rename.
            Err(_) => {
                File::create_new(target)?;
                between_calls(target);
                fs::rename(&self.path, target)?;
            }
        }
        between_calls(target);
        sync_folder(parent_folder(target))
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
        // After a rename the file is gone. A file that cannot be removed is harmless.
        drop(fs::remove_file(&self.path));
    }
}

/// Resolves the links at `path`; the final target need not exist.
fn resolve_links(path: &Path) -> io::Result<PathBuf> {
    /// The limit of Linux on links in one path.
    const MAX_LINKS: usize = 40;
    let mut target = path.to_path_buf();
    for _ in 0..MAX_LINKS {
        // Everything that is not a readable link is the target.
        let Ok(next) = fs::read_link(&target) else { return Ok(target) };
        target.pop();
        target.push(next);
    }
    Err(io::Error::other("too many links"))
}

/// Copies owner and group from the metadata of another file, as far as the system allows: usually
/// only root may give files away.
#[cfg(unix)]
fn copy_owner(file: &File, source: &Metadata) -> io::Result<()> {
    use std::os::unix::fs::{MetadataExt, fchown};

    let metadata = file.metadata()?;
    let owner = (metadata.uid() != source.uid()).then_some(source.uid());
    let group = (metadata.gid() != source.gid()).then_some(source.gid());
    // Change owner and group separately: a process that may not change the owner may be allowed to
    // change the group.
    for (owner, group) in [(owner, None), (None, group)] {
        match fchown(file, owner, group) {
            // The process lacks the permission, or the file system has no owners.
            Err(error) if is_refused(&error) => {}
            result => result?,
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
#[expect(clippy::unnecessary_wraps, reason = "the signature on Unix")]
fn copy_owner(_: &File, _: &Metadata) -> io::Result<()> {
    Ok(())
}
