//! The writer of safetensors files.

use std::{
    cmp::Reverse,
    collections::BTreeMap,
    io::{self, Seek, Write},
    mem,
    ops::Range,
    path::{Path, PathBuf},
};

use bytemuck::cast_slice;
use candle_core::{CpuStorage, DType, Device, Storage, Tensor};
use fsdp_plan::{SourceError, support::MAX_HEADER_LEN};
use safetensors::tensor::{Dtype, TensorInfo as FileTensorInfo};
use serde::{Serialize, Serializer, ser::SerializeMap};

use crate::{
    disk::{AtPath, between_calls},
    error::{Doing, Error, Result, parameter::ParameterError},
    safetensors::{
        checksum::{BLOCK, Checksum, HEADER_KEY, tensor_key, to_digits},
        finite::AllowedValues,
        scan::{BlockScan, PIECE, ScanResult},
        stored::header_bytes,
    },
};

/// The name, shape and dtype of a tensor.
#[derive(Clone, Debug, PartialEq)]
pub struct TensorInfo {
    /// The name in the file or the model.
    pub name: String,
    /// The dimensions.
    pub shape: Vec<usize>,
    /// The dtype of the items.
    pub dtype: DType,
}

impl TensorInfo {
    /// Describes `tensor` under a name.
    ///
    /// # Examples
    ///
    /// ```
    /// use candle_core::{DType, Device, Tensor};
    /// use dist_checkpoint::TensorInfo;
    ///
    /// let info = TensorInfo::new("weight", &Tensor::zeros((2, 3), DType::F32, &Device::Cpu)?);
    /// assert_eq!((info.shape, info.dtype), (vec![2, 3], DType::F32));
    /// # Ok::<(), candle_core::Error>(())
    /// ```
    pub fn new(name: impl Into<String>, tensor: &Tensor) -> Self {
        Self { name: name.into(), shape: tensor.dims().to_vec(), dtype: tensor.dtype() }
    }

    /// Sorts tensors as a file needs them: wide dtypes first, so that all are aligned. Tensors of
    /// one dtype keep their order.
    pub(crate) fn sort(tensors: &mut [Self]) {
        tensors.sort_by_key(|info| Reverse(Dtype::from(info.dtype)));
    }

    pub(crate) fn n_bytes(&self) -> usize {
        let size = self.dtype.size_in_bytes();
        self.shape.iter().fold(size, |bytes, &dim| bytes.saturating_mul(dim))
    }
}

/// A safetensors file that is written tensor by tensor.
///
/// It copies at most one tensor at a time. Tensors may be views, on any device.
///
/// The metadata of the file contains checksums: `crc32` of the header, and `crc32:NAME` of each
/// block of 1 MiB of a tensor, 8 hexadecimal digits for each. [`StoredWeights`] compares them.
///
/// [`StoredWeights`]: crate::StoredWeights
///
/// # Examples
///
/// ```
/// use std::collections::BTreeMap;
///
/// use candle_core::{Device, Tensor};
/// use dist_checkpoint::{TensorFile, TensorInfo, files::AtomicFile};
///
/// # let folder = tempfile::tempdir()?;
/// # let path = folder.path().join("logits.safetensors");
/// let logits = Tensor::new(&[[0.5_f32, 1.5]], &Device::Cpu)?;
/// let tensors = [TensorInfo::new("logits", &logits)];
/// let mut file = TensorFile::create(AtomicFile::new(&path)?, &path, &tensors, BTreeMap::new())?;
/// file.write(&logits)?;
/// file.finish()?.persist()?;
/// let read = candle_core::safetensors::load(&path, &Device::Cpu)?;
/// assert_eq!(read["logits"].to_vec2::<f32>()?, [[0.5, 1.5]]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct TensorFile<W> {
    out: W,
    /// The path that errors name.
    path: PathBuf,
    header: FileHeader,
    values: AllowedValues,
    n_written: usize,
}

/// The length and checksum of a file, for the index.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WrittenFile {
    /// The length.
    pub(crate) bytes: u64,
    /// The checksum of the header.
    pub(crate) header: Checksum,
}

