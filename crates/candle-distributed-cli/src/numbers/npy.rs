//! NumPy arrays: a header, then the bytes of the numbers.
//!
//! The header is a Python dictionary with three keys, and its dtype may be any type of NumPy. Only
//! lists of numbers are supported here. A parser for Python literals would accept more, only to
//! reject it later, and add four dependencies.
//!
//! The format: <https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html>.

use std::{
    io::{self, BufRead, Read},
    marker::PhantomData,
};

use super::{
    NumberList,
    number::{Number, NumberValue},
};
use crate::error::Result;

/// The first byte of an array. No UTF-8 text begins with it.
pub(super) const FIRST_BYTE: u8 = MAGIC[0];

const MAGIC: [u8; 6] = *b"\x93NUMPY";

/// Returns true if a file with these first bytes, at least six, is an array.
///
/// As a raw number, these bytes would be above 2^48.
pub(super) fn is_array(first: &[u8]) -> bool {
    first.starts_with(&MAGIC)
}

/// NumPy's own limit for headers of untrusted files.
const MAX_HEADER_BYTES: u64 = 10_000;

/// Returns the header of an array of 64-bit integers of this shape. The numbers must follow it.
pub(crate) fn header(shape: &[u64]) -> Vec<u8> {
    /// Alignment of the numbers, so that they can be mapped into memory.
    const ALIGNMENT: usize = 64;
    const BEFORE_TEXT: usize = MAGIC.len() + 4;

    let sizes: String = shape.iter().map(|size| size.to_string() + ",").collect();
    let mut text = format!("{{'descr': '<i8', 'fortran_order': False, 'shape': ({sizes}), }}");
    let n_bytes = (BEFORE_TEXT + text.len() + 1).next_multiple_of(ALIGNMENT) - BEFORE_TEXT;
    text.extend(std::iter::repeat_n(' ', n_bytes - 1 - text.len()));
    text.push('\n');
    // The version, then the length of the text. 16 bits suffice, since each dimension has at most
    // 20 digits.
    let [low, high, ..] = n_bytes.to_le_bytes();
    [&MAGIC[..], &[1, 0, low, high], text.as_bytes()].concat()
}

/// Reads the numbers of a one-dimensional array.
pub(super) fn read<T: Number>(
    list: NumberList,
    mut source: impl BufRead + 'static,
) -> Result<impl Iterator<Item = Result<T>>> {
    let array_error = |fault: String| list.error(format!("{} {fault}", list.name()));
    let text = header_text(&mut source).map_err(|source| list.read_error(source))?;
    let header = text.as_deref().and_then(ArrayHeader::parse).ok_or_else(|| {
        array_error("begins like a NumPy array, but has no header of version 1, 2 or 3".into())
    })?;
    let (dtype, len) = header.list_type(T::IS_REAL).map_err(array_error)?;
    Ok(ArrayItems { list, source, dtype, len: Some(len), n_read: 0, number: PhantomData })
}

/// Reads raw 64-bit numbers without a header.
pub(super) fn read_raw<T: Number>(
    list: NumberList,
    source: impl BufRead + 'static,
) -> impl Iterator<Item = Result<T>> {
    let dtype = ArrayDtype { kind: NumberKind::Unsigned, n_bytes: 8 };
    ArrayItems { list, source, dtype, len: None, n_read: 0, number: PhantomData }
}

/// Reads the text of a header, or returns `None` if it is invalid.
fn header_text(source: &mut impl Read) -> io::Result<Option<String>> {
    let mut start = [0; 8];
    let has_start = read_up_to(source, &mut start)? == start.len() && start[..6] == MAGIC;
    let n_size_bytes = match start[6] {
        1 => 2,
        2 | 3 => 4,
        _ => return Ok(None),
    };
    let mut size = [0; 4];
    let has_size = read_up_to(source, &mut size[..n_size_bytes])? == n_size_bytes;
    let n_bytes = u64::from(u32::from_le_bytes(size));
    if !has_start || !has_size || n_bytes > MAX_HEADER_BYTES {
        return Ok(None);
    }
    let mut text = Vec::new();
    source.take(n_bytes).read_to_end(&mut text)?;
    if (text.len() as u64) < n_bytes {
        return Ok(None);
    }
    Ok(String::from_utf8(text).ok())
}

