//! Reading of a slot's file: first its header, later ranges of its items.

use std::{collections::BTreeMap, fs::File, io::Read, ops::Range, path::Path, sync::Arc};

use candle_core::{DType, Tensor};
use fsdp_plan::support::{SafetensorsHeader, StoredTensor};

use crate::{
    disk::{AtPath, check_file},
    error::{Error, Result, file_part::FilePart},
    run::{
        key::{ParameterAndKind, TensorKey},
        shard::FileOrigin,
    },
    safetensors::{
        checksum::Checksum,
        finite::AllowedValues,
        stored::{self, StoredItems},
    },
};

/// The entry for a file in the index.
#[derive(Clone, Debug)]
pub(in crate::run) struct ExpectedFile {
    /// Its length.
    pub(in crate::run) bytes: u64,
    /// The run, step and slot that it belongs to.
    pub(in crate::run) origin: FileOrigin,
    /// The checksum of its header.
    pub(in crate::run) header: Checksum,
}

/// Opens a file and returns its pieces, if it is the expected one.
///
/// # Errors
///
/// [`Error::Damaged`], [`Error::Io`] and the errors of [`parse`].
pub(in crate::run) fn open(
    path: &Path,
    expected: &ExpectedFile,
) -> Result<Vec<(ParameterAndKind, TensorPiece)>> {
    let found = check_file(path).at(path)?.len();
    if found != expected.bytes {
        let expected = expected.bytes;
        let reason = format!("the file has {found} bytes, expected {expected}");
        return Err(Error::damaged(path, reason));
    }
    let (header, pieces) = parse(path, File::open(path).at(path)?, expected)?;
    stored::check_extent(path, &header, found)?;
    Ok(pieces)
}

/// Parses the header of the file at `path`, read from `file`, and returns its pieces.
///
/// # Errors
///
/// [`Error::Header`], [`Error::Damaged`], [`Error::Unsuitable`] and
/// [`ParameterError::UnknownDtype`](crate::ParameterError::UnknownDtype).
pub(in crate::run) fn parse(
    path: &Path,
    file: impl Read,
    expected: &ExpectedFile,
) -> Result<(SafetensorsHeader, Vec<(ParameterAndKind, TensorPiece)>)> {
    let (header, bytes) = stored::parse(path, file)?;
    let texts = header.metadata().map_err(|cause| Error::header(path, cause))?;
    check_origin(path, texts, &expected.origin)?;
    stored::check(path, expected.header, Checksum::compute(&bytes), || FilePart::Header)?;
    let file: Arc<Path> = path.into();
    let pieces: Result<_> =
        header.tensors.iter().map(|tensor| TensorPiece::new(&file, tensor, texts)).collect();
    let pieces = pieces?;
    Ok((header, pieces))
}

/// Rejects an intact file of another step, run or slot.
fn check_origin(
    path: &Path,
    texts: &BTreeMap<String, String>,
    expected: &FileOrigin,
) -> Result<()> {
    match FileOrigin::from_texts(texts) {
        Some(found) if found != *expected => {
            Err(Error::unsuitable(path, format!("the file is {found}, not {expected}")))
        }
        // A header without an origin has another checksum too.
        _ => Ok(()),
    }
}

/// Some items of a parameter, in a file.
#[derive(Debug)]
pub(in crate::run) struct TensorPiece {
    /// The index of its first item in the parameter.
    start: usize,
    len: usize,
    stored: StoredItems,
}

impl TensorPiece {
    /// Returns the piece of a tensor in `file`, with its owner; `texts` contain the checksums.
    fn new(
        file: &Arc<Path>,
        tensor: &StoredTensor,
        texts: &BTreeMap<String, String>,
    ) -> Result<(ParameterAndKind, Self)> {
        let Some((key, len)) = checked_range(tensor) else {
            let name = tensor.info.name();
            let reason = format!("{name:?} is not {{kind}}/{{parameter}}@{{first item}}");
            return Err(Error::unsuitable(file, reason));
        };
        let stored = StoredItems::new(file, tensor, texts)?;
        stored.require_checksums()?;
        Ok((key.parameter_and_kind(), Self { start: key.start, len, stored }))
    }

    /// Returns the type of the items.
    pub(in crate::run) fn dtype(&self) -> DType {
        self.stored.dtype()
    }

    /// Returns the piece's range of the parameter's items.
    pub(in crate::run) fn items(&self) -> Range<usize> {
        self.start..self.start + self.len
    }

    /// Reads a range of the parameter's items within this piece, as one dimension on the processor,
    /// and checks their blocks.
    ///
    /// # Errors
    ///
    /// [`Error::Damaged`], [`Error::NotFinite`], [`Error::Io`].
    pub(in crate::run) fn read(
        &self,
        items: Range<usize>,
        values: AllowedValues,
    ) -> Result<Tensor> {
        self.stored.read(items.start - self.start..items.end - self.start, values)
    }

    /// Reads and checks all items.
    ///
    /// # Errors
    ///
    /// The errors of [`read`](Self::read).
    pub(in crate::run) fn verify(&self, values: AllowedValues) -> Result<()> {
        self.stored.verify(values)
    }
}

/// Returns the key and the number of items of a tensor, if they do not overflow.
fn checked_range(stored: &StoredTensor) -> Option<(TensorKey<'_>, usize)> {
    let key = TensorKey::parse(stored.info.name())?;
    let len = usize::try_from(stored.info.numel()).ok()?;
    usize::try_from(stored.info.bytes()).ok()?;
    key.start.checked_add(len)?;
    Some((key, len))
}
