//! The names of checkpoint folders, and the folders that have them.

use std::{
    collections::BTreeMap,
    fs, io,
    path::{Path, PathBuf},
};

use crate::{
    disk::AtPath,
    error::{Error, Result},
};

/// The end of a folder's name while the checkpoint is being written or removed.
const PARTIAL: &str = ".partial";

/// Returns the name of a complete checkpoint.
pub(super) fn complete_name(step: u64) -> String {
    format!("step-{step:010}")
}

/// Returns the name of a checkpoint that a group of processes is writing or removing.
pub(super) fn partial_name(step: u64, writer_id: u64) -> String {
    format!("{}.{writer_id:016x}{PARTIAL}", complete_name(step))
}

/// Returns the name to which a foreign checkpoint is renamed if it has the name that a new
/// checkpoint needs.
pub(super) fn moved_name(step: u64, writer_id: u64) -> String {
    format!("{}.{writer_id:016x}.moved", complete_name(step))
}

/// Checks that a folder is not named after another step than `step`.
///
/// # Errors
///
/// [`Error::Unsuitable`].
pub(super) fn check_step(path: &Path, step: u64) -> Result<()> {
    match folder_name(path).and_then(parse_name) {
        Some(other) if other != step => {
            Err(Error::unsuitable(path, format!("the folder has the checkpoint of step {step}")))
        }
        _ => Ok(()),
    }
}

/// Returns the folders in `folder` with the name of a complete checkpoint, by step.
pub(super) fn find_complete(folder: &Path) -> Result<BTreeMap<u64, PathBuf>> {
    let mut complete = BTreeMap::new();
    for path in list_folders(folder)? {
        if let Some(step) = folder_name(&path).and_then(parse_name) {
            complete.insert(step, path);
        }
    }
    Ok(complete)
}

/// A folder that a process was writing or removing when it was interrupted.
#[derive(Debug)]
pub(super) struct PartialFolder {
    pub(super) path: PathBuf,
    pub(super) step: u64,
    /// The group of processes that wrote the folder; `None` if it has no writer id.
    pub(super) writer_id: Option<u64>,
}

/// Returns the folders in `folder` that an interrupted process was writing or removing.
pub(super) fn find_partial(folder: &Path) -> Result<Vec<PartialFolder>> {
    let mut partial = Vec::new();
    for path in list_folders(folder)? {
        if let Some((step, writer_id)) = folder_name(&path).and_then(parse_partial_name) {
            partial.push(PartialFolder { path, step, writer_id });
        }
    }
    Ok(partial)
}

/// Returns the folders in `folder`, which need not exist.
fn list_folders(folder: &Path) -> Result<Vec<PathBuf>> {
    let entries = match fs::read_dir(folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.at(folder)?,
    };
    let mut folders = Vec::new();
    for entry in entries {
        let path = entry.at(folder)?.path();
        if path.is_dir() {
            folders.push(path);
        }
    }
    Ok(folders)
}

/// Returns the name of a folder, if it is valid UTF-8.
fn folder_name(path: &Path) -> Option<&str> {
    path.file_name()?.to_str()
}

/// Returns the step in the name of a complete checkpoint, or `None` for any other name.
fn parse_name(text: &str) -> Option<u64> {
    let step = text.strip_prefix("step-")?.parse().ok()?;
    (complete_name(step) == text).then_some(step)
}

/// Returns the step in the name of a partial folder, and the writer id, if it has one.
fn parse_partial_name(text: &str) -> Option<(u64, Option<u64>)> {
    let text = text.strip_suffix(PARTIAL)?;
    match text.split_once('.') {
        None => Some((parse_name(text)?, None)),
        Some((step, writer_id)) => {
            Some((parse_name(step)?, Some(u64::from_str_radix(writer_id, 16).ok()?)))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip() {
        for step in [0, 7, 9_999_999_999, 10_000_000_000, u64::MAX] {
            assert_eq!(parse_name(&complete_name(step)), Some(step));
            for writer_id in [0, 0xcafe, u64::MAX] {
                let partial = partial_name(step, writer_id);
                assert_eq!(parse_partial_name(&partial), Some((step, Some(writer_id))));
                assert_eq!(parse_name(&partial), None);
                let moved = moved_name(step, writer_id);
                assert_eq!((parse_name(&moved), parse_partial_name(&moved)), (None, None));
            }
        }
        assert_eq!(parse_partial_name("step-0000000003.partial"), Some((3, None)));
        for other in ["step-3", "step-+000000003", "notes.partial", "step-0000000003.x.partial"] {
            assert_eq!((parse_name(other), parse_partial_name(other)), (None, None), "{other}");
        }
    }

    #[test]
    fn folder_of_another_step_is_rejected() {
        for path in ["runs/step-0000000004", "runs/best", "step-4", "/"] {
            assert!(check_step(Path::new(path), 4).is_ok(), "{path}");
        }
        let renamed = check_step(Path::new("runs/step-0000000008"), 4);
        assert!(matches!(renamed, Err(Error::Unsuitable { .. })));
    }
}
