//! Names of unfinished files and folders.

use std::{
    collections::hash_map::RandomState,
    ffi::OsStr,
    hash::BuildHasher,
    io::{self, ErrorKind},
    path::{Path, PathBuf},
    process,
    sync::atomic::{AtomicU64, Ordering},
};

use super::sync::{between_calls, parent_folder};

const PREFIX: &str = ".";
const SUFFIX: &str = ".partial";

/// Returns true if this is a name of an unfinished [`AtomicFile`](super::AtomicFile) or
/// [`AtomicFolder`](super::AtomicFolder).
///
/// If only one program writes to a folder, for example under a lock, it may remove such files,
/// which interrupted programs left.
///
/// # Examples
///
/// ```
/// use core_types::files::{AtomicFile, is_partial};
///
/// # let folder = core_types::files::AtomicFolder::new(std::env::temp_dir().join("example"))?;
/// let file = AtomicFile::new(folder.path().join("model.safetensors"))?;
/// assert!(file.path().file_name().is_some_and(is_partial));
/// assert!(!is_partial("notes.partial"));
/// # Ok::<(), std::io::Error>(())
/// ```
pub fn is_partial(name: impl AsRef<OsStr>) -> bool {
    let digits =
        name.as_ref().to_str().and_then(|name| name.strip_prefix(PREFIX)?.strip_suffix(SUFFIX));
    digits.is_some_and(|digits| digits.len() == 16 && digits.bytes().all(is_hex_digit))
}

fn is_hex_digit(byte: u8) -> bool {
    matches!(byte, b'0'..=b'9' | b'a'..=b'f')
}

/// Creates a file or folder under a random name in the folder of `target`, and returns its path.
pub(super) fn create_beside<T>(
    target: &Path,
    create: impl Fn(&Path) -> io::Result<T>,
) -> io::Result<(T, PathBuf)> {
    /// Two random names are equal once in 2^64; repeated failures are a fault of the file system.
    const MAX_TRIES: usize = 8;
    let folder = parent_folder(target);
    for _ in 1..MAX_TRIES {
        let path = folder.join(format!("{PREFIX}{:016x}{SUFFIX}", random_number()));
        between_calls(&path);
        match create(&path) {
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
            result => return result.map(|created| (created, path)),
        }
    }
    Err(io::Error::new(ErrorKind::AlreadyExists, "every random name is taken"))
}

/// Returns an unpredictable number.
///
/// The keys of a `RandomState` come from the random numbers of the system, for which the standard
/// library has no other interface. A forked process has its parent's keys, so the process id is
/// hashed, too.
fn random_number() -> u64 {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    // Relaxed is enough: the numbers must differ, and they order no other memory access.
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    RandomState::new().hash_one((process::id(), count))
}
