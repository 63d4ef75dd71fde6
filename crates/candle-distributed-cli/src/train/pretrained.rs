//! The model that a run begins with, in place of new parameters.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::{
    error::{Error, Result},
    hint,
    train::model_file,
};

/// The model that a run begins with, as `run.json` records it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Pretrained {
    /// The file.
    pub(crate) path: PathBuf,
    /// That of its bytes, in hexadecimal digits.
    pub(crate) fingerprint: String,
}

impl Pretrained {
    /// The model in `path`: a safetensors file, or the folder of a run that has ended.
    pub(crate) fn read(path: &Path) -> Result<Self> {
        let path = if path.is_dir() { model_file::in_folder(path) } else { path.to_owned() };
        if path.to_str().is_none() {
            return Err(Error::usage(format!(
                "--weights {} is not UTF-8, and run.json cannot name it",
                path.display()
            )));
        }
        if !path.is_file() {
            let nothing = Error::usage(format!("{} is no file of a model", path.display()));
            return Err(nothing.hinted(hint::WEIGHTS));
        }
        let fingerprint = model_file::fingerprint(&path);
        Ok(Self { fingerprint: fingerprint.map_err(|source| Error::read(&path, source))?, path })
    }

    /// The model that a run began with: in `moved` if that is given, and else where it was.
    pub(crate) fn again(&self, moved: Option<&Path>) -> Result<Self> {
        let found = Self::read(moved.unwrap_or(&self.path))?;
        if found.fingerprint != self.fingerprint {
            let name = found.path.display();
            let other = Error::usage(format!("{name} is not the model that the run began with"));
            return Err(other.hinted(hint::OTHER_WEIGHTS));
        }
        Ok(found)
    }
}
