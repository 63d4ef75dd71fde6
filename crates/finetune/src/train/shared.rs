//! Agreement of the processes of a run.

use std::{
    fs, io,
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use core_types::files::AtomicFile;
use pmap_mesh::DeviceMesh;

use crate::{
    error::{Error, Result, run::RunError},
    run::folder::{RunSnapshot, claim_number, numbered},
};

/// Returns the largest number of all processes.
pub(super) fn largest(mesh: &DeviceMesh, number: u64) -> Result<u64> {
    let numbers = vec![[number]; mesh.devices().len()];
    let all = mesh.gather_numbers(&numbers)?;
    Ok(all.into_iter().map(|[number]| number).fold(0, u64::max))
}

/// Creates the next free folder for a new run in the first process, and returns its path in every
/// process.
pub(super) fn claim_folder(mesh: &DeviceMesh) -> Result<PathBuf> {
    let claim = if mesh.is_first_process() { claim_number() } else { Ok(0) };
    let own_number = mesh.all_ok(claim)?;
    Ok(numbered(largest(mesh, own_number)?))
}

/// Checks that all processes see the folder that the first process is about to write into. For this,
/// the first process creates a temporary file in the folder.
pub(super) fn check_shared(mesh: &DeviceMesh, path: &Path) -> Result<()> {
    if !mesh.spans_processes() {
        return Ok(());
    }
    let outcome = if mesh.is_first_process() { create_token(path).map(Some) } else { Ok(None) };
    let token = mesh.all_ok(outcome)?;
    let token_path =
        token.as_ref().map_or_else(String::new, |token| token.path().display().to_string());
    let all_paths = mesh.gather_texts(&[token_path])?;
    // Only the name is used: the first process may reach the folder by another path.
    let name = all_paths.first().and_then(|paths| Path::new(paths.first()?).file_name());
    let is_hidden = !name.is_some_and(|name| wait_until_visible(&path.join(name)));
    let own_flags = vec![[u64::from(is_hidden)]; mesh.devices().len()];
    let hidden_flags = mesh.gather_numbers(&own_flags)?;
    match hidden_flags.iter().position(|&[is_hidden]| is_hidden > 0) {
        None => Ok(()),
        Some(rank) => Err(RunError::NotShared { rank, path: path.into() }.into()),
    }
}

fn create_token(path: &Path) -> Result<AtomicFile> {
    let token = fs::create_dir_all(path).and_then(|()| AtomicFile::replacing(path.join("shared")));
    token.map_err(|cause: io::Error| Error::write(path, cause))
}

/// Waits until a file is visible, and returns false if it stays invisible: network file systems show
/// new files late.
fn wait_until_visible(path: &Path) -> bool {
    /// Longer than NFS caches a folder by default (`acdirmin`).
    const TIMEOUT: Duration = Duration::from_secs(40);
    const PAUSE: Duration = Duration::from_millis(50);
    let start = Instant::now();
    while !path.exists() {
        if start.elapsed() > TIMEOUT {
            return false;
        }
        thread::sleep(PAUSE);
    }
    true
}

/// Checks that the run in `path` has not changed since each process took its snapshot. Call it when the
/// run is locked: until then, another program may have trained steps, which must not be trained again.
pub(super) fn check_unchanged(
    mesh: &DeviceMesh,
    path: &Path,
    snapshot: Option<&RunSnapshot>,
) -> Result<()> {
    let now = snapshot.map(|_| RunSnapshot::take(path)).transpose()?;
    // All processes wait for each other here, so none writes while another one still compares.
    if largest(mesh, u64::from(now.as_ref() != snapshot))? == 0 {
        return Ok(());
    }
    Err(RunError::ChangedWhileRead { path: path.into() }.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_process_agrees_with_itself() {
        let mesh = DeviceMesh::cpu(3).unwrap();
        assert_eq!(largest(&mesh, 7).unwrap(), 7);
        check_shared(&mesh, Path::new("/no/such/folder")).unwrap();
        check_unchanged(&mesh, Path::new("/no/such/folder"), None).unwrap();
    }
}
