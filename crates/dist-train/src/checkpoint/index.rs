//! The index of a checkpoint: what it holds, and in which files.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::File,
    io::{self, Read, Write},
    path::Path,
};

use fsdp_plan::source::MAX_HEADER_LEN;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::{
    checkpoint::{
        checksum::Checksum,
        disk::{At, check_file},
        seal,
        shard::{self, Origin, read::Expected, write::Written},
    },
    error::{
        Result,
        checkpoint::{CheckpointError, FilePart},
    },
    progress::TrainerState,
};

/// The name of the index in its folder.
pub(super) const INDEX: &str = "index.json";
/// The form of the index and of the files that it lists.
const FORMAT_VERSION: u32 = 2;
/// The form before it, which had no checksums and no names of runs.
const WITHOUT_CHECKSUMS: u32 = 1;
/// What is read of an index at most: it names what the headers of its files describe, and is no
/// longer than one may be.
const MAX_BYTES: u64 = MAX_HEADER_LEN;

/// What is written into the index.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Index {
    format_version: u32,
    /// What the run is called, if it has a name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) run: Option<String>,
    /// How many steps had been taken.
    pub(super) step: u64,
    /// The model's parameters and their shapes.
    pub(super) parameters: BTreeMap<String, Vec<usize>>,
    pub(super) files: Vec<Listed>,
    /// How far training was, if a trainer wrote it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) trainer: Option<TrainerState>,
    /// Whatever else the run had to remember.
    pub(super) state: Value,
    // The last member of the text, `checksum`, is added and checked by `seal`.
}

/// What every version of the index says.
#[derive(Deserialize)]
struct Version {
    format_version: u32,
}

/// A file of a checkpoint.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Listed {
    pub(super) name: String,
    bytes: u64,
    /// The checksum of its header, which has those of its tensors.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    header: Option<Checksum>,
}

impl Listed {
    pub(super) fn new(name: String, written: Written) -> Self {
        Self { name, bytes: written.bytes, header: Some(written.header) }
    }
}

impl Index {
    pub(super) fn new(
        run: Option<String>,
        step: u64,
        parameters: BTreeMap<String, Vec<usize>>,
        files: Vec<Listed>,
        trainer: Option<TrainerState>,
        state: Value,
    ) -> Self {
        let format_version = FORMAT_VERSION;
        Self { format_version, run, step, parameters, files, trainer, state }
    }

    /// Writes it, and waits until it is on disk.
    pub(super) fn write(&self, path: &Path) -> Result<()> {
        let text = self.to_text(path)?;
        let found = text.len() as u64;
        // What would be refused when it is read must not replace an older checkpoint.
        if found > MAX_BYTES {
            let path = path.to_owned();
            return Err(CheckpointError::IndexTooLong { path, found, max: MAX_BYTES }.into());
        }
        // Nor what is nested too deep.
        Self::parse(path, &text)?;
        let mut file = File::create_new(path).at(path)?;
        file.write_all(&text).at(path)?;
        file.sync_all().at(path)
    }

    /// What is written to `path`.
    pub(super) fn to_text(&self, path: &Path) -> Result<Vec<u8>> {
        let text = serde_json::to_vec_pretty(self).map_err(|cause| json_error(path, cause))?;
        Ok(seal::add(text))
    }

    /// The index at `path`, and the checksum of its text, which is that of all that the checkpoint
    /// holds: the text has the checksums of headers, and those have the ones of tensors.
    pub(super) fn read(path: &Path) -> Result<(Self, Checksum)> {
        let text = read_text(path).at(path)?;
        Ok((Self::parse(path, &text)?, Checksum::of(&text)))
    }

