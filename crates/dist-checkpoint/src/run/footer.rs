//! The footer of a JSON file: the checksum of the preceding text, as the last member of the object.

use std::path::Path;

use crate::{
    error::{Result, file_part::FilePart},
    safetensors::{checksum::Checksum, stored},
};

const BEGIN: &[u8] = b",\n  \"checksum\": \"";
const END: &[u8] = b"\"\n}";

/// Adds a checksum to the text of an object that is printed over several lines.
pub fn add_footer(mut text: Vec<u8>) -> Vec<u8> {
    debug_assert!(text.ends_with(b"\n}"), "an object that is printed over several lines");
    text.truncate(text.len() - 2);
    let checksum = Checksum::compute(&text);
    [&text, BEGIN, checksum.to_string().as_bytes(), END].concat()
}

/// Checks that a text ends with the checksum of the preceding text.
///
/// # Errors
///
/// [`Error::Damaged`](crate::Error::Damaged).
pub fn check_footer(path: &Path, text: &[u8]) -> Result<()> {
    let Some((covered_text, expected)) = split(text) else {
        return Err(stored::bad_checksums(path, &FilePart::Index));
    };
    stored::check(path, expected, Checksum::compute(covered_text), || FilePart::Index)
}

/// Splits a text into the part that the checksum covers and the checksum.
fn split(text: &[u8]) -> Option<(&[u8], Checksum)> {
    let without_end = text.strip_suffix(END)?;
    let digits_start = without_end.len().checked_sub(Checksum::DIGITS)?;
    let (with_begin, digits) = without_end.split_at_checked(digits_start)?;
    let checksum = Checksum::parse(str::from_utf8(digits).ok()?)?;
    Some((with_begin.strip_suffix(BEGIN)?, checksum))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn footer_has_checksum_of_preceding_text() {
        let text = br#"{
  "format_version": 1,
  "step": 7
}"#;
        let complete = add_footer(text.to_vec());
        // Computed with `zlib.crc32` of Python.
        let expected = [&text[..text.len() - 2], b",\n  \"checksum\": \"256f795d\"\n}"].concat();
        assert_eq!(String::from_utf8(complete), String::from_utf8(expected));
    }
}
