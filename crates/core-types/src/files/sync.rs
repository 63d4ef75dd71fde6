//! Names that are changed on disk, not only in memory.

use std::{
    fs::{self, File},
    io::{self, ErrorKind},
    path::Path,
};

/// Renames a file or folder within its folder, and syncs the folder: after a failure of the machine,
/// too, it has the new name.
///
/// The content must be on disk before.
///
/// # Errors
///
/// What the system returns. If it cannot sync the folder, the name is changed all the same.
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
    sync_folder(folder_of(to))
}

/// Syncs the names in a folder to disk, where the system can do so.
///
/// # Errors
///
/// What the system returns.
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
    match File::open(path).and_then(|folder| folder.sync_all()) {
        // A file system that has no such call, or a folder that may be written and not read.
        Err(error) if cannot_sync(&error) => Ok(()),
        synced => synced,
    }
}

/// Returns the folder in which `path` is.
pub(super) fn folder_of(path: &Path) -> &Path {
    match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    }
}

fn cannot_sync(error: &io::Error) -> bool {
    use ErrorKind::{InvalidInput, PermissionDenied, Unsupported};

    matches!(error.kind(), InvalidInput | PermissionDenied | Unsupported)
}

/// Lets a test look at the files between two system calls, of which one is about `path`.
#[cfg(test)]
pub(super) fn between_calls(path: &Path) {
    super::tests::observe(path);
}

#[cfg(not(test))]
pub(super) fn between_calls(_: &Path) {}
