//! Untrusted line indexes: whatever is in the file of an index, no sample is wrong unless its
//! checksums are forged, and none panics.
//!
//! The input up to its first NUL is a text. The next byte tells whether to forge the checksums, and
//! each further 3 bytes are a position in the index and its new byte.

#![no_main]

use std::{fs, path::Path};

use core_types::files::AtomicFolder;
use data_loader::{BoxError, Dataset, Error, IndexPlace, TextConfig, TextDataset};
use libfuzzer_sys::fuzz_target;

const HEADER_BYTES: usize = 72;
/// Bytes of a block of 4,096 samples: the number of lines, 64 starts, the ends and a checksum.
const BLOCK_BYTES: usize = 8 + 64 * 8 + 4096 * 4 + 4;

fuzz_target!(|bytes: &[u8]| {
    let mut parts = bytes.splitn(2, |&byte| byte == 0);
    let text = parts.next().unwrap_or_default();
    let (is_forged, edits) = parts.next().and_then(<[u8]>::split_first).unwrap_or((&0, &[]));
    let is_forged = is_forged % 2 == 1;
    let folder = AtomicFolder::new(std::env::temp_dir().join("line_index")).expect("a folder");
    let (path, index) = (folder.path().join("text"), folder.path().join("index"));
    fs::write(&path, text).expect("a file");

    let lines = naive_lines(text);
    assert_eq!(read(&path, &index), lines, "a new index");
    assert_eq!(read(&path, &index), lines, "a kept index");
    let mut bytes = fs::read(&index).expect("the index was kept");
    edit(&mut bytes, edits);
    if is_forged {
        forge(&mut bytes);
    }
    fs::write(&index, bytes).expect("a file");
    let edited = read(&path, &index);
    if !is_forged {
        assert_eq!(edited.len(), lines.len());
        for (line, expected) in edited.iter().zip(&lines) {
            assert!(line == expected || *line == Line::CorruptIndex, "{line:?} for {expected:?}");
        }
    }
});

/// A line, or the reason why it cannot be read.
#[derive(Debug, PartialEq, Eq)]
enum Line {
    Text(String),
    Invalid,
    CorruptIndex,
}

fn read(path: &Path, index: &Path) -> Vec<Line> {
    let config = TextConfig { index: IndexPlace::At(index.into()), ..TextConfig::default() };
    let texts = TextDataset::open_with(path, &config).expect("any text can be opened");
    (0..texts.len()).map(|n| texts.read(n).map_or_else(|error| fault(&error), Line::Text)).collect()
}

fn fault(error: &BoxError) -> Line {
    match error.downcast_ref() {
        Some(Error::Content { .. }) => Line::CorruptIndex,
        Some(Error::Line { .. }) => Line::Invalid,
        _ => panic!("{error}"),
    }
}

fn naive_lines(text: &[u8]) -> Vec<Line> {
    let text = text.strip_prefix("\u{feff}".as_bytes()).unwrap_or(text);
    let mut lines = Vec::new();
    for line in text.split_inclusive(|&byte| byte == b'\n') {
        let end = if line.ends_with(b"\r\n") { 2 } else { usize::from(line.ends_with(b"\n")) };
        let line = std::str::from_utf8(&line[..line.len() - end]);
        lines.push(line.map_or(Line::Invalid, |line| Line::Text(line.into())));
    }
    lines
}

fn edit(index: &mut [u8], edits: &[u8]) {
    for edit in edits.chunks_exact(3) {
        let position = usize::from(u16::from_le_bytes([edit[0], edit[1]])) % index.len();
        index[position] = edit[2];
    }
}

/// Writes valid checksums into an index.
fn forge(index: &mut [u8]) {
    let (header, blocks) = index.split_at_mut(HEADER_BYTES);
    let (fields, checksum) = header.split_at_mut(HEADER_BYTES - 8);
    checksum.copy_from_slice(&u64::from(crc32fast::hash(fields)).to_le_bytes());
    let header_checksum = crc32fast::hash(header);
    for (number, block) in (0_u64..).zip(blocks.chunks_mut(BLOCK_BYTES)) {
        let (content, checksum) = block.split_at_mut(block.len() - 4);
        let mut hasher = crc32fast::Hasher::new_with_initial(header_checksum);
        hasher.update(&number.to_le_bytes());
        hasher.update(content);
        checksum.copy_from_slice(&hasher.finalize().to_le_bytes());
    }
}
