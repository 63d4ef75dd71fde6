//! Reads files, and lists the files of folders.

use std::{
    fs::{self, File},
    io::{self, Read},
    path::{Path, PathBuf},
};

use data_loader::list_files;

use crate::error::{Error, Result};

/// The file with the sizes and properties of a model.
pub(crate) const CONFIG: &str = "config.json";

/// The description of a run in its folder.
pub(crate) const RUN_JSON: &str = "run.json";

/// Size limit of a file that this module reads into memory. Configurations, tokenizers and records
/// of runs are far smaller.
const MAX_BYTES: u64 = 1 << 30;

/// Returns true if an error says that a file or its folder does not exist.
pub(crate) fn is_missing(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory)
}

/// Reads a file, or returns `None` if it does not exist.
///
/// # Errors
///
/// [`Error::Io`] if the path is not a regular file, if the file is longer than 1 GiB, or if it cannot
/// be read.
pub fn read_if_there(path: &Path) -> Result<Option<Vec<u8>>> {
    match read(path) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(error) if is_missing(&error) => Ok(None),
        Err(cause) => Err(Error::io(path, cause)),
    }
}

/// Opens a regular file, or returns `None` if it does not exist.
///
/// # Errors
///
/// [`Error::Io`] if the path is not a regular file, or if it cannot be opened.
pub(crate) fn open_if_there(path: &Path) -> Result<Option<File>> {
    match open(path) {
        Ok(file) => Ok(Some(file)),
        Err(error) if is_missing(&error) => Ok(None),
        Err(cause) => Err(Error::io(path, cause)),
    }
}

/// Reads a regular file of at most 1 GiB as text.
pub(crate) fn read_text(path: &Path) -> io::Result<String> {
    String::from_utf8(read(path)?).map_err(|_| io::ErrorKind::InvalidData.into())
}

/// Reads a regular file of at most 1 GiB.
fn read(path: &Path) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    open(path)?.take(MAX_BYTES + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > MAX_BYTES {
        return Err(io::Error::other(format!("it is longer than {MAX_BYTES} bytes")));
    }
    Ok(bytes)
}

fn open(path: &Path) -> io::Result<File> {
    // Opening a pipe would block until a writer opens it.
    if !fs::metadata(path)?.is_file() {
        return Err(io::Error::other("it is not a file"));
    }
    File::open(path)
}

/// Lists the files under a folder in the same order on every machine. Hidden files and the folders
/// of runs are left out, since a run does not learn from its own files. The list of a file is the
/// file itself.
pub(crate) fn list(path: &Path) -> Result<Vec<PathBuf>> {
    list_files(path, is_run).map_err(|error| match error {
        data_loader::Error::Io { path, cause } => Error::Io { path, cause },
        error => error.into(),
    })
}

/// Returns true if a folder is that of a run, with a warning.
fn is_run(folder: &Path) -> bool {
    let is_run = folder.join(RUN_JSON).is_file()
        && ["metrics.jsonl", "checkpoints"].iter().any(|name| folder.join(name).exists());
    if is_run {
        tracing::warn!("{} holds a run, so its files are not read as texts", folder.display());
    }
    is_run
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_are_not_listed() {
        let dir = tempfile::tempdir().unwrap();
        let run = dir.path().join("runs/0001");
        fs::create_dir_all(run.join("checkpoints")).unwrap();
        for name in ["text.txt", "runs/0001/run.json", "runs/0001/sample.txt", "runs/notes.txt"] {
            fs::write(dir.path().join(name), name).unwrap();
        }
        let expected = ["runs/notes.txt", "text.txt"].map(|name| dir.path().join(name));
        assert_eq!(list(dir.path()).unwrap(), expected);
        fs::remove_dir(run.join("checkpoints")).unwrap();
        assert_eq!(list(&run).unwrap().len(), 2, "run.json alone may be a text");
    }

    #[test]
    fn listing_is_sorted_without_hidden_files() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("b")).unwrap();
        for name in ["c.txt", "b/a", "a", ".x"] {
            fs::write(dir.path().join(name), name).unwrap();
        }
        let listed = list(dir.path()).unwrap();
        assert_eq!(listed, ["a", "b/a", "c.txt"].map(|name| dir.path().join(name)));
        let missing = list(&dir.path().join("none")).unwrap_err();
        assert!(matches!(missing, Error::Io { .. }));
        #[cfg(unix)]
        {
            std::os::unix::fs::symlink("nowhere", dir.path().join("dangling")).unwrap();
            let dangling = list(dir.path()).unwrap_err().to_string();
            assert!(dangling.contains("dangling: "), "{dangling}");
            fs::remove_file(dir.path().join("dangling")).unwrap();
            // Two such links in a folder have 2^40 paths before the system ends them.
            for name in ["first", "second"] {
                std::os::unix::fs::symlink(".", dir.path().join(name)).unwrap();
            }
            let endless = list(dir.path()).unwrap_err().to_string();
            assert!(endless.contains("a link to a folder that contains it"), "{endless}");
        }
    }
}