impl<W: Write + Seek> TensorFile<W> {
    /// Writes the header of a file of these tensors to `out`, which is the file at `path`. The
    /// checksums are zeros until the file is finished.
    ///
    /// The items must follow in this order. Readers map files into memory: tensors are aligned if
    /// those of larger dtypes come first.
    ///
    /// # Errors
    ///
    /// [`Error::Header`] if a file with this many tensors could not be read, [`Error::Io`].
    pub fn create(
        mut out: W,
        path: impl Into<PathBuf>,
        tensors: &[TensorInfo],
        metadata: BTreeMap<String, String>,
    ) -> Result<Self> {
        let path = path.into();
        check_header_len(&path, tensors)?;
        let header = FileHeader::new(tensors, metadata);
        let bytes = header.to_bytes(&path)?;
        between_calls();
        out.write_all(&bytes).at(&path)?;
        Ok(Self { out, path, header, values: AllowedValues::default(), n_written: 0 })
    }

    /// Accepts infinite numbers and NaN, which are errors by default.
    #[must_use]
    pub fn allow_non_finite(self) -> Self {
        self.with_values(AllowedValues::Any)
    }

    pub(crate) fn with_values(self, values: AllowedValues) -> Self {
        Self { values, ..self }
    }

    /// Writes the items of the next tensor.
    ///
    /// # Errors
    ///
    /// [`Error::Unsuitable`] if all tensors are written already, [`ParameterError::Shape`] or
    /// [`ParameterError::Dtype`] if it is not the next tensor, [`Error::NotFinite`], [`Error::Io`].
    pub fn write(&mut self, tensor: &Tensor) -> Result<()> {
        let Some((info, _)) = self.header.tensors.get(self.n_written) else {
            return Err(self.count_error(self.n_written + 1));
        };
        ParameterError::check_shape(&info.name, tensor.dims(), &info.shape)?;
        ParameterError::check_dtype(&info.name, tensor.dtype(), info.dtype)?;
        let mut blocks = BlockWriter::new(&mut self.out, info, self.values);
        let local = tensor.contiguous().and_then(|items| items.to_device(&Device::Cpu));
        match local.and_then(|items| copy_items(&items, &mut blocks)) {
            Err(candle_core::Error::Io(cause)) => return Err(cause).at(&self.path),
            written => written.doing("copying a tensor to a file")?,
        }
        blocks.end_block().at(&self.path)?;
        if let Some(item) = blocks.rejected {
            let (path, tensor) = (self.path.clone(), info.name.clone());
            return Err(Error::NotFinite { path, tensor, item });
        }
        self.header.metadata.insert(tensor_key(&info.name), to_digits(&blocks.checksums));
        self.n_written += 1;
        Ok(())
    }

    /// Writes the checksums after all tensors, and returns the file. It may not be synced to disk
    /// yet.
    ///
    /// # Errors
    ///
    /// [`Error::Unsuitable`] if tensors are missing, [`Error::Io`].
    pub fn finish(self) -> Result<W> {
        Ok(self.finish_described()?.0)
    }

    /// Finishes like [`finish`](Self::finish), and returns the entry for the index too.
    pub(crate) fn finish_described(mut self) -> Result<(W, WrittenFile)> {
        if self.n_written < self.header.tensors.len() {
            return Err(self.count_error(self.n_written));
        }
        let unchecked = Checksum::compute(&self.header.to_bytes(&self.path)?);
        self.header.metadata.insert(HEADER_KEY.to_owned(), unchecked.to_string());
        let header = self.header.to_bytes(&self.path)?;
        let bytes = (header.len() + self.header.n_bytes()) as u64;
        between_calls();
        self.out.rewind().at(&self.path)?;
        self.out.write_all(&header).at(&self.path)?;
        Ok((self.out, WrittenFile { bytes, header: Checksum::compute(&header) }))
    }

    fn count_error(&self, found: usize) -> Error {
        let expected = self.header.tensors.len();
        let reason = format!("the header describes {expected} tensors, but {found} were written");
        Error::unsuitable(&self.path, reason)
    }
}

/// The header of a file.
#[derive(Debug)]
struct FileHeader {
    /// The texts of the caller, and the checksums.
    metadata: BTreeMap<String, String>,
    /// The tensors, with the positions of their bytes.
    tensors: Vec<(TensorInfo, usize)>,
}

impl FileHeader {
    fn new(tensors: &[TensorInfo], mut metadata: BTreeMap<String, String>) -> Self {
        let mut end = 0_usize;
        let mut placed = Vec::with_capacity(tensors.len());
        metadata.insert(HEADER_KEY.to_owned(), Checksum::default().to_string());
        for info in tensors {
            let zeros = vec![Checksum::default(); info.n_bytes().div_ceil(BLOCK)];
            metadata.insert(tensor_key(&info.name), to_digits(&zeros));
            placed.push((info.clone(), end));
            end = end.saturating_add(info.n_bytes());
        }
        Self { metadata, tensors: placed }
    }

