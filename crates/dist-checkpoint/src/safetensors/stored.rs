//! The reader of ranges of items in safetensors files.

use std::{
    collections::BTreeMap,
    fs::File,
    io::{self, Read, Seek, SeekFrom},
    ops::Range,
    path::Path,
    sync::Arc,
};

use candle_core::{DType, Device, Tensor};
use fsdp_plan::support::{SafetensorsHeader, StoredTensor};

use crate::{
    disk::{AtPath, check_file},
    dtype::dtype_of,
    error::{Doing, Error, Result, file_part::FilePart, parameter::ParameterError},
    safetensors::{
        checksum::{BLOCK, Checksum, HEADER_KEY, parse_digits, tensor_key},
        finite::AllowedValues,
        scan::{BlockScan, PIECE, ScanResult},
    },
};

/// The items of a tensor in a file, with their checksums if the file has any.
#[derive(Clone, Debug)]
pub(crate) struct StoredItems {
    file: Arc<Path>,
    name: String,
    dtype: DType,
    /// The position of the first item in the file.
    offset: u64,
    /// The number of bytes of all items.
    n_bytes: usize,
    /// The checksum of each block.
    checksums: Option<Vec<Checksum>>,
}

impl StoredItems {
    /// Returns the items of a tensor that the header of `file` describes; `metadata` may contain
    /// their checksums.
    ///
    /// # Errors
    ///
    /// [`ParameterError::UnknownDtype`] if candle cannot hold them, [`Error::Damaged`] if their
    /// checksums are malformed.
    pub(crate) fn new(
        file: &Arc<Path>,
        tensor: &StoredTensor,
        metadata: &BTreeMap<String, String>,
    ) -> Result<Self> {
        let info = &tensor.info;
        let name = info.name().to_owned();
        let Some(dtype) = dtype_of(info.dtype()) else {
            let dtype = info.dtype().to_string();
            return Err(ParameterError::UnknownDtype { name, dtype }.into());
        };
        // The file is as long as its header says, so this fails only if `usize` has 32 bits.
        let n_bytes = usize::try_from(info.bytes()).map_err(|_| {
            let part = FilePart::Tensor(name.clone());
            Error::damaged(file, format!("{part} is too large for this system"))
        })?;
        let checksums = match metadata.get(&tensor_key(&name)) {
            None => None,
            Some(digits) => {
                let checksums = parse_digits(digits, n_bytes);
                Some(checksums.ok_or_else(|| bad_tensor_checksums(file, &name))?)
            }
        };
        let offset = tensor.range.start;
        Ok(Self { file: Arc::clone(file), name, dtype, offset, n_bytes, checksums })
    }

    /// Requires checksums.
    ///
    /// # Errors
    ///
    /// [`Error::Damaged`] without checksums.
    pub(crate) fn require_checksums(&self) -> Result<()> {
        match self.checksums {
            Some(_) => Ok(()),
            None => Err(bad_tensor_checksums(&self.file, &self.name)),
        }
    }

    /// Returns the path of the file.
    pub(crate) fn path(&self) -> &Path {
        &self.file
    }

    /// Returns the type of the items.
    pub(crate) fn dtype(&self) -> DType {
        self.dtype
    }

    /// Checks that the tensor has all items of a range.
    pub(crate) fn check_range(&self, items: &Range<usize>) -> Result<(), ParameterError> {
        let len = self.n_bytes / self.dtype.size_in_bytes();
        if items.start <= items.end && items.end <= len {
            return Ok(());
        }
        let (name, kind) = (self.name.clone(), "weights".to_owned());
        Err(ParameterError::Incomplete { name, kind, item: items.start.max(len) })
    }

    /// Reads a range of the tensor's items into a one-dimensional tensor on the CPU, and checks the
    /// blocks that contain them.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] if the file cannot be read, [`Error::Damaged`],
    /// [`Error::NotFinite`] if the blocks contain a number that `values` rejects.
    pub(crate) fn read(&self, items: Range<usize>, values: AllowedValues) -> Result<Tensor> {
        let size = self.dtype.size_in_bytes();
        let wanted = items.start * size..items.end * size;
        // Without checksums there is no reason to read complete blocks.
        let (begin, end) = match self.checksums {
            Some(_) => {
                let end = wanted.end.next_multiple_of(BLOCK).min(self.n_bytes);
                (wanted.start / BLOCK * BLOCK, end)
            }
            None => (wanted.start, wanted.end),
        };
        let mut bytes = vec![0; end - begin];
        let mut file = self.open_at(begin)?;
        let mut first = begin;
        for bytes in bytes.chunks_mut(BLOCK) {
            self.read_block(&mut file, first, bytes, values)?;
            first += bytes.len();
        }
        let bytes = &bytes[wanted.start - begin..wanted.end - begin];
        Tensor::from_raw_buffer(bytes, self.dtype, &[items.len()], &Device::Cpu)
            .doing("reading a tensor of a file")
    }

    /// Reads and checks all items.
    ///
    /// # Errors
    ///
    /// The errors of [`read`](Self::read).
    pub(crate) fn verify(&self, values: AllowedValues) -> Result<()> {
        let mut bytes = vec![0; self.n_bytes.min(BLOCK)];
        let mut file = self.open_at(0)?;
        for first in (0..self.n_bytes).step_by(BLOCK) {
            let len = (self.n_bytes - first).min(BLOCK);
            self.read_block(&mut file, first, &mut bytes[..len], values)?;
        }
        Ok(())
    }

    /// Opens the file at a byte of the tensor.
    fn open_at(&self, first: usize) -> Result<File> {
        let mut file = File::open(&self.file).at(&self.file)?;
        file.seek(SeekFrom::Start(self.offset + first as u64)).at(&self.file)?;
        Ok(file)
    }

