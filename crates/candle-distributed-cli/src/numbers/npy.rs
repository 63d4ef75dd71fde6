//! Numbers after the header of a NumPy array.

use std::{
    io::{self, BufRead, ErrorKind, Read},
    marker::PhantomData,
};

use candle_distributed::data::{NpyDtype, NpyFault, NpyHeader, NpyNumber};

use super::{NumberList, number::Number};
use crate::error::Result;

/// The first byte of an array. No UTF-8 text begins with it.
pub(super) const FIRST_BYTE: u8 = b'\x93';

/// Reads the numbers of a one-dimensional array.
pub(super) fn read<T: Number>(
    list: NumberList,
    mut source: impl BufRead + 'static,
) -> Result<impl Iterator<Item = Result<T>>> {
    let array_error = |fault: String| list.error(format!("{} {fault}", list.name()));
    let NpyHeader { dtype, shape } = NpyHeader::read(&mut source).map_err(|fault| match fault {
        NpyFault::Io(fault) if fault.kind() != ErrorKind::UnexpectedEof => list.read_error(fault),
        NpyFault::Io(_) => array_error("ends within its NumPy header".into()),
        fault => array_error(format!("is an invalid NumPy array: {fault}")),
    })?;
    if dtype.is_real() && !T::IS_REAL {
        let fault = format!("has dtype '{dtype}', which is not a dtype of integers");
        return Err(array_error(fault));
    }
    let [len] = shape[..] else {
        return Err(array_error(format!("has shape {shape:?}, which must have one dimension")));
    };
    Ok(ArrayItems { list, source, dtype, len, n_read: 0, number: PhantomData })
}

/// Reads until `bytes` is full or the source ends, and returns the number of bytes read.
fn read_up_to(source: &mut impl Read, bytes: &mut [u8]) -> io::Result<usize> {
    let mut n_read = 0;
    while n_read < bytes.len() {
        match source.read(&mut bytes[n_read..]) {
            Ok(0) => break,
            Ok(n) => n_read += n,
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(n_read)
}

/// An iterator over the numbers after a header.
struct ArrayItems<T, R> {
    list: NumberList,
    source: R,
    dtype: NpyDtype,
    len: u64,
    n_read: u64,
    number: PhantomData<T>,
}

impl<T: Number, R: BufRead> ArrayItems<T, R> {
    /// Reads the next number, or returns `None` after the last.
    fn read(&mut self) -> Result<Option<T>> {
        let name = self.list.name();
        if self.len == self.n_read {
            let rest = self.source.fill_buf().map_err(|fault| self.list.read_error(fault))?;
            if rest.is_empty() {
                return Ok(None);
            }
            let message = format!("{name} has bytes after its {} numbers", self.n_read);
            return Err(self.list.error(message));
        }
        let mut bytes = [0; 8];
        let n_bytes = self.dtype.n_bytes();
        let outcome = read_up_to(&mut self.source, &mut bytes[..n_bytes]);
        match outcome.map_err(|fault| self.list.read_error(fault))? {
            n if n == n_bytes => {}
            _ => {
                let message = format!("{name} ends after {} of {} numbers", self.n_read, self.len);
                return Err(self.list.error(message));
            }
        }
        self.n_read += 1;
        let value = self.dtype.decode(bytes);
        match T::from_value(value) {
            Ok(number) => Ok(Some(number)),
            Err(fault) => Err(self.list.error_at(self.n_read, &fault, &number_text(value))),
        }
    }
}

fn number_text(number: NpyNumber) -> String {
    match number {
        NpyNumber::Signed(number) => number.to_string(),
        NpyNumber::Unsigned(number) => number.to_string(),
        NpyNumber::Real(number) => number.to_string(),
    }
}

impl<T: Number, R: BufRead> Iterator for ArrayItems<T, R> {
    type Item = Result<T>;

    fn next(&mut self) -> Option<Self::Item> {
        self.read().transpose()
    }
}
