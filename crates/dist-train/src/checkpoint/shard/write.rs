//! Writing the file of a slot.

use std::{
    cmp::Reverse,
    collections::BTreeMap,
    fs::File,
    io::{self, Seek, Write},
    mem,
    ops::Range,
    path::Path,
};

use bytemuck::cast_slice;
use candle_core::{CpuStorage, DType, Device, Storage, Tensor};
use safetensors::tensor::{Dtype, TensorInfo};
use serde::{Serialize, Serializer, ser::SerializeMap};

use crate::{
    checkpoint::{
        checksum::{BLOCK, Checksum, to_digits},
        disk::At,
        finite::Values,
        shard::{
            Origin,
            scan::{PIECE, Scan, Scanned},
        },
    },
    error::{Doing, Result, checkpoint::CheckpointError},
    stored::beginning,
};

/// What the index says of a file.
#[derive(Clone, Copy, Debug)]
pub(in crate::checkpoint) struct Written {
    /// Its length.
    pub(in crate::checkpoint) bytes: u64,
    /// The checksum of its header.
    pub(in crate::checkpoint) header: Checksum,
}

/// Writes tensors, and waits until they are on disk.
///
/// Tensors are written once, from the first to the last, and summed up on the way; their checksums
/// then take the places that the header has left for them. No more than one tensor is copied at
/// once. (`safetensors::serialize_to_file` writes a file for its owner alone, and replaces what is
/// there; a checkpoint's files have the permissions that the system gives new ones.)
///
/// # Errors
///
/// [`CheckpointError::NotFinite`], [`CheckpointError::Header`] if a file with so many tensors could
/// not be read, [`CheckpointError::Io`].
pub(in crate::checkpoint) fn write(
    path: &Path,
    origin: &Origin,
    tensors: &BTreeMap<String, Tensor>,
    values: Values,
) -> Result<Written> {
    let ordered = in_file_order(tensors);
    let mut header = Header::new(origin, &ordered);
    let places = header.to_bytes(path)?;
    let mut file = File::create_new(path).at(path)?;
    file.write_all(&places).at(path)?;
    for (name, tensor) in ordered {
        header.set_checksums(name, &write_items(&file, path, (name, tensor), values)?);
    }
    let header = header.to_bytes(path)?;
    debug_assert_eq!(header.len(), places.len(), "every checksum has its place");
    file.rewind().at(path)?;
    file.write_all(&header).at(path)?;
    file.sync_all().at(path)?;
    Ok(Written { bytes: file.metadata().at(path)?.len(), header: Checksum::of(&header) })
}

/// Wide types first and then by name, as the `safetensors` crate orders them: so every tensor is
/// aligned to its type.
fn in_file_order(tensors: &BTreeMap<String, Tensor>) -> Vec<(&str, &Tensor)> {
    let mut ordered: Vec<_> =
        tensors.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect();
    ordered.sort_by_key(|(_, tensor)| Reverse(Dtype::from(tensor.dtype())));
    ordered
}

/// The header of a file, as it is written.
struct Header<'a> {
    /// The origin of the file, and the checksums of the tensors under their names.
    metadata: BTreeMap<String, String>,
    tensors: Vec<(&'a str, TensorInfo)>,
}

impl<'a> Header<'a> {
    /// The header of a file with these tensors, with zeros in the place of checksums.
    fn new(origin: &Origin, ordered: &[(&'a str, &Tensor)]) -> Self {
        let mut header = Self { metadata: origin.to_texts(), tensors: Vec::new() };
        let mut end = 0;
        for &(name, tensor) in ordered {
            let begin = end;
            end += n_bytes(tensor);
            let zeros = vec![Checksum::default(); n_bytes(tensor).div_ceil(BLOCK)];
            header.set_checksums(name, &zeros);
            let dtype = tensor.dtype().into();
            let shape = tensor.dims().to_vec();
            header.tensors.push((name, TensorInfo { dtype, shape, data_offsets: (begin, end) }));
        }
        header
    }

    fn set_checksums(&mut self, name: &str, blocks: &[Checksum]) {
        self.metadata.insert(name.to_owned(), to_digits(blocks));
    }

    /// The beginning of a file: the length of the header, and the header.
    fn to_bytes(&self, path: &Path) -> Result<Vec<u8>> {
        let json = serde_json::to_vec(self)
            .map_err(|cause| CheckpointError::Json { path: path.to_owned(), cause })?;
        beginning(&json, path)
    }
}

impl Serialize for Header<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(1 + self.tensors.len()))?;
        map.serialize_entry("__metadata__", &self.metadata)?;
        for (name, info) in &self.tensors {
            map.serialize_entry(name, info)?;
        }
        map.end()
    }
}

