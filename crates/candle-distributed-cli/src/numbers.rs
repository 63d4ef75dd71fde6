//! Lists of numbers, one per sample: read word by word, and kept in no more bytes than they need.

use std::{
    fmt,
    io::{self, BufRead, BufReader, ErrorKind, Read},
    path::Path,
};

use candle_distributed::{
    batch::SequenceLengths,
    types::human::{HumanBytes, Printable},
};

use crate::{
    error::{Error, Result},
    input,
    train::limits::{self, Limit},
};

/// The longest word that may be a number. Words that never end are none.
const MAX_WORD_BYTES: usize = 4096;

// What commands take for each number at their peak, the list included.
/// Measured with 5 million lengths: 32 bytes for neighbors, 64 for sorted sequences.
const LENGTH_BYTES: u64 = 64;
/// A class, and its sample's places in the class and in the order, with the key that sorts it.
const CLASS_BYTES: u64 = 28;
/// A weight and its slot in the table of draws.
const WEIGHT_BYTES: u64 = 16;

/// The lengths of sequences.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Lengths {
    /// In 32 bits each, as long as all of them fit.
    Short(Vec<u32>),
    Long(Vec<u64>),
}

impl Lengths {
    /// Reads lengths, at least one; errors name `source` by `path`.
    pub(crate) fn read(source: impl Read, path: &Path) -> Result<Self> {
        let mut lengths = Self::Short(Vec::new());
        let list = List { what: "length", path, room: Room::for_numbers_of(LENGTH_BYTES) };
        list.for_each(source, |length| lengths.push(length))?;
        Ok(lengths)
    }

    fn push(&mut self, length: u64) -> Option<()> {
        if let Self::Short(short) = self {
            if let Ok(length) = u32::try_from(length) {
                return push(short, length);
            }
            let mut long = Vec::new();
            long.try_reserve(short.len() + 1).ok()?;
            long.extend(short.iter().copied().map(u64::from));
            *self = Self::Long(long);
        }
        match self {
            Self::Short(_) => None,
            Self::Long(long) => push(long, length),
        }
    }

    /// The lengths in order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = u64> + Clone {
        let (short, long) = match self {
            Self::Short(short) => (&short[..], &[][..]),
            Self::Long(long) => (&[][..], &long[..]),
        };
        short.iter().copied().map(u64::from).chain(long.iter().copied())
    }
}

impl SequenceLengths for Lengths {
    fn count(&self) -> u64 {
        match self {
            Self::Short(short) => short.count(),
            Self::Long(long) => long.count(),
        }
    }

    fn length(&self, index: u64) -> Option<u64> {
        match self {
            Self::Short(short) => short.length(index),
            Self::Long(long) => long.length(index),
        }
    }
}

/// The class of each sample, from the file at `path`.
pub(crate) fn classes(path: &Path) -> Result<Vec<u32>> {
    read(List { what: "class", path, room: Room::for_numbers_of(CLASS_BYTES) })
}

/// The weight of each sample, from the file at `path`.
pub(crate) fn weights(path: &Path) -> Result<Vec<f64>> {
    read(List { what: "weight", path, room: Room::for_numbers_of(WEIGHT_BYTES) })
}

fn read<T: Number>(list: List<'_>) -> Result<Vec<T>> {
    let mut numbers = Vec::new();
    list.for_each(input::open(list.path)?, |number| push(&mut numbers, number))?;
    Ok(numbers)
}

/// Adds a number, or returns `None` if there is no memory for it.
fn push<T>(numbers: &mut Vec<T>, number: T) -> Option<()> {
    numbers.try_reserve(1).ok()?;
    numbers.push(number);
    Some(())
}

/// A number in a list.
trait Number: Sized {
    /// The number that `word` is, or what is wrong with it.
    fn read(word: &str) -> Result<Self, String>;
}

