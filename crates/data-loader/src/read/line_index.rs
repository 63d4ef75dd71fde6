//! The places of samples in a text file, stored in memory or in a separate file.
//!
//! The index has blocks of 4,096 samples. A block stores the number of lines before it, the start
//! of each 64 samples in 8 bytes, and the end of each sample after that start in 4 bytes: 4.1 bytes
//! a sample.
//!
//! An index file has a header and the blocks, each with a checksum, in little-endian order. The
//! header names the length, the time and some content of the text file; if anything differs, the
//! index is built anew. A block is read and checked when one of its samples is read, so opening
//! takes the same time for files of any length.

use std::{
    io::{self, Write},
    ops::Range,
    path::{Path, PathBuf},
    sync::OnceLock,
};

use core_types::files::AtomicFile;

use crate::{
    error::{Error, Result},
    read::{
        file::DataFile,
        split_text::{SampleEnd, SplitRule, split},
    },
};

/// The place where a line index is kept.
///
/// Finding the lines of a file takes about a second per gigabyte. A kept index saves this time when
/// the file is opened again.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum IndexPlace {
    /// In memory. No file is written.
    #[default]
    InMemory,
    /// In a file next to the text file, with `.line-index` after its name.
    Beside,
    /// In this file. A folder of texts has no such place.
    At(PathBuf),
}

/// The end of the name of a kept index.
pub(crate) const INDEX_EXTENSION: &str = "line-index";

impl IndexPlace {
    /// Returns the path of the index of a text file.
    fn path(&self, text: &Path) -> Option<PathBuf> {
        match self {
            Self::InMemory => None,
            Self::Beside => {
                let mut name = text.file_name()?.to_owned();
                name.push(".");
                name.push(INDEX_EXTENSION);
                Some(text.with_file_name(name))
            }
            Self::At(path) => Some(path.clone()),
        }
    }
}

const MAGIC: [u8; 8] = *b"lineidx\0";
const VERSION: u32 = 1;
const HEADER_BYTES: usize = 72;
const BLOCK_SAMPLES: usize = 4096;
const GROUP_SAMPLES: usize = 64;
const CHECKSUM_BYTES: usize = 4;

/// The places of all samples of a file.
#[derive(Debug)]
pub(crate) struct LineIndex {
    n_samples: u64,
    n_text_bytes: u64,
    /// Blocks, empty until they are read from the index file.
    blocks: Vec<OnceLock<IndexBlock>>,
    kept: Option<KeptIndex>,
}

/// An index file and the checksum of its header.
#[derive(Debug)]
struct KeptIndex {
    path: PathBuf,
    header_checksum: u32,
}

#[derive(Debug, Default, PartialEq, Eq)]
struct IndexBlock {
    /// Number of lines before the block.
    n_lines: u64,
    /// Start of each group.
    starts: Vec<u64>,
    /// End of each sample, from the start of its group.
    ends: Vec<u32>,
}

/// The place of a sample, and an earlier place with a known line number.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SamplePlace {
    pub(crate) bytes: Range<u64>,
    pub(crate) known_position: u64,
    pub(crate) lines_before_known: u64,
}

impl LineIndex {
    /// Opens the index of a file at its place, or builds it, and keeps it there.
    pub(crate) fn open(text: &DataFile, rule: SplitRule, place: &IndexPlace) -> Result<Self> {
        let Some(path) = place.path(&text.path) else { return Self::build(text, rule) };
        let edge_hash = text.edge_hash()?;
        if let Some(kept) = Self::open_kept(text, rule, &path, edge_hash) {
            return Ok(kept);
        }
        let index = Self::build(text, rule)?;
        let header = encode_header(text, rule, edge_hash, index.n_samples);
        index.keep(&header, &path).map_err(Error::io(path))?;
        Ok(index)
    }

    fn build(text: &DataFile, rule: SplitRule) -> Result<Self> {
        let mut builder = IndexBuilder::default();
        split(text, rule, |end| builder.push(&text.path, end))?;
        Ok(builder.finish(text.len()))
    }

