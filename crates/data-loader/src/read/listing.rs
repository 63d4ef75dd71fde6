//! The files of a folder.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use crate::error::{Error, Result};

/// Returns the file at `path`, or the files below a folder in the order of their paths.
///
/// Hidden files and folders are left out, and those for which `is_left_out` returns true, also a folder
/// at `path`. Pipes and devices in folders are left out too, since they may never end.
///
/// # Errors
///
/// [`Error::Io`] for a path that is neither a file nor a folder, for a folder that cannot be read, and
/// for a link to a folder that contains it.
pub fn list_files(path: &Path, is_left_out: impl Fn(&Path) -> bool) -> Result<Vec<PathBuf>> {
    let metadata = fs::metadata(path).map_err(Error::io(path))?;
    if metadata.is_file() {
        return Ok(vec![path.into()]);
    }
    if !metadata.is_dir() {
        return Err(Error::io(path)(io::Error::other("it is neither a file nor a folder")));
    }
    let mut listing = Listing { is_left_out, parents: Vec::new(), files: Vec::new() };
    listing.add(path)?;
    listing.files.sort();
    Ok(listing.files)
}

struct Listing<F> {
    is_left_out: F,
    /// Folders that contain the current path, without links.
    parents: Vec<PathBuf>,
    files: Vec<PathBuf>,
}

impl<F: Fn(&Path) -> bool> Listing<F> {
    /// Adds a file, or the files below a folder.
    fn add(&mut self, path: &Path) -> Result<()> {
        let metadata = fs::metadata(path).map_err(Error::io(path))?;
        if (self.is_left_out)(path) {
            return Ok(());
        }
        if metadata.is_file() {
            self.files.push(path.into());
        }
        if metadata.is_dir() { self.add_folder(path) } else { Ok(()) }
    }

    fn add_folder(&mut self, folder: &Path) -> Result<()> {
        let target = fs::canonicalize(folder).map_err(Error::io(folder))?;
        if self.parents.contains(&target) {
            let cause = io::Error::other("it is a link to a folder that contains it");
            return Err(Error::io(folder)(cause));
        }
        self.parents.push(target);
        for entry in fs::read_dir(folder).map_err(Error::io(folder))? {
            let path = entry.map_err(Error::io(folder))?.path();
            if !path.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b".")) {
                self.add(&path)?;
            }
        }
        self.parents.pop();
        Ok(())
    }
}
