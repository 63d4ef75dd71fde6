//! The index of a checkpoint: its parameters, its files, and the states of trainer and run.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::File,
    io::{self, Read},
    path::Path,
};

use fsdp_plan::support::MAX_HEADER_LEN;
use serde::{Deserialize, Serialize};
use serde_json::{Value, value::RawValue};

use crate::{
    disk::{AtPath, check_file, write_file},
    error::{Error, Result},
    run::{
        footer,
        shard::{self, FileOrigin, read::ExpectedFile},
    },
    safetensors::{checksum::Checksum, tensor_file::WrittenFile},
};

/// The name of the index in its folder.
pub(super) const INDEX: &str = "index.json";
/// The format version of the index and its files.
const FORMAT_VERSION: u32 = 1;
/// The largest index that can be read. It lists the names in the headers of its files, so it may be
/// as long as a header.
const MAX_BYTES: u64 = MAX_HEADER_LEN;

/// The index of a checkpoint.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Index {
    format_version: u32,
    /// The name of the run, if it has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) run: Option<String>,
    /// The number of completed steps.
    pub(super) step: u64,
    /// The model's parameters and their shapes.
    pub(super) parameters: BTreeMap<String, Vec<usize>>,
    pub(super) files: Vec<IndexedFile>,
    /// The state of the trainer that wrote the checkpoint, if it has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) trainer: Option<Box<RawValue>>,
    /// The state of the run.
    pub(super) state: Value,
    // The footer adds and checks the last member of the text, `checksum`.
}

/// The part of an index that all format versions share.
#[derive(Deserialize)]
struct VersionField {
    format_version: u32,
}

/// A file of a checkpoint.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct IndexedFile {
    pub(super) name: String,
    bytes: u64,
    /// The checksum of the file's header, which contains the checksums of its tensors.
    header: Checksum,
}

impl IndexedFile {
    pub(super) fn new(name: String, written: WrittenFile) -> Self {
        Self { name, bytes: written.bytes, header: written.header }
    }
}

impl Index {
    pub(super) fn new(
        run: Option<String>,
        step: u64,
        parameters: BTreeMap<String, Vec<usize>>,
        files: Vec<IndexedFile>,
        trainer: Option<Box<RawValue>>,
        state: Value,
    ) -> Self {
        let format_version = FORMAT_VERSION;
        Self { format_version, run, step, parameters, files, trainer, state }
    }

    /// Writes the index and syncs it to disk.
    pub(super) fn write(&self, path: &Path) -> Result<()> {
        let text = self.to_text(path)?;
        let found = text.len() as u64;
        // An unreadable index must not replace an older checkpoint.
        if found > MAX_BYTES {
            let reason =
                format!("the index has {found} bytes, more than the maximum of {MAX_BYTES}");
            return Err(Error::unsuitable(path, reason));
        }
        // Parsing also rejects a state that is nested too deeply.
        Self::parse(path, &text)?;
        write_file(path, &text)
    }

    /// Returns the text of the index at `path`.
    pub(super) fn to_text(&self, path: &Path) -> Result<Vec<u8>> {
        let text = serde_json::to_vec_pretty(self).map_err(|cause| json_error(path, cause))?;
        Ok(footer::add_footer(text))
    }

    /// Reads the index at `path`. Also returns the checksum of its text, which covers the whole
    /// checkpoint: the text contains the checksums of headers, and headers contain the checksums of
    /// tensors.
    pub(super) fn read(path: &Path) -> Result<(Self, Checksum)> {
        let text = read_text(path).at(path)?;
        Ok((Self::parse(path, &text)?, Checksum::compute(&text)))
    }

    /// Reads the text of the index at `path`.
    pub(super) fn parse(path: &Path, text: &[u8]) -> Result<Self> {
        // Only the version is common to all formats of the index.
        let VersionField { format_version } =
            serde_json::from_slice(text).map_err(|cause| json_error(path, cause))?;
        if format_version != FORMAT_VERSION {
            let reason =
                format!("format version {format_version} is not supported, only {FORMAT_VERSION}");
            return Err(Error::unsuitable(path, reason));
        }
        footer::check_footer(path, text)?;
        let index: Self = serde_json::from_slice(text).map_err(|cause| json_error(path, cause))?;
        index.check_files(path)?;
        Ok(index)
    }

