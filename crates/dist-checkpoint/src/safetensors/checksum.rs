//! Checksums of files: CRC-32 as in zlib, gzip and PNG, so that other programs find it in their
//! standard library.
//!
//! A 32-bit checksum detects every change of up to 32 consecutive bits, and all but one in four
//! billion of other changes.

use std::fmt;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error};

/// The size of a tensor's blocks. Each block has a checksum, so that a range of items can be
/// checked without reading the others. A checksum takes 8 bytes of the header.
pub(crate) const BLOCK: usize = 1 << 20;

/// The key of the header's own checksum in the metadata of a safetensors file. It is computed with
/// zeros in its place.
pub(crate) const HEADER_KEY: &str = "crc32";

/// Returns the key of a tensor's checksums in the metadata of a safetensors file.
pub(crate) fn tensor_key(name: &str) -> String {
    format!("{HEADER_KEY}:{name}")
}

/// Returns the key of another file's checksum in the metadata of a safetensors file.
pub(crate) fn file_key(name: &str) -> String {
    format!("{HEADER_KEY}/{name}")
}

/// Returns the name of the file that a key belongs to, or `None` for other keys. A name with a
/// folder is not the name of a file beside the weights.
pub(crate) fn file_of_key(key: &str) -> Option<&str> {
    let name = key.strip_prefix(HEADER_KEY)?.strip_prefix('/')?;
    (!name.is_empty() && name != ".." && !name.contains(['/', '\\'])).then_some(name)
}

/// The checksum of some bytes, displayed as 8 hexadecimal digits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Checksum(u32);

impl Checksum {
    /// The number of its digits.
    pub(crate) const DIGITS: usize = 8;

    pub(crate) fn compute(bytes: &[u8]) -> Self {
        Self(crc32fast::hash(bytes))
    }

    pub(crate) fn get(self) -> u32 {
        self.0
    }

    /// Parses a displayed checksum; rejects any other form.
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
        Self::parse(&text).ok_or_else(|| D::Error::custom(format!("{text:?} is not a checksum")))
    }
}

/// Returns the digits of the checksums of a tensor's blocks, concatenated.
pub(crate) fn to_digits(blocks: &[Checksum]) -> String {
    blocks.iter().map(Checksum::to_string).collect()
}

/// Parses the checksums of a tensor of `n_bytes`; returns `None` if the digits are malformed or
/// their number is wrong.
pub(crate) fn parse_digits(digits: &str, n_bytes: usize) -> Option<Vec<Checksum>> {
    let blocks: Option<Vec<_>> = digits
        .as_bytes()
        .chunks(Checksum::DIGITS)
        .map(|digits| Checksum::parse(str::from_utf8(digits).ok()?))
        .collect();
    blocks.filter(|blocks| blocks.len() == n_bytes.div_ceil(BLOCK))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checksum_matches_zlib() {
        // The check value of CRC-32/ISO-HDLC in the catalogue of CRC algorithms.
        assert_eq!(Checksum::compute(b"123456789").to_string(), "cbf43926");
    }

    #[test]
    fn keys_name_files_of_the_same_folder() {
        assert_eq!(file_of_key(&file_key("config.json")), Some("config.json"));
        for key in ["crc32", "crc32/", "crc32/..", "crc32/../a", "crc32/a\\b", "crc32:a"] {
            assert_eq!(file_of_key(key), None, "{key}");
        }
    }

    #[test]
    fn digits_round_trip() {
        let checksums = [Checksum(0), Checksum(0xcafe), Checksum(u32::MAX)];
        assert_eq!(parse_digits(&to_digits(&checksums), 2 * BLOCK + 1), Some(checksums.to_vec()));
        assert_eq!(parse_digits("", 0), Some(vec![]));
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
            assert_eq!(parse_digits(digits, n_bytes), None, "{digits} of {n_bytes} bytes");
        }
    }
}
