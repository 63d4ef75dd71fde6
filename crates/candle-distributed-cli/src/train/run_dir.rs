//! The folder of a run: its metrics and its checkpoint.

use std::{
    fs::{self, File},
    io::{self, Write},
    path::{Path, PathBuf},
};

use candle_nn::VarMap;
use serde::Serialize;

use crate::{
    error::{Error, Result},
    train::parameters,
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
            Some(path) => Self::create_at(path)?
                .ok_or_else(|| Error::Usage(format!("{} already holds a run or a model", path.display()))),
            None => Self::create_numbered(Path::new("runs")),
        }
    }

    fn create_numbered(parent: &Path) -> Result<Self> {
        let mut number = 1_u32;
        loop {
            match Self::create_at(&parent.join(format!("{number:04}")))? {
                Some(run) => return Ok(run),
                None => number += 1,
            }
        }
    }

    /// `None` if there is a run or a model in `path` already.
    fn create_at(path: &Path) -> Result<Option<Self>> {
        let failed = |source| Error::Write { path: path.into(), source };
        fs::create_dir_all(path).map_err(failed)?;
        if path.join(CHECKPOINT).exists() {
            return Ok(None);
        }
        match File::create_new(path.join(METRICS)) {
            Ok(metrics) => Ok(Some(Self { path: path.into(), metrics })),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(None),
            Err(error) => Err(failed(error)),
        }
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
    pub(crate) fn save(&self, vars: &VarMap) -> Result<()> {
        let path = self.path.join(CHECKPOINT);
        write_checkpoint(vars, &path).map_err(|source| Error::Write { path, source })
    }
}

fn write_checkpoint(vars: &VarMap, path: &Path) -> io::Result<()> {
    let vars = parameters::by_name(vars).map_err(io::Error::other)?;
    let tensors = vars.iter().map(|(name, var)| (name, var.as_tensor()));
    let bytes = safetensors::serialize(tensors, None).map_err(io::Error::other)?;
    let partial = path.with_extension("partial");
    let mut file = File::create(&partial)?;
    file.write_all(&bytes)?;
    file.sync_all()?;
    fs::rename(partial, path)
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

        let model = parent.path().join("model");
        fs::create_dir(&model).unwrap();
        fs::write(model.join(CHECKPOINT), "weights").unwrap();
        assert!(matches!(RunDir::create(Some(&model)), Err(Error::Usage(_))));
        assert!(
            matches!(RunDir::create(Some(&model.join(CHECKPOINT))), Err(Error::Write { .. })),
            "a file is no folder"
        );
    }
}