    /// Opens an index file if it belongs to the text.
    fn open_kept(text: &DataFile, rule: SplitRule, path: &Path, edge_hash: u64) -> Option<Self> {
        // Every fault means that the index must be built.
        let file = DataFile::open(path).ok()?;
        let header = file.read(0..HEADER_BYTES as u64).ok()?;
        let n_samples = read_number(header.get(..8)?);
        let expected = encode_header(text, rule, edge_hash, n_samples);
        if header != expected || file.len() != index_bytes(n_samples)? {
            return None;
        }
        let n_blocks = usize::try_from(n_samples.div_ceil(BLOCK_SAMPLES as u64)).ok()?;
        let blocks = std::iter::repeat_with(OnceLock::new).take(n_blocks).collect();
        let kept = KeptIndex { path: path.into(), header_checksum: crc32fast::hash(&header) };
        Some(Self { n_samples, n_text_bytes: text.len(), blocks, kept: Some(kept) })
    }

    /// Writes the index to a file, which is complete when it has its name.
    fn keep(&self, header: &[u8], path: &Path) -> io::Result<()> {
        let header_checksum = crc32fast::hash(header);
        let mut file = AtomicFile::new(path)?;
        file.write_all(header)?;
        for (number, block) in (0..).zip(&self.blocks) {
            if let Some(block) = block.get() {
                file.write_all(&block.encode(header_checksum, number))?;
            }
        }
        file.persist()
    }

    pub(crate) fn len(&self) -> u64 {
        self.n_samples
    }

    pub(crate) fn place(&self, index: u64) -> Result<SamplePlace> {
        let (block, in_block) = self.locate(index)?;
        Ok(SamplePlace {
            bytes: block.range(in_block),
            known_position: block.starts[0],
            lines_before_known: block.n_lines,
        })
    }

    /// Returns the block of a sample and its number in the block.
    fn locate(&self, index: u64) -> Result<(&IndexBlock, usize)> {
        if index >= self.n_samples {
            return Err(Error::IndexOutOfRange { index, len: self.n_samples });
        }
        #[expect(clippy::cast_possible_truncation, reason = "the blocks are in memory")]
        let block = self.block((index / BLOCK_SAMPLES as u64) as usize)?;
        #[expect(clippy::cast_possible_truncation, reason = "below the length of a block")]
        Ok((block, (index % BLOCK_SAMPLES as u64) as usize))
    }

    fn block(&self, number: usize) -> Result<&IndexBlock> {
        let slot = &self.blocks[number];
        if let Some(block) = slot.get() {
            return Ok(block);
        }
        // Two threads may read the same block, with the same result.
        let block = self.read_block(number as u64)?;
        Ok(slot.get_or_init(|| block))
    }

    fn read_block(&self, number: u64) -> Result<IndexBlock> {
        #[expect(clippy::expect_used, reason = "only a kept index has empty blocks")]
        let kept = self.kept.as_ref().expect("blocks in memory are never empty");
        let first = number * BLOCK_SAMPLES as u64;
        let n_samples = (self.n_samples - first).min(BLOCK_SAMPLES as u64);
        let start = HEADER_BYTES as u64 + number * block_bytes(BLOCK_SAMPLES as u64);
        let bytes = DataFile::open(&kept.path)?.read(start..start + block_bytes(n_samples))?;
        IndexBlock::decode(&bytes, kept.header_checksum, number, self.n_text_bytes).ok_or_else(
            || Error::Content {
                path: kept.path.clone(),
                fault: format!("block {number} of the line index is corrupt; remove the file"),
            },
        )
    }
}

/// Returns the bytes of a block.
fn block_bytes(n_samples: u64) -> u64 {
    let starts = n_samples.div_ceil(GROUP_SAMPLES as u64) * 8;
    8 + starts + n_samples * 4 + CHECKSUM_BYTES as u64
}

/// Returns the bytes of an index file.
fn index_bytes(n_samples: u64) -> Option<u64> {
    let n_full = n_samples / BLOCK_SAMPLES as u64;
    let full = n_full.checked_mul(block_bytes(BLOCK_SAMPLES as u64))?;
    let n_rest = n_samples % BLOCK_SAMPLES as u64;
    let rest = if n_rest == 0 { 0 } else { block_bytes(n_rest) };
    full.checked_add(rest)?.checked_add(HEADER_BYTES as u64)
}

/// Returns the header of the index of a text. It begins with the number of samples, the only value
/// that is unknown before it is read; another text or rule has another header.
fn encode_header(text: &DataFile, rule: SplitRule, edge_hash: u64, n_samples: u64) -> Vec<u8> {
    let unit = 2 * rule.unit as u64 + u64::from(rule.skips_blank_lines);
    let mut header = n_samples.to_le_bytes().to_vec();
    header.extend(MAGIC);
    for number in [
        u64::from(VERSION),
        text.stamp.n_bytes,
        text.stamp.modified,
        edge_hash,
        unit,
        rule.max_bytes.unwrap_or(0),
    ] {
        header.extend(number.to_le_bytes());
    }
    let checksum = u64::from(crc32fast::hash(&header));
    header.extend(checksum.to_le_bytes());
    header
}

