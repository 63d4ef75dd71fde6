//! Reading input: text files that fit in memory.

use std::{
    fs::File,
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

/// The text of the file at `path`.
pub(crate) fn read_file(path: &Path) -> Result<String> {
    read_text(open(path)?, path)
}

/// The text that `source` holds; errors name it by `path`.
pub(crate) fn read_text(source: impl Read, path: &Path) -> Result<String> {
    let bytes = read_bytes(source, path)?;
    String::from_utf8(bytes)
        .map_err(|fault| Error::read(path, io::Error::new(io::ErrorKind::InvalidData, fault)))
}

/// The bytes that `source` holds; errors name it by `path`.
pub(crate) fn read_bytes(source: impl Read, path: &Path) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let read = source.take(MAX_BYTES + 1).read_to_end(&mut bytes);
    read.map_err(|source| Error::read(path, source))?;
    if bytes.len() as u64 > MAX_BYTES {
        return Err(Error::usage(format!("{} is longer than {MAX_BYTES} bytes", path.display())));
    }
    Ok(bytes)
}

/// The value in the JSON file at `path`; errors say that the file does not hold `what`.
pub(crate) fn read_json<T: DeserializeOwned>(path: &Path, what: &'static str) -> Result<T> {
    serde_json::from_str(&read_file(path)?).map_err(|source| Error::json(path, what, source))
}

/// A text that was read, in quotes, as far as a line of an error has room for it.
pub(crate) fn excerpt(text: &str) -> String {
    const SHOWN_CHARS: usize = 40;
    let shown: String = text.chars().take(SHOWN_CHARS).collect();
    let more = if shown.len() < text.len() { "…" } else { "" };
    format!("{shown:?}{more}")
}
