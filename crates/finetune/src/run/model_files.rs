//! Files of the resulting model of a run.

use std::{fs, io, path::Path};

use core_types::Fingerprint;

/// Returns the names of the files in the folder of a model.
pub(super) fn names(path: &Path) -> io::Result<Vec<String>> {
    let name = |entry: io::Result<fs::DirEntry>| {
        let name = entry?.file_name().into_string();
        name.map_err(|name| io::Error::other(format!("{} is not UTF-8", name.display())))
    };
    let mut names: Vec<String> = fs::read_dir(path)?.map(name).collect::<io::Result<_>>()?;
    names.sort();
    Ok(names)
}

/// Returns the fingerprint of these files of a folder.
pub(super) fn fingerprint(path: &Path, names: &[String]) -> io::Result<String> {
    let mut all = Fingerprint::new();
    for name in names {
        all.write_bytes(name.as_bytes());
        all.write_bytes(Fingerprint::read(&path.join(name))?.to_string().as_bytes());
    }
    Ok(all.to_string())
}
