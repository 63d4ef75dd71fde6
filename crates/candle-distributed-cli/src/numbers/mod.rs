//! Lists of numbers, one per sample, as other programs write them: a text, a NumPy array, JSON, or
//! nothing but the numbers' bytes.
//!
//! The form is recognized by the first bytes, so that a pipe needs no name and no option: an array
//! begins with `\x93`, which no UTF-8 text does, JSON with a bracket. All forms but JSON lists
//! are read one number at a time, and lengths that are held take no more bytes than the largest
//! needs.

mod json;
pub(crate) mod npy;
mod number;
mod text;

use std::{
    fmt, fs,
    io::{self, BufReader, Read},
    iter,
    path::{Path, PathBuf},
};

use candle_distributed::{
    batch::SequenceLengths,
    finetune::cost::{MemoryLimit, machine_bytes, system_limits},
    types::human::{HumanBytes, Printable},
};

use self::number::Number;
use crate::{
    error::{Error, Result},
    hint, input,
};

// What commands take for each number at their peak, the list included.
/// Measured with 5 million lengths: 32 bytes for neighbors, 64 for sorted sequences.
const LENGTH_BYTES: u64 = 64;
/// A class, and its sample's places in the class and in the order, with the key that sorts it.
const CLASS_BYTES: u64 = 28;
/// A weight and its slot in the table of draws.
const WEIGHT_BYTES: u64 = 16;

/// Numbers that are read as they are asked for.
pub(crate) type Numbers<T> = Box<dyn Iterator<Item = Result<T>>>;

/// The length of each sequence: the numbers of these files, one file after the other, or a field of
/// their lines.
pub(crate) fn lengths(paths: &[PathBuf], field: Option<&str>) -> Numbers<u64> {
    let paths = paths.to_vec();
    let field = field.map(str::to_owned);
    Box::new(paths.into_iter().flat_map(move |path| {
        let list = List { what: "length", path, hint: hint::LENGTHS };
        list.read(field.as_deref(), IsRaw::Never)
    }))
}

/// The positions that the file at `path` lists, among them what `sample` prints.
pub(crate) fn positions(path: &Path) -> Numbers<u64> {
    let list = List { what: "position", path: path.into(), hint: hint::ORDER };
    list.read(None, IsRaw::WhereTextIsNot)
}

/// The class of each sample, from the file at `path`.
pub(crate) fn classes(path: &Path) -> Result<Vec<u32>> {
    collect("class", path, Room::for_numbers_of(CLASS_BYTES))
}

/// The weight of each sample, from the file at `path`.
pub(crate) fn weights(path: &Path) -> Result<Vec<f64>> {
    collect("weight", path, Room::for_numbers_of(WEIGHT_BYTES))
}

fn collect<T: Number>(what: &'static str, path: &Path, room: Room) -> Result<Vec<T>> {
    let list = List { what, path: path.into(), hint: hint::NUMBERS };
    let mut numbers = Vec::new();
    room.hold(list.read(None, IsRaw::Never), path.display(), |number| push(&mut numbers, number))?;
    Ok(numbers)
}

/// Adds a number, or returns `None` if there is no memory for it.
fn push<T>(numbers: &mut Vec<T>, number: T) -> Option<()> {
    numbers.try_reserve(1).ok()?;
    numbers.push(number);
    Some(())
}

/// Whether a list may be the bytes of its numbers and nothing else.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum IsRaw {
    Never,
    /// Where the first number has a byte of zero, which no text has: below 2^56, every number does.
    WhereTextIsNot,
}

/// A list of numbers, as errors speak of it.
#[derive(Clone, Debug)]
struct List {
    /// What one of its numbers is.
    what: &'static str,
    /// Its file, or `-` for standard input.
    path: PathBuf,
    /// What to do about an error in it.
    hint: &'static str,
}