macro_rules! whole_numbers {
    ($($int:ty)*) => {$(
        impl Number for $int {
            fn read(word: &str) -> Result<Self, String> {
                let is_digits = !word.is_empty() && word.bytes().all(|byte| byte.is_ascii_digit());
                word.parse().map_err(|_| {
                    if is_digits {
                        format!("above the limit of {}", Self::MAX)
                    } else {
                        String::from(NOT_A_NUMBER)
                    }
                })
            }
        }
    )*};
}

const NOT_A_NUMBER: &str = "not a number";

whole_numbers!(u32 u64);

impl Number for f64 {
    fn read(word: &str) -> Result<Self, String> {
        word.parse().map_err(|_| String::from(NOT_A_NUMBER))
    }
}

/// A list of numbers, as errors speak of it.
#[derive(Clone, Copy)]
struct List<'a> {
    /// What one of its numbers is.
    what: &'static str,
    path: &'a Path,
    room: Room,
}

/// How many numbers there is memory for.
///
/// Where the system takes memory away that it has promised, the limit must be known before.
#[derive(Clone, Copy)]
struct Room {
    n_numbers: u64,
    bytes: u64,
}

impl Room {
    /// As much as the system grants this process, for numbers that take `n_bytes` each.
    fn for_numbers_of(n_bytes: u64) -> Self {
        let limits = limits::of_system(1);
        let granted = limits.iter().map(Limit::share).chain(limits::of_machine()).min();
        // Where nothing is known of the system, what it refuses is an error all the same.
        let bytes = granted.unwrap_or(u64::MAX);
        Self { n_numbers: bytes / n_bytes, bytes }
    }
}

impl List<'_> {
    /// Calls `add` for each number that `source` holds, separated by white space: at least one. It
    /// is an error if `add` finds no memory for a number.
    fn for_each<T: Number>(
        &self,
        source: impl Read,
        mut add: impl FnMut(T) -> Option<()>,
    ) -> Result<()> {
        let mut words =
            Words { source: BufReader::with_capacity(1 << 16, source), word: Vec::new() };
        let mut n_read: u64 = 0;
        while let Some(word) = words.next().map_err(|source| Error::read(self.path, source))? {
            let text = String::from_utf8_lossy(word);
            // Beside the white space of ASCII there is that of Unicode.
            for word in text.split_whitespace() {
                let number =
                    T::read(word).map_err(|fault| self.not_read(n_read + 1, word, &fault))?;
                let is_room = n_read < self.room.n_numbers && add(number).is_some();
                if !is_room {
                    return Err(self.too_long(n_read));
                }
                n_read += 1;
            }
        }
        if n_read == 0 {
            return Err(Error::usage(format!("there is no {} in {}", self.what, self.name())));
        }
        Ok(())
    }

    fn name(&self) -> Printable<impl fmt::Display> {
        Printable(self.path.display())
    }

    fn not_read(&self, n: u64, word: &str, fault: &str) -> Error {
        let name = self.name();
        let shown = input::excerpt(word);
        Error::usage(format!("{} {n} in {name} is {fault}: {shown}", self.what))
    }

    fn too_long(&self, n_read: u64) -> Error {
        let name = self.name();
        let memory = HumanBytes(self.room.bytes.into());
        Error::usage(format!(
            "{name} has more than {n_read} numbers, and this process may take {memory}"
        ))
    }
}

/// The words of a source, of which no more than one is held.
struct Words<R> {
    source: R,
    word: Vec<u8>,
}

impl<R: BufRead> Words<R> {
    /// The next word; of one that is longer than a number the beginning, if not all.
    fn next(&mut self) -> io::Result<Option<&[u8]>> {
        self.word.clear();
        loop {
            let buffer = match self.source.fill_buf() {
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                buffer => buffer?,
            };
            let end = buffer.iter().position(u8::is_ascii_whitespace);
            let part = &buffer[..end.unwrap_or(buffer.len())];
            self.word.extend_from_slice(part);
            let is_last = buffer.is_empty() || MAX_WORD_BYTES < self.word.len();
            let n_bytes = part.len() + usize::from(end.is_some());
            self.source.consume(n_bytes);
            if !self.word.is_empty() && (end.is_some() || is_last) {
                return Ok(Some(&self.word));
            }
            if is_last {
                return Ok(None);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A reader that gives a few bytes at a time.
    struct Slow<'a>(&'a [u8]);

    impl Read for Slow<'_> {
        fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
            let n_bytes = out.len().min(3);
            self.0.read(&mut out[..n_bytes])
        }
    }

