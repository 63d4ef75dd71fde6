//! The names of checkpoint folders, and the folders that have them.

use std::{
    collections::BTreeMap,
    fs, io,
    path::{Path, PathBuf},
};

use crate::{
    disk::At,
    error::{Error, Result},
};

/// The end of a folder's name while the checkpoint is written or removed.
const PARTIAL: &str = ".partial";

/// The name of a checkpoint that is whole.
pub(super) fn name(step: u64) -> String {
    format!("step-{step:010}")
}

/// The name of a checkpoint that the group of processes of a writer id write or remove.
pub(super) fn partial_name(step: u64, writer_id: u64) -> String {
    format!("{}.{writer_id:016x}{PARTIAL}", name(step))
}

/// The name to which a checkpoint is moved that lies in the place of another: it is nobody's.
pub(super) fn moved_name(step: u64, writer_id: u64) -> String {
    format!("{}.{writer_id:016x}.moved", name(step))
}

/// Checks that a folder, if it is called after a step, is called after this one.
///
/// # Errors
///
/// [`Error::Renamed`].
pub(super) fn check_step(path: &Path, step: u64) -> Result<()> {
    match name_of(path).and_then(step_of) {
        Some(named) if named != step => Err(Error::Renamed { path: path.to_owned(), step }),
        _ => Ok(()),
    }
}

/// The folders in `folder` that have the name of a checkpoint that is whole, by step.
pub(super) fn complete(folder: &Path) -> Result<BTreeMap<u64, PathBuf>> {
    let mut complete = BTreeMap::new();
    for path in folders(folder)? {
        if let Some(step) = name_of(&path).and_then(step_of) {
            complete.insert(step, path);
        }
    }
    Ok(complete)
}

/// What an interrupted process has left.
#[derive(Debug)]
pub(super) struct Partial {
    pub(super) path: PathBuf,
    pub(super) step: u64,
    /// Nothing if a program wrote it that did not give it a name of its own.
    pub(super) writer_id: Option<u64>,
}

/// The folders in `folder` that were not written or removed to the end.
pub(super) fn partial(folder: &Path) -> Result<Vec<Partial>> {
    let mut partial = Vec::new();
    for path in folders(folder)? {
        if let Some((step, writer_id)) = name_of(&path).and_then(parse_partial_name) {
            partial.push(Partial { path, step, writer_id });
        }
    }
    Ok(partial)
}

fn folders(folder: &Path) -> Result<Vec<PathBuf>> {
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

/// The name of a folder, if it is text, as ours are.
fn name_of(path: &Path) -> Option<&str> {
    path.file_name()?.to_str()
}

/// The step in the name of a checkpoint's folder, if it has exactly the name of that step.
fn step_of(text: &str) -> Option<u64> {
    let step = text.strip_prefix("step-")?.parse().ok()?;
    (name(step) == text).then_some(step)
}

/// The step in the name of a partial folder, and the writer id, if there is one.
fn parse_partial_name(text: &str) -> Option<(u64, Option<u64>)> {
    let text = text.strip_suffix(PARTIAL)?;
    match text.split_once('.') {
        None => Some((step_of(text)?, None)),
        Some((step, writer_id)) => {
            Some((step_of(step)?, Some(u64::from_str_radix(writer_id, 16).ok()?)))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_as_they_are_written() {
        for step in [0, 7, 9_999_999_999, 10_000_000_000, u64::MAX] {
            assert_eq!(step_of(&name(step)), Some(step));
            for writer_id in [0, 0xcafe, u64::MAX] {
                let partial = partial_name(step, writer_id);
                assert_eq!(parse_partial_name(&partial), Some((step, Some(writer_id))));
                assert_eq!(step_of(&partial), None);
                let moved = moved_name(step, writer_id);
                assert_eq!((step_of(&moved), parse_partial_name(&moved)), (None, None));
            }
        }
        assert_eq!(parse_partial_name("step-0000000003.partial"), Some((3, None)));
        for other in ["step-3", "step-+000000003", "notes.partial", "step-0000000003.x.partial"] {
            assert_eq!((step_of(other), parse_partial_name(other)), (None, None), "{other}");
        }
    }

    #[test]
    fn only_a_folder_of_another_step_is_refused() {
        for path in ["runs/step-0000000004", "runs/best", "step-4", "/"] {
            assert!(check_step(Path::new(path), 4).is_ok(), "{path}");
        }
        let renamed = check_step(Path::new("runs/step-0000000008"), 4);
        assert!(matches!(renamed, Err(Error::Renamed { step: 4, .. })));
    }
}