/// Reads until `bytes` is full or the source ends, and returns the number of bytes read.
fn read_up_to(source: &mut impl Read, bytes: &mut [u8]) -> io::Result<usize> {
    let mut n_read = 0;
    while n_read < bytes.len() {
        match source.read(&mut bytes[n_read..]) {
            Ok(0) => break,
            Ok(n) => n_read += n,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(n_read)
}

/// The values of a header, unparsed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct ArrayHeader<'a> {
    descr: &'a str,
    fortran_order: &'a str,
    shape: &'a str,
}

impl<'a> ArrayHeader<'a> {
    fn parse(text: &'a str) -> Option<Self> {
        let value =
            |key: &str| Some(text.split_once(key)?.1.trim_start().strip_prefix(':')?.trim_start());
        let cut_at = |end: &[char], value: &'a str| Some(value.split_once(end)?.0.trim_end());
        let shape = value("'shape'")?.strip_prefix('(')?;
        Some(Self {
            descr: cut_at(&[',', '}'], value("'descr'")?)?,
            fortran_order: cut_at(&[',', '}'], value("'fortran_order'")?)?,
            shape: cut_at(&[')'], shape)?,
        })
    }

    /// Returns the dtype and the length of a list, or describes the fault for a message.
    fn list_type(self, is_real: bool) -> Result<(ArrayDtype, u64), String> {
        let Self { descr, fortran_order, shape } = self;
        let dtype =
            ArrayDtype::parse(descr).filter(|dtype| is_real || dtype.kind != NumberKind::Real);
        let dtype = dtype.ok_or_else(|| {
            let numbers = if is_real { "numbers" } else { "integers" };
            format!("has dtype {descr}, which is not a dtype of little-endian {numbers}")
        })?;
        if fortran_order != "False" {
            return Err(format!("has fortran_order {fortran_order}, which must be False"));
        }
        match shape.trim().strip_suffix(',').and_then(|len| len.trim().parse().ok()) {
            Some(len) => Ok((dtype, len)),
            None => Err(format!("has shape ({shape}), which must have one dimension")),
        }
    }
}

/// The type of the numbers of an array.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct ArrayDtype {
    kind: NumberKind,
    n_bytes: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum NumberKind {
    Signed,
    Unsigned,
    Real,
}

impl ArrayDtype {
    /// Parses the quoted name of a dtype in a header.
    fn parse(name: &str) -> Option<Self> {
        let (kind, n_bytes) = match name.trim_matches('\'') {
            "|i1" => (NumberKind::Signed, 1),
            "<i2" => (NumberKind::Signed, 2),
            "<i4" => (NumberKind::Signed, 4),
            "<i8" => (NumberKind::Signed, 8),
            "|u1" => (NumberKind::Unsigned, 1),
            "<u2" => (NumberKind::Unsigned, 2),
            "<u4" => (NumberKind::Unsigned, 4),
            "<u8" => (NumberKind::Unsigned, 8),
            "<f4" => (NumberKind::Real, 4),
            "<f8" => (NumberKind::Real, 8),
            _ => return None,
        };
        Some(Self { kind, n_bytes })
    }

    /// Decodes the number in the first bytes. The remaining bytes must be zero.
    fn value(self, bytes: [u8; 8]) -> NumberValue {
        let number = u64::from_le_bytes(bytes);
        match self.kind {
            NumberKind::Unsigned => NumberValue::Unsigned(number),
            NumberKind::Signed => {
                let unused_bits = 8 * (bytes.len() - self.n_bytes);
                NumberValue::Signed((number << unused_bits).cast_signed() >> unused_bits)
            }
            NumberKind::Real if self.n_bytes == 4 => {
                let [a, b, c, d, ..] = bytes;
                NumberValue::Real(f32::from_le_bytes([a, b, c, d]).into())
            }
            NumberKind::Real => NumberValue::Real(f64::from_bits(number)),
        }
    }
}

/// An iterator over the numbers after a header.
struct ArrayItems<T, R> {
    list: NumberList,
    source: R,
    dtype: ArrayDtype,
    /// Expected number of items, if known.
    len: Option<u64>,
    n_read: u64,
    number: PhantomData<T>,
}

impl<T: Number, R: BufRead> ArrayItems<T, R> {
    /// Reads the next number, or returns `None` after the last.
    fn read(&mut self) -> Result<Option<T>> {
        let name = self.list.name();
        if self.len == Some(self.n_read) {
            let rest = self.source.fill_buf().map_err(|fault| self.list.read_error(fault))?;
            if rest.is_empty() {
                return Ok(None);
            }
            let message = format!("{name} has bytes after its {} numbers", self.n_read);
            return Err(self.list.error(message));
        }
        let mut bytes = [0; 8];
        let n_bytes = self.dtype.n_bytes;
        let outcome = read_up_to(&mut self.source, &mut bytes[..n_bytes]);
        match outcome.map_err(|fault| self.list.read_error(fault))? {
            0 if self.len.is_none() => return Ok(None),
            n if n == n_bytes => {}
            _ => {
                let total = self.len.map_or_else(String::new, |len| format!(" of {len}"));
                let message = format!("{name} ends after {}{total} numbers", self.n_read);
                return Err(self.list.error(message));
            }
        }
        self.n_read += 1;
        let value = self.dtype.value(bytes);
        match T::from_value(value) {
            Ok(number) => Ok(Some(number)),
            Err(fault) => Err(self.list.error_at(self.n_read, &fault, &value.to_string())),
        }
    }
}

impl<T: Number, R: BufRead> Iterator for ArrayItems<T, R> {
    type Item = Result<T>;

    fn next(&mut self) -> Option<Self::Item> {
        self.read().transpose()
    }
}