    fn lengths(text: &[u8]) -> Result<Lengths> {
        let path = Path::new("l\u{1b}.txt");
        let read = Lengths::read(text, path);
        let slowly = Lengths::read(Slow(text), path);
        assert_eq!(
            read.as_ref().map_err(ToString::to_string),
            slowly.as_ref().map_err(ToString::to_string)
        );
        read
    }

    #[test]
    fn numbers_take_as_many_bytes_as_the_largest_needs() {
        let short = lengths(b"12 0\r\n\t4294967295\x0c7").unwrap();
        assert_eq!(short, Lengths::Short(vec![12, 0, u32::MAX, 7]));
        let long = lengths(b"12 4294967296 18446744073709551615\n3").unwrap();
        let expected = vec![12, 1 << 32, u64::MAX, 3];
        assert_eq!(long, Lengths::Long(expected.clone()));
        assert_eq!(long.iter().collect::<Vec<_>>(), expected);
        assert_eq!((long.count(), long.length(1), long.length(4)), (4, Some(1 << 32), None));
        assert_eq!((short.count(), short.length(2)), (4, Some(u32::MAX.into())));
    }

    #[test]
    fn words_are_separated_by_any_white_space() {
        let text = "1\u{a0}2\u{2003}3 \u{3000} 4";
        assert_eq!(lengths(text.as_bytes()).unwrap(), Lengths::Short(vec![1, 2, 3, 4]));
    }

    #[test]
    fn what_is_no_number_is_named_with_its_place_and_limit() {
        let message = |text: &[u8]| lengths(text).unwrap_err().to_string();
        let cases: [(&[u8], &str); 6] = [
            (b"1 two 3", "length 2 in l\\u{1b}.txt is not a number: \"two\""),
            (
                b"18446744073709551616",
                "length 1 in l\\u{1b}.txt is above the limit of 18446744073709551615: \
                 \"18446744073709551616\"",
            ),
            (b"1 -2", "length 2 in l\\u{1b}.txt is not a number: \"-2\""),
            (b"1 \xff", "length 2 in l\\u{1b}.txt is not a number: \"\u{fffd}\""),
            (b"  \n", "there is no length in l\\u{1b}.txt"),
            (b"", "there is no length in l\\u{1b}.txt"),
        ];
        for (text, expected) in cases {
            assert_eq!(message(text), expected);
        }
        assert!(u32::read("4294967296").unwrap_err().contains("limit of 4294967295"));
    }

    #[test]
    fn a_word_that_never_ends_is_refused() {
        let error = Lengths::read(io::repeat(0), Path::new("zeros")).unwrap_err();
        let expected = format!("length 1 in zeros is not a number: \"{}\"…", "\\0".repeat(40));
        assert_eq!(error.to_string(), expected);
    }

    #[test]
    fn numbers_for_which_there_is_no_memory_are_an_error() {
        let read = |n_numbers, most| {
            let room = Room { n_numbers, bytes: 1 << 30 };
            let list = List { what: "length", path: Path::new("l.txt"), room };
            let add = |number: u64| (number <= most).then_some(());
            list.for_each(&b"1 2 3"[..], add).map_err(|error| error.to_string())
        };
        assert_eq!(read(3, 3), Ok(()));
        let expected = "l.txt has more than 2 numbers, and this process may take 1.00 GiB";
        assert_eq!(read(2, 3), Err(expected.to_owned()));
        assert_eq!(read(3, 2), Err(expected.to_owned()));
    }
}
