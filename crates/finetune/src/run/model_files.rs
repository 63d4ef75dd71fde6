//! Files of the resulting model of a run.

use std::{fs, io, path::Path};

use core_types::Fingerprint;

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