    /// Returns the length, origin and checksum that a file of the index must have.
    pub(super) fn expected_file(&self, file: &IndexedFile) -> ExpectedFile {
        let origin = FileOrigin { run: self.run.clone(), step: self.step, file: file.name.clone() };
        ExpectedFile { bytes: file.bytes, origin, header: file.header }
    }

    /// Checks that each file is a shard in the folder of the index, and is listed once.
    fn check_files(&self, path: &Path) -> Result<()> {
        let mut names = BTreeSet::new();
        for IndexedFile { name, .. } in &self.files {
            if !shard::is_name(name) || !names.insert(name) {
                let reason = format!("{name:?} is listed twice, or is not a shard in this folder");
                return Err(Error::unsuitable(path, reason));
            }
        }
        Ok(())
    }
}

/// Returns the error for malformed JSON in the index at `path`.
pub(super) fn json_error(path: &Path, cause: serde_json::Error) -> Error {
    Error::Json { path: path.to_owned(), cause }
}

fn read_text(path: &Path) -> io::Result<Vec<u8>> {
    let mut text = Vec::new();
    if check_file(path)?.len() > MAX_BYTES {
        let fault = format!("it is longer than {MAX_BYTES} bytes");
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, fault));
    }
    File::open(path)?.take(MAX_BYTES).read_to_end(&mut text)?;
    Ok(text)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::error::Error;

    fn index(state: Value) -> Index {
        let parameters = [("a".to_owned(), vec![2, 3]), ("b".to_owned(), vec![])].into();
        let written = WrittenFile { bytes: 376, header: Checksum::compute(b"a header") };
        let files = vec![IndexedFile::new(shard::name(0, 1), written)];
        Index::new(Some("c0ffee".to_owned()), 7, parameters, files, None, state)
    }

    #[test]
    fn too_long_index_is_not_written() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(INDEX);
        let state = Value::String("x".repeat(usize::try_from(MAX_BYTES).unwrap()));
        let error = index(state).write(&path).unwrap_err();
        assert!(error.to_string().contains(&format!("the maximum of {MAX_BYTES}")), "{error}");
        assert!(!path.exists());
    }

    #[test]
    fn too_deep_index_is_not_written() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(INDEX);
        let nested = |depth| (0..depth).fold(Value::Null, |inner, _| Value::Array(vec![inner]));
        let rejected = index(nested(200)).write(&path);
        assert!(matches!(rejected, Err(Error::Json { .. })));
        assert!(!path.exists());
        index(nested(100)).write(&path).unwrap();
        assert_eq!(Index::read(&path).unwrap().0.state, nested(100));
    }

    #[test]
    fn every_flipped_bit_is_detected() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(INDEX);
        // Text that looks like the end of an index, in the middle of it.
        let state =
            json!({"x": ",\n  \"checksum\": \"00000000\"\n}", "y": [1.5, null, "\u{1f980}"]});
        index(state.clone()).write(&path).unwrap();
        let (read, checksum) = Index::read(&path).unwrap();
        assert_eq!((read.state, read.step, read.run.as_deref()), (state, 7, Some("c0ffee")));
        let text = std::fs::read(&path).unwrap();
        assert_eq!(checksum, Checksum::compute(&text));
        for bit in 0..text.len() * 8 {
            let mut other = text.clone();
            other[bit / 8] ^= 1 << (bit % 8);
            assert!(Index::parse(&path, &other).is_err(), "bit {bit}");
        }
        for len in 0..text.len() {
            assert!(Index::parse(&path, &text[..len]).is_err(), "{len} bytes");
        }
        assert!(Index::parse(&path, &[&text[..], b"\n"].concat()).is_err());
    }
}
