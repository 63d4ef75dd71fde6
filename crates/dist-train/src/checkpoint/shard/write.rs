//! Writing the file of a slot.

use std::{
    cmp::Reverse,
    collections::BTreeMap,
    fs::File,
    io::{self, Seek, Write},
    path::Path,
};

use candle_core::{DType, Device, Tensor};
use fsdp_plan::source::SafetensorsHeader;
use safetensors::tensor::{Dtype, TensorInfo};
use serde::{Serialize, Serializer, ser::SerializeMap};

use crate::{
    checkpoint::{
        checksum::{BLOCK, Checksum, to_digits},
        disk::At,
        finite::Values,
        shard::Origin,
    },
    error::{Doing, Result, checkpoint::CheckpointError},
};

/// Headers begin and end at multiples of this, so that tensors are aligned.
const ALIGNMENT: usize = 8;

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
        let padded_len = json.len().next_multiple_of(ALIGNMENT);
        let mut bytes = (padded_len as u64).to_le_bytes().to_vec();
        bytes.extend(json);
        bytes.resize(size_of::<u64>() + padded_len, b' ');
        // What would be refused when it is read must not be written: a header that is too long.
        SafetensorsHeader::parse(&bytes)
            .map_err(|cause| CheckpointError::Header { path: path.to_owned(), cause })?;
        Ok(bytes)
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
    match here.and_then(|items| items.write_bytes(&mut blocks)) {
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

/// Collects the bytes of a tensor, and writes them block by block. Each block is summed up, and
/// searched for what is not finite, while it is in the processor's caches.
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
        let first = self.checksums.len() * BLOCK / self.dtype.size_in_bytes();
        let refused = self.values.first_refused(self.dtype, &self.bytes);
        self.refused = self.refused.or(refused.map(|item| first + item));
        self.checksums.push(Checksum::of(&self.bytes));
        self.file.write_all(&self.bytes)?;
        self.bytes.clear();
        Ok(())
    }
}

impl Write for Blocks<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let len = bytes.len().min(BLOCK - self.bytes.len());
        self.bytes.extend_from_slice(&bytes[..len]);
        if self.bytes.len() == BLOCK {
            self.end_block()?;
        }
        Ok(len)
    }

    /// Does nothing: a block ends when it is full.
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
