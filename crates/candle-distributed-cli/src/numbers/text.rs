//! Numbers in text, separated by white space.

use std::io::{self, BufRead, ErrorKind};

use super::{NumberList, number::Number};
use crate::error::Result;

/// The length limit of a word. A longer word is refused, so that an endless word does not fill the
/// memory.
const MAX_WORD_BYTES: usize = 4096;

/// Reads the numbers of a text.
pub(super) fn read<T: Number>(
    list: NumberList,
    source: impl BufRead + 'static,
) -> impl Iterator<Item = Result<T>> {
    let mut words =
        WordReader { source, bytes: Vec::new(), text: String::new(), end: 0, is_cut: false };
    (1_u64..).map_while(move |n| match words.next() {
        Ok(Some(Ok(word))) => Some(T::parse(word).map_err(|fault| list.error_at(n, &fault, word))),
        Ok(Some(Err(long_word))) => {
            let fault = format!("longer than {MAX_WORD_BYTES} bytes");
            Some(Err(list.error_at(n, &fault, long_word)))
        }
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
    /// Whether the last word in `text` continues in the source, beyond the length limit.
    is_cut: bool,
}

impl<R: BufRead> WordReader<R> {
    /// Returns the next word, `Err` with the beginning of a word that is too long, or `None` at the
    /// end of the source.
    fn next(&mut self) -> io::Result<Option<Result<&str, &str>>> {
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
        let word = &self.text[start..self.end];
        let continues = self.is_cut && self.end == self.text.len();
        let is_too_long = continues || MAX_WORD_BYTES < word.len();
        Ok(Some(if is_too_long { Err(word) } else { Ok(word) }))
    }

    /// Reads up to the next ASCII white space, and returns true unless the source has ended. A
    /// piece that is longer than [`MAX_WORD_BYTES`] is cut where a buffer ends.
    fn read_piece(&mut self) -> io::Result<bool> {
        self.bytes.clear();
        loop {
            let buffer = match self.source.fill_buf() {
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                buffer => buffer?,
            };
            if buffer.is_empty() || MAX_WORD_BYTES < self.bytes.len() {
                self.is_cut = buffer.first().is_some_and(|byte| !byte.is_ascii_whitespace());
                return Ok(!self.bytes.is_empty());
            }
            let end = buffer.iter().position(u8::is_ascii_whitespace);
            let part = &buffer[..end.unwrap_or(buffer.len())];
            self.bytes.extend_from_slice(part);
            let n_bytes = part.len() + usize::from(end.is_some());
            self.source.consume(n_bytes);
            if end.is_some() && !self.bytes.is_empty() {
                self.is_cut = false;
                return Ok(true);
            }
        }
    }
}
