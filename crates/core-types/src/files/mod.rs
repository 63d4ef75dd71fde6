//! Atomic replacement of files and folders.
//!
//! A program can be killed, and a machine can fail, between any two system calls. A file written by this module then
//! has either its old content or its new one: the content is written to a new file in the same folder, synced to disk
//! and renamed, and then the folder is synced. An interrupted program leaves at most a file that ends in `.partial`
//! (see [`is_partial`]), which other programs ignore.
//!
//! The new file has a random, unused name. Other writers would share a fixed name, and an attacker could plant a link
//! under it.
//!
//! # Differences between systems
//!
//! On Unix a replaced file keeps its permissions, and its owner and group as far as the system allows. Windows syncs no
//! folders and keeps only the read-only flag. On file systems that cannot sync a folder, that step is skipped.
//!
//! # Examples
//!
//! ```
//! use std::io::Write;
//!
//! use core_types::files::{self, AtomicFile};
//!
//! # let folder = files::AtomicFolder::new(std::env::temp_dir().join("example"))?;
//! # let path = folder.path().join("results.json");
//! files::write(&path, b"[]")?; // all at once
//!
//! let mut file = AtomicFile::new(&path)?; // in several writes
//! file.write_all(b"[1, ")?;
//! assert_eq!(std::fs::read(&path)?, b"[]");
//! file.write_all(b"2]")?;
//! file.persist()?;
//! assert_eq!(std::fs::read(&path)?, b"[1, 2]");
//! # Ok::<(), std::io::Error>(())
//! ```

mod atomic_file;
mod atomic_folder;
mod partial_name;
mod sync;
#[cfg(test)]
mod tests;

use std::{
    ffi::OsString,
    fs::{self, File},
    io::{self, ErrorKind, Write},
    path::{Path, PathBuf},
};

pub use self::{
    atomic_file::AtomicFile,
    atomic_folder::{AtomicFolder, restore_replaced},
    partial_name::is_partial,
    sync::{rename, sync_folder},
};

/// Writes `bytes` to the file at `path`, which is created or atomically replaced.
///
/// With several concurrent writers, the file has the whole content of one. Links, permissions and
/// owner are handled as by [`AtomicFile::new`]. Pipes and devices cannot be replaced, and are
/// written directly.
///
/// # Errors
///
/// An I/O error; the old content is then unchanged.
///
/// # Examples
///
/// ```
/// use core_types::files::{self, AtomicFolder};
///
/// # let folder = AtomicFolder::new(std::env::temp_dir().join("example"))?;
/// let path = folder.path().join("config.json");
/// for text in ["{}", "{\"rank\": 8}"] {
///     files::write(&path, text.as_bytes())?;
///     assert_eq!(std::fs::read_to_string(&path)?, text);
/// }
/// # Ok::<(), std::io::Error>(())
/// ```
pub fn write(path: impl AsRef<Path>, bytes: &[u8]) -> io::Result<()> {
    let path = path.as_ref();
    match fs::metadata(path) {
        Ok(known) if !known.is_file() => File::options().write(true).open(path)?.write_all(bytes),
        _ => {
            let mut file = AtomicFile::new(path)?;
            file.write_all(bytes)?;
            file.persist()
        }
    }
}

/// Copies the file at `path` to a new file in the same folder, and returns its path.
///
/// `word` is part of the name: `metrics.jsonl` becomes `metrics.damaged-0001.jsonl`, with the first
/// free number. No file is replaced.
///
/// # Errors
///
/// An I/O error.
///
/// # Examples
///
/// ```
/// use core_types::files::{self, AtomicFolder};
///
/// # let folder = AtomicFolder::new(std::env::temp_dir().join("example"))?;
/// let path = folder.path().join("metrics.jsonl");
/// std::fs::write(&path, b"{\"loss\":")?;
/// for number in 1..=2 {
///     let copy = files::back_up(&path, "damaged")?;
///     assert!(copy.ends_with(format!("metrics.damaged-000{number}.jsonl")));
/// }
/// # Ok::<(), std::io::Error>(())
/// ```
pub fn back_up(path: impl AsRef<Path>, word: &str) -> io::Result<PathBuf> {
    let path = path.as_ref();
    let mut file = AtomicFile::replacing(path)?;
    io::copy(&mut File::open(path)?, &mut file)?;
    file.sync()?;
    let mut number = 1_u64;
    loop {
        let copy = path.with_file_name(numbered_name(path, word, number));
        match file.publish_new(&copy) {
            Err(error) if error.kind() == ErrorKind::AlreadyExists => number += 1,
            result => return result.map(|()| copy),
        }
    }
}

/// Returns the name of `path` with a word and a number before its extension.
fn numbered_name(path: &Path, word: &str, number: u64) -> OsString {
    let mut name = path.file_stem().unwrap_or_default().to_owned();
    name.push(format!(".{word}-{number:04}"));
    if let Some(extension) = path.extension() {
        name.push(".");
        name.push(extension);
    }
    name
}
