//! The header of a NumPy array: a Python dictionary with dtype, order and shape.
//!
//! The format: <https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html>.

use std::io::Read;

use core_types::human::Printable;

use crate::{error::NpyFault, read::npy::dtype::NpyDtype};

const MAGIC: [u8; 6] = *b"\x93NUMPY";

/// NumPy's own limit for headers of untrusted files.
const MAX_HEADER_BYTES: u32 = 10_000;

/// The header of an array, followed by its numbers in C order.
///
/// # Examples
///
/// ```
/// use data_loader::{NpyDtype, NpyHeader};
///
/// let header = NpyHeader { dtype: NpyDtype::for_element::<f32>(), shape: vec![2, 3] };
/// let bytes = header.to_bytes();
/// let mut file = &bytes[..];
/// assert_eq!(NpyHeader::read(&mut file)?, header);
/// assert!(file.is_empty());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[expect(clippy::exhaustive_structs, reason = "the format has no other properties")]
pub struct NpyHeader {
    /// Type of the numbers.
    pub dtype: NpyDtype,
    /// Sizes of the dimensions.
    pub shape: Vec<u64>,
}

impl NpyHeader {
    /// Reads a header. The numbers follow in `source`.
    ///
    /// # Errors
    ///
    /// An [`NpyFault`] if the header cannot be read, is invalid, or describes an array of other
    /// types or order.
    pub fn read(source: &mut impl Read) -> Result<Self, NpyFault> {
        Self::parse(&read_text(source)?)
    }

    fn parse(text: &str) -> Result<Self, NpyFault> {
        let fields = HeaderFields::parse(text);
        let HeaderFields { descr, fortran_order, shape } =
            fields.ok_or_else(|| invalid_header(text))?;
        let dtype = NpyDtype::parse(descr).ok_or_else(|| NpyFault::DtypeMismatch {
            found: shorten(descr),
            expected: format!("one of {}", NpyDtype::names()),
        })?;
        if fortran_order != "False" {
            return Err(invalid("it is in Fortran order, it must be in C order"));
        }
        let shape = parse_shape(shape).ok_or_else(|| invalid_header(text))?;
        Ok(Self { dtype, shape })
    }

    /// Returns the bytes of the header, version 1. Their number is a multiple of 64.
    pub fn to_bytes(&self) -> Vec<u8> {
        /// Alignment of the numbers, so that they can be mapped into memory.
        const ALIGNMENT: usize = 64;
        const BEFORE_TEXT: usize = MAGIC.len() + 4;

        let sizes: String = self.shape.iter().map(|size| size.to_string() + ",").collect();
        let dtype = self.dtype;
        let mut text =
            format!("{{'descr': '{dtype}', 'fortran_order': False, 'shape': ({sizes}), }}");
        let n_bytes = (BEFORE_TEXT + text.len() + 1).next_multiple_of(ALIGNMENT) - BEFORE_TEXT;
        text.extend(std::iter::repeat_n(' ', n_bytes - 1 - text.len()));
        text.push('\n');
        // NumPy allows 64 dimensions of 20 digits, which 16 bits can count.
        let [low, high, ..] = n_bytes.to_le_bytes();
        [&MAGIC[..], &[1, 0, low, high], text.as_bytes()].concat()
    }

    /// Returns the bytes of the numbers, or `None` if 64 bits cannot count them.
    pub(crate) fn n_data_bytes(&self) -> Option<u64> {
        let sizes = self.shape.iter();
        sizes.copied().try_fold(self.dtype.n_bytes() as u64, u64::checked_mul)
    }
}

/// Reads the text of a header.
fn read_text(source: &mut impl Read) -> Result<String, NpyFault> {
    let mut start = [0; 8];
    source.read_exact(&mut start).map_err(NpyFault::Io)?;
    let n_size_bytes = match start[6] {
        1 => 2,
        2 | 3 => 4,
        _ => return Err(no_header()),
    };
    if start[..6] != MAGIC {
        return Err(no_header());
    }
    let mut size = [0; 4];
    source.read_exact(&mut size[..n_size_bytes]).map_err(NpyFault::Io)?;
    let n_bytes = u32::from_le_bytes(size);
    if n_bytes > MAX_HEADER_BYTES {
        return Err(no_header());
    }
    let mut text = vec![0; n_bytes as usize];
    source.read_exact(&mut text).map_err(NpyFault::Io)?;
    String::from_utf8(text).map_err(|fault| {
        let text = String::from_utf8_lossy(fault.as_bytes());
        invalid_header(&text)
    })
}

/// The unparsed values of a header.
///
/// A parser for Python literals would accept more, only to reject it later.
struct HeaderFields<'a> {
    descr: &'a str,
    fortran_order: &'a str,
    shape: &'a str,
}

impl<'a> HeaderFields<'a> {
    fn parse(text: &'a str) -> Option<Self> {
        let value =
            |key: &str| Some(text.split_once(key)?.1.trim_start().strip_prefix(':')?.trim_start());
        let cut_at = |end: &[char], value: &'a str| Some(value.split_once(end)?.0.trim_end());
        let shape = value("'shape'")?.strip_prefix('(')?;
        Some(Self {
            descr: type_description(value("'descr'")?)?,
            fortran_order: cut_at(&[',', '}'], value("'fortran_order'")?)?,
            shape: cut_at(&[')'], shape)?,
        })
    }
}

/// Returns the description of the type at the start of a text: a name, or a list for a structured type.
fn type_description(text: &str) -> Option<&str> {
    if text.starts_with('[') {
        return text.find(']').map(|end| &text[..=end]);
    }
    Some(text.split_once([',', '}'])?.0.trim_end())
}

/// Parses the sizes of a tuple: `""`, `"5,"` or `"2, 3"`.
fn parse_shape(text: &str) -> Option<Vec<u64>> {
    let text = text.trim();
    let text = text.strip_suffix(',').unwrap_or(text);
    if text.is_empty() {
        return Some(Vec::new());
    }
    text.split(',').map(|size| size.trim().parse().ok()).collect()
}

fn invalid(fault: &str) -> NpyFault {
    NpyFault::Invalid(fault.into())
}

fn no_header() -> NpyFault {
    invalid("it has no NumPy header of version 1, 2 or 3 with at most 10000 bytes")
}

fn invalid_header(text: &str) -> NpyFault {
    NpyFault::Invalid(format!("its header is invalid: {}", shorten(text)))
}

/// Returns the start of an untrusted text, with control characters escaped.
fn shorten(text: &str) -> String {
    const MAX_CHARS: usize = 200;
    let start: String = text.trim_end().chars().take(MAX_CHARS).collect();
    Printable(start).to_string()
}
