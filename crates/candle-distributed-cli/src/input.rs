//! Where input comes from: text files of a size that fits the memory.

use std::{
    fs::File,
    io::{self, Read},
    path::Path,
};

use crate::error::{Error, Result};

/// The longest text read; what is longer is no list of anything a person has, or a device without an end.
const MAX_BYTES: u64 = 1 << 30;

/// The text of the file at `path`.
pub(crate) fn read_file(path: &Path) -> Result<String> {
    let file = File::open(path).map_err(|source| Error::Read { path: path.into(), source })?;
    read_text(file, path)
}

/// The text that `source` holds; `path` names it if it cannot be read.
pub(crate) fn read_text(source: impl Read, path: &Path) -> Result<String> {
    let text =
        io::read_to_string(source.take(MAX_BYTES + 1)).map_err(|source| Error::Read { path: path.into(), source })?;
    if text.len() as u64 > MAX_BYTES {
        return Err(Error::Usage(format!("{} is longer than {MAX_BYTES} bytes", path.display())));
    }
    Ok(text)
}
