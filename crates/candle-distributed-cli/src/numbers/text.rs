//! Numbers in text, separated by white space.

use std::io::{self, BufRead, ErrorKind};

use super::{NumberList, number::Number};
use crate::error::Result;

/// The length limit of a word. Longer input, such as an endless word, is not a number.
const MAX_WORD_BYTES: usize = 4096;

/// Reads the numbers of a text.
pub(super) fn read<T: Number>(
    list: NumberList,
    source: impl BufRead + 'static,
) -> impl Iterator<Item = Result<T>> {
    let mut words = WordReader { source, bytes: Vec::new(), text: String::new(), end: 0 };
    (1_u64..).map_while(move |n| match words.next() {
        Ok(Some(word)) => Some(T::parse(word).map_err(|fault| list.error_at(n, &fault, word))),
        Ok(None) => None,
        Err(fault) => Some(Err(list.read_error(fault))),
    })
}

/// Splits a source into words, with one piece in memory at a time.
struct WordReader<R> {
    source: R,
    /// The current piece, before its conversion to `text`.
    bytes: Vec<u8>,
    /// Text between two ASCII white spaces. It may contain Unicode white space.
    text: String,
    /// End of the last word in `text`.
    end: usize,
}

impl<R: BufRead> WordReader<R> {
    /// Returns the next word, or `None` at the end of the source.
    fn next(&mut self) -> io::Result<Option<&str>> {
        while self.text[self.end..].trim_start().is_empty() {
            if !self.read_piece()? {
                return Ok(None);
            }
            self.text.clear();
            self.text.push_str(&String::from_utf8_lossy(&self.bytes));
            self.end = 0;
        }
        let rest = self.text[self.end..].trim_start();
        let start = self.text.len() - rest.len();
        self.end = start + rest.find(char::is_whitespace).unwrap_or(rest.len());
        Ok(Some(&self.text[start..self.end]))
    }

    /// Reads up to the next ASCII white space, and returns true unless the source has ended. Text
    /// that is longer than any number is read in pieces.
    fn read_piece(&mut self) -> io::Result<bool> {
        self.bytes.clear();
        loop {
            let buffer = match self.source.fill_buf() {
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                buffer => buffer?,
            };
            let end = buffer.iter().position(u8::is_ascii_whitespace);
            let part = &buffer[..end.unwrap_or(buffer.len())];
            self.bytes.extend_from_slice(part);
            let is_last = buffer.is_empty() || MAX_WORD_BYTES < self.bytes.len();
            let n_bytes = part.len() + usize::from(end.is_some());
            self.source.consume(n_bytes);
            if !self.bytes.is_empty() && (end.is_some() || is_last) {
                return Ok(true);
            }
            if is_last {
                return Ok(false);
            }
        }
    }
}
