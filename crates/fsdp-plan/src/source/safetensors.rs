//! The header of a safetensors file: the length of a JSON text, and the text.

use std::{
    borrow::Cow,
    collections::BTreeMap,
    io::{self, Read},
    ops::Range,
};

use serde::Deserialize;

use super::{
    entries::{Entries, Entry, Metadata, unique_parameters},
    parse,
};
use crate::{
    error::{Error, Result, SourceError},
    param::{ParameterInfo, dtype_of},
};

/// The bytes at the start of a safetensors file that hold the length of its header.
pub const PREFIX_LEN: u64 = 8;

/// The longest header accepted, the same as in the `safetensors` crate.
pub const MAX_HEADER_LEN: u64 = 100_000_000;

/// The length of the header that follows `prefix`, the first bytes of a safetensors file.
///
/// With it a caller reads as much of a file as [`from_safetensors`] wants, however large the
/// tensors are.
///
/// # Errors
///
/// [`SourceError::HeaderTooLong`] above [`MAX_HEADER_LEN`].
pub fn header_len(prefix: [u8; 8]) -> Result<u64> {
    let len = u64::from_le_bytes(prefix);
    if len > MAX_HEADER_LEN {
        Err(Error::Source(SourceError::HeaderTooLong { len, max: MAX_HEADER_LEN }))
    } else {
        Ok(len)
    }
}

/// Reads the parameters of a safetensors file from its beginning, in the order in which their
/// tensors lie in the file.
///
/// `bytes` begins where the file does, and goes at least to the end of the header; what follows is
/// not looked at. [`SafetensorsHeader`] also tells where the tensors lie.
///
/// # Errors
///
/// Those of [`SafetensorsHeader::parse`].
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

/// What the header of a safetensors file says: which tensors lie in it, and where.
///
/// A header that exists is consistent: tensors lie side by side, each as long as its shape and
/// dtype ask for, and no name occurs twice. Whether the file is as long as the header says is for
/// the caller to see, by [`file_len`](Self::file_len).
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
/// assert_eq!(header.file_len(), file.len() as u64);
/// assert_eq!(header.metadata()?["step"], "7");
///
/// let bias = &header.tensors()[0];
/// assert_eq!((bias.info.name(), bias.info.shape()), ("bias", &[2][..]));
/// let start = usize::try_from(bias.range.start).unwrap();
/// assert_eq!(file[start..][..4], 1.5_f32.to_le_bytes());
/// # Ok::<(), fsdp_plan::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct SafetensorsHeader {
    tensors: Vec<StoredTensor>,
    metadata: Option<Metadata>,
    file_len: u64,
}

/// A tensor of a safetensors file.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct StoredTensor {
    /// Its name, shape and dtype.
    pub info: ParameterInfo,
    /// Its bytes, counted from the start of the file.
    pub range: Range<u64>,
}

impl SafetensorsHeader {
    /// Reads a header from the beginning of a file, and nothing behind it.
    ///
    /// Memory stays in proportion to the bytes there are, whatever length the file states.
    ///
    /// # Errors
    ///
    /// [`SourceError::Unreadable`] if `reader` fails, and those of [`parse`](Self::parse).
    pub fn read(mut reader: impl Read) -> Result<Self> {
        let mut bytes = Vec::new();
        reader.by_ref().take(PREFIX_LEN).read_to_end(&mut bytes).map_err(unreadable)?;
        if let Ok(prefix) = bytes.as_slice().try_into() {
            reader.take(header_len(prefix)?).read_to_end(&mut bytes).map_err(unreadable)?;
        }
        Self::parse(&bytes)
    }

