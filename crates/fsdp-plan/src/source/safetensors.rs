//! The header of a safetensors file: the length of a JSON text, and the text.

use std::borrow::Cow;

use serde::Deserialize;

use super::{
    entries::{Entries, Entry, unique_parameters},
    parse,
};
use crate::{
    elem::ElemType,
    error::{Error, Result},
    param::ParameterInfo,
};

/// The bytes at the start of a safetensors file that hold the length of its header.
pub const PREFIX_LEN: u64 = 8;

/// The longest header accepted, the same as in the `safetensors` crate.
pub const MAX_HEADER_LEN: u64 = 100_000_000;

/// The length of the header that follows `prefix`, the first bytes of a safetensors file.
///
/// With it a caller reads as much of a file as [`from_safetensors`] wants, however large the tensors are.
///
/// # Errors
///
/// [`Error::HeaderTooLong`] above [`MAX_HEADER_LEN`].
pub fn header_len(prefix: [u8; 8]) -> Result<u64> {
    let len = u64::from_le_bytes(prefix);
    if len > MAX_HEADER_LEN { Err(Error::HeaderTooLong { len, max: MAX_HEADER_LEN }) } else { Ok(len) }
}

/// Reads the parameters of a safetensors file from its beginning, in the order in which their tensors lie in the file.
///
/// `bytes` begins where the file does, and goes at least to the end of the header; what follows is not looked at.
///
/// # Errors
///
/// - [`Error::HeaderTooLong`] or [`Error::HeaderTruncated`];
/// - [`Error::Malformed`], [`Error::UnknownDtype`], [`Error::DuplicateName`] or [`Error::ParameterTooLarge`];
/// - [`Error::TotalTooLarge`] if offsets would leave 64 bits;
/// - [`Error::BadOffsets`] if tensors overlap, leave gaps, or have another size than shape and dtype say.
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
    let mut placed = parse::<Entries<Tensor<'_>>>("safetensors header", header(bytes)?)?.0?;
    unique_parameters(placed.len(), |position| &placed[position].0)?;
    // Tensors without bytes begin where the next one does; the sort is stable, so they stay in the order of the text.
    placed.sort_by_key(|&(_, offsets)| offsets);
    placed.iter().try_fold(0, |end, (info, offsets)| next_end(end, info, *offsets))?;
    Ok(placed.into_iter().map(|(info, _)| info).collect())
}

/// The text of the header.
fn header(bytes: &[u8]) -> Result<&[u8]> {
    let available = bytes.len() as u64;
    let truncated = |needed| Error::HeaderTruncated { needed, available };
    let (&prefix, rest) = bytes.split_first_chunk::<8>().ok_or_else(|| truncated(PREFIX_LEN))?;
    let len = header_len(prefix)?;
    usize::try_from(len).ok().and_then(|len| rest.get(..len)).ok_or_else(|| truncated(PREFIX_LEN + len))
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
        let dtype = ElemType::of_tensor(&name, &self.dtype)?;
        Ok((ParameterInfo::new(name, self.shape, dtype)?, self.data_offsets))
    }
}

/// The end of a parameter, which must begin where the one before it ends.
fn next_end(expected_begin: u64, info: &ParameterInfo, (begin, end): (u64, u64)) -> Result<u64> {
    let too_large = Error::TotalTooLarge { what: "the bytes of the tensors of a file" };
    let expected_end = expected_begin.checked_add(info.bytes()).ok_or(too_large)?;
    if (begin, end) == (expected_begin, expected_end) {
        return Ok(end);
    }
    let name = info.name().to_owned();
    Err(Error::BadOffsets { name, begin, end, expected_begin, expected_end })
}