    /// Reads the text of the index at `path`.
    pub(super) fn parse(path: &Path, text: &[u8]) -> Result<Self> {
        // The version is all that the forms of the index have in common.
        let Version { format_version } =
            serde_json::from_slice(text).map_err(|cause| json_error(path, cause))?;
        let is_known = (WITHOUT_CHECKSUMS..=FORMAT_VERSION).contains(&format_version);
        if !is_known {
            return Err(CheckpointError::FormatVersion {
                path: path.to_owned(),
                found: format_version,
                supported: FORMAT_VERSION,
            }
            .into());
        }
        let checksum = seal::check(path, text)?;
        // One that says another version may be damaged there, and then has a checksum all the same.
        if checksum.is_none() && format_version != WITHOUT_CHECKSUMS {
            return Err(no_checksum(path, FilePart::Index).into());
        }
        let index: Self = serde_json::from_slice(text).map_err(|cause| json_error(path, cause))?;
        index.check_files(path)?;
        Ok(index)
    }

    /// Whether damage of its files would be noticed.
    pub(super) fn has_checksums(&self) -> bool {
        self.format_version != WITHOUT_CHECKSUMS
    }

    /// What a file must be.
    pub(super) fn expected(&self, listed: &Listed) -> Expected {
        let origin =
            || Origin { run: self.run.clone(), step: self.step, file: listed.name.clone() };
        Expected { bytes: listed.bytes, header: listed.header.map(|checksum| (origin(), checksum)) }
    }

    fn check_files(&self, path: &Path) -> Result<(), CheckpointError> {
        let mut names = BTreeSet::new();
        for Listed { name, header, .. } in &self.files {
            if !shard::is_name(name) || !names.insert(name) {
                let (path, file) = (path.to_owned(), name.clone());
                return Err(CheckpointError::Listed { path, file });
            }
            if header.is_some() != self.has_checksums() {
                return Err(no_checksum(&path.with_file_name(name), FilePart::Header));
            }
        }
        Ok(())
    }
}

fn no_checksum(path: &Path, part: FilePart) -> CheckpointError {
    CheckpointError::NoChecksum { path: path.to_owned(), part }
}

/// An error of the JSON in the index at `path`.
pub(super) fn json_error(path: &Path, cause: serde_json::Error) -> CheckpointError {
    CheckpointError::Json { path: path.to_owned(), cause }
}

fn read_text(path: &Path) -> io::Result<Vec<u8>> {
    let mut text = Vec::new();
    check_file(path)?;
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
        let written = Written { bytes: 376, header: Checksum::of(b"a header") };
        let files = vec![Listed::new(shard::name(0, 1), written)];
        Index::new(Some("c0ffee".to_owned()), 7, parameters, files, None, state)
    }

    #[test]
    fn an_index_that_could_not_be_read_is_not_written() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(INDEX);
        let state = Value::String("x".repeat(usize::try_from(MAX_BYTES).unwrap()));
        let error = index(state).write(&path).unwrap_err();
        let Error::Checkpoint(CheckpointError::IndexTooLong { found, max, .. }) = error else {
            panic!("{error}")
        };
        assert!(found > max && !path.exists());
    }

    #[test]
    fn an_index_that_is_nested_too_deep_is_not_written() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(INDEX);
        let nested = |depth| (0..depth).fold(Value::Null, |inner, _| Value::Array(vec![inner]));
        let refused = index(nested(200)).write(&path);
        assert!(matches!(refused, Err(Error::Checkpoint(CheckpointError::Json { .. }))));
        assert!(!path.exists());
        index(nested(100)).write(&path).unwrap();
        assert_eq!(Index::read(&path).unwrap().0.state, nested(100));
    }

    #[test]
    fn every_changed_bit_and_every_missing_end_is_noticed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(INDEX);
        // Text that looks like the end of an index, in the middle of one.
        let state =
            json!({"x": ",\n  \"checksum\": \"00000000\"\n}", "y": [1.5, null, "\u{1f980}"]});
        index(state.clone()).write(&path).unwrap();
        let (read, checksum) = Index::read(&path).unwrap();
        assert_eq!((read.state, read.step, read.run.as_deref()), (state, 7, Some("c0ffee")));
        let text = std::fs::read(&path).unwrap();
        assert_eq!(checksum, Checksum::of(&text));
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
