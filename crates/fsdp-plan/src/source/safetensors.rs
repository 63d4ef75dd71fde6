//! Headers of safetensors files: a length, then a JSON text.

use std::{
    borrow::Cow,
    collections::BTreeMap,
    io::{self, Read},
    ops::Range,
};

use core_types::human::Printable;
use serde::Deserialize;

use super::{
    entries::{HeaderMetadata, JsonEntries, NamedEntry, check_unique_parameters},
    parse,
};
use crate::{
    error::{Error, Result, SourceError},
    param::{ParameterInfo, parse_dtype},
};

/// Size of the length field at the start of a safetensors file, in bytes.
pub const PREFIX_LEN: u64 = 8;

/// Limit on the length of a header in bytes, as in the `safetensors` crate.
pub const MAX_HEADER_LEN: u64 = 100_000_000;

/// Returns the length of the header after `prefix`, the first bytes of a safetensors file.
///
/// Callers can then read only the part of a file that [`from_safetensors`] needs.
///
/// # Errors
///
/// [`SourceError::Header`] above [`MAX_HEADER_LEN`], and for the pointer that Git LFS leaves in place of a
/// file.
pub fn header_len(prefix: [u8; 8]) -> Result<u64> {
    // The first line of a pointer is `version https://git-lfs.github.com/spec/v1`.
    if prefix == *b"version " {
        let pointer = "it is a pointer of Git LFS: `git lfs pull` fetches the file";
        return Err(header_error(pointer.into()));
    }
    let len = u64::from_le_bytes(prefix);
    if len <= MAX_HEADER_LEN {
        return Ok(len);
    }
    Err(header_error(format!("safetensors header has {len} bytes, the limit is {MAX_HEADER_LEN}")))
}

/// Reads the parameters from the start of a safetensors file, in the order of their tensors in the
/// file.
///
/// `bytes` must cover the whole header; bytes after the header are ignored. [`SafetensorsHeader`]
/// also gives the position of each tensor.
///
/// # Errors
///
/// The errors of [`SafetensorsHeader::parse`].
///
/// # Examples
///
/// ```
/// let json = r#"{"bias": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}"#;
/// let mut file = (json.len() as u64).to_le_bytes().to_vec();
/// file.extend(json.as_bytes());
///
/// let parameters = fsdp_plan::source::from_safetensors(&file)?;
/// assert_eq!((parameters[0].name(), parameters[0].shape()), ("bias", &[2][..]));
/// # Ok::<(), fsdp_plan::Error>(())
/// ```
pub fn from_safetensors(bytes: &[u8]) -> Result<Vec<ParameterInfo>> {
    Ok(SafetensorsHeader::parse(bytes)?.tensors.into_iter().map(|tensor| tensor.info).collect())
}

/// The header of a safetensors file: its tensors and their byte ranges.
///
/// A header is always consistent: tensors are contiguous, the size of each matches its shape and
/// dtype, and names are distinct. The caller must compare [`file_len`](Self::file_len) with the
/// length of the file.
///
/// # Examples
///
/// ```
/// use fsdp_plan::support::SafetensorsHeader;
///
/// let json = r#"{
///     "__metadata__": {"step": "7"},
///     "bias": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
/// }"#;
/// let mut file = (json.len() as u64).to_le_bytes().to_vec();
/// file.extend(json.as_bytes());
/// file.extend([1.5_f32, 2.5].map(f32::to_le_bytes).as_flattened());
///
/// let header = SafetensorsHeader::read(&file[..])?;
/// assert_eq!(header.file_len, file.len() as u64);
/// assert_eq!(header.metadata()?["step"], "7");
///
/// let bias = &header.tensors[0];
/// assert_eq!((bias.info.name(), bias.info.shape()), ("bias", &[2][..]));
/// let start = usize::try_from(bias.range.start).unwrap();
/// assert_eq!(file[start..][..4], 1.5_f32.to_le_bytes());
/// # Ok::<(), fsdp_plan::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct SafetensorsHeader {
    /// Tensors in the order of the file.
    pub tensors: Vec<StoredTensor>,
    metadata: Option<HeaderMetadata>,
    /// Length of the file, which ends with its last tensor.
    pub file_len: u64,
}

/// A tensor of a safetensors file.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct StoredTensor {
    /// Name, shape and dtype.
    pub info: ParameterInfo,
    /// Byte range, from the start of the file.
    pub range: Range<u64>,
}

impl SafetensorsHeader {
    /// Reads a header from the start of a file, and nothing after it.
    ///
    /// Memory is proportional to the bytes read, not to the stated length.
    ///
    /// # Errors
    ///
    /// [`SourceError::Unreadable`] if `reader` fails, and the errors of [`parse`](Self::parse).
    pub fn read(mut reader: impl Read) -> Result<Self> {
        let mut bytes = Vec::new();
        reader.by_ref().take(PREFIX_LEN).read_to_end(&mut bytes).map_err(read_error)?;
        if let Ok(prefix) = bytes.as_slice().try_into() {
            reader.take(header_len(prefix)?).read_to_end(&mut bytes).map_err(read_error)?;
        }
        Self::parse(&bytes)
    }

