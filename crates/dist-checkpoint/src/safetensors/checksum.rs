//! Checksums of what is written: CRC-32, as zlib, gzip and PNG have it, so that other programs find
//! a function for it in their standard library.
//!
//! A checksum of 32 bits finds every change of up to 32 bits in a row, and of any other damage all
//! but one case in four billion.

use std::{
    fmt,
    io::{self, Read},
};

use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error};

/// A tensor has a checksum for every so many bytes, so that some of its items can be checked
/// without reading the others. Its checksum takes 8 bytes of the header.
pub(crate) const BLOCK: usize = 1 << 20;

/// The checksum of some bytes: 8 hexadecimal digits where it is written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Checksum(u32);

impl Checksum {
    /// The number of its digits.
    pub(crate) const DIGITS: usize = 8;

    pub(crate) fn of(bytes: &[u8]) -> Self {
        Self(crc32fast::hash(bytes))
    }

    pub(crate) fn get(self) -> u32 {
        self.0
    }

    /// Reads what is displayed, and nothing else.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let checksum = Self(u32::from_str_radix(text, 16).ok()?);
        (checksum.to_string() == text).then_some(checksum)
    }
}

impl From<u32> for Checksum {
    fn from(number: u32) -> Self {
        Self(number)
    }
}

impl fmt::Display for Checksum {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:08x}", self.0)
    }
}

impl Serialize for Checksum {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Checksum {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        Self::parse(&text).ok_or_else(|| D::Error::custom(format!("{text:?} is no checksum")))
    }
}

/// The digits of the checksums of a tensor's blocks, one after the other.
pub(crate) fn to_digits(blocks: &[Checksum]) -> String {
    blocks.iter().map(Checksum::to_string).collect()
}

/// The checksums of a tensor of `n_bytes`, if these are the digits of as many as it has blocks.
pub(crate) fn of_digits(digits: &str, n_bytes: usize) -> Option<Vec<Checksum>> {
    let blocks: Option<Vec<_>> = digits
        .as_bytes()
        .chunks(Checksum::DIGITS)
        .map(|digits| Checksum::parse(str::from_utf8(digits).ok()?))
        .collect();
    blocks.filter(|blocks| blocks.len() == n_bytes.div_ceil(BLOCK))
}

/// Sums up what is read through it.
#[derive(Debug, Default)]
pub(crate) struct Summing<R> {
    reader: R,
    hasher: crc32fast::Hasher,
}

impl<R> Summing<R> {
    pub(crate) fn new(reader: R) -> Self {
        Self { reader, hasher: crc32fast::Hasher::new() }
    }

    /// The checksum of all bytes that were read.
    pub(crate) fn checksum(self) -> Checksum {
        Checksum(self.hasher.finalize())
    }
}

impl<R: Read> Read for Summing<R> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let n_read = self.reader.read(bytes)?;
        self.hasher.update(&bytes[..n_read]);
        Ok(n_read)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_the_checksum_of_zlib() {
        // The check value in the catalogue of CRC algorithms, under CRC-32/ISO-HDLC.
        assert_eq!(Checksum::of(b"123456789").to_string(), "cbf43926");
        let mut summing = Summing::new(&b"123456789"[..]);
        summing.read_exact(&mut [0; 4]).unwrap();
        io::copy(&mut summing, &mut io::sink()).unwrap();
        assert_eq!(summing.checksum(), Checksum::of(b"123456789"));
    }

    #[test]
    fn digits_are_read_as_they_are_written() {
        let checksums = [Checksum(0), Checksum(0xcafe), Checksum(u32::MAX)];
        assert_eq!(of_digits(&to_digits(&checksums), 2 * BLOCK + 1), Some(checksums.to_vec()));
        assert_eq!(of_digits("", 0), Some(vec![]));
        for (digits, n_bytes) in [
            ("", 1),
            ("0000000", 1),
            ("0000000g", 1),
            ("+0000000", 1),
            ("CAFECAFE", 1),
            ("00000000", 0),
            ("00000000", BLOCK + 1),
            ("0000000000000000", BLOCK),
            ("000000ä", 1),
        ] {
            assert_eq!(of_digits(digits, n_bytes), None, "{digits} of {n_bytes} bytes");
        }
    }
}
