//! Tensors in safetensors files: where their bytes lie, and how some of their items are read.

use std::{
    fs::{self, File},
    io::{Read, Seek, SeekFrom},
    ops::Range,
    path::Path,
    sync::Arc,
};

use candle_core::{DType, Device, Tensor};
use fsdp_plan::source::{SafetensorsHeader, StoredTensor};

use crate::{
    checkpoint::disk::At,
    dtype::dtype_of,
    error::{Doing, Result, checkpoint::CheckpointError, parameter::ParameterError},
};

/// The items of a tensor in a file.
#[derive(Clone, Debug)]
pub(crate) struct StoredItems {
    file: Arc<Path>,
    dtype: DType,
    /// Where the first item begins in the file.
    offset: u64,
}

impl StoredItems {
    /// Those of a tensor that the header of `file` describes.
    ///
    /// # Errors
    ///
    /// [`ParameterError::UnknownDtype`] if candle cannot hold them.
    pub(crate) fn new(file: &Arc<Path>, tensor: &StoredTensor) -> Result<Self> {
        let info = &tensor.info;
        let dtype = dtype_of(info.dtype()).ok_or_else(|| ParameterError::UnknownDtype {
            name: info.name().to_owned(),
            dtype: info.dtype().to_string(),
        })?;
        Ok(Self { file: Arc::clone(file), dtype, offset: tensor.range.start })
    }

    /// The file.
    pub(crate) fn path(&self) -> &Path {
        &self.file
    }

    /// The type of the items.
    pub(crate) fn dtype(&self) -> DType {
        self.dtype
    }

    /// The size of an item.
    pub(crate) fn item_bytes(&self) -> usize {
        self.dtype.size_in_bytes()
    }

    /// Reads items that the tensor has, and no others: one dimension, on the processor.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::Io`] if the file cannot be read.
    pub(crate) fn read(&self, items: Range<usize>) -> Result<Tensor> {
        let mut bytes = vec![0; items.len() * self.item_bytes()];
        let mut file = self.bytes_from(items.start * self.item_bytes())?;
        file.read_exact(&mut bytes).at(&self.file)?;
        self.tensor(&bytes)
    }

    /// The file, to be read from a byte of the tensor on.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::Io`] if it cannot be opened.
    pub(crate) fn bytes_from(&self, first: usize) -> Result<File> {
        let mut file = File::open(&self.file).at(&self.file)?;
        file.seek(SeekFrom::Start(self.offset + first as u64)).at(&self.file)?;
        Ok(file)
    }

    /// The items whose bytes these are: one dimension, on the processor.
    ///
    /// # Errors
    ///
    /// [`Error::Tensor`](crate::Error::Tensor) if candle fails.
    pub(crate) fn tensor(&self, bytes: &[u8]) -> Result<Tensor> {
        let len = bytes.len() / self.item_bytes();
        Tensor::from_raw_buffer(bytes, self.dtype, &[len], &Device::Cpu)
            .doing("reading a tensor of a file")
    }
}

/// Reads the header of a file, which must be as long as the header says.
///
/// # Errors
///
/// [`CheckpointError::Io`], [`CheckpointError::Header`] or [`CheckpointError::Extent`].
pub(crate) fn header(path: &Path) -> Result<SafetensorsHeader> {
    let header = parse(path, File::open(path).at(path)?)?;
    check_extent(path, &header, fs::metadata(path).at(path)?.len())?;
    Ok(header)
}

/// Reads the header of the file at `path` from `file`, and nothing behind it.
///
/// # Errors
///
/// [`CheckpointError::Header`].
pub(crate) fn parse(path: &Path, file: impl Read) -> Result<SafetensorsHeader, CheckpointError> {
    SafetensorsHeader::read(file)
        .map_err(|cause| CheckpointError::Header { path: path.to_owned(), cause })
}

/// Checks that a file of `found` bytes is as long as its header says.
///
/// # Errors
///
/// [`CheckpointError::Extent`].
pub(crate) fn check_extent(
    path: &Path,
    header: &SafetensorsHeader,
    found: u64,
) -> Result<(), CheckpointError> {
    let described = header.file_len();
    if described == found {
        return Ok(());
    }
    Err(CheckpointError::Extent { path: path.to_owned(), described, found })
}

/// Headers begin and end at multiples of this, so that tensors are aligned.
pub(crate) const ALIGNMENT: usize = 8;

/// The beginning of a safetensors file: the length of its header, and the header.
///
/// # Errors
///
/// [`CheckpointError::Header`] for one that would be refused when it is read: it is too long.
pub(crate) fn beginning(json: &[u8], path: &Path) -> Result<Vec<u8>> {
    let padded_len = json.len().next_multiple_of(ALIGNMENT);
    let mut bytes = (padded_len as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(json);
    bytes.resize(size_of::<u64>() + padded_len, b' ');
    SafetensorsHeader::parse(&bytes)
        .map_err(|cause| CheckpointError::Header { path: path.to_owned(), cause })?;
    Ok(bytes)
}
