//! What the system is asked to do with files and folders, with the path in every error.

use std::{
    fs::{self, File, Metadata},
    io,
    path::Path,
};

use crate::error::{Result, checkpoint::CheckpointError};

/// Says which path an error of the system is about.
pub(crate) trait At<T> {
    /// Turns the system's error into [`CheckpointError::Io`].
    fn at(self, path: &Path) -> Result<T>;
}

impl<T> At<T> for io::Result<T> {
    fn at(self, path: &Path) -> Result<T> {
        self.map_err(|cause| CheckpointError::Io { path: path.to_owned(), cause }.into())
    }
}

/// What is known of a file. What is there and is no file is refused: to open a named pipe would wait
/// for ever.
pub(super) fn check_file(path: &Path) -> io::Result<Metadata> {
    let known = fs::metadata(path)?;
    if known.is_file() {
        return Ok(known);
    }
    Err(io::Error::new(io::ErrorKind::InvalidInput, "this is not a file"))
}

/// Brings the names in a folder to disk, where the system has a way to do so.
pub(crate) fn sync_folder(path: &Path) -> Result<()> {
    if cfg!(unix) {
        File::open(path).and_then(|folder| folder.sync_all()).at(path)?;
    }
    Ok(())
}

/// Removes a folder and all that is in it.
pub(super) fn remove(path: &Path) -> Result<()> {
    fs::remove_dir_all(path).at(path)
}
