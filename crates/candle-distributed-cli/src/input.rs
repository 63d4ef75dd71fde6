//! Reading input files that fit in memory.

use std::{
    fs::File,
    io::{self, Read},
    path::Path,
};

use serde::de::DeserializeOwned;

use crate::error::{Error, Result};

/// The size limit of input that is read into memory. No real list is longer: longer input is probably
/// from an endless device.
const MAX_BYTES: u64 = 1 << 30;

/// Opens the file at `path` for reading.
pub(crate) fn open(path: &Path) -> Result<File> {
    File::open(path).map_err(|source| Error::read(path, source))
}

/// Reads the file at `path` as text.
pub(crate) fn read_file(path: &Path) -> Result<String> {
    read_text(open(path)?, path)
}

/// Reads `source` as text. Errors name `path`.
pub(crate) fn read_text(source: impl Read, path: &Path) -> Result<String> {
    let bytes = read_bytes(source, path)?;
    String::from_utf8(bytes)
        .map_err(|fault| Error::read(path, io::Error::new(io::ErrorKind::InvalidData, fault)))
}

/// Reads all bytes of `source`. Errors name `path`.
pub(crate) fn read_bytes(source: impl Read, path: &Path) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let outcome = source.take(MAX_BYTES + 1).read_to_end(&mut bytes);
    outcome.map_err(|source| Error::read(path, source))?;
    if bytes.len() as u64 > MAX_BYTES {
        return Err(Error::usage(format!("{} is longer than {MAX_BYTES} bytes", path.display())));
    }
    Ok(bytes)
}

/// Reads the JSON file at `path`. Errors say that the file does not hold `what`.
pub(crate) fn read_json<T: DeserializeOwned>(path: &Path, what: &'static str) -> Result<T> {
    serde_json::from_str(&read_file(path)?).map_err(|source| Error::json(path, what, source))
}

/// Quotes `text` for an error message, shortened to one line.
pub(crate) fn excerpt(text: &str) -> String {
    const MAX_CHARS: usize = 40;
    let beginning: String = text.chars().take(MAX_CHARS).collect();
    let ellipsis = if beginning.len() < text.len() { "…" } else { "" };
    format!("{beginning:?}{ellipsis}")
}
