//! Rows of a fixed number of bytes in a file, and windows over them.

use core_types::Fingerprint;

use crate::{
    error::{Error, Result},
    read::file::DataFile,
};

/// Windows of neighboring rows; at first each row is one.
#[derive(Debug)]
pub(crate) struct FileRows {
    pub(crate) file: DataFile,
    /// Position of the first row; all rows are in the file.
    start: u64,
    n_rows: u64,
    row_bytes: u64,
    /// Number of rows in a window.
    pub(crate) length: u64,
    stride: u64,
}

impl FileRows {
    pub(crate) fn new(file: DataFile, start: u64, n_rows: u64, row_bytes: u64) -> Self {
        Self { file, start, n_rows, row_bytes, length: 1, stride: 1 }
    }

    /// Makes each `length` neighboring rows a window; windows begin `stride` rows apart.
    pub(crate) fn windows(self, length: u64, stride: u64) -> Result<Self> {
        for (name, value) in [("the length of a window", length), ("the stride", stride)] {
            if value == 0 {
                return Err(Error::setting(name, &value, "at least 1"));
            }
        }
        Ok(Self { length, stride, ..self })
    }

    /// Returns the number of windows.
    pub(crate) fn len(&self) -> u64 {
        self.n_rows.checked_sub(self.length).map_or(0, |last_start| last_start / self.stride + 1)
    }

    /// Reads the bytes of a window.
    pub(crate) fn read(&self, index: u64) -> Result<Vec<u8>> {
        let len = self.len();
        if index >= len {
            return Err(Error::IndexOutOfRange { index, len });
        }
        // All windows are in the file, so these products are below its length.
        let start = self.start + index * self.stride * self.row_bytes;
        self.file.read(start..start + self.length * self.row_bytes)
    }

    pub(crate) fn fingerprint(&self) -> Option<u64> {
        let mut fingerprint = Fingerprint::new();
        fingerprint.extend([self.file.edge_hash().ok()?, self.length, self.stride]);
        Some(fingerprint.finish())
    }
}
