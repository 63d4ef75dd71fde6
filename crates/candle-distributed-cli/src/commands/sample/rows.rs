//! Writes numbers as text or as bytes, in blocks. Written one by one, the writes would take longer
//! than the computation.

use std::io::{self, Write};

use candle_distributed::data::{NpyDtype, NpyHeader};

/// Numbers per block. The numbers and their text fit into a processor's cache.
const BLOCK: usize = 4096;

/// Writes one number per row.
pub(super) struct RowWriter<F> {
    pub(super) n_rows: u64,
    /// Function that fills a slice with the next numbers.
    pub(super) fill: F,
}

impl<F: FnMut(&mut [u64])> RowWriter<F> {
    /// Writes one line per row.
    pub(super) fn write_text(self, out: &mut dyn Write) -> io::Result<()> {
        let mut digits = itoa::Buffer::new();
        let mut text = Vec::new();
        self.for_each_block(|numbers| {
            text.clear();
            for &number in numbers {
                text.extend_from_slice(digits.format(number).as_bytes());
                text.push(b'\n');
            }
            out.write_all(&text)
        })
    }

    /// Writes a NumPy array. The samplers' limit of 2^63 samples keeps indices signed.
    pub(super) fn write_npy(self, out: &mut dyn Write) -> io::Result<()> {
        let header = NpyHeader { dtype: NpyDtype::for_element::<i64>(), shape: vec![self.n_rows] };
        out.write_all(&header.to_bytes())?;
        self.write_raw(out)
    }

    /// Writes raw 64-bit numbers.
    fn write_raw(self, out: &mut dyn Write) -> io::Result<()> {
        let mut bytes = Vec::new();
        self.for_each_block(|numbers| {
            bytes.clear();
            bytes.extend(numbers.iter().flat_map(|number| number.to_le_bytes()));
            out.write_all(&bytes)
        })
    }

    fn for_each_block(mut self, mut write: impl FnMut(&[u64]) -> io::Result<()>) -> io::Result<()> {
        let mut block = vec![0; BLOCK];
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

/// Returns a function that fills slices from an iterator, which must be long enough.
pub(super) fn fill_from(mut numbers: impl Iterator<Item = u64>) -> impl FnMut(&mut [u64]) {
    move |block| block.iter_mut().zip(&mut numbers).for_each(|(slot, number)| *slot = number)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows(n_rows: u64) -> RowWriter<impl FnMut(&mut [u64])> {
        RowWriter { n_rows, fill: fill_from(0..) }
    }

    #[test]
    fn blocks_write_every_number_once() {
        for n_rows in [0, 1, 3, BLOCK as u64 - 1, BLOCK as u64, BLOCK as u64 + 1, 3 * BLOCK as u64]
        {
            let mut raw = Vec::new();
            rows(n_rows).write_raw(&mut raw).unwrap();
            let expected: Vec<u8> = (0..n_rows).flat_map(u64::to_le_bytes).collect();
            assert!(raw == expected, "{n_rows} rows");
            let mut text = Vec::new();
            rows(n_rows).write_text(&mut text).unwrap();
            let lines = str::from_utf8(&text).unwrap().lines();
            assert!(lines.eq((0..n_rows).map(|n| n.to_string())), "{n_rows} rows");
        }
    }
}