impl List {
    /// Its numbers, or those in a field of its lines: at least one, or an error.
    fn read<T: Number>(self, field: Option<&str>, is_raw: IsRaw) -> Numbers<T> {
        let none = self.error(format!("there is no {} in {}", self.what, self.name()));
        let source = self.open();
        match source.and_then(|source| self.numbers(source, field, is_raw)) {
            Ok(numbers) => at_least_one(numbers, none),
            Err(error) => Box::new(iter::once(Err(error))),
        }
    }

    fn open(&self) -> Result<Box<dyn Read>> {
        if is_stdin(&self.path) {
            return Ok(Box::new(io::stdin()));
        }
        let file = input::open(&self.path).map_err(|error| error.hinted(self.hint))?;
        Ok(Box::new(file))
    }

    /// The numbers that a source holds, in whatever form.
    fn numbers<T: Number>(
        self,
        source: impl Read + 'static,
        field: Option<&str>,
        is_raw: IsRaw,
    ) -> Result<Numbers<T>> {
        let mut source = BufReader::with_capacity(BUFFER_BYTES, source);
        if let Some(field) = field {
            return Ok(Box::new(json::field_of_lines(self, source, field.to_owned())));
        }
        // A program that writes a text as it goes may wait before its second line: no more bytes are
        // waited for than it takes.
        let n_bytes = if is_raw == IsRaw::Never { 1 } else { 8 };
        let mut first = Vec::new();
        let read = source.by_ref().take(n_bytes).read_to_end(&mut first);
        read.map_err(|fault| self.unreadable(fault))?;
        let source = io::Cursor::new(first.clone()).chain(source);
        // Its first byte may be that of any other form, so that this is asked before.
        if is_raw == IsRaw::WhereTextIsNot && first.contains(&0) && !npy::is_array(&first) {
            return Ok(Box::new(npy::read_raw(self, source)));
        }
        Ok(match first[..] {
            [npy::FIRST_BYTE, ..] => Box::new(npy::read(self, source)?),
            [b'[' | b'{', ..] => Box::new(json::whole(&self, source)?.into_iter().map(Ok)),
            _ => Box::new(text::read(self, source)),
        })
    }

    fn name(&self) -> Printable<impl fmt::Display> {
        Printable(self.path.display())
    }

    /// A fault of the whole list.
    fn error(&self, message: impl Into<String>) -> Error {
        Error::usage(message).hinted(self.hint)
    }

    /// A fault of number `n`, counted from 1, which reads as `shown`.
    fn fault(&self, n: u64, fault: &str, shown: &str) -> Error {
        let shown = input::excerpt(shown);
        self.error(format!("{} {n} in {} is {fault}: {shown}", self.what, self.name()))
    }

    fn unreadable(&self, source: io::Error) -> Error {
        Error::read(&self.path, source).hinted(self.hint)
    }
}

const BUFFER_BYTES: usize = 1 << 16;

/// Whether a path stands for standard input.
pub(crate) fn is_stdin(path: &Path) -> bool {
    path.as_os_str() == "-"
}

/// Whether a program may still be writing what is read here.
pub(crate) fn is_live(path: &Path) -> bool {
    is_stdin(path) || fs::metadata(path).is_ok_and(|known| !known.is_file())
}

/// The numbers, or an error in place of none.
fn at_least_one<T: 'static>(mut numbers: Numbers<T>, none: Error) -> Numbers<T> {
    let mut none = Some(none);
    Box::new(iter::from_fn(move || match (numbers.next(), none.take()) {
        (None, Some(none)) => Some(Err(none)),
        (next, _) => next,
    }))
}

/// The lengths of sequences.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Lengths {
    /// In 32 bits each, as long as all of them fit.
    Short(Vec<u32>),
    Long(Vec<u64>),
}

