//! Numbers as NumPy writes them: a header, and their bytes.
//!
//! The header is a dictionary of Python with three keys, one of whose values may be any type of
//! NumPy. What is read here are lists of numbers, so a parser of Python's literals would understand
//! more only to refuse it, and bring four crates.
//!
//! The format: <https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html>.

use std::{
    io::{self, BufRead, Read},
    marker::PhantomData,
};

use super::{
    List,
    number::{Number, Value},
};
use crate::error::Result;

/// No text begins with it.
pub(super) const FIRST_BYTE: u8 = MAGIC[0];

const MAGIC: [u8; 6] = *b"\x93NUMPY";

/// Whether a file that begins with these bytes, six or more, is an array. As a number they would be
/// above 2^48.
pub(super) fn is_array(first: &[u8]) -> bool {
    first.starts_with(&MAGIC)
}

/// NumPy's own limit for headers that are read without trust.
const MAX_HEADER_BYTES: u64 = 10_000;

/// The header of an array of 64-bit integers of this shape, whose bytes follow it.
pub(crate) fn header(shape: &[u64]) -> Vec<u8> {
    /// The bytes of an array begin at a multiple of it, so that they can be mapped into memory.
    const ALIGNMENT: usize = 64;
    const BEFORE_TEXT: usize = MAGIC.len() + 4;

    let sizes: String = shape.iter().map(|size| size.to_string() + ",").collect();
    let mut text = format!("{{'descr': '<i8', 'fortran_order': False, 'shape': ({sizes}), }}");
    let n_bytes = (BEFORE_TEXT + text.len() + 1).next_multiple_of(ALIGNMENT) - BEFORE_TEXT;
    text.extend(std::iter::repeat_n(' ', n_bytes - 1 - text.len()));
    text.push('\n');
    // The version, and in 16 bits the length of the text, which has a number of 20 digits for each
    // dimension at most.
    let [low, high, ..] = n_bytes.to_le_bytes();
    [&MAGIC[..], &[1, 0, low, high], text.as_bytes()].concat()
}

/// The numbers of an array of one dimension.
pub(super) fn read<T: Number>(
    list: List,
    mut source: impl BufRead + 'static,
) -> Result<impl Iterator<Item = Result<T>>> {
    let fault = |fault: String| list.error(format!("{} {fault}", list.name()));
    let text = header_text(&mut source).map_err(|source| list.unreadable(source))?;
    let header = text.as_deref().and_then(Header::parse).ok_or_else(|| {
        fault("begins like an array of NumPy, and has no header of one in version 1, 2 or 3".into())
    })?;
    let (dtype, len) = header.of_list(T::IS_REAL).map_err(fault)?;
    Ok(Items { list, source, dtype, len: Some(len), n_read: 0, number: PhantomData })
}

/// Numbers of 64 bits with nothing before and after them.
pub(super) fn read_raw<T: Number>(
    list: List,
    source: impl BufRead + 'static,
) -> impl Iterator<Item = Result<T>> {
    let dtype = Dtype { kind: Kind::Unsigned, n_bytes: 8 };
    Items { list, source, dtype, len: None, n_read: 0, number: PhantomData }
}

/// The text of a header; `None` if there is none.
fn header_text(source: &mut impl Read) -> io::Result<Option<String>> {
    let mut start = [0; 8];
    let is_there = read_up_to(source, &mut start)? == start.len() && start[..6] == MAGIC;
    let n_size_bytes = match start[6] {
        1 => 2,
        2 | 3 => 4,
        _ => return Ok(None),
    };
    let mut size = [0; 4];
    let is_whole = read_up_to(source, &mut size[..n_size_bytes])? == n_size_bytes;
    let n_bytes = u64::from(u32::from_le_bytes(size));
    if !is_there || !is_whole || n_bytes > MAX_HEADER_BYTES {
        return Ok(None);
    }
    let mut text = Vec::new();
    source.take(n_bytes).read_to_end(&mut text)?;
    let is_whole = text.len() as u64 == n_bytes;
    Ok(String::from_utf8(text).ok().filter(|_| is_whole))
}

/// Reads until `bytes` are full or the source ends, and returns how many are read.
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

/// The values of a header as they stand there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Header<'a> {
    descr: &'a str,
    fortran_order: &'a str,
    shape: &'a str,
}