    /// Parses a header from `bytes`, which must cover the whole header.
    ///
    /// # Errors
    ///
    /// - [`SourceError::Header`] if the header is too long or ends early, or if tensors overlap, leave gaps,
    ///   or do not match their shape;
    /// - [`SourceError::Malformed`], [`Error::UnknownDtype`] or [`Error::InvalidParameter`];
    /// - [`Error::TotalTooLarge`] if the end of a tensor exceeds 64 bits.
    pub fn parse(bytes: &[u8]) -> Result<Self> {
        let text = header_text(bytes)?;
        let JsonEntries { entries, metadata } =
            parse::<JsonEntries<HeaderEntry<'_>>>(HEADER, text)?;
        let mut tensor_entries = entries?;
        check_unique_parameters(tensor_entries.len(), |position| &tensor_entries[position].0)?;
        // An empty tensor begins where the next tensor does; the stable sort keeps the two in the
        // order of the text.
        tensor_entries.sort_by_key(|&(_, offsets)| offsets);
        let mut data_len = 0;
        for (info, offsets) in &tensor_entries {
            data_len = next_end(data_len, info, *offsets)?;
        }
        let data_start = PREFIX_LEN + text.len() as u64;
        let file_len = data_start.checked_add(data_len).ok_or(TOO_LARGE)?;
        let tensors = tensor_entries.into_iter().map(|(info, (begin, end))| {
            let range = data_start + begin..data_start + end;
            StoredTensor { info, range }
        });
        Ok(Self { tensors: tensors.collect(), metadata, file_len })
    }

    /// Returns the entry `__metadata__`, empty if there is none.
    ///
    /// # Errors
    ///
    /// [`SourceError::Malformed`] if the entry is not an object of strings, or occurs twice.
    pub fn metadata(&self) -> Result<&BTreeMap<String, String>> {
        static EMPTY: BTreeMap<String, String> = BTreeMap::new();
        match &self.metadata {
            None => Ok(&EMPTY),
            Some(HeaderMetadata::Texts(texts)) => Ok(texts),
            Some(HeaderMetadata::Other(_)) => {
                let reason = String::from("__metadata__ must be one object of strings");
                Err(Error::Source(SourceError::Malformed { what: HEADER, reason }))
            }
        }
    }
}

const HEADER: &str = "safetensors header";

const TOO_LARGE: Error = Error::TotalTooLarge { what: "the bytes of the tensors of a file" };

#[expect(clippy::needless_pass_by_value, reason = "the signature that `map_err` expects")]
fn read_error(error: io::Error) -> Error {
    Error::Source(SourceError::Unreadable { kind: error.kind(), reason: error.to_string() })
}

/// Returns the JSON text of the header.
fn header_text(bytes: &[u8]) -> Result<&[u8]> {
    let available = bytes.len() as u64;
    let truncated = |needed| {
        header_error(format!(
            "safetensors header ends at byte {needed}, but the file has only {available} bytes"
        ))
    };
    let (&prefix, rest) = bytes.split_first_chunk::<8>().ok_or_else(|| truncated(PREFIX_LEN))?;
    let len = header_len(prefix)?;
    #[expect(clippy::expect_used, reason = "`header_len` rejects lengths above 100 MB")]
    let end = usize::try_from(len).expect("the length of a header fits into 32 bits");
    rest.get(..end).ok_or_else(|| truncated(PREFIX_LEN + len))
}

#[derive(Deserialize)]
struct HeaderEntry<'a> {
    #[serde(borrow)]
    dtype: Cow<'a, str>,
    shape: Vec<u64>,
    data_offsets: (u64, u64),
}

impl NamedEntry for HeaderEntry<'_> {
    /// The parameter with its begin and end offsets.
    type Named = (ParameterInfo, (u64, u64));

    fn into_named(self, name: String) -> Result<Self::Named> {
        let dtype = parse_dtype(&name, &self.dtype)?;
        Ok((ParameterInfo::new(name, self.shape, dtype)?, self.data_offsets))
    }
}

/// Returns the end of a parameter, which must begin at the end of the previous one.
fn next_end(expected_begin: u64, info: &ParameterInfo, (begin, end): (u64, u64)) -> Result<u64> {
    let expected_end = expected_begin.checked_add(info.bytes()).ok_or(TOO_LARGE)?;
    if (begin, end) == (expected_begin, expected_end) {
        return Ok(end);
    }
    Err(header_error(format!(
        "tensor {} is at bytes {begin}..{end}, expected {expected_begin}..{expected_end}",
        Printable(info.name())
    )))
}

fn header_error(reason: String) -> Error {
    Error::Source(SourceError::Header { reason })
}
