//! `cargo xtask snapshots`: whether the stored plans are those the planner makes, and whether all are still in use.

use std::{
    collections::BTreeSet,
    ffi::OsStr,
    fs, io,
    path::{Path, PathBuf},
};

use crate::{
    cmd::{Call, Result},
    workspace::{self, Workspace},
};

/// Compares the snapshots of `fsdp-plan` with what the crates make today, and looks for orphans.
#[derive(clap::Args)]
#[group(required = true, multiple = false)]
pub(crate) struct Args {
    /// Fails if a snapshot differs.
    #[arg(long)]
    check: bool,
    /// Overwrites the snapshots that differ; read the diff before you commit it.
    #[arg(long)]
    accept: bool,
}

pub(crate) fn run(args: &Args) -> Result {
    let references = Workspace::read()?.target_dir.join("snapshot-references.txt");
    forget(&references)?;
    let update = if args.accept { "always" } else { "no" };
    let tests = Call::cargo("test --package fsdp-plan --test plans").env("INSTA_UPDATE", update);
    tests.env("INSTA_SNAPSHOT_REFERENCES_FILE", &references).run()?;
    report(&orphans(&stored()?, &referenced(&references)?))
}

/// Removes the list of an earlier run, to which insta would append.
fn forget(references: &Path) -> io::Result<()> {
    match fs::remove_file(references) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// The snapshots in the tree.
fn stored() -> io::Result<BTreeSet<PathBuf>> {
    let files = workspace::files_below(&workspace::root().join("crates/fsdp-plan/tests"))?;
    files.iter().filter(|path| path.extension() == Some(OsStr::new("snap"))).map(fs::canonicalize).collect()
}

/// The snapshots that a test has read; insta leaves no list if there were none.
fn referenced(references: &Path) -> io::Result<BTreeSet<PathBuf>> {
    if !references.exists() {
        return Ok(BTreeSet::new());
    }
    fs::read_to_string(references)?.lines().map(fs::canonicalize).collect()
}

fn orphans(stored: &BTreeSet<PathBuf>, referenced: &BTreeSet<PathBuf>) -> Vec<PathBuf> {
    stored.difference(referenced).cloned().collect()
}

fn report(orphans: &[PathBuf]) -> Result {
    for path in orphans {
        println!("{}: no test reads this snapshot", path.display());
    }
    match orphans.len() {
        0 => Ok(()),
        n => Err(format!("{n} orphaned snapshots, delete them if their tests are gone for good").into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_snapshot_that_no_test_reads_is_an_orphan() {
        let paths = |names: &[&str]| names.iter().map(PathBuf::from).collect();
        let orphans = orphans(&paths(&["a.snap", "b.snap"]), &paths(&["a.snap", "c.snap"]));
        assert_eq!(orphans, [PathBuf::from("b.snap")]);
        assert!(report(&orphans).is_err());
        assert!(report(&[]).is_ok());
    }
}
