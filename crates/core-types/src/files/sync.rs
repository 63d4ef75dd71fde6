//! Durable renames: names that are changed on disk, not only in memory.

use std::{
    fs::{self, File},
    io::{self, ErrorKind},
    path::Path,
};

/// Renames a file or folder within its folder, and syncs the folder, so that the new name survives
/// a failure of the machine.
///
/// The content must already be on disk.
///
/// # Errors
///
/// An I/O error. If only syncing the folder fails, the name has still changed.
///
/// # Examples
///
/// ```
/// use core_types::files;
///
/// # let folder = files::AtomicFolder::new(std::env::temp_dir().join("example"))?;
/// let written = folder.path().join("step-8.new");
/// std::fs::create_dir(&written)?;
/// files::sync_folder(&written)?;
/// files::rename(&written, folder.path().join("step-8"))?;
/// # Ok::<(), std::io::Error>(())
/// ```
pub fn rename(from: impl AsRef<Path>, to: impl AsRef<Path>) -> io::Result<()> {
    let to = to.as_ref();
    fs::rename(from, to)?;
    between_calls(to);
    sync_folder(parent_folder(to))
}

/// Syncs the names in a folder to disk, if the system supports it.
///
/// # Errors
///
/// An I/O error.
///
/// # Examples
///
/// ```
/// core_types::files::sync_folder(std::env::temp_dir())?;
/// # Ok::<(), std::io::Error>(())
/// ```
pub fn sync_folder(path: impl AsRef<Path>) -> io::Result<()> {
    if !cfg!(unix) {
        return Ok(());
    }
    let path = path.as_ref();
    match File::open(path).and_then(|folder| folder.sync_all()) {
        // The file system does not support it, or the folder is writable but not readable.
        Err(error) if cannot_sync(&error) => {}
        result => result?,
    }
    between_calls(path);
    Ok(())
}

/// Returns the parent folder of `path`.
pub(super) fn parent_folder(path: &Path) -> &Path {
    match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    }
}

fn cannot_sync(error: &io::Error) -> bool {
    use ErrorKind::{InvalidInput, PermissionDenied, Unsupported};

    matches!(error.kind(), InvalidInput | PermissionDenied | Unsupported)
}

/// Lets a test inspect the files between two system calls, one of them on `path`.
#[cfg(test)]
pub(super) fn between_calls(path: &Path) {
    super::tests::observe(path);
}

#[cfg(not(test))]
pub(super) fn between_calls(_: &Path) {}
