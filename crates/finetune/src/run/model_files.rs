//! Fingerprints of the files of models.

use std::{fs, io, path::Path};

use candle_distributed::types::Fingerprint;

/// Returns the names of the files in the folder of a model.
pub(crate) fn names_in(path: &Path) -> io::Result<Vec<String>> {
    let name = |entry: io::Result<fs::DirEntry>| {
        let name = entry?.file_name().into_string();
        name.map_err(|name| io::Error::other(format!("{} is not UTF-8", name.display())))
    };
    let mut names: Vec<String> = fs::read_dir(path)?.map(name).collect::<io::Result<_>>()?;
    names.sort();
    Ok(names)
}

/// Returns the fingerprint of a model: of these files of its folder.
pub(crate) fn fingerprint_of_model(path: &Path, names: &[String]) -> io::Result<String> {
    let mut all = Fingerprint::new();
    for name in names {
        all.write_bytes(name.as_bytes());
        all.write_bytes(fingerprint(&path.join(name))?.as_bytes());
    }
    Ok(format!("{:016x}", all.finish()))
}

/// Returns the fingerprint of the bytes of a file, in hexadecimal digits.
pub(crate) fn fingerprint(path: &Path) -> io::Result<String> {
    Ok(format!("{:016x}", Fingerprint::read(path)?.finish()))
}
