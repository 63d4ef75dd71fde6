//! The folder of a run: its metrics and its checkpoint.

use std::{
    fs::{self, File},
    io::{self, Write},
    path::{Path, PathBuf},
};

use serde::Serialize;

use crate::{
    error::{Error, Result},
    train::parameters::Parameters,
};

const METRICS: &str = "metrics.jsonl";
const CHECKPOINT: &str = "model.safetensors";

/// A folder that holds one run and never overwrites another.
#[derive(Debug)]
pub(crate) struct RunDir {
    path: PathBuf,
    metrics: File,
}

impl RunDir {
    /// Makes the folder `path`, which must not hold a run; or, without one, the first `runs/NUMBER` that is free.
    pub(crate) fn create(path: Option<&Path>) -> Result<Self> {
        match path {
            Some(path) => Self::create_at(path).map_err(|source| match source.kind() {
                io::ErrorKind::AlreadyExists => Error::Usage(format!("{} already holds a run", path.display())),
                _ => Error::Write { path: path.into(), source },
            }),
            None => Self::create_numbered(Path::new("runs")),
        }
    }

    fn create_numbered(parent: &Path) -> Result<Self> {
        let mut number = 1_u32;
        loop {
            let path = parent.join(format!("{number:04}"));
            match Self::create_at(&path) {
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => number += 1,
                run => return run.map_err(|source| Error::Write { path, source }),
            }
        }
    }

    fn create_at(path: &Path) -> io::Result<Self> {
        fs::create_dir_all(path)?;
        let metrics = File::create_new(path.join(METRICS))?;
        Ok(Self { path: path.into(), metrics })
    }

    /// The folder.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Appends one line to the metrics.
    pub(crate) fn append(&mut self, line: &impl Serialize) -> Result<()> {
        let line = serde_json::to_string(line).map_err(io::Error::from);
        let written = line.and_then(|line| writeln!(self.metrics, "{line}"));
        written.map_err(|source| Error::Write { path: self.path.join(METRICS), source })
    }

    /// Writes the checkpoint beside its place and renames it, so that no reader ever sees half of one.
    pub(crate) fn save(&self, parameters: &Parameters) -> Result<()> {
        let path = self.path.join(CHECKPOINT);
        self.write_checkpoint(parameters, &path).map_err(|source| Error::Write { path, source })
    }

    fn write_checkpoint(&self, parameters: &Parameters, path: &Path) -> io::Result<()> {
        let tensors = parameters.iter().map(|(name, var)| (name, var.as_tensor()));
        let bytes = safetensors::serialize(tensors, None).map_err(io::Error::other)?;
        let mut file = tempfile::NamedTempFile::new_in(&self.path)?;
        file.write_all(&bytes)?;
        file.as_file().sync_all()?;
        file.persist(path)?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_that_holds_a_run_is_never_written_again() {
        let parent = tempfile::tempdir().unwrap();
        let numbered = || RunDir::create_numbered(parent.path()).unwrap().path;
        assert_eq!([numbered(), numbered()], ["0001", "0002"].map(|name| parent.path().join(name)));
        assert!(matches!(RunDir::create(Some(&parent.path().join("0002"))), Err(Error::Usage(_))));
    }
}
