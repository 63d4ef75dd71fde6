//! A text file with the places of its samples.

use std::{
    io::{self, BufReader, Read},
    path::{Path, PathBuf},
};

use crate::{
    error::{BoxError, Error, Result},
    read::{
        file::{DataFile, FileStamp},
        line_index::{IndexPlace, LineIndex, SamplePlace},
        split_text::{BYTE_ORDER_MARK, SplitRule, count_newlines},
    },
};

/// The path, stamp and sample index of a text file. It keeps no open file: callers get one from
/// [`reopen`](Self::reopen).
#[derive(Debug)]
pub(crate) struct IndexedText {
    path: PathBuf,
    stamp: FileStamp,
    /// Hash of the length and of the first and last 4 KiB.
    edge_hash: u64,
    /// Whether the last line ends in a newline.
    ends_in_newline: bool,
    pub(crate) index: LineIndex,
}

/// The bytes of a sample with its separators.
#[derive(Debug)]
pub(crate) struct RawSample {
    pub(crate) bytes: Vec<u8>,
    place: SamplePlace,
}

impl IndexedText {
    pub(crate) fn open(path: &Path, rule: SplitRule, place: &IndexPlace) -> Result<Self> {
        let file = DataFile::open(path)?;
        let index = LineIndex::open(&file, rule, place)?;
        let ends_in_newline = file.read(file.len().saturating_sub(1)..file.len())? == b"\n";
        let edge_hash = file.edge_hash()?;
        Ok(Self { path: path.into(), stamp: file.stamp, edge_hash, ends_in_newline, index })
    }

    /// Opens the file, which must not have changed.
    pub(crate) fn reopen(&self) -> Result<DataFile> {
        DataFile::reopen(&self.path, self.stamp)
    }

    /// Returns true if the line that ends at `position` has a newline, as every line has but perhaps the
    /// last.
    pub(crate) fn is_line_end(&self, position: u64) -> bool {
        position < self.stamp.n_bytes || self.ends_in_newline
    }

    /// Returns numbers that tell this content from another's.
    pub(crate) fn identity(&self) -> [u64; 2] {
        [self.edge_hash, self.index.len()]
    }

    /// Reads a sample, without a byte order mark at the start of the file, for callers that check later
    /// that the file is unchanged.
    pub(crate) fn read_unchecked(&self, file: &DataFile, index: u64) -> Result<RawSample> {
        let place = self.index.place(index)?;
        let mut bytes = file.read_unchecked(place.bytes.clone())?;
        if place.bytes.start == 0 && bytes.starts_with(BYTE_ORDER_MARK) {
            bytes.drain(..BYTE_ORDER_MARK.len());
        }
        Ok(RawSample { bytes, place })
    }

    /// Returns the error of an invalid sample, with the number of its first line that is not empty.
    pub(crate) fn invalid_line(
        &self,
        file: &DataFile,
        sample: &RawSample,
        cause: impl Into<BoxError>,
    ) -> Error {
        let n_blank = sample.bytes.iter().take_while(|byte| byte.is_ascii_whitespace()).count();
        let n_blank_lines = count_newlines(&sample.bytes[..n_blank]);
        // The index knows line numbers only at some positions: count the newlines from there to the
        // sample.
        let known = sample.place.known_position;
        let gap = file.reader_at(known).take(sample.place.bytes.start - known);
        let newlines = BufReader::new(gap).bytes().map(|byte| Ok(u64::from(byte? == b'\n')));
        match newlines.sum::<io::Result<u64>>() {
            Ok(n_lines) => Error::Line {
                path: self.path.clone(),
                line: sample.place.lines_before_known + n_lines + n_blank_lines + 1,
                cause: cause.into(),
            },
            Err(error) => Error::io(&self.path)(error),
        }
    }
}