impl Lengths {
    /// Holds lengths; an error says that `name` has too many.
    pub(crate) fn hold(numbers: Numbers<u64>, name: impl fmt::Display) -> Result<Self> {
        let mut lengths = Self::Short(Vec::new());
        let room = Room::for_numbers_of(LENGTH_BYTES);
        room.hold(numbers, name, |length| lengths.push(length))?;
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
        let limits = system_limits(1);
        let granted = limits.iter().map(MemoryLimit::share).chain(machine_bytes()).min();
        // Where nothing is known of the system, what it refuses is an error all the same.
        let bytes = granted.unwrap_or(u64::MAX);
        Self { n_numbers: bytes / n_bytes, bytes }
    }

    /// Calls `add` for each number. It is an error if `add` finds no memory for one.
    fn hold<T>(
        self,
        numbers: Numbers<T>,
        name: impl fmt::Display,
        mut add: impl FnMut(T) -> Option<()>,
    ) -> Result<()> {
        for (n_held, number) in (0_u64..).zip(numbers) {
            let number = number?;
            let is_room = n_held < self.n_numbers && add(number).is_some();
            if !is_room {
                let name = Printable(name);
                let memory = HumanBytes(self.bytes.into());
                return Err(Error::usage(format!(
                    "{name} has more than {n_held} numbers, and this process may take {memory}"
                )));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::{collection::vec, prelude::*, sample::select};

    use super::*;

    /// A reader that gives a few bytes at a time.
    struct Slow(io::Cursor<Vec<u8>>);

    impl Read for Slow {
        fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
            let n_bytes = out.len().min(3);
            self.0.read(&mut out[..n_bytes])
        }
    }

    fn list(what: &'static str) -> List {
        List { what, path: "l\u{1b}.txt".into(), hint: hint::LENGTHS }
    }

    /// The numbers that these bytes are, or the error that they end with; however few bytes come at
    /// a time.
    fn read<T: Number + fmt::Debug + PartialEq>(
        bytes: &[u8],
        field: Option<&str>,
        is_raw: IsRaw,
    ) -> Result<Vec<T>, String> {
        let numbers = |source: Box<dyn Read>| -> Result<Vec<T>> {
            let list = list("length");
            let none = list.error("there is none");
            at_least_one(list.numbers(source, field, is_raw)?, none).collect()
        };
        let bytes = || io::Cursor::new(bytes.to_vec());
        let [read, slowly]: [Result<Vec<T>>; 2] =
            [numbers(Box::new(bytes())), numbers(Box::new(Slow(bytes())))];
        let [read, slowly] = [read, slowly].map(|read| read.map_err(|error| error.to_string()));
        assert_eq!(read, slowly);
        read
    }

    fn lengths_in(bytes: impl AsRef<[u8]>) -> Result<Vec<u64>, String> {
        read(bytes.as_ref(), None, IsRaw::Never)
    }

    fn hold(bytes: &[u8]) -> Lengths {
        let numbers = lengths_in(bytes).unwrap();
        Lengths::hold(Box::new(numbers.into_iter().map(Ok)), "l.txt").unwrap()
    }

    #[test]
    fn lengths_take_as_many_bytes_as_the_largest_needs() {
        let short = hold(b"12 0\r\n\t4294967295\x0c7");
        assert_eq!(short, Lengths::Short(vec![12, 0, u32::MAX, 7]));
        let long = hold(b"12 4294967296 18446744073709551615\n3");
        let expected = vec![12, 1 << 32, u64::MAX, 3];
        assert_eq!(long, Lengths::Long(expected.clone()));
        assert_eq!(long.iter().collect::<Vec<_>>(), expected);
        assert_eq!((long.count(), long.length(1), long.length(4)), (4, Some(1 << 32), None));
        assert_eq!((short.count(), short.length(2)), (4, Some(u32::MAX.into())));
    }

    #[test]
    fn words_are_separated_by_any_white_space() {
        for text in ["1\u{a0}2\u{2003}3 \u{3000} 4", "\n1 2\t3\r\n\n4\u{2003}", "1 2 3 4"] {
            assert_eq!(lengths_in(text), Ok(vec![1, 2, 3, 4]), "{text:?}");
        }
    }

    #[test]
    fn what_is_no_number_is_named_with_its_place_and_limit() {
        let cases: [(&[u8], &str); 6] = [
            (b"1 two 3", "length 2 in l\\u{1b}.txt is not a number: \"two\""),
            (
                b"18446744073709551616",
                "length 1 in l\\u{1b}.txt is above the limit of 18446744073709551615: \
                 \"18446744073709551616\"",
            ),
            (b"1 -2", "length 2 in l\\u{1b}.txt is not a number: \"-2\""),
            (b"1 \xff", "length 2 in l\\u{1b}.txt is not a number: \"\u{fffd}\""),
            (b"  \n", "there is none"),
            (b"", "there is none"),
        ];
        for (text, expected) in cases {
            assert_eq!(lengths_in(text), Err(expected.to_owned()));
        }
        assert!(u32::parse("4294967296").unwrap_err().contains("limit of 4294967295"));
    }

    #[test]
    fn a_word_that_never_ends_is_refused() {
        let mut numbers = list("length").numbers::<u64>(io::repeat(0), None, IsRaw::Never).unwrap();
        let error = numbers.next().unwrap().unwrap_err().to_string();
        let zeros = "\\0".repeat(40);
        assert_eq!(error, format!("length 1 in l\\u{{1b}}.txt is not a number: \"{zeros}\"…"));
    }

    #[test]
    fn numbers_for_which_there_is_no_memory_are_an_error() {
        let read = |n_numbers, most| {
            let room = Room { n_numbers, bytes: 1 << 30 };
            let add = |number: u64| (number <= most).then_some(());
            let numbers = Box::new([1, 2, 3].into_iter().map(Ok));
            room.hold(numbers, "l.txt", add).map_err(|error| error.to_string())
        };
        assert_eq!(read(3, 3), Ok(()));
        let expected = "l.txt has more than 2 numbers, and this process may take 1.00 GiB";
        assert_eq!(read(2, 3), Err(expected.to_owned()));
        assert_eq!(read(3, 2), Err(expected.to_owned()));
    }

    /// An array whose header has this text.
    fn array(header: &str, bytes: &[u8]) -> Vec<u8> {
        let n_bytes = u16::try_from(header.len()).unwrap().to_le_bytes();
        [b"\x93NUMPY\x01\0", &n_bytes[..], header.as_bytes(), bytes].concat()
    }

    fn array_of(dtype: &str, len: usize, bytes: &[u8]) -> Vec<u8> {
        let header =
            format!("{{'descr': '{dtype}', 'fortran_order': False, 'shape': ({len},), }}\n");
        array(&header, bytes)
    }

    #[test]
    fn arrays_of_every_integer_are_read() {
        let bytes = |dtype| match dtype {
            "|i1" | "|u1" => vec![3, 127],
            "<i2" | "<u2" => [3_u16, 127].into_iter().flat_map(u16::to_le_bytes).collect(),
            "<i4" | "<u4" => [3_u32, 127].into_iter().flat_map(u32::to_le_bytes).collect(),
            _ => [3_u64, 127].into_iter().flat_map(u64::to_le_bytes).collect::<Vec<_>>(),
        };
        for dtype in ["|i1", "|u1", "<i2", "<u2", "<i4", "<u4", "<i8", "<u8"] {
            let array = array_of(dtype, 2, &bytes(dtype));
            assert_eq!(lengths_in(&array), Ok(vec![3, 127]), "{dtype}");
            assert_eq!(read::<f64>(&array, None, IsRaw::Never), Ok(vec![3.0, 127.0]), "{dtype}");
        }
        let largest = array_of("<u8", 1, &[255; 8]);
        assert_eq!(lengths_in(largest), Ok(vec![u64::MAX]));
        let halves = [0.5_f32, -2.25].into_iter().flat_map(f32::to_le_bytes).collect::<Vec<_>>();
        assert_eq!(
            read::<f64>(&array_of("<f4", 2, &halves), None, IsRaw::Never),
            Ok(vec![0.5, -2.25])
        );
        let wide = 0.1_f64.to_le_bytes();
        assert_eq!(read::<f64>(&array_of("<f8", 1, &wide), None, IsRaw::Never), Ok(vec![0.1]));
        // The other versions have four bytes for the length of their header.
        let header = "{'descr': '<u2', 'fortran_order': False, 'shape': (1,), }\n";
        let size = u32::try_from(header.len()).unwrap().to_le_bytes();
        let second = [b"\x93NUMPY\x02\0", &size[..], header.as_bytes(), &[9, 1]].concat();
        assert_eq!(lengths_in(second), Ok(vec![265]));
    }

    #[test]
    fn what_is_written_is_read() {
        for n in [0_u64, 1, 2, 300] {
            let bytes: Vec<u8> = (0..n).flat_map(u64::to_le_bytes).collect();
            let header = npy::header(&[n]);
            assert_eq!((header.len() % 64, header.last()), (0, Some(&b'\n')));
            let expected = if n == 0 { Err("there is none".into()) } else { Ok((0..n).collect()) };
            assert_eq!(lengths_in([header, bytes].concat()), expected);
        }
        let longest = npy::header(&[u64::MAX; 20]);
        assert_eq!(longest.len() % 64, 0);
        assert_eq!(usize::from(longest[8]) + 256 * usize::from(longest[9]) + 10, longest.len());
    }

    #[test]
    fn arrays_that_are_no_list_of_numbers_are_refused_by_what_they_are() {
        let header = |descr: &str, order: &str, shape: &str| {
            array(
                &format!("{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}, }}"),
                &[],
            )
        };
        let cases = [
            (header("'>i8'", "False", "(1,)"), "dtype '>i8'"),
            (
                header("'<f8'", "False", "(1,)"),
                "dtype '<f8', which is not one of little-endian int",
            ),
            (header("'|b1'", "False", "(1,)"), "dtype '|b1'"),
            (header("[('a', '<i8')]", "False", "(1,)"), "dtype [('a'"),
            (header("'<i8'", "True", "(1,)"), "fortran_order True"),
            (header("'<i8'", "False", "(2, 3)"), "shape (2, 3), which must be of one dimension"),
            (header("'<i8'", "False", "()"), "shape ()"),
            (header("'<i8'", "False", "(-1,)"), "shape (-1,)"),
            (array("{'descr': '<i8'}", &[]), "no header"),
            (b"\x93NUMPY\x04\0\0\0".to_vec(), "no header"),
            (b"\x93NUMPY\x01\0\x80\0{".to_vec(), "no header"),
            (b"\x93NUMPY\x02\0\xff\xff\xff\xff".to_vec(), "no header"),
            (b"\x93".to_vec(), "no header"),
            (array_of("<i2", 2, &[1, 0, 255, 255]), "length 2 in l\\u{1b}.txt is negative: \"-1\""),
            (array_of("<i8", 3, &[0; 20]), "ends after 2 of 3 numbers"),
            (array_of("<i8", 1, &[0; 9]), "has more bytes than its 1 numbers take"),
        ];
        for (bytes, expected) in cases {
            let error = lengths_in(&bytes).unwrap_err();
            assert!(error.contains(expected), "{expected:?} is not in {error:?}");
        }
        let classes =
            read::<u32>(&array_of("<i8", 1, &[0, 0, 0, 0, 1, 0, 0, 0]), None, IsRaw::Never);
        assert!(classes.unwrap_err().contains("above the limit of 4294967295: \"4294967296\""));
    }

    #[test]
    fn positions_may_be_nothing_but_their_bytes() {
        let raw = |bytes: &[u8]| read::<u64>(bytes, None, IsRaw::WhereTextIsNot);
        let bytes: Vec<u8> =
            [7, 0x0a31, (1 << 56) - 1].iter().flat_map(|n: &u64| n.to_le_bytes()).collect();
        assert_eq!(raw(&bytes), Ok(vec![7, 0x0a31, (1 << 56) - 1]));
        assert!(raw(&bytes[..20]).unwrap_err().contains("ends after 2 numbers"));
        // As they begin an array, a list and an object.
        for first in *b"\x93[{" {
            assert_eq!(raw(&u64::from(first).to_le_bytes()), Ok(vec![first.into()]));
        }
        assert_eq!(raw(b"12345678 9"), Ok(vec![12_345_678, 9]));
        assert_eq!(raw(b"7"), Ok(vec![7]));
        assert!(lengths_in(&bytes).unwrap_err().contains("length 1"));
    }

    #[test]
    fn json_is_a_list_or_what_sample_prints() {
        assert_eq!(lengths_in("[3, 4,\n5]"), Ok(vec![3, 4, 5]));
        let answer = r#"{"format_version":1,"len":3,"indices":[2,0],"padding":[false,true]}"#;
        assert_eq!(lengths_in(answer), Ok(vec![2, 0]));
        assert_eq!(read::<f64>(b"[0.5, 2]", None, IsRaw::Never), Ok(vec![0.5, 2.0]));
        let cases = [
            ("[3, 4.5]", "a list of numbers"),
            ("[-1]", "a list of numbers"),
            ("[1", "a list of numbers"),
            (r#"{"format_version":2,"indices":[2]}"#, "a list of numbers"),
            (r#"{"format_version":1,"entries":[[0,2]]}"#, "a list of numbers"),
            ("[]", "there is none"),
        ];
        for (text, expected) in cases {
            let error = lengths_in(text).unwrap_err();
            assert!(error.contains(expected), "{text}: {error}");
        }
    }

    #[test]
    fn a_field_of_each_line_is_a_number_or_a_list_that_is_counted() {
        let field = |lines: &str| read::<u64>(lines.as_bytes(), Some("tokens"), IsRaw::Never);
        let lines = "{\"text\": \"a {b}\", \"tokens\": 7}\n\n  \n{\"tokens\": [5, [6], \"c\"], \"n\": 1}\r\n{\"tokens\":0}";
        assert_eq!(field(lines), Ok(vec![7, 3, 0]));
        let cases = [
            (r#"{"other": 7}"#, "there is no such field"),
            (r#"{"tokens": -7}"#, "-7"),
            (r#"{"tokens": 7.5}"#, "7.5"),
            (r#"{"tokens": "seven"}"#, "a whole number, or a list"),
            (r#"{"tokens": 1, "tokens": 2}"#, "twice"),
            (r#"{"tokens": 7} 8"#, "trailing"),
            (r#"{"tokens": 7"#, "EOF"),
            ("7", "an object with a field \"tokens\""),
            ("{\"tokens\": 7, \"text\": \"\u{1b}\"}", "control character"),
        ];
        for (line, expected) in cases {
            let error = field(&format!("{{\"tokens\": 1}}\n\n{line}\n")).unwrap_err();
            let start = "line 3 of l\\u{1b}.txt has no length in \"tokens\": ";
            assert!(error.starts_with(start) && error.contains(expected), "{line}: {error}");
        }
        assert_eq!(field("\n"), Err("there is none".into()));
    }

    #[test]
    fn an_array_that_is_cut_off_is_refused() {
        let whole = array_of("<i8", 2, &[1; 16]);
        for end in 0..whole.len() {
            assert!(lengths_in(&whole[..end]).is_err(), "{end} bytes");
        }
    }

    #[test]
    fn what_a_header_promises_takes_no_memory() {
        let header = npy::header(&[u64::MAX]);
        let source = io::Cursor::new(header).chain(io::repeat(0));
        let numbers = list("length").numbers::<u64>(source, None, IsRaw::Never).unwrap();
        assert!(numbers.take(3).all(|number| number.unwrap() == 0));
    }

    #[test]
    fn a_line_that_never_ends_is_refused() {
        let line = io::Cursor::new(b"{}\n").chain(io::repeat(b'['));
        let mut numbers =
            list("length").numbers::<u64>(line, Some("tokens"), IsRaw::Never).unwrap();
        let mut error = || numbers.next().unwrap().unwrap_err().to_string();
        assert!(error().contains("no such field"));
        assert_eq!(error(), "line 2 of l\\u{1b}.txt is longer than 67108864 bytes");
    }

    /// These numbers in every form: the bytes, the field of their lines, and whether they are raw.
    fn forms(numbers: &[u64]) -> Vec<(Vec<u8>, Option<&'static str>, IsRaw)> {
        let words: Vec<String> = numbers.iter().map(u64::to_string).collect();
        let lines: Vec<String> = words.iter().map(|n| format!(r#"{{"a":[[]],"n":{n}}}"#)).collect();
        let answer = format!(r#"{{"indices":[{}],"format_version":1}}"#, words.join(", "));
        let bytes: Vec<u8> = numbers.iter().flat_map(|n| n.to_le_bytes()).collect();
        let array = array_of("<u8", numbers.len(), &bytes);
        vec![
            (words.join("\n").into(), None, IsRaw::WhereTextIsNot),
            (format!("[{}]\n", words.join(",")).into(), None, IsRaw::Never),
            (answer.into(), None, IsRaw::WhereTextIsNot),
            (array, None, IsRaw::Never),
            (bytes, None, IsRaw::WhereTextIsNot),
            (lines.join("\n").into(), Some("n"), IsRaw::Never),
        ]
    }

    /// A byte of a file, put there, left out or changed.
    fn damage() -> impl Strategy<Value = (usize, u8, u8)> {
        let meant = select(b"\x93\0\x01\xff[]{}(),:'\"-.0918eu<>|\n TF".to_vec());
        (any::<usize>(), prop_oneof![meant, any::<u8>()], 0..3_u8)
    }

    fn damaged(mut bytes: Vec<u8>, damages: &[(usize, u8, u8)]) -> Vec<u8> {
        for &(at, byte, kind) in damages {
            let at = at % (bytes.len() + 1);
            let end = if kind == 0 { at } else { bytes.len().min(at + 1) };
            bytes.splice(at..end, (kind < 2).then_some(byte));
        }
        bytes
    }

    proptest! {
        #[test]
        fn every_form_holds_the_same_numbers(
            numbers in vec(prop_oneof![0..300_u64, any::<u64>()], 1..20),
        ) {
            for (bytes, field, is_raw) in forms(&numbers) {
                let is_known = is_raw == IsRaw::Never || numbers[0] < 1 << 56;
                if is_known {
                    prop_assert_eq!(read(&bytes, field, is_raw), Ok(numbers.clone()));
                }
            }
        }

        /// A damaged file is refused or read, never with more numbers than bytes, and what is said
        /// of it is short.
        #[test]
        fn no_bytes_make_a_reader_panic(
            numbers in vec(0..1000_u64, 1..4),
            damages in vec(damage(), 1..6),
        ) {
            for (bytes, field, is_raw) in forms(&numbers) {
                let bytes = damaged(bytes, &damages);
                for field in [field, None] {
                    match read::<u64>(&bytes, field, is_raw) {
                        Ok(numbers) => prop_assert!(numbers.len() <= bytes.len()),
                        Err(error) => prop_assert!(error.len() < 1000, "{}", error),
                    }
                    // Some of what is no number of one kind is one of another.
                    drop(read::<u32>(&bytes, field, is_raw));
                    drop(kept(&bytes, field, is_raw));
                }
            }
        }
    }

    /// How many real numbers these bytes are, of which some may equal nothing.
    fn kept(bytes: &[u8], field: Option<&str>, is_raw: IsRaw) -> Result<usize> {
        let source = io::Cursor::new(bytes.to_vec());
        let mut numbers = list("weight").numbers::<f64>(source, field, is_raw)?;
        numbers.try_fold(0, |n, number| number.map(|_| n + 1))
    }
}
