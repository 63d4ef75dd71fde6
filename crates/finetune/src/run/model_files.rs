//! Files of the resulting model of a run.

use std::{fs, io, path::Path};

use core_types::Fingerprint;
use dist_checkpoint::StoredWeights;

use crate::{
    error::folder::FolderError,
    folder::{ADAPTER_WEIGHTS, check_files_beside},
};

/// Returns the names of the files in the folder of a model.
pub(super) fn names(path: &Path) -> io::Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in fs::read_dir(path)? {
        match entry?.file_name().into_string() {
            Ok(name) => names.push(name),
            Err(name) => {
                return Err(io::Error::other(format!("{} is not UTF-8", name.display())));
            }
        }
    }
    names.sort();
    Ok(names)
}

/// Checks the weights of a model or of adapters, and the files that the run wrote beside them.
pub(super) fn verify(folder: &Path) -> Result<(), FolderError> {
    let adapters = folder.join(ADAPTER_WEIGHTS);
    let path = if adapters.exists() { &adapters } else { folder };
    let weights = StoredWeights::open(path).map_err(Box::new)?;
    check_files_beside(folder, &weights)?;
    Ok(weights.verify().map_err(Box::new)?)
}

/// Returns the fingerprint of these files of a folder.
pub(super) fn fingerprint(path: &Path, names: &[String]) -> io::Result<String> {
    let mut all = Fingerprint::new();
    for name in names {
        let file = path.join(name);
        // Reading a pipe or a device might never end.
        if !fs::metadata(&file)?.is_file() {
            return Err(io::Error::other(format!("{name} is not a file")));
        }
        all.write_bytes(name.as_bytes());
        all.write_bytes(Fingerprint::read(&file)?.to_string().as_bytes());
    }
    Ok(all.to_string())
}
