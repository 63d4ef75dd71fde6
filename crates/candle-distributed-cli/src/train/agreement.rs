//! What the processes of a run must have in common, compared before anything is written.

use std::{
    fs, io,
    path::Path,
    thread,
    time::{Duration, Instant},
};

use candle_distributed::{finetune::run::RunSnapshot, mesh::DeviceMesh};

use crate::{
    error::{self, Error, ErrorKind, Result, WithHint},
    hint,
    train::trainer,
};

/// Checks that every process of a mesh says the same, in as many `words`: what it has and does,
/// such as `has --steps 12`. What differs is an error in all of them, which the first one reports.
pub(crate) fn compare(mesh: &DeviceMesh, words: &[String]) -> Result<()> {
    // Processes whose --replicas differ have meshes that differ, and cannot even compare.
    let said = gather(mesh, words).with_hint(hint::SAME_RUN)?;
    let difference = differences(&said);
    if difference.is_empty() {
        return Ok(());
    }
    Err(of_first(mesh, || {
        let different = format!("the processes do not start the same run: {difference}");
        Error::usage(different).hinted(hint::SAME_RUN)
    }))
}

/// What the processes of these ranks do not say alike.
fn differences(said: &[(usize, Vec<String>)]) -> String {
    let Some(((first, of_first), others)) = said.split_first() else { return String::new() };
    let mut differences = Vec::new();
    for (rank, words) in others {
        for (here, there) in of_first.iter().zip(words).filter(|(here, there)| here != there) {
            differences.push(format!("rank {first} {here}, rank {rank} {there}"));
        }
    }
    differences.join("; ")
}

/// Checks that all processes reach the folder in which the first one is about to write, by a file
/// that it makes there for a moment.
pub(crate) fn check_shared(mesh: &DeviceMesh, path: &Path) -> Result<()> {
    if !mesh.spans_processes() {
        return Ok(());
    }
    let token = if mesh.is_first_process() { Some(token(path)?) } else { None };
    let word = match &token {
        Some(token) => token.path().display().to_string(),
        None => "somebody else makes it".into(),
    };
    let told = gather(mesh, &[word])?;
    // The first process may call the folder otherwise.
    let name = told.first().and_then(|(_, words)| Path::new(&words[0]).file_name());
    let is_there = name.is_some_and(|name| appears(&path.join(name)));
    let word = if is_there { "sees it" } else { "does not" };
    let said = gather(mesh, &[word.into()])?;
    match said.iter().find(|(_, words)| *words != said[0].1) {
        None => Ok(()),
        Some((rank, _)) => Err(of_first(mesh, || {
            let apart =
                format!("rank {rank} does not see what rank 0 writes into {}", path.display());
            Error::usage(apart).hinted(hint::SHARED)
        })),
    }
}

/// Checks, once the run in `path` is locked, that no process finds it changed since it was `seen`:
/// another run of it may have ended only now, and what that saved must not be trained anew.
pub(crate) fn check_unchanged(mesh: &DeviceMesh, path: &Path, seen: &RunSnapshot) -> Result<()> {
    let is_changed = RunSnapshot::take(path)? != *seen;
    // One that writes must not be ahead of another that still compares.
    if trainer::largest(mesh, is_changed.into())? == 0 {
        return Ok(());
    }
    Err(of_first(mesh, || went_on(path)))
}

/// Returns the error of a run that another program started or continued in the meantime.
pub(crate) fn went_on(path: &Path) -> Error {
    let changed = format!("the run in {} went on while it was read", path.display());
    Error::usage(changed).hinted(hint::WENT_ON)
}

/// A new file in the folder, which is made if there is none.
fn token(path: &Path) -> Result<tempfile::NamedTempFile> {
    let made = fs::create_dir_all(path)
        .and_then(|()| tempfile::Builder::new().prefix(".shared-").tempfile_in(path));
    made.map_err(|source: io::Error| Error::write(path, source))
}

/// Whether there is this file, or will soon be: systems that share files over a network show new
/// ones late.
fn appears(path: &Path) -> bool {
    /// Longer than NFS keeps what it knows of a folder, by default (`acdirmin`).
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

/// The error of a process if it is the first; the others end without a word.
fn of_first(mesh: &DeviceMesh, error: impl FnOnce() -> Error) -> Error {
    if mesh.is_first_process() {
        error()
    } else {
        ErrorKind::SaidByFirst { exit_code: error::BAD_INPUT, is_of_all: false }.into()
    }
}

/// What each process says, by the rank of its first device.
fn gather(mesh: &DeviceMesh, words: &[String]) -> Result<Vec<(usize, Vec<String>)>> {
    let texts = mesh.gather_texts(words)?.into_iter().enumerate();
    // Only the first device of each process speaks.
    Ok(texts.filter(|(_, words)| !words.is_empty()).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_differs_is_said_with_the_rank() {
        let words = |words: &[&str]| words.iter().map(ToString::to_string).collect::<Vec<_>>();
        let same = words(&["starts after step 0", "has --steps 12", "writes into run"]);
        let other = words(&["starts after step 0", "has --steps 9", "writes into elsewhere"]);
        let complete = words(&["finds the run complete"]);
        assert_eq!(differences(&[(0, same.clone()), (1, same.clone())]), "");
        assert_eq!(
            differences(&[(0, same.clone()), (1, same.clone()), (2, other)]),
            "rank 0 has --steps 12, rank 2 has --steps 9; \
             rank 0 writes into run, rank 2 writes into elsewhere"
        );
        assert_eq!(
            differences(&[(0, same), (1, complete)]),
            "rank 0 starts after step 0, rank 1 finds the run complete"
        );
    }

    #[test]
    fn a_process_alone_agrees_with_itself() {
        let mesh = DeviceMesh::cpu(3).unwrap();
        let words = [String::from("has --steps 12"), String::from("writes into \u{fc}")];
        assert_eq!(gather(&mesh, &words).unwrap(), [(0, words.to_vec())]);
        compare(&mesh, &words).unwrap();
        check_shared(&mesh, Path::new("/no/such/folder")).unwrap();
    }
}
