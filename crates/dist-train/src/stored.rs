//! Tensors in safetensors files: where their bytes lie, and how some of their items are read.

use std::{
    fs::{self, File},
    io::{self, Read, Seek, SeekFrom},
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

    /// The type of the items.
    pub(crate) fn dtype(&self) -> DType {
        self.dtype
    }

    /// Reads items that the tensor has, and no others: one dimension, on the processor.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::Io`] if the file cannot be read.
    pub(crate) fn read(&self, items: Range<usize>) -> Result<Tensor> {
        let bytes = self.read_bytes(&items).at(&self.file)?;
        Tensor::from_raw_buffer(&bytes, self.dtype, &[items.len()], &Device::Cpu)
            .doing("reading a tensor of a file")
    }

    fn read_bytes(&self, items: &Range<usize>) -> io::Result<Vec<u8>> {
        let size = self.dtype.size_in_bytes();
        let mut file = File::open(&self.file)?;
        file.seek(SeekFrom::Start(self.offset + (items.start * size) as u64))?;
        let mut bytes = vec![0; items.len() * size];
        file.read_exact(&mut bytes)?;
        Ok(bytes)
    }
}

/// Reads the header of a file, which must be as long as the header says.
///
/// # Errors
///
/// [`CheckpointError::Io`], [`CheckpointError::Header`] or [`CheckpointError::Extent`].
pub(crate) fn header(path: &Path) -> Result<SafetensorsHeader> {
    let header = SafetensorsHeader::read(File::open(path).at(path)?)
        .map_err(|cause| CheckpointError::Header { path: path.to_owned(), cause })?;
    let described = header.file_len();
    let found = fs::metadata(path).at(path)?.len();
    if described != found {
        return Err(CheckpointError::Extent { path: path.to_owned(), described, found }.into());
    }
    Ok(header)
}
