//! Files that are read at any position by several threads at once.

use std::{
    fs::{File, Metadata},
    io::{self, ErrorKind, Read},
    ops::Range,
    path::{Path, PathBuf},
    time::UNIX_EPOCH,
};

use core_types::Fingerprint;

use crate::error::{Error, Result};

/// The length and the time of a file: another content has another stamp, unless the file system has
/// no times and the length is the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FileStamp {
    pub(crate) n_bytes: u64,
    /// Nanoseconds since 1970; 0 if there is no time.
    pub(crate) modified: u64,
}

impl FileStamp {
    fn new(metadata: &Metadata) -> Self {
        let modified = metadata.modified().ok();
        let since_1970 = modified.and_then(|time| time.duration_since(UNIX_EPOCH).ok());
        let nanoseconds = since_1970.and_then(|time| u64::try_from(time.as_nanos()).ok());
        Self { n_bytes: metadata.len(), modified: nanoseconds.unwrap_or(0) }
    }
}

/// A file that must not change while it is read.
#[derive(Debug)]
pub(crate) struct DataFile {
    pub(crate) path: PathBuf,
    file: File,
    pub(crate) stamp: FileStamp,
}

impl DataFile {
    pub(crate) fn open(path: &Path) -> Result<Self> {
        let file = File::open(path).map_err(Error::io(path))?;
        let metadata = file.metadata().map_err(Error::io(path))?;
        if metadata.is_dir() {
            return Err(Error::io(path)(ErrorKind::IsADirectory.into()));
        }
        let stamp = FileStamp::new(&metadata);
        Ok(Self { path: path.into(), file, stamp })
    }

    /// Opens a file again, which must have the same stamp as before.
    pub(crate) fn reopen(path: &Path, stamp: FileStamp) -> Result<Self> {
        let file = Self::open(path)?;
        check_unchanged(path, stamp, file.stamp)?;
        Ok(file)
    }

    pub(crate) fn len(&self) -> u64 {
        self.stamp.n_bytes
    }

    /// Reads the bytes of a range, as far as the file has them.
    ///
    /// The stamp is compared after the read, because a file may change at any time before.
    pub(crate) fn read(&self, range: Range<u64>) -> Result<Vec<u8>> {
        let bytes = self.read_unchecked(range);
        // Report a change first: it explains a failed read.
        self.check_unchanged()?;
        bytes
    }

    /// Like [`read`](Self::read), for callers that compare the stamp later.
    pub(crate) fn read_unchecked(&self, range: Range<u64>) -> Result<Vec<u8>> {
        // A range beyond the end would allocate memory for nothing.
        let n_bytes = range.end.min(self.len()).saturating_sub(range.start);
        let n_bytes = usize::try_from(n_bytes)
            .map_err(|_| Error::io(&self.path)(ErrorKind::OutOfMemory.into()))?;
        let mut bytes = vec![0; n_bytes];
        self.reader_at(range.start).read_exact(&mut bytes).map_err(Error::io(&self.path))?;
        Ok(bytes)
    }

    /// Returns an error if the file has changed since it was opened.
    pub(crate) fn check_unchanged(&self) -> Result<()> {
        let metadata = self.file.metadata().map_err(Error::io(&self.path))?;
        check_unchanged(&self.path, self.stamp, FileStamp::new(&metadata))
    }

    /// Returns a reader from a position to the end.
    pub(crate) fn reader_at(&self, position: u64) -> FileReader<'_> {
        FileReader { file: &self.file, position }
    }

    /// Returns a hash of the length and of the first and the last bytes.
    ///
    /// A copy of the file has another time, but the same hash.
    pub(crate) fn edge_hash(&self) -> Result<u64> {
        const EDGE_BYTES: u64 = 4096;
        let mut fingerprint = Fingerprint::new();
        fingerprint.write_u64(self.len());
        fingerprint.write_bytes(&self.read(0..EDGE_BYTES)?);
        fingerprint.write_bytes(&self.read(self.len().saturating_sub(EDGE_BYTES)..self.len())?);
        Ok(fingerprint.finish())
    }
}

fn check_unchanged(path: &Path, expected: FileStamp, found: FileStamp) -> Result<()> {
    if expected == found {
        return Ok(());
    }
    Err(Error::FileChanged { path: path.into(), expected: expected.n_bytes, found: found.n_bytes })
}

/// Reads a file from a position to the end, without the file's own position.
#[derive(Debug)]
pub(crate) struct FileReader<'a> {
    file: &'a File,
    pub(crate) position: u64,
}

impl Read for FileReader<'_> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        #[cfg(unix)]
        let n_read = std::os::unix::fs::FileExt::read_at(self.file, bytes, self.position)?;
        #[cfg(windows)]
        let n_read = std::os::windows::fs::FileExt::seek_read(self.file, bytes, self.position)?;
        self.position += n_read as u64;
        Ok(n_read)
    }
}
