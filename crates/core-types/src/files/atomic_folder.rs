//! Folders that appear under their name when they are complete.

use std::{
    fs::{self, File},
    io,
    path::{Path, PathBuf},
};

use super::{
    partial_name::create_beside,
    sync::{between_calls, rename, sync_folder},
};

/// A new folder that gets the name of its target when it is complete.
///
/// If it is dropped without [`persist`](Self::persist), it is removed with its content.
///
/// # Examples
///
/// ```
/// use std::fs;
///
/// use core_types::files::AtomicFolder;
///
/// # let parent = AtomicFolder::new(std::env::temp_dir().join("example"))?;
/// let target = parent.path().join("model");
/// let folder = AtomicFolder::new(&target)?;
/// fs::write(folder.path().join("config.json"), "{}")?;
/// assert!(!target.exists());
/// folder.persist()?;
/// assert_eq!(fs::read_to_string(target.join("config.json"))?, "{}");
/// # Ok::<(), std::io::Error>(())
/// ```
#[derive(Debug)]
#[must_use = "dropped without `persist`, it is removed"]
pub struct AtomicFolder {
    path: PathBuf,
    target: PathBuf,
}

impl AtomicFolder {
    /// Creates an empty folder next to `target`.
    ///
    /// # Errors
    ///
    /// An I/O error.
    pub fn new(target: impl AsRef<Path>) -> io::Result<Self> {
        let target = target.as_ref().to_path_buf();
        let ((), path) = create_beside(&target, |path| fs::create_dir(path))?;
        between_calls(&path);
        Ok(Self { path, target })
    }

    /// Returns the path of the folder until it is persisted.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Syncs the content of the folder, renames the folder to its target, and syncs the parent
    /// folder.
    ///
    /// # Errors
    ///
    /// An I/O error, also if the target exists and is not an empty folder: no system replaces a
    /// folder atomically, so move the old one first.
    pub fn persist(self) -> io::Result<()> {
        sync_all_in(&self.path)?;
        rename(&self.path, &self.target)
    }

    /// Persists the folder like [`persist`](Self::persist), also in the place of a folder that is
    /// not empty.
    ///
    /// No system replaces a folder atomically. The old folder is moved aside as `TARGET.replaced`
    /// and removed at the end; after an interruption, [`restore_replaced`](super::restore_replaced)
    /// leaves either the old folder or the new one.
    ///
    /// # Errors
    ///
    /// An I/O error.
    ///
    /// # Examples
    ///
    /// ```
    /// use std::fs;
    ///
    /// use core_types::files::AtomicFolder;
    ///
    /// # let parent = AtomicFolder::new(std::env::temp_dir().join("example"))?;
    /// let target = parent.path().join("best");
    /// for step in ["100", "200"] {
    ///     let folder = AtomicFolder::new(&target)?;
    ///     fs::write(folder.path().join("step"), step)?;
    ///     folder.replace()?;
    ///     assert_eq!(fs::read_to_string(target.join("step"))?, step);
    /// }
    /// # Ok::<(), std::io::Error>(())
    /// ```
    pub fn replace(self) -> io::Result<()> {
        sync_all_in(&self.path)?;
        let old = replaced_name(&self.target);
        if self.target.exists() {
            remove_if_there(&old)?;
            rename(&self.target, &old)?;
        }
        rename(&self.path, &self.target)?;
        remove_if_there(&old)
    }
}

/// Ends a replacement of `target` that an interruption has cut short: moves the old folder back if
/// the new one is missing, and removes it otherwise.
///
/// # Errors
///
/// An I/O error.
///
/// # Examples
///
/// ```
/// use std::fs;
///
/// use core_types::files::{self, AtomicFolder};
///
/// # let parent = AtomicFolder::new(std::env::temp_dir().join("example"))?;
/// let target = parent.path().join("best");
/// fs::create_dir(parent.path().join("best.replaced"))?;
/// files::restore_replaced(&target)?;
/// assert!(target.exists());
/// # Ok::<(), std::io::Error>(())
/// ```
pub fn restore_replaced(target: impl AsRef<Path>) -> io::Result<()> {
    let target = target.as_ref();
    let old = replaced_name(target);
    if old.exists() && !target.exists() {
        return rename(&old, target);
    }
    remove_if_there(&old)
}

/// Returns the name of a folder while another one takes its place.
fn replaced_name(target: &Path) -> PathBuf {
    let mut name = target.file_name().unwrap_or_default().to_owned();
    name.push(".replaced");
    target.with_file_name(name)
}

fn remove_if_there(folder: &Path) -> io::Result<()> {
    match fs::remove_dir_all(folder) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

impl Drop for AtomicFolder {
    fn drop(&mut self) {
        // After a rename the folder is gone. A folder that cannot be removed is harmless.
        drop(fs::remove_dir_all(&self.path));
    }
}

/// Syncs the files and folders in a folder, and then the folder.
fn sync_all_in(folder: &Path) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let kind = entry.file_type()?;
        if kind.is_dir() {
            sync_all_in(&entry.path())?;
        } else if kind.is_file() {
            // Windows syncs only files opened for writing; other systems also sync read-only files.
            File::options().read(true).write(cfg!(windows)).open(entry.path())?.sync_all()?;
        }
        between_calls(&entry.path());
    }
    sync_folder(folder)
}
