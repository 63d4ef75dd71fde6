//! Hashes that distinguish inputs.

use std::{
    fmt,
    fs::File,
    io::{self, Read},
    path::Path,
};

use crate::seed::Seed;

/// The number of bytes read at a time: a multiple of the word size, so that only the last word of a
/// file may be incomplete.
const PART_BYTES: usize = 1 << 20;

/// A hash of a sequence of words and byte strings, the same on every machine and in every version
/// of Rust.
///
/// Use it to compare data sets, orders or calls: samplers check that a saved state has the same
/// weights, and processes compare their collectives. The order of words matters. The hash is not
/// cryptographic: collisions can be constructed.
///
/// Each word is hashed with its position, and the hashes are added. So no hash depends on an
/// earlier one, and the processor computes several at once.
///
/// # Determinism
///
/// Tests pin the values, so that a new version reads the states of old versions.
///
/// # Examples
///
/// ```
/// use core_types::Fingerprint;
///
/// let fingerprint = |words: [u64; 2]| words.into_iter().collect::<Fingerprint>().finish();
/// assert_eq!(fingerprint([1, 2]), fingerprint([1, 2]));
/// assert_ne!(fingerprint([1, 2]), fingerprint([2, 1]));
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Fingerprint {
    sum: u64,
    n_words: u64,
}

impl Fingerprint {
    /// Creates an empty fingerprint.
    pub const fn new() -> Self {
        Self { sum: 0, n_words: 0 }
    }

    /// Returns the fingerprint of a file, equal to [`write_bytes`](Self::write_bytes) of its
    /// content, without loading the whole file.
    ///
    /// # Errors
    ///
    /// Returns an [`io::Error`] if the file cannot be read.
    pub fn read(path: &Path) -> io::Result<Self> {
        let mut file = File::open(path)?;
        let mut fingerprint = Self::new();
        fingerprint.write_u64(file.metadata()?.len());
        let mut part = Vec::with_capacity(PART_BYTES);
        while file.by_ref().take(PART_BYTES as u64).read_to_end(&mut part)? > 0 {
            fingerprint.write_words(&part);
            part.clear();
        }
        Ok(fingerprint)
    }

    /// Adds a word.
    pub fn write_u64(&mut self, word: u64) -> &mut Self {
        self.sum = self.sum.wrapping_add(Seed::new(word).derive(self.n_words).as_u64());
        self.n_words = self.n_words.wrapping_add(1);
        self
    }

    /// Adds a byte string with its length: `"ab"`, `"c"` differs from `"a"`, `"bc"`.
    pub fn write_bytes(&mut self, bytes: &[u8]) -> &mut Self {
        self.write_u64(bytes.len() as u64);
        self.write_words(bytes);
        self
    }

    /// Adds bytes as words; the last word is filled with zeros.
    fn write_words(&mut self, bytes: &[u8]) {
        for chunk in bytes.chunks(size_of::<u64>()) {
            let mut word = [0; size_of::<u64>()];
            word[..chunk.len()].copy_from_slice(chunk);
            self.write_u64(u64::from_le_bytes(word));
        }
    }

    /// Returns the hash.
    #[must_use]
    pub const fn finish(&self) -> u64 {
        self.sum
    }
}

impl fmt::Display for Fingerprint {
    /// Writes the number as 16 hexadecimal digits.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.finish())
    }
}

impl Extend<u64> for Fingerprint {
    fn extend<I: IntoIterator<Item = u64>>(&mut self, words: I) {
        for word in words {
            self.write_u64(word);
        }
    }
}

impl FromIterator<u64> for Fingerprint {
    fn from_iter<I: IntoIterator<Item = u64>>(words: I) -> Self {
        let mut fingerprint = Self::new();
        fingerprint.extend(words);
        fingerprint
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn hash_strings(strings: &[&[u8]]) -> u64 {
        let mut fingerprint = Fingerprint::new();
        for string in strings {
            fingerprint.write_bytes(string);
        }
        fingerprint.finish()
    }

    #[test]
    fn values_are_pinned() {
        let words = (0..3).collect::<Fingerprint>();
        assert_eq!(Fingerprint::new().finish(), 0);
        assert_eq!(words.finish(), 13_465_756_208_001_373_876);
        assert_eq!(hash_strings(&[b"model.layers.0.mlp"]), 11_572_214_712_638_276_848);
    }

    #[test]
    fn string_boundaries_count() {
        let strings: [&[&[u8]]; 9] = [
            &[],
            &[b""],
            &[b"", b""],
            &[b"ab", b"c"],
            &[b"a", b"bc"],
            &[b"abc"],
            &[b"abc\0"],
            &[b"abcdefgh"],
            &[b"abcdefgh\0"],
        ];
        let all: BTreeSet<u64> = strings.iter().map(|strings| hash_strings(strings)).collect();
        assert_eq!(all.len(), strings.len());
    }

    #[test]
    fn file_matches_its_bytes() {
        let path = std::env::temp_dir().join(format!("fingerprint-{}", std::process::id()));
        for len in [0, 1, PART_BYTES, 2 * PART_BYTES + 3] {
            let bytes: Vec<u8> = (0..=250).cycle().take(len).collect();
            std::fs::write(&path, &bytes).unwrap();
            assert_eq!(
                Fingerprint::read(&path).unwrap().finish(),
                hash_strings(&[&bytes]),
                "{len}"
            );
        }
        std::fs::remove_file(&path).unwrap();
        assert_eq!(Fingerprint::read(&path).unwrap_err().kind(), io::ErrorKind::NotFound);
    }

    #[test]
    fn words_can_be_added_in_parts() {
        let mut parts = Fingerprint::new();
        parts.extend([7, 8]);
        parts.write_u64(9);
        assert_eq!(parts, [7, 8, 9].into_iter().collect());
    }
}
