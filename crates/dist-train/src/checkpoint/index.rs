//! The index of a checkpoint: what it holds, and in which files.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::File,
    io::{self, Read, Write},
    path::Path,
};

use fsdp_plan::source::MAX_HEADER_LEN;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::{
    checkpoint::{disk::At, file::is_shard_name},
    error::{Result, checkpoint::CheckpointError},
    progress::TrainerState,
};

/// The name of the index in its folder.
pub(super) const INDEX: &str = "index.json";
/// The form of the index.
const FORMAT_VERSION: u32 = 1;
/// What is read of an index at most: it names what the headers of its files describe, and is no
/// longer than one may be.
const MAX_BYTES: u64 = MAX_HEADER_LEN;

/// What is written into the index.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Index {
    format_version: u32,
    /// How many steps had been taken.
    pub(super) step: u64,
    /// The model's parameters and their shapes.
    pub(super) parameters: BTreeMap<String, Vec<usize>>,
    pub(super) files: Vec<Listed>,
    /// How far training was, if a trainer wrote it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) trainer: Option<TrainerState>,
    /// Whatever else the run had to remember.
    pub(super) state: Value,
}

/// What every version of the index says.
#[derive(Deserialize)]
struct Version {
    format_version: u32,
}

/// A file of a checkpoint.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Listed {
    pub(super) name: String,
    pub(super) bytes: u64,
}

impl Index {
    pub(super) fn new(
        step: u64,
        parameters: BTreeMap<String, Vec<usize>>,
        files: Vec<Listed>,
        trainer: Option<TrainerState>,
        state: Value,
    ) -> Self {
        Self { format_version: FORMAT_VERSION, step, parameters, files, trainer, state }
    }

    /// Writes it, and waits until it is on disk.
    pub(super) fn write(&self, path: &Path) -> Result<()> {
        let text = serde_json::to_vec_pretty(self).map_err(|cause| json_error(path, cause))?;
        let found = text.len() as u64;
        // What would be refused when it is read must not replace an older checkpoint.
        if found > MAX_BYTES {
            let path = path.to_owned();
            return Err(CheckpointError::IndexTooLong { path, found, max: MAX_BYTES }.into());
        }
        let mut file = File::create(path).at(path)?;
        file.write_all(&text).at(path)?;
        file.sync_all().at(path)
    }

    pub(super) fn read(path: &Path) -> Result<Self> {
        let text = read_text(path).at(path)?;
        // The version is all that the forms of the index have in common.
        let Version { format_version: found } =
            serde_json::from_slice(&text).map_err(|cause| json_error(path, cause))?;
        if found != FORMAT_VERSION {
            let (path, supported) = (path.to_owned(), FORMAT_VERSION);
            return Err(CheckpointError::FormatVersion { path, found, supported }.into());
        }
        let index: Self = serde_json::from_slice(&text).map_err(|cause| json_error(path, cause))?;
        index.check_names(path)?;
        Ok(index)
    }

    fn check_names(&self, path: &Path) -> Result<()> {
        let mut names = BTreeSet::new();
        for Listed { name, .. } in &self.files {
            if !is_shard_name(name) || !names.insert(name) {
                let (path, file) = (path.to_owned(), name.clone());
                return Err(CheckpointError::Listed { path, file }.into());
            }
        }
        Ok(())
    }
}

/// An error of the JSON in the index at `path`.
pub(super) fn json_error(path: &Path, cause: serde_json::Error) -> CheckpointError {
    CheckpointError::Json { path: path.to_owned(), cause }
}

fn read_text(path: &Path) -> io::Result<Vec<u8>> {
    let mut text = Vec::new();
    File::open(path)?.take(MAX_BYTES).read_to_end(&mut text)?;
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Error;

    #[test]
    fn an_index_that_could_not_be_read_is_not_written() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(INDEX);
        let state = Value::String("x".repeat(usize::try_from(MAX_BYTES).unwrap()));
        let error =
            Index::new(1, BTreeMap::new(), Vec::new(), None, state).write(&path).unwrap_err();
        let Error::Checkpoint(CheckpointError::IndexTooLong { found, max, .. }) = error else {
            panic!("{error}")
        };
        assert!(found > max && !path.exists());
    }
}