impl IndexBlock {
    fn range(&self, sample: usize) -> Range<u64> {
        let group_start = self.starts[sample / GROUP_SAMPLES];
        let start = if sample % GROUP_SAMPLES == 0 { 0 } else { self.ends[sample - 1] };
        group_start + u64::from(start)..group_start + u64::from(self.ends[sample])
    }

    /// Returns the block with a checksum, which includes the header and the block's number: a block
    /// at another place is corrupt too.
    fn encode(&self, header_checksum: u32, number: u64) -> Vec<u8> {
        let mut bytes = self.n_lines.to_le_bytes().to_vec();
        bytes.extend(self.starts.iter().flat_map(|start| start.to_le_bytes()));
        bytes.extend(self.ends.iter().flat_map(|end| end.to_le_bytes()));
        bytes.extend(checksum(&bytes, header_checksum, number).to_le_bytes());
        bytes
    }

    /// Decodes a block, or returns `None` if it is corrupt.
    fn decode(bytes: &[u8], header_checksum: u32, number: u64, n_text_bytes: u64) -> Option<Self> {
        let (content, found) = bytes.split_at_checked(bytes.len().checked_sub(CHECKSUM_BYTES)?)?;
        if checksum(content, header_checksum, number).to_le_bytes() != found {
            return None;
        }
        let (n_lines, content) = content.split_at_checked(8)?;
        // Each group has 8 bytes, and each sample 4.
        let n_groups = content.len().div_ceil(8 + 4 * GROUP_SAMPLES);
        let (starts, ends) = content.split_at_checked(n_groups * 8)?;
        #[expect(clippy::cast_possible_truncation, reason = "a number of 4 bytes")]
        let block = Self {
            n_lines: read_number(n_lines),
            starts: starts.chunks_exact(8).map(read_number).collect(),
            ends: ends.chunks_exact(4).map(|end| read_number(end) as u32).collect(),
        };
        block.is_possible(n_text_bytes).then_some(block)
    }

    /// Returns true if the samples are in ascending order within the text, with at most one line
    /// per byte before them. A checksum proves only that the block is as it was written.
    fn is_possible(&self, n_text_bytes: u64) -> bool {
        let Some(&(mut position)) = self.starts.first() else { return false };
        if self.n_lines > position {
            return false;
        }
        self.ends.iter().enumerate().all(|(sample, &end)| {
            let start = self.starts[sample / GROUP_SAMPLES];
            let is_joined = sample % GROUP_SAMPLES > 0 || start == position;
            let end = start.checked_add(end.into()).filter(|&end| end <= n_text_bytes);
            let is_valid = is_joined && end.is_some_and(|end| end >= position);
            position = end.unwrap_or(position);
            is_valid
        })
    }
}

fn checksum(content: &[u8], header_checksum: u32, number: u64) -> u32 {
    let mut hasher = crc32fast::Hasher::new_with_initial(header_checksum);
    hasher.update(&number.to_le_bytes());
    hasher.update(content);
    hasher.finalize()
}

/// Returns the little-endian number in at most 8 bytes.
fn read_number(bytes: &[u8]) -> u64 {
    bytes.iter().rev().fold(0, |number, &byte| number << 8 | u64::from(byte))
}

#[derive(Default)]
struct IndexBuilder {
    blocks: Vec<OnceLock<IndexBlock>>,
    open: IndexBlock,
    n_samples: u64,
    last: u64,
    n_lines: u64,
}

impl IndexBuilder {
    fn push(&mut self, text: &Path, sample: SampleEnd) -> Result<()> {
        if self.open.ends.len() == BLOCK_SAMPLES {
            self.close_block();
        }
        if self.open.ends.is_empty() {
            self.open.n_lines = self.n_lines;
        }
        if self.open.ends.len() % GROUP_SAMPLES == 0 {
            self.open.starts.push(self.last);
        }
        let start = self.open.starts.last().copied().unwrap_or(self.last);
        let end = u32::try_from(sample.end - start).map_err(|_| {
            let first = self.n_samples - self.n_samples % GROUP_SAMPLES as u64;
            Error::Content {
                path: text.into(),
                fault: format!("64 samples from sample {first} on have more than 4 GiB"),
            }
        })?;
        self.open.ends.push(end);
        self.n_samples += 1;
        self.last = sample.end;
        self.n_lines = sample.n_lines;
        Ok(())
    }