impl<'a> Header<'a> {
    fn parse(text: &'a str) -> Option<Self> {
        let value =
            |key: &str| Some(text.split_once(key)?.1.trim_start().strip_prefix(':')?.trim_start());
        let until = |end: &[char], value: &'a str| Some(value.split_once(end)?.0.trim_end());
        let shape = value("'shape'")?.strip_prefix('(')?;
        Some(Self {
            descr: until(&[',', '}'], value("'descr'")?)?,
            fortran_order: until(&[',', '}'], value("'fortran_order'")?)?,
            shape: until(&[')'], shape)?,
        })
    }

    /// The type and the number of numbers, or what is wrong with them.
    fn of_list(self, is_real: bool) -> Result<(Dtype, u64), String> {
        let Self { descr, fortran_order, shape } = self;
        let dtype = Dtype::parse(descr).filter(|dtype| is_real || dtype.kind != Kind::Real);
        let dtype = dtype.ok_or_else(|| {
            let numbers = if is_real { "numbers" } else { "integers" };
            format!("has dtype {descr}, which is not one of little-endian {numbers}")
        })?;
        if fortran_order != "False" {
            return Err(format!("has fortran_order {fortran_order}, which must be False"));
        }
        let len = shape.trim().strip_suffix(',').and_then(|len| len.trim().parse().ok());
        let len =
            len.ok_or_else(|| format!("has shape ({shape}), which must be of one dimension"))?;
        Ok((dtype, len))
    }
}

/// The type of the numbers of an array.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Dtype {
    kind: Kind,
    n_bytes: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Signed,
    Unsigned,
    Real,
}

impl Dtype {
    /// The type that a header calls by this name, in the quotes of Python.
    fn parse(name: &str) -> Option<Self> {
        let (kind, n_bytes) = match name.trim_matches('\'') {
            "|i1" => (Kind::Signed, 1),
            "<i2" => (Kind::Signed, 2),
            "<i4" => (Kind::Signed, 4),
            "<i8" => (Kind::Signed, 8),
            "|u1" => (Kind::Unsigned, 1),
            "<u2" => (Kind::Unsigned, 2),
            "<u4" => (Kind::Unsigned, 4),
            "<u8" => (Kind::Unsigned, 8),
            "<f4" => (Kind::Real, 4),
            "<f8" => (Kind::Real, 8),
            _ => return None,
        };
        Some(Self { kind, n_bytes })
    }

    /// The number in the first bytes; those behind it are zeros.
    fn value(self, bytes: [u8; 8]) -> Value {
        let number = u64::from_le_bytes(bytes);
        match self.kind {
            Kind::Unsigned => Value::Unsigned(number),
            Kind::Signed => {
                let unused_bits = 8 * (bytes.len() - self.n_bytes);
                Value::Signed((number << unused_bits).cast_signed() >> unused_bits)
            }
            Kind::Real if self.n_bytes == 4 => {
                let [a, b, c, d, ..] = bytes;
                Value::Real(f32::from_le_bytes([a, b, c, d]).into())
            }
            Kind::Real => Value::Real(f64::from_bits(number)),
        }
    }
}

/// The numbers behind a header.
struct Items<T, R> {
    list: List,
    source: R,
    dtype: Dtype,
    /// How many there must be, if that is known.
    len: Option<u64>,
    n_read: u64,
    number: PhantomData<T>,
}

impl<T: Number, R: BufRead> Items<T, R> {
    /// The next number, or `None` if all are read.
    fn read(&mut self) -> Result<Option<T>> {
        let name = self.list.name();
        if self.len == Some(self.n_read) {
            let rest = self.source.fill_buf().map_err(|fault| self.list.unreadable(fault))?;
            if rest.is_empty() {
                return Ok(None);
            }
            let end = format!("{name} has more bytes than its {} numbers take", self.n_read);
            return Err(self.list.error(end));
        }
        let mut bytes = [0; 8];
        let n_bytes = self.dtype.n_bytes;
        let read = read_up_to(&mut self.source, &mut bytes[..n_bytes]);
        match read.map_err(|fault| self.list.unreadable(fault))? {
            0 if self.len.is_none() => return Ok(None),
            n if n == n_bytes => {}
            _ => {
                let of_all = self.len.map_or_else(String::new, |len| format!(" of {len}"));
                let end = format!("{name} ends after {}{of_all} numbers", self.n_read);
                return Err(self.list.error(end));
            }
        }
        self.n_read += 1;
        let value = self.dtype.value(bytes);
        let fault = |fault: String| self.list.fault(self.n_read, &fault, &value.to_string());
        T::of(value).map(Some).map_err(fault)
    }
}

impl<T: Number, R: BufRead> Iterator for Items<T, R> {
    type Item = Result<T>;

    fn next(&mut self) -> Option<Self::Item> {
        self.read().transpose()
    }
}