    /// Reads and checks the bytes from `first` on, at most a block.
    fn read_block(
        &self,
        file: &mut File,
        first: usize,
        bytes: &mut [u8],
        values: AllowedValues,
    ) -> Result<()> {
        let mut scan = BlockScan::new(self.dtype, values);
        for piece in bytes.chunks_mut(PIECE) {
            file.read_exact(piece).at(&self.file)?;
            scan.add(piece);
        }
        let ScanResult { checksum, rejected } = scan.finish();
        if let Some(checksums) = &self.checksums {
            let part = || FilePart::Tensor(self.name.clone());
            check(&self.file, checksums[first / BLOCK], checksum, part)?;
        }
        match rejected {
            None => Ok(()),
            Some(item) => Err(Error::NotFinite {
                path: self.file.to_path_buf(),
                tensor: self.name.clone(),
                item: first / self.dtype.size_in_bytes() + item,
            }),
        }
    }
}

/// Compares the checksum of a part of a file.
///
/// # Errors
///
/// [`Error::Damaged`].
pub(crate) fn check(
    path: &Path,
    expected: Checksum,
    found: Checksum,
    part: impl FnOnce() -> FilePart,
) -> Result<()> {
    if found == expected {
        return Ok(());
    }
    let part = part();
    let reason = format!("{part} is damaged, its checksum is {found} instead of {expected}");
    Err(Error::damaged(path, reason))
}

/// Returns the error of a part whose checksums are missing, malformed or too many.
pub(crate) fn bad_checksums(path: &Path, part: &FilePart) -> Error {
    Error::damaged(path, format!("{part} has missing, extra or malformed checksums"))
}

fn bad_tensor_checksums(path: &Path, tensor: &str) -> Error {
    bad_checksums(path, &FilePart::Tensor(tensor.to_owned()))
}

/// Reads the header of a file, checks its checksum if it has one, and checks the length of the
/// file.
///
/// # Errors
///
/// [`Error::Io`], [`Error::Header`] or [`Error::Damaged`].
pub(crate) fn header(path: &Path) -> Result<SafetensorsHeader> {
    let found = check_file(path).at(path)?.len();
    let (header, bytes) = parse(path, File::open(path).at(path)?)?;
    // Metadata that is not an object of strings contains no checksums. Other writers may have it.
    if let Ok(metadata) = header.metadata() {
        check_header(path, metadata, bytes)?;
    }
    check_extent(path, &header, found)?;
    Ok(header)
}

/// Reads the header of the file at `path` from `file`, without reading further; returns its bytes
/// too.
///
/// # Errors
///
/// [`Error::Header`].
pub(crate) fn parse(path: &Path, file: impl Read) -> Result<(SafetensorsHeader, Vec<u8>)> {
    let mut recording = RecordingReader { reader: file, bytes: Vec::new() };
    let header =
        SafetensorsHeader::read(&mut recording).map_err(|cause| Error::header(path, cause))?;
    Ok((header, recording.bytes))
}

/// A reader that keeps a copy of the bytes read through it.
struct RecordingReader<R> {
    reader: R,
    bytes: Vec<u8>,
}

impl<R: Read> Read for RecordingReader<R> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let n_read = self.reader.read(bytes)?;
        self.bytes.extend_from_slice(&bytes[..n_read]);
        Ok(n_read)
    }
}

/// Checks the header's own checksum. Files of other writers have none.
fn check_header(path: &Path, metadata: &BTreeMap<String, String>, bytes: Vec<u8>) -> Result<()> {
    let malformed = || bad_checksums(path, &FilePart::Header);
    let Some(digits) = metadata.get(HEADER_KEY) else {
        let has_others = metadata.keys().any(|key| key.starts_with(HEADER_KEY));
        return if has_others { Err(malformed()) } else { Ok(()) };
    };
    let expected = Checksum::parse(digits).ok_or_else(malformed)?;
    let found = header_checksum(bytes, expected).ok_or_else(malformed)?;
    check(path, expected, found, || FilePart::Header)
}

/// Returns the checksum of a header with zeros in place of `stored`, or `None` if it lacks `stored`.
pub(crate) fn header_checksum(mut bytes: Vec<u8>, stored: Checksum) -> Option<Checksum> {
    let field = format!("\"{HEADER_KEY}\":\"{stored}\"").into_bytes();
    let start = bytes.windows(field.len()).position(|found| found == field)?;
    // The digits end before the closing quote.
    let digits_end = start + field.len() - 1;
    bytes[digits_end - Checksum::DIGITS..digits_end].fill(b'0');
    Some(Checksum::compute(&bytes))
}

/// Checks that a file of `found` bytes has the length that its header describes.
///
/// # Errors
///
/// [`Error::Damaged`].
pub(crate) fn check_extent(path: &Path, header: &SafetensorsHeader, found: u64) -> Result<()> {
    let described = header.file_len;
    if described == found {
        return Ok(());
    }
    let reason = format!("the header describes {described} bytes, but the file has {found}");
    Err(Error::damaged(path, reason))
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

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn headers_without_their_checksum_are_rejected() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.safetensors");
        for (metadata, is_valid) in [(r#"{"format":"pt"}"#, true), (r#"{"crc32:a":""}"#, false)] {
            let tensor = r#"{"dtype":"F32","shape":[0],"data_offsets":[0,0]}"#;
            let json = format!(r#"{{"__metadata__":{metadata},"a":{tensor}}}"#);
            fs::write(&path, header_bytes(json.as_bytes(), &path).unwrap()).unwrap();
            let found = header(&path);
            assert_eq!(found.is_ok(), is_valid, "{metadata}");
            assert!(matches!(found, Ok(_) | Err(Error::Damaged { .. })), "{metadata}");
        }
    }
}
