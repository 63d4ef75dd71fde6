//! Reading input: text files that fit in memory.

use std::{
    fs::{self, File},
    io::{self, Read},
    path::Path,
};

use serde::de::DeserializeOwned;

use crate::error::{Error, Result};

/// The longest text that is read. Longer input is not a list that anybody has, or comes from a
/// device that never ends.
const MAX_BYTES: u64 = 1 << 30;

/// The file at `path`, for reading.
pub(crate) fn open(path: &Path) -> Result<File> {
    File::open(path).map_err(|source| Error::read(path, source))
}

/// The content of the file at `path`, if there is one.
pub(crate) fn read_if_there(path: &Path) -> Result<Option<Vec<u8>>> {
    match fs::read(path) {
        Ok(content) => Ok(Some(content)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(Error::read(path, source)),
    }
}

/// The text of the file at `path`.
pub(crate) fn read_file(path: &Path) -> Result<String> {
    read_text(open(path)?, path)
}

/// The text that `source` holds; errors name it by `path`.
pub(crate) fn read_text(source: impl Read, path: &Path) -> Result<String> {
    let text = io::read_to_string(source.take(MAX_BYTES + 1))
        .map_err(|source| Error::read(path, source))?;
    if text.len() as u64 > MAX_BYTES {
        return Err(Error::usage(format!("{} is longer than {MAX_BYTES} bytes", path.display())));
    }
    Ok(text)
}

/// The value in the JSON file at `path`; errors say that the file does not hold `what`.
pub(crate) fn read_json<T: DeserializeOwned>(path: &Path, what: &'static str) -> Result<T> {
    serde_json::from_str(&read_file(path)?).map_err(|source| Error::json(path, what, source))
}