    fn close_block(&mut self) {
        let block = std::mem::take(&mut self.open);
        self.blocks.push(OnceLock::from(block));
    }

    fn finish(mut self, n_text_bytes: u64) -> LineIndex {
        if !self.open.ends.is_empty() {
            self.close_block();
        }
        LineIndex { n_samples: self.n_samples, n_text_bytes, blocks: self.blocks, kept: None }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::read::split_text::TextUnit;

    const LINES: SplitRule =
        SplitRule { unit: TextUnit::Line, skips_blank_lines: false, max_bytes: None };

    /// Writes a file with a hole before its last bytes.
    fn sparse_file(folder: &Path, start: u64, end: &[u8]) -> DataFile {
        use std::{
            fs::File,
            io::{Seek, SeekFrom},
        };

        let path = folder.join("sparse.txt");
        let mut file = File::create(&path).unwrap();
        file.seek(SeekFrom::Start(start)).unwrap();
        file.write_all(end).unwrap();
        drop(file);
        DataFile::open(&path).unwrap()
    }

    fn check_ranges(index: &LineIndex, ends: &[u64]) {
        let mut start = 0;
        for (n, &end) in (0..).zip(ends) {
            assert_eq!(index.place(n).unwrap().bytes, start..end, "sample {n}");
            start = end;
        }
        assert!(matches!(index.place(index.len()), Err(Error::IndexOutOfRange { .. })));
    }

    #[test]
    fn index_finds_samples_beyond_4_gib() {
        let folder = tempfile::tempdir().unwrap();
        let mut ends: Vec<u64> = (1..9000).map(|n| n << 20).collect();
        let start = ends.last().copied().unwrap();
        assert!(start > 1 << 33);
        let text = sparse_file(folder.path(), start, b"last line\n");
        ends.push(text.len());
        let mut builder = IndexBuilder::default();
        for (n_lines, &end) in (1..).zip(&ends) {
            builder.push(&text.path, SampleEnd { end, n_lines }).unwrap();
        }
        let built = builder.finish(text.len());
        let path = folder.path().join("index");
        let edge_hash = text.edge_hash().unwrap();
        built.keep(&encode_header(&text, LINES, edge_hash, built.len()), &path).unwrap();
        let kept = LineIndex::open_kept(&text, LINES, &path, edge_hash).unwrap();
        assert!(path.metadata().unwrap().len() < 9000 * 42 / 10);
        for index in [&built, &kept] {
            check_ranges(index, &ends);
            let place = index.place(8999).unwrap();
            assert_eq!((place.known_position, place.lines_before_known), (8192 << 20, 8192));
            assert_eq!(text.read(place.bytes).unwrap(), b"last line\n");
        }
    }

    #[test]
    fn long_samples_are_rejected() {
        let mut builder = IndexBuilder::default();
        builder.push(Path::new("text"), SampleEnd { end: 5, n_lines: 1 }).unwrap();
        let end = SampleEnd { end: 1 << 32, n_lines: 2 };
        let error = builder.push(Path::new("text"), end).unwrap_err();
        assert!(matches!(error, Error::Content { .. }), "{error}");
    }

    #[test]
    fn flipped_bits_of_a_block_are_found() {
        let block = IndexBlock { n_lines: 7, starts: vec![10, 138], ends: (1..=70).collect() };
        let mut block = block;
        block.ends[..64].iter_mut().for_each(|end| *end *= 2);
        block.ends[64..].iter_mut().for_each(|end| *end -= 64);
        let bytes = block.encode(3, 5);
        assert_eq!(bytes.len() as u64, block_bytes(70));
        assert_eq!(IndexBlock::decode(&bytes, 3, 5, 144), Some(block));
        for (header_checksum, number, n_text_bytes) in [(4, 5, 144), (3, 6, 144), (3, 5, 143)] {
            assert_eq!(IndexBlock::decode(&bytes, header_checksum, number, n_text_bytes), None);
        }
        for bit in 0..bytes.len() * 8 {
            let mut flipped = bytes.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(IndexBlock::decode(&flipped, 3, 5, 144), None);
        }
        for len in 0..bytes.len() {
            assert_eq!(IndexBlock::decode(&bytes[..len], 3, 5, 144), None);
        }
    }
}