    /// Returns the number of bytes of all tensors.
    fn n_bytes(&self) -> usize {
        self.tensors.last().map_or(0, |(info, begin)| begin + info.n_bytes())
    }

    fn to_bytes(&self, path: &Path) -> Result<Vec<u8>> {
        let json = serde_json::to_vec(self)
            .map_err(|cause| Error::Json { path: path.to_owned(), cause })?;
        header_bytes(&json, path)
    }
}

/// Checks that a header can hold the checksums of the tensors, before they take memory.
fn check_header_len(path: &Path, tensors: &[TensorInfo]) -> Result<()> {
    let mut len = 0_u64;
    for info in tensors {
        let n_blocks = info.n_bytes().div_ceil(BLOCK) as u64;
        len = len.saturating_add(n_blocks * Checksum::DIGITS as u64);
    }
    if len <= MAX_HEADER_LEN {
        return Ok(());
    }
    let reason = format!("safetensors header has {len} bytes, the limit is {MAX_HEADER_LEN}");
    let cause = SourceError::Header { reason };
    Err(Error::header(path, fsdp_plan::Error::Source(cause)))
}

impl Serialize for FileHeader {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        map.serialize_entry("__metadata__", &self.metadata)?;
        for (info, begin) in &self.tensors {
            let file_info = FileTensorInfo {
                dtype: info.dtype.into(),
                shape: info.shape.clone(),
                data_offsets: (*begin, begin + info.n_bytes()),
            };
            map.serialize_entry(&info.name, &file_info)?;
        }
        map.end()
    }
}

/// Writes the items of a contiguous tensor on the processor.
fn copy_items<W: Write>(
    items: &Tensor,
    blocks: &mut BlockWriter<'_, W>,
) -> candle_core::Result<()> {
    let (storage, layout) = items.storage_and_layout();
    if let Storage::Cpu(storage) = &*storage
        && let Some((start, end)) = layout.contiguous_offsets()
        && let Some(bytes) = bytes_of(storage, start..end)
    {
        return Ok(blocks.write_all(bytes)?);
    }
    // candle locks the storage again, so release the lock. candle copies the tensor and passes it
    // item by item, which takes several times as long as the write.
    drop(storage);
    items.write_bytes(blocks)
}

/// Returns the bytes of some items, if memory has the same form as a file.
fn bytes_of(storage: &CpuStorage, items: Range<usize>) -> Option<&[u8]> {
    if cfg!(target_endian = "big") {
        return None;
    }
    Some(match storage {
        CpuStorage::U8(all) => &all[items],
        CpuStorage::U32(all) => cast_slice(&all[items]),
        CpuStorage::I16(all) => cast_slice(&all[items]),
        CpuStorage::I32(all) => cast_slice(&all[items]),
        CpuStorage::I64(all) => cast_slice(&all[items]),
        CpuStorage::BF16(all) => cast_slice(&all[items]),
        CpuStorage::F16(all) => cast_slice(&all[items]),
        CpuStorage::F32(all) => cast_slice(&all[items]),
        CpuStorage::F64(all) => cast_slice(&all[items]),
        // The crates of other dtypes do not guarantee their layout.
        _ => return None,
    })
}

/// Collects the bytes of a tensor, writes them block by block, and scans each block.
struct BlockWriter<'a, W> {
    out: &'a mut W,
    dtype: DType,
    values: AllowedValues,
    /// The incomplete block.
    bytes: Vec<u8>,
    /// The checksums of the written blocks.
    checksums: Vec<Checksum>,
    /// The first rejected item in the written blocks.
    rejected: Option<usize>,
}

impl<'a, W: Write> BlockWriter<'a, W> {
    fn new(out: &'a mut W, info: &TensorInfo, values: AllowedValues) -> Self {
        let bytes = Vec::with_capacity(info.n_bytes().min(BLOCK));
        Self { out, dtype: info.dtype, values, bytes, checksums: Vec::new(), rejected: None }
    }

    /// Writes the incomplete block, unless it is empty.
    fn end_block(&mut self) -> io::Result<()> {
        if self.bytes.is_empty() {
            return Ok(());
        }
        let mut bytes = mem::take(&mut self.bytes);
        self.write_block(&bytes)?;
        bytes.clear();
        self.bytes = bytes;
        Ok(())
    }

