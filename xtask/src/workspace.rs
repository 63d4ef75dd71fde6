//! The packages of the workspace as cargo sees them, and its files.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use cargo_metadata::{Metadata, MetadataCommand, Package};

use crate::cmd::{self, Result};

/// Reads the metadata of this workspace on this machine.
pub(crate) fn read() -> Result<Metadata> {
    let on_this_machine = ["--filter-platform".to_owned(), "host-tuple".to_owned()];
    Ok(MetadataCommand::new().current_dir(cmd::root()).other_options(on_this_machine).exec()?)
}

/// Returns the packages that users depend on, in `crates/`.
pub(crate) fn crates(metadata: &Metadata) -> impl Iterator<Item = &Package> {
    let packages = metadata.workspace_packages();
    packages.into_iter().filter(|package| folder(package).starts_with("crates/"))
}

/// Returns a package's folder, relative to the root, with `/` on every system.
pub(crate) fn folder(package: &Package) -> String {
    let manifest = package.manifest_path.as_std_path();
    relative(manifest.parent().unwrap_or(manifest))
}

/// Returns a path for messages: relative to the root, with `/` on every system.
pub(crate) fn relative(path: &Path) -> String {
    path.strip_prefix(cmd::root()).unwrap_or(path).to_string_lossy().replace('\\', "/")
}

/// Returns every file below `dir` in the order of its path, without hidden folders and build outputs.
///
/// A folder that does not exist has no files.
pub(crate) fn files_below(dir: &Path) -> io::Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    if dir.is_dir() {
        collect_files(dir, &mut files)?;
    }
    files.sort();
    Ok(files)
}

fn collect_files(dir: &Path, files: &mut Vec<PathBuf>) -> io::Result<()> {
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        let name = entry.file_name();
        match entry.file_type()?.is_dir() {
            true if name == "target" || name.to_string_lossy().starts_with('.') => {}
            true => collect_files(&entry.path(), files)?,
            false => files.push(entry.path()),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn outputs_and_hidden_folders_are_skipped() {
        let dir = tempfile::tempdir().unwrap();
        for folder in ["src/a", "target/debug", ".hidden"] {
            fs::create_dir_all(dir.path().join(folder)).unwrap();
            fs::write(dir.path().join(folder).join("x.rs"), "").unwrap();
        }
        assert_eq!(files_below(dir.path()).unwrap(), [dir.path().join("src/a/x.rs")]);
        assert!(files_below(&dir.path().join("gone")).unwrap().is_empty());
    }

    #[test]
    fn crates_match_their_folders() {
        let metadata = read().unwrap();
        let folders: Vec<_> = crates(&metadata).map(folder).collect();
        assert!(folders.contains(&"crates/core-types".to_owned()), "{folders:?}");
        assert!(!folders.contains(&"xtask".to_owned()), "{folders:?}");
    }
}
