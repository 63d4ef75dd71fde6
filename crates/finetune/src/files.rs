//! The files of a folder.

use std::{
    fmt::Display,
    fs, io,
    path::{Path, PathBuf},
};

use crate::error::{Error, Result};

/// The sizes and properties of a model.
pub(crate) const CONFIG: &str = "config.json";

/// Returns the error about a file of a folder.
pub(crate) fn refused(file: &Path, fault: impl Display) -> Error {
    Error::usage(format!("{}: {fault}", file.display()))
}

/// Lists the files under a folder, but for hidden ones, or the file itself, in the same order on
/// every machine.
pub(crate) fn list(path: &Path) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    add_files(path, &mut files)?;
    Ok(files)
}

/// Adds the files under `path` to `files`, sorted.
fn add_files(path: &Path, files: &mut Vec<PathBuf>) -> Result<()> {
    let metadata = fs::metadata(path).map_err(|source| Error::read(path, source))?;
    if !metadata.is_dir() {
        // Pipes and devices may never end.
        files.extend(metadata.is_file().then(|| path.to_path_buf()));
        return Ok(());
    }
    let mut entries = entries(path).map_err(|source| Error::read(path, source))?;
    entries.retain(|entry| !is_hidden(entry));
    entries.sort();
    entries.iter().try_for_each(|entry| add_files(entry, files))
}

fn entries(folder: &Path) -> io::Result<Vec<PathBuf>> {
    fs::read_dir(folder)?.map(|entry| entry.map(|entry| entry.path())).collect()
}

fn is_hidden(path: &Path) -> bool {
    path.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"."))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;

    #[test]
    fn files_are_listed_in_order_without_hidden_ones() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("b")).unwrap();
        for name in ["c.txt", "b/a", "a", ".x"] {
            fs::write(dir.path().join(name), name).unwrap();
        }
        let listed = list(dir.path()).unwrap();
        assert_eq!(listed, ["a", "b/a", "c.txt"].map(|name| dir.path().join(name)));
        let missing = list(&dir.path().join("none")).unwrap_err();
        assert!(matches!(*missing.kind, ErrorKind::Read { .. }));
        #[cfg(unix)]
        {
            std::os::unix::fs::symlink("nowhere", dir.path().join("dangling")).unwrap();
            let dangling = list(dir.path()).unwrap_err().to_string();
            assert!(dangling.ends_with("dangling"), "{dangling}");
        }
    }
}