    /// Reads a header from `bytes`, which begin where the file does and go at least to the end of
    /// the header.
    ///
    /// # Errors
    ///
    /// - [`SourceError::HeaderTooLong`] or [`SourceError::HeaderTruncated`];
    /// - [`SourceError::Malformed`],
    ///   [`ParameterError::UnknownDtype`](crate::ParameterError::UnknownDtype),
    ///   [`ParameterError::DuplicateName`](crate::ParameterError::DuplicateName) or
    ///   [`ParameterError::TooLarge`](crate::ParameterError::TooLarge);
    /// - [`Error::TotalTooLarge`] if the end of a tensor would leave 64 bits;
    /// - [`SourceError::BadOffsets`] if tensors overlap, leave gaps, or have another size than
    ///   shape and dtype say.
    pub fn parse(bytes: &[u8]) -> Result<Self> {
        let text = header(bytes)?;
        let Entries { named, metadata } = parse::<Entries<Tensor<'_>>>(HEADER, text)?;
        let mut placed = named?;
        unique_parameters(placed.len(), |position| &placed[position].0)?;
        // Tensors without bytes begin where the next one does; the sort is stable, so they stay in
        // the order of the text.
        placed.sort_by_key(|&(_, offsets)| offsets);
        let data_len =
            placed.iter().try_fold(0, |end, (info, offsets)| next_end(end, info, *offsets))?;
        let data_start = PREFIX_LEN + text.len() as u64;
        let file_len = data_start.checked_add(data_len).ok_or(TOO_LARGE)?;
        let stored = |(info, (begin, end))| StoredTensor {
            info,
            range: data_start + begin..data_start + end,
        };
        Ok(Self { tensors: placed.into_iter().map(stored).collect(), metadata, file_len })
    }

    /// Every tensor, in the order in which they lie in the file.
    pub fn tensors(&self) -> &[StoredTensor] {
        &self.tensors
    }

    /// The texts of the entry `__metadata__` by their keys; none if there is no such entry.
    ///
    /// # Errors
    ///
    /// [`SourceError::Malformed`] if the entry is anything but an object of texts, or occurs twice.
    pub fn metadata(&self) -> Result<&BTreeMap<String, String>> {
        static NONE: BTreeMap<String, String> = BTreeMap::new();
        match &self.metadata {
            None => Ok(&NONE),
            Some(Metadata::Texts(texts)) => Ok(texts),
            Some(Metadata::Other(_)) => {
                let reason = String::from("__metadata__ must be one object of texts");
                Err(Error::Source(SourceError::Malformed { what: HEADER, reason }))
            }
        }
    }

    /// The length of the whole file, which ends where its last tensor does.
    pub fn file_len(&self) -> u64 {
        self.file_len
    }
}

const HEADER: &str = "safetensors header";

const TOO_LARGE: Error = Error::TotalTooLarge { what: "the bytes of the tensors of a file" };

#[expect(clippy::needless_pass_by_value, reason = "as `map_err` wants it")]
fn unreadable(error: io::Error) -> Error {
    Error::Source(SourceError::Unreadable { kind: error.kind(), reason: error.to_string() })
}

/// The text of the header.
fn header(bytes: &[u8]) -> Result<&[u8]> {
    let available = bytes.len() as u64;
    let truncated = |needed| Error::Source(SourceError::HeaderTruncated { needed, available });
    let (&prefix, rest) = bytes.split_first_chunk::<8>().ok_or_else(|| truncated(PREFIX_LEN))?;
    let len = header_len(prefix)?;
    #[expect(clippy::expect_used, reason = "`header_len` refuses what is longer than 100 MB")]
    let end = usize::try_from(len).expect("the length of a header fits into 32 bits");
    rest.get(..end).ok_or_else(|| truncated(PREFIX_LEN + len))
}

#[derive(Deserialize)]
struct Tensor<'a> {
    #[serde(borrow)]
    dtype: Cow<'a, str>,
    shape: Vec<u64>,
    data_offsets: (u64, u64),
}

impl Entry for Tensor<'_> {
    /// The parameter, and where it begins and ends.
    type Named = (ParameterInfo, (u64, u64));

    fn named(self, name: String) -> Result<Self::Named> {
        let dtype = dtype_of(&name, &self.dtype)?;
        Ok((ParameterInfo::new(name, self.shape, dtype)?, self.data_offsets))
    }
}

/// The end of a parameter, which must begin where the one before it ends.
fn next_end(expected_begin: u64, info: &ParameterInfo, (begin, end): (u64, u64)) -> Result<u64> {
    let expected_end = expected_begin.checked_add(info.bytes()).ok_or(TOO_LARGE)?;
    if (begin, end) == (expected_begin, expected_end) {
        return Ok(end);
    }
    let name = info.name().to_owned();
    Err(Error::Source(SourceError::BadOffsets { name, begin, end, expected_begin, expected_end }))
}