    fn write_block(&mut self, bytes: &[u8]) -> io::Result<()> {
        let mut scan = BlockScan::new(self.dtype, self.values);
        for piece in bytes.chunks(PIECE) {
            between_calls();
            self.out.write_all(piece)?;
            scan.add(piece);
        }
        let ScanResult { checksum, rejected } = scan.finish();
        let first = self.checksums.len() * BLOCK / self.dtype.size_in_bytes();
        self.rejected = self.rejected.or(rejected.map(|item| first + item));
        self.checksums.push(checksum);
        Ok(())
    }

    /// Writes bytes of at least one block. Whole blocks are written without a copy.
    #[cold]
    fn write_blocks(&mut self, mut bytes: &[u8]) -> io::Result<()> {
        if !self.bytes.is_empty() {
            let (first, rest) = bytes.split_at(BLOCK - self.bytes.len());
            self.bytes.extend_from_slice(first);
            self.end_block()?;
            bytes = rest;
        }
        let blocks = bytes.chunks_exact(BLOCK);
        self.bytes.extend_from_slice(blocks.remainder());
        for block in blocks {
            self.write_block(block)?;
        }
        Ok(())
    }
}

impl<W: Write> Write for BlockWriter<'_, W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.write_all(bytes)?;
        Ok(bytes.len())
    }

    /// candle passes single items, so this must cost no more than a copy.
    #[inline]
    fn write_all(&mut self, bytes: &[u8]) -> io::Result<()> {
        if bytes.len() >= BLOCK - self.bytes.len() {
            return self.write_blocks(bytes);
        }
        self.bytes.extend_from_slice(bytes);
        Ok(())
    }

    /// Does nothing: a block ends when it is full.
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::io::Cursor;

    use super::*;

    #[test]
    fn impossible_sizes_are_rejected() {
        let max = usize::MAX;
        let cases: [(&[&[usize]], bool); 5] = [
            (&[&[1 << 30]], true),
            (&[&[1 << 43], &[1 << 43]], false),
            (&[&[max]], false),
            (&[&[max, 2], &[max, max]], false),
            (&[&[max, 2, 0]], false),
        ];
        for (shapes, fits) in cases {
            let info = |shape: &&[usize]| TensorInfo {
                name: format!("{shape:?}"),
                shape: shape.to_vec(),
                dtype: DType::U8,
            };
            let tensors: Vec<_> = shapes.iter().map(info).collect();
            let mut out = Cursor::new(Vec::new());
            let created = TensorFile::create(&mut out, "a", &tensors, BTreeMap::new());
            assert_eq!(created.is_ok(), fits, "{shapes:?}");
            assert!(matches!(created, Ok(_) | Err(Error::Header { .. })), "{shapes:?}");
        }
    }

    #[test]
    fn only_announced_tensors_are_written() {
        let announced = [TensorInfo { name: "a".to_owned(), shape: vec![2], dtype: DType::F32 }];
        let create = || {
            let out = Cursor::new(Vec::new());
            TensorFile::create(out, "a", &announced, BTreeMap::new()).unwrap()
        };
        for (len, dtype, is_announced) in
            [(2, DType::F32, true), (2, DType::U32, false), (3, DType::F32, false)]
        {
            let tensor = Tensor::zeros(len, dtype, &Device::Cpu).unwrap();
            assert_eq!(create().write(&tensor).is_ok(), is_announced, "{len} of {dtype:?}");
        }
        let counted = create().finish();
        assert!(matches!(counted, Err(Error::Unsuitable { .. })));
    }

    #[test]
    fn blocks_are_independent_of_write_sizes() {
        let len = 3 * BLOCK + 5;
        let info = TensorInfo { name: "a".to_owned(), shape: vec![len], dtype: DType::U8 };
        let bytes: Vec<u8> = (0..251).cycle().take(len).collect();
        let expected: Vec<_> = bytes.chunks(BLOCK).map(Checksum::compute).collect();
        for cut in [1 << 10, 4097, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, len] {
            let mut out = Vec::new();
            let mut blocks = BlockWriter::new(&mut out, &info, AllowedValues::Finite);
            for bytes in bytes.chunks(cut) {
                blocks.write_all(bytes).unwrap();
            }
            blocks.end_block().unwrap();
            assert_eq!(blocks.checksums, expected, "{cut} bytes at once");
            assert!(out == bytes, "{cut} bytes at once");
        }
    }
}