fn n_bytes(tensor: &Tensor) -> usize {
    tensor.elem_count() * tensor.dtype().size_in_bytes()
}

/// Appends the items of a tensor, which may lie on any device and be a view; returns the checksums
/// of its blocks.
fn write_items(
    file: &File,
    path: &Path,
    (name, tensor): (&str, &Tensor),
    values: Values,
) -> Result<Vec<Checksum>> {
    let mut blocks = Blocks::new(file, tensor, values);
    let here = tensor.contiguous().and_then(|items| items.to_device(&Device::Cpu));
    match here.and_then(|items| copy_items(&items, &mut blocks)) {
        Err(candle_core::Error::Io(cause)) => return Err(cause).at(path),
        written => written.doing("copying a tensor for a checkpoint")?,
    }
    blocks.end_block().at(path)?;
    match blocks.refused {
        None => Ok(blocks.checksums),
        Some(item) => {
            let tensor = name.to_owned();
            Err(CheckpointError::NotFinite { path: path.to_owned(), tensor, item }.into())
        }
    }
}

/// Writes the items of a contiguous tensor on the processor.
fn copy_items(items: &Tensor, blocks: &mut Blocks<'_>) -> candle_core::Result<()> {
    let (storage, layout) = items.storage_and_layout();
    if let Storage::Cpu(storage) = &*storage
        && let Some((start, end)) = layout.contiguous_offsets()
        && let Some(bytes) = bytes_of(storage, start..end)
    {
        return Ok(blocks.write_all(bytes)?);
    }
    // candle locks it again. It copies the tensor, and hands over item by item: that takes several
    // times as long as to write them.
    drop(storage);
    items.write_bytes(blocks)
}

/// Some items as a file has them, if they lie in memory so.
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
        // The crates of other types do not promise it.
        _ => return None,
    })
}

/// Collects the bytes of a tensor, writes them block by block, and scans each.
struct Blocks<'a> {
    file: &'a File,
    dtype: DType,
    values: Values,
    /// The block that is being filled.
    bytes: Vec<u8>,
    /// Those of the blocks that are written.
    checksums: Vec<Checksum>,
    /// The first item that is refused, in the blocks that are written.
    refused: Option<usize>,
}

impl<'a> Blocks<'a> {
    fn new(file: &'a File, tensor: &Tensor, values: Values) -> Self {
        let bytes = Vec::with_capacity(n_bytes(tensor).min(BLOCK));
        let dtype = tensor.dtype();
        Self { file, dtype, values, bytes, checksums: Vec::new(), refused: None }
    }

    /// Writes the block that is being filled, if there is anything in it.
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
        let mut scan = Scan::new(self.dtype, self.values);
        for piece in bytes.chunks(PIECE) {
            self.file.write_all(piece)?;
            scan.add(piece);
        }
        let Scanned { checksum, refused } = scan.finish();
        let first = self.checksums.len() * BLOCK / self.dtype.size_in_bytes();
        self.refused = self.refused.or(refused.map(|item| first + item));
        self.checksums.push(checksum);
        Ok(())
    }

    /// Takes bytes that fill a block at least. Whole blocks are written from where they lie.
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

impl Write for Blocks<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.write_all(bytes)?;
        Ok(bytes.len())
    }

    /// candle hands over item by item: this must be no more than the copy of one.
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
    use std::fs;

    use super::*;

    #[test]
    fn blocks_are_the_same_however_they_come() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("blocks");
        let len = 3 * BLOCK + 5;
        let tensor = Tensor::zeros(len, DType::U8, &Device::Cpu).unwrap();
        let bytes: Vec<u8> = (0..251).cycle().take(len).collect();
        let expected: Vec<_> = bytes.chunks(BLOCK).map(Checksum::of).collect();
        for cut in [1 << 10, 4097, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, len] {
            let file = File::create(&path).unwrap();
            let mut blocks = Blocks::new(&file, &tensor, Values::Finite);
            for bytes in bytes.chunks(cut) {
                blocks.write_all(bytes).unwrap();
            }
            blocks.end_block().unwrap();
            assert_eq!(blocks.checksums, expected, "{cut} bytes at once");
            assert!(fs::read(&path).unwrap() == bytes, "{cut} bytes at once");
        }
    }
}
