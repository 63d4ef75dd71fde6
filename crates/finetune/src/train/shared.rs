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

/// Returns the path of a new run in the next free folder, which the first process makes.
pub(super) fn claim_folder(mesh: &DeviceMesh) -> Result<PathBuf> {
    let claimed = if mesh.is_first_process() { claim_number() } else { Ok(0) };
    let number = mesh.all_ok(claimed)?;
    Ok(numbered(largest(mesh, number)?))
}

/// Checks that all processes see the folder that the first process is about to write into, by a
/// file that it makes there for a moment.
pub(super) fn check_shared(mesh: &DeviceMesh, path: &Path) -> Result<()> {
    if !mesh.spans_processes() {
        return Ok(());
    }
    let token = if mesh.is_first_process() { create_token(path).map(Some) } else { Ok(None) };
    let token = mesh.all_ok(token)?;
    let name = token.as_ref().map_or_else(String::new, |token| token.path().display().to_string());
    let names = mesh.gather_texts(&[name])?;
    // The first process may reach the folder by another path.
    let name = names.first().and_then(|names| Path::new(names.first()?).file_name());
    let is_hidden = !name.is_some_and(|name| appears(&path.join(name)));
    let hidden = vec![[u64::from(is_hidden)]; mesh.devices().len()];
    let hidden = mesh.gather_numbers(&hidden)?;
    match hidden.iter().position(|&[is_hidden]| is_hidden > 0) {
        None => Ok(()),
        Some(rank) => Err(RunError::NotShared { rank, path: path.into() }.into()),
    }
}

fn create_token(path: &Path) -> Result<AtomicFile> {
    let token = fs::create_dir_all(path).and_then(|()| AtomicFile::replacing(path.join("shared")));
    token.map_err(|cause: io::Error| Error::write(path, cause))
}

/// Returns true if a file exists, or soon will: systems that share files over a network show new
/// files late.
fn appears(path: &Path) -> bool {
    /// Longer than NFS caches a folder by default (`acdirmin`).
    const LATEST: Duration = Duration::from_secs(40);
    const PAUSE: Duration = Duration::from_millis(50);
    let start = Instant::now();
    while !path.exists() {
        if start.elapsed() > LATEST {
            return false;
        }
        thread::sleep(PAUSE);
    }
    true
}

/// Checks, once the run in `path` is locked, that no process finds it changed since its snapshot:
/// another program may have ended only now, and its steps must not be trained again.
pub(super) fn check_unchanged(
    mesh: &DeviceMesh,
    path: &Path,
    snapshot: Option<&RunSnapshot>,
) -> Result<()> {
    let now = snapshot.map(|_| RunSnapshot::take(path)).transpose()?;
    // No process may write while another one still compares.
    if largest(mesh, u64::from(now.as_ref() != snapshot))? == 0 {
        return Ok(());
    }
    Err(RunError::WentOn { path: path.into() }.into())
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
