//! Finding the samples of a text file: lines, paragraphs or the whole text.

use std::io::{self, BufRead, BufReader, ErrorKind};

use memchr::{memchr, memchr_iter};

use crate::{
    error::{Error, Result},
    read::file::DataFile,
};

/// The part of a text file that is a sample.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum TextUnit {
    /// A line, blank ones included.
    #[default]
    Line,
    /// Lines between empty lines. Paragraphs of white space are skipped.
    Paragraph,
    /// The whole file. Empty files are skipped.
    Document,
}

/// The rule that splits a file into samples.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SplitRule {
    pub(crate) unit: TextUnit,
    /// Whether blank lines are left out.
    pub(crate) skips_blank_lines: bool,
    /// Maximum bytes of a sample; longer ones are cut.
    pub(crate) max_bytes: Option<u64>,
}

/// The byte order mark, which some programs write at the start of a text.
pub(crate) const BYTE_ORDER_MARK: &[u8] = "\u{feff}".as_bytes();

const BUFFER_BYTES: usize = 1 << 18;

/// A sample of a file begins at the end of the sample before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SampleEnd {
    /// End of the sample, separators included.
    pub(crate) end: u64,
    /// Number of lines before the end.
    pub(crate) n_lines: u64,
}

/// Finds the ends of all samples in a file, and passes them to `push`.
pub(crate) fn split(
    file: &DataFile,
    rule: SplitRule,
    push: impl FnMut(SampleEnd) -> Result<()>,
) -> Result<()> {
    let mark_len = BYTE_ORDER_MARK.len() as u64;
    let has_mark = file.len() >= mark_len && file.read(0..mark_len)? == BYTE_ORDER_MARK;
    let position = if has_mark { mark_len } else { 0 };
    let mut splitter = Splitter { file, rule, push, position, n_lines: 0, open: None };
    let mut source = BufReader::with_capacity(BUFFER_BYTES, file.reader_at(position));
    while let Some(line) = next_line(&mut source).map_err(Error::io(&file.path))? {
        splitter.add_line(&line)?;
    }
    splitter.close()?;
    file.check_unchanged()
}

/// Facts about a line, with its end.
#[derive(Clone, Copy, Debug, Default)]
struct LineFacts {
    n_bytes: u64,
    n_end_bytes: u64,
    is_blank: bool,
}

/// Reads a line, without keeping its bytes. Returns `None` at the end of the file.
fn next_line(source: &mut impl BufRead) -> io::Result<Option<LineFacts>> {
    let mut line = LineFacts { is_blank: true, ..LineFacts::default() };
    let mut last_byte = None;
    loop {
        let bytes = match source.fill_buf() {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == ErrorKind::Interrupted => continue,
            Err(error) => return Err(error),
        };
        if bytes.is_empty() {
            return Ok((line.n_bytes > 0).then_some(line));
        }
        let end = memchr(b'\n', bytes);
        let text = &bytes[..end.unwrap_or(bytes.len())];
        line.is_blank = line.is_blank && text.iter().all(u8::is_ascii_whitespace);
        last_byte = text.last().copied().or(last_byte);
        let n_bytes = text.len() + usize::from(end.is_some());
        line.n_bytes += n_bytes as u64;
        source.consume(n_bytes);
        if end.is_some() {
            line.n_end_bytes = if last_byte == Some(b'\r') { 2 } else { 1 };
            return Ok(Some(line));
        }
    }
}

/// Returns the number of line feeds.
pub(crate) fn count_newlines(bytes: &[u8]) -> u64 {
    memchr_iter(b'\n', bytes).count() as u64
}

/// A sample with an end that is not known yet.
#[derive(Clone, Copy, Debug)]
struct OpenSample {
    /// Start and end without separators.
    start: u64,
    end: u64,
    /// Number of lines before the start.
    n_lines: u64,
    is_blank: bool,
}

struct Splitter<'a, F> {
    file: &'a DataFile,
    rule: SplitRule,
    push: F,
    position: u64,
    n_lines: u64,
    open: Option<OpenSample>,
}

impl<F: FnMut(SampleEnd) -> Result<()>> Splitter<'_, F> {
    fn add_line(&mut self, line: &LineFacts) -> Result<()> {
        let start = self.position;
        let is_empty = line.n_bytes == line.n_end_bytes;
        // The first empty line ends a paragraph.
        if self.rule.unit == TextUnit::Paragraph && is_empty {
            self.close()?;
        } else {
            let n_lines = self.n_lines;
            let new = OpenSample { start, end: start, n_lines, is_blank: true };
            let open = self.open.get_or_insert(new);
            open.end = start + line.n_bytes - line.n_end_bytes;
            open.is_blank = open.is_blank && line.is_blank;
        }
        self.position += line.n_bytes;
        self.n_lines += 1;
        match self.rule.unit {
            TextUnit::Line => self.close(),
            TextUnit::Paragraph | TextUnit::Document => Ok(()),
        }
    }

    /// Ends the open sample at the current position, if it is not skipped.
    fn close(&mut self) -> Result<()> {
        let Some(mut open) = self.open.take() else { return Ok(()) };
        let is_skipped = match self.rule.unit {
            TextUnit::Line => self.rule.skips_blank_lines && open.is_blank,
            TextUnit::Paragraph => open.is_blank,
            TextUnit::Document => false,
        };
        if is_skipped {
            return Ok(());
        }
        if self.rule.unit == TextUnit::Document {
            open.end = self.position;
        }
        if let Some(max_bytes) = self.rule.max_bytes {
            self.cut(open, max_bytes)?;
        }
        (self.push)(SampleEnd { end: self.position, n_lines: self.n_lines })
    }

    /// Cuts a sample into pieces of at most `max_bytes`.
    fn cut(&mut self, open: OpenSample, max_bytes: u64) -> Result<()> {
        let mut start = open.start;
        let mut n_lines = open.n_lines;
        while open.end - start > max_bytes {
            let piece = self.file.read(start..start + max_bytes + 1)?;
            let piece = &piece[..last_boundary(&piece)];
            start += piece.len() as u64;
            n_lines += count_newlines(piece);
            (self.push)(SampleEnd { end: start, n_lines })?;
        }
        Ok(())
    }
}

/// Returns the last boundary in a text that is longer than [`MIN_SAMPLE_BYTES`]: a place that is
/// not in a character or between `\r` and `\n`. Text that is not UTF-8 may lack one near its end.
fn last_boundary(text: &[u8]) -> usize {
    let last = text.len() - 1;
    (last - LONGEST_CUT..=last).rev().find(|&end| is_boundary(text, end)).unwrap_or(last)
}

fn is_boundary(text: &[u8], position: usize) -> bool {
    let is_character_start = text[position] & 0xc0 != 0x80;
    is_character_start && !(text[position] == b'\n' && text[position - 1] == b'\r')
}

/// Maximum distance of a boundary: 3 bytes of a character.
const LONGEST_CUT: usize = 3;

/// Minimum bytes per sample, so that a piece has at least a character and a line end.
pub(crate) const MIN_SAMPLE_BYTES: u64 = 8;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn boundaries_keep_characters_whole() {
        for (end, expected) in [("abcd", 11), ("ab\r\n", 10), ("abé", 10), ("a€", 9), ("😀", 8)]
        {
            let text = "01234567".to_owned() + end;
            assert_eq!(last_boundary(text.as_bytes()), expected, "{text:?}");
        }
        assert_eq!(last_boundary(&[0x80; 9]), 8);
    }
}
