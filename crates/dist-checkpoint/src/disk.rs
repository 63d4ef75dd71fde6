//! System calls on files and folders; every error names the path.
//!
//! Each call that changes a file or folder is in a function of this module, so that a test can look
//! at the folder between any two calls.

use std::{
    fs::{self, File, Metadata},
    io::{self, Write},
    path::Path,
};

use core_types::files;

use crate::error::{Error, Result};

/// Adds the path to an error of the system.
pub(crate) trait AtPath<T> {
    /// Turns the system's error into [`Error::Io`].
    fn at(self, path: &Path) -> Result<T>;
}

impl<T> AtPath<T> for io::Result<T> {
    fn at(self, path: &Path) -> Result<T> {
        self.map_err(|cause| Error::Io { path: path.to_owned(), cause })
    }
}

/// Returns the metadata of a regular file. Anything else is an error: opening a named pipe would
/// block forever.
pub(crate) fn check_file(path: &Path) -> io::Result<Metadata> {
    let metadata = fs::metadata(path)?;
    if metadata.is_file() {
        return Ok(metadata);
    }
    Err(io::Error::new(io::ErrorKind::InvalidInput, "this is not a file"))
}

/// Creates a file that must not exist.
pub(crate) fn create_file(path: &Path) -> Result<File> {
    between_calls();
    File::create_new(path).at(path)
}

/// Writes a file that must not exist, and syncs it to disk.
pub(crate) fn write_file(path: &Path, bytes: &[u8]) -> Result<()> {
    let mut file = create_file(path)?;
    between_calls();
    file.write_all(bytes).at(path)?;
    sync_file(&file, path)
}

/// Syncs a file to disk.
pub(crate) fn sync_file(file: &File, path: &Path) -> Result<()> {
    between_calls();
    file.sync_all().at(path)
}

/// Creates a folder and its parents.
pub(crate) fn create_folder(path: &Path) -> Result<()> {
    between_calls();
    fs::create_dir_all(path).at(path)
}

/// Syncs the names in a folder to disk.
pub(crate) fn sync_folder(path: &Path) -> Result<()> {
    between_calls();
    files::sync_folder(path).at(path)
}

/// Renames a file or folder, and syncs its parent folder.
pub(crate) fn rename(from: &Path, to: &Path) -> Result<()> {
    between_calls();
    files::rename(from, to).at(from)
}

/// Removes a folder and its contents.
pub(crate) fn remove_folder(path: &Path) -> Result<()> {
    between_calls();
    fs::remove_dir_all(path).at(path)
}

/// Removes a file, if it exists.
pub(crate) fn remove_file(path: &Path) -> Result<()> {
    between_calls();
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error).at(path),
        _ => Ok(()),
    }
}

/// Lets a test look at the files between two system calls.
#[cfg(test)]
pub(crate) fn between_calls() {
    crate::run::kills::observe();
}

#[cfg(not(test))]
pub(crate) fn between_calls() {}
