//! The reader of ranges of items in safetensors files.

use std::{
    fs::{self, File},
    io::{Read, Seek, SeekFrom},
    ops::Range,
    path::Path,
    sync::Arc,
};

use candle_core::{DType, Device, Tensor};
use fsdp_plan::support::{SafetensorsHeader, StoredTensor};

use crate::{
    disk::AtPath,
    dtype::dtype_of,
    error::{Doing, Error, Result, parameter::ParameterError},
};

/// The items of a tensor in a file.
#[derive(Clone, Debug)]
pub(crate) struct StoredItems {
    file: Arc<Path>,
    dtype: DType,
    /// The position of the first item in the file.
    offset: u64,
}

impl StoredItems {
    /// Returns the items of a tensor that the header of `file` describes.
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

    /// Returns the path of the file.
    pub(crate) fn path(&self) -> &Path {
        &self.file
    }

    /// Returns the type of the items.
    pub(crate) fn dtype(&self) -> DType {
        self.dtype
    }

    /// Returns the size of an item in bytes.
    pub(crate) fn item_bytes(&self) -> usize {
        self.dtype.size_in_bytes()
    }

    /// Reads some of the tensor's items as one dimension on the processor.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] if the file cannot be read.
    pub(crate) fn read(&self, items: Range<usize>) -> Result<Tensor> {
        let mut bytes = vec![0; items.len() * self.item_bytes()];
        let mut file = self.bytes_from(items.start * self.item_bytes())?;
        file.read_exact(&mut bytes).at(&self.file)?;
        self.tensor(&bytes)
    }

    /// Opens the file at a byte of the tensor.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] if it cannot be opened.
    pub(crate) fn bytes_from(&self, first: usize) -> Result<File> {
        let mut file = File::open(&self.file).at(&self.file)?;
        file.seek(SeekFrom::Start(self.offset + first as u64)).at(&self.file)?;
        Ok(file)
    }

    /// Makes a tensor of one dimension on the processor from the bytes of some items.
    ///
    /// # Errors
    ///
    /// [`Error::Tensor`] if candle fails.
    pub(crate) fn tensor(&self, bytes: &[u8]) -> Result<Tensor> {
        let len = bytes.len() / self.item_bytes();
        Tensor::from_raw_buffer(bytes, self.dtype, &[len], &Device::Cpu)
            .doing("reading a tensor of a file")
    }
}

/// Reads the header of a file, and checks the length of the file.
///
/// # Errors
///
/// [`Error::Io`], [`Error::Header`] or [`Error::Extent`].
pub(crate) fn header(path: &Path) -> Result<SafetensorsHeader> {
    let header = parse(path, File::open(path).at(path)?)?;
    check_extent(path, &header, fs::metadata(path).at(path)?.len())?;
    Ok(header)
}

/// Reads the header of the file at `path` from `file`, without reading further.
///
/// # Errors
///
/// [`Error::Header`].
pub(crate) fn parse(path: &Path, file: impl Read) -> Result<SafetensorsHeader> {
    SafetensorsHeader::read(file).map_err(|cause| Error::header(path, cause))
}

/// Checks that a file of `found` bytes has the length that its header describes.
///
/// # Errors
///
/// [`Error::Extent`].
pub(crate) fn check_extent(path: &Path, header: &SafetensorsHeader, found: u64) -> Result<()> {
    let described = header.file_len();
    if described == found {
        return Ok(());
    }
    Err(Error::Extent { path: path.to_owned(), described, found })
}

/// The alignment of the start and end of headers, so that tensors are aligned.
pub(crate) const ALIGNMENT: usize = 8;

/// Returns the first bytes of a safetensors file: the length of its header, and the header.
///
/// # Errors
///
/// [`Error::Header`] if the header is too long to be read.
pub(crate) fn header_bytes(json: &[u8], path: &Path) -> Result<Vec<u8>> {
    let padded_len = json.len().next_multiple_of(ALIGNMENT);
    let mut bytes = (padded_len as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(json);
    bytes.resize(size_of::<u64>() + padded_len, b' ');
    SafetensorsHeader::parse(&bytes).map_err(|cause| Error::header(path, cause))?;
    Ok(bytes)
}
