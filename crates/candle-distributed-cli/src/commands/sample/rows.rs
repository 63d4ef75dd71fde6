//! Writes numbers as text or as bytes, in blocks. Written one by one, the writes would take longer
//! than the computation.

use std::io::{self, Write};

use candle_distributed::data::{NpyDtype, NpyHeader};

use crate::error::{Error, Result};

/// Numbers per block. The numbers and their text fit into a processor's cache.
const BLOCK: usize = 4096;

/// Writes rows of `WIDTH` numbers each.
pub(super) struct RowWriter<const WIDTH: usize, F> {
    pub(super) n_rows: u64,
    /// Function that fills a slice with the next rows.
    pub(super) fill: F,
}

impl<const WIDTH: usize, F: FnMut(&mut [[u64; WIDTH]])> RowWriter<WIDTH, F> {
    /// Writes one line per row, with spaces between the numbers.
    pub(super) fn write_text(self, out: &mut dyn Write) -> io::Result<()> {
        let mut digits = itoa::Buffer::new();
        let mut text = Vec::new();
        self.for_each_block(|rows| {
            text.clear();
            for row in rows {
                for &number in row {
                    text.extend_from_slice(digits.format(number).as_bytes());
                    text.push(b' ');
                }
                // Replaces the last space.
                if let Some(end) = text.last_mut() {
                    *end = b'\n';
                }
            }
            out.write_all(&text)
        })
    }

    /// Writes a NumPy array.
    pub(super) fn write_npy(self, out: &mut dyn Write) -> io::Result<()> {
        let shape = [self.n_rows, WIDTH as u64];
        let n_dims = if WIDTH == 1 { 1 } else { shape.len() };
        let header = NpyHeader { dtype: NpyDtype::of::<i64>(), shape: shape[..n_dims].to_vec() };
        out.write_all(&header.to_bytes())?;
        self.write_raw(out)
    }

    /// Writes raw 64-bit numbers.
    fn write_raw(self, out: &mut dyn Write) -> io::Result<()> {
        let mut bytes = Vec::new();
        self.for_each_block(|rows| {
            bytes.clear();
            bytes.extend(rows.as_flattened().iter().flat_map(|number| number.to_le_bytes()));
            out.write_all(&bytes)
        })
    }

    fn for_each_block(
        mut self,
        mut write: impl FnMut(&[[u64; WIDTH]]) -> io::Result<()>,
    ) -> io::Result<()> {
        let mut block = vec![[0; WIDTH]; BLOCK / WIDTH];
        let mut n_left = self.n_rows;
        while n_left > 0 {
            #[expect(clippy::cast_possible_truncation, reason = "at most the length of a slice")]
            let n_rows = n_left.min(block.len() as u64) as usize;
            (self.fill)(&mut block[..n_rows]);
            write(&block[..n_rows])?;
            n_left -= n_rows as u64;
        }
        Ok(())
    }
}

/// Returns a function that fills rows from an iterator, which must be long enough.
pub(super) fn fill_from<const WIDTH: usize>(
    mut rows: impl Iterator<Item = [u64; WIDTH]>,
) -> impl FnMut(&mut [[u64; WIDTH]]) {
    move |block| block.iter_mut().zip(&mut rows).for_each(|(slot, row)| *slot = row)
}

/// Rejects a number of samples with indices above the signed integers of `--format npy`.
pub(super) fn check_npy(n_samples: u64) -> Result<()> {
    const LIMIT: u64 = i64::MAX.cast_unsigned() + 1;
    if n_samples <= LIMIT {
        return Ok(());
    }
    let message =
        format!("{n_samples} samples are more than the limit of --format npy, {LIMIT} samples");
    Err(Error::usage(message).with_hint("--format text has no limit"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows<const WIDTH: usize>(n_rows: u64) -> RowWriter<WIDTH, impl FnMut(&mut [[u64; WIDTH]])> {
        let rows = (0..).map(|n| std::array::from_fn(|column| n * WIDTH as u64 + column as u64));
        RowWriter { n_rows, fill: fill_from(rows) }
    }

    #[test]
    fn blocks_write_every_number_once() {
        for n_rows in [0, 1, 3, BLOCK as u64 - 1, BLOCK as u64, BLOCK as u64 + 1, 3 * BLOCK as u64]
        {
            let mut raw = Vec::new();
            rows::<1>(n_rows).write_raw(&mut raw).unwrap();
            let expected: Vec<u8> = (0..n_rows).flat_map(u64::to_le_bytes).collect();
            assert!(raw == expected, "{n_rows} rows");
            let mut text = Vec::new();
            rows::<2>(n_rows).write_text(&mut text).unwrap();
            let expected: String = (0..n_rows)
                .map(|n| {
                    [(2 * n).to_string(), " ".into(), (2 * n + 1).to_string(), "\n".into()].concat()
                })
                .collect();
            assert!(text == expected.as_bytes(), "{n_rows} rows");
        }
    }

    #[test]
    fn arrays_are_limited_to_signed_integers() {
        assert!(check_npy(1 << 63).is_ok());
        let error = check_npy((1 << 63) + 1).unwrap_err();
        assert!(error.to_string().contains("9223372036854775809"), "{error}");
    }
}
