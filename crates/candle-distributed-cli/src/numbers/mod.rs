//! Readers of number lists with one number per sample: text, NumPy arrays or JSON.
//!
//! The first bytes determine the format, so that a pipe needs neither a file name nor an option: an
//! array begins with `\x93`, which no UTF-8 text does, and JSON with a bracket. All formats except
//! JSON lists are read one number at a time.

mod json;
mod npy;
mod number;
mod text;

use std::{
    fmt, fs,
    io::{self, BufReader, Read},
    iter,
    path::{Path, PathBuf},
};

use candle_distributed::{
    finetune::cost::{MemoryLimit, machine_bytes, system_limits},
    types::human::{HumanBytes, Printable},
};

use self::number::Number;
use crate::{
    error::{Error, Result},
    hint, input,
};

// Peak memory of the commands per number, the list included.
/// Measured with 5 million lengths: 36 bytes for consecutive sequences, 68 for sorted sequences.
const LENGTH_BYTES: u64 = 68;
/// A class, the positions of its sample in the class and in the order, and a sort key.
const CLASS_BYTES: u64 = 28;
/// A weight and its slot in the sampling table.
const WEIGHT_BYTES: u64 = 16;

/// A lazy list of numbers.
pub(crate) type Numbers<T> = Box<dyn Iterator<Item = Result<T>>>;

/// Reads sequence lengths from files in turn, or from a field of their lines.
pub(crate) fn lengths(paths: &[PathBuf], field: Option<&str>) -> Numbers<u64> {
    let paths = paths.to_vec();
    let field = field.map(str::to_owned);
    Box::new(paths.into_iter().flat_map(move |path| {
        let list = NumberList { what: "length", path, hint: hint::LENGTHS };
        list.read(field.as_deref())
    }))
}

/// Reads positions from the file at `path`, in any format of `sample`.
pub(crate) fn positions(path: &Path) -> Numbers<u64> {
    let list = NumberList { what: "position", path: path.into(), hint: hint::ORDER };
    list.read(None)
}

/// Reads the class of each sample from the file at `path`.
pub(crate) fn classes(path: &Path) -> Result<Vec<u32>> {
    read_all("class", path, MemoryBudget::per_number(CLASS_BYTES))
}

/// Reads the weight of each sample from the file at `path`.
pub(crate) fn weights(path: &Path) -> Result<Vec<f64>> {
    read_all("weight", path, MemoryBudget::per_number(WEIGHT_BYTES))
}

/// Reads sequence lengths from files into memory. `name` is for the error if they do not fit.
pub(crate) fn load_lengths(numbers: Numbers<u64>, name: impl fmt::Display) -> Result<Vec<u64>> {
    MemoryBudget::per_number(LENGTH_BYTES).load(numbers, name)
}

/// Reads all numbers of a list into memory.
fn read_all<T: Number>(what: &'static str, path: &Path, budget: MemoryBudget) -> Result<Vec<T>> {
    let list = NumberList { what, path: path.into(), hint: hint::NUMBERS };
    budget.load(list.read(None), path.display())
}

/// A file with a list of numbers, and its words for error messages.
#[derive(Clone, Debug)]
struct NumberList {
    /// Noun for a number of the list.
    what: &'static str,
    /// Path of the file, or `-` for standard input.
    path: PathBuf,
    /// Advice for errors of the list.
    hint: &'static str,
}

impl NumberList {
    /// Reads the numbers of the list, or of a field of its lines. An empty list is an error.
    fn read<T: Number>(self, field: Option<&str>) -> Numbers<T> {
        let empty_error = self.error(format!("there is no {} in {}", self.what, self.name()));
        let source = self.open();
        match source.and_then(|source| self.numbers(source, field)) {
            Ok(numbers) => at_least_one(numbers, empty_error),
            Err(error) => Box::new(iter::once(Err(error))),
        }
    }

    fn open(&self) -> Result<Box<dyn Read>> {
        if is_stdin(&self.path) {
            return Ok(Box::new(io::stdin()));
        }
        let file = input::open(&self.path).map_err(|error| error.with_hint(self.hint))?;
        Ok(Box::new(file))
    }

    /// Reads the numbers of a source in any format.
    fn numbers<T: Number>(
        self,
        source: impl Read + 'static,
        field: Option<&str>,
    ) -> Result<Numbers<T>> {
        let mut source = BufReader::with_capacity(BUFFER_BYTES, source);
        if let Some(field) = field {
            return Ok(Box::new(json::read_field_of_lines(self, source, field.to_owned())));
        }
        // A program that writes text line by line may pause before its second line, so this reads
        // no more bytes than the check needs.
        let mut first = Vec::new();
        let outcome = source.by_ref().take(1).read_to_end(&mut first);
        outcome.map_err(|fault| self.read_error(fault))?;
        let source = io::Cursor::new(first.clone()).chain(source);
        Ok(match first[..] {
            [npy::FIRST_BYTE] => Box::new(npy::read(self, source)?),
            [b'[' | b'{'] => Box::new(json::read(&self, source)?.into_iter().map(Ok)),
            _ => Box::new(text::read(self, source)),
        })
    }

    /// Returns the path for messages.
    fn name(&self) -> Printable<impl fmt::Display> {
        Printable(self.path.display())
    }

    /// Returns an error about the whole list.
    fn error(&self, message: impl Into<String>) -> Error {
        Error::usage(message).with_hint(self.hint)
    }

    /// Returns an error about number `n`, counted from 1, which has the text `shown`.
    fn error_at(&self, n: u64, fault: &str, shown: &str) -> Error {
        let shown = input::excerpt(shown);
        self.error(format!("{} {n} in {} is {fault}: {shown}", self.what, self.name()))
    }

    /// Returns an error for a failed read.
    fn read_error(&self, source: io::Error) -> Error {
        Error::read(&self.path, source).with_hint(self.hint)
    }
}

const BUFFER_BYTES: usize = 1 << 16;

/// Returns true if a path means standard input.
pub(crate) fn is_stdin(path: &Path) -> bool {
    path.as_os_str() == "-"
}

/// Returns true if another program may still be writing this input.
pub(crate) fn is_live(path: &Path) -> bool {
    is_stdin(path) || fs::metadata(path).is_ok_and(|metadata| !metadata.is_file())
}

/// Returns the numbers, or `empty_error` if there are none.
fn at_least_one<T: 'static>(mut numbers: Numbers<T>, empty_error: Error) -> Numbers<T> {
    // Taken before the first number.
    let mut error_if_first = Some(empty_error);
    Box::new(iter::from_fn(move || match (numbers.next(), error_if_first.take()) {
        (None, Some(error)) => Some(Err(error)),
        (next, _) => next,
    }))
}

/// The maximum number of numbers in memory.
///
/// The limit is checked beforehand, since a system that overcommits memory kills the process
/// instead of failing an allocation.
#[derive(Clone, Copy)]
struct MemoryBudget {
    n_numbers: u64,
    bytes: u64,
}

impl MemoryBudget {
    /// Returns the limit of this process for numbers that take `n_bytes` each.
    fn per_number(n_bytes: u64) -> Self {
        let limits = system_limits(1);
        let limit = limits.iter().map(MemoryLimit::share).chain(machine_bytes()).min();
        // On a system without known limits, only a failed allocation is an error.
        let bytes = limit.unwrap_or(u64::MAX);
        Self { n_numbers: bytes / n_bytes, bytes }
    }

    /// Reads all numbers.
    ///
    /// # Errors
    ///
    /// More numbers than the limit, or a failed allocation.
    fn load<T>(self, numbers: Numbers<T>, name: impl fmt::Display) -> Result<Vec<T>> {
        let mut loaded = Vec::new();
        for number in numbers {
            let number = number?;
            let n_loaded = loaded.len();
            if n_loaded as u64 == self.n_numbers || loaded.try_reserve(1).is_err() {
                let name = Printable(name);
                let memory = HumanBytes(self.bytes.into());
                return Err(Error::usage(format!(
                    "{name} has more than {n_loaded} numbers, too many for the memory limit of \
                     {memory}"
                )));
            }
            loaded.push(number);
        }
        Ok(loaded)
    }
}

#[cfg(test)]
mod tests {
    use candle_distributed::data::{NpyDtype, NpyHeader};
    use proptest::{collection::vec, prelude::*, sample::select};

    use super::*;

    /// A reader that returns a few bytes at a time.
    struct SlowReader(io::Cursor<Vec<u8>>);

    impl Read for SlowReader {
        fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
            let n_bytes = out.len().min(3);
            self.0.read(&mut out[..n_bytes])
        }
    }

    fn list(what: &'static str) -> NumberList {
        NumberList { what, path: "l\u{1b}.txt".into(), hint: hint::LENGTHS }
    }

    /// Reads numbers from these bytes, all at once and in small pieces, and checks that the results
    /// are equal.
    fn read<T: Number + fmt::Debug + PartialEq>(
        bytes: &[u8],
        field: Option<&str>,
    ) -> Result<Vec<T>, String> {
        let numbers = |source: Box<dyn Read>| -> Result<Vec<T>> {
            let list = list("length");
            let empty = list.error("the list is empty");
            at_least_one(list.numbers(source, field)?, empty).collect()
        };
        let bytes = || io::Cursor::new(bytes.to_vec());
        let [read, slowly]: [Result<Vec<T>>; 2] =
            [numbers(Box::new(bytes())), numbers(Box::new(SlowReader(bytes())))];
        let [read, slowly] = [read, slowly].map(|read| read.map_err(|error| error.to_string()));
        assert_eq!(read, slowly);
        read
    }

    fn lengths_in(bytes: impl AsRef<[u8]>) -> Result<Vec<u64>, String> {
        read(bytes.as_ref(), None)
    }

    #[test]
    fn words_above_the_length_limit_are_refused() {
        assert_eq!(lengths_in("0".repeat(4096)), Ok(vec![0]));
        for n_digits in [4097, 20_000] {
            let fault = lengths_in("0".repeat(n_digits)).unwrap_err();
            assert!(fault.contains("is longer than 4096 bytes: \"000"), "{fault}");
        }
    }

    #[test]
    fn any_white_space_separates_words() {
        for text in ["1\u{a0}2\u{2003}3 \u{3000} 4", "\n1 2\t3\r\n\n4\u{2003}", "1 2 3 4"] {
            assert_eq!(lengths_in(text), Ok(vec![1, 2, 3, 4]), "{text:?}");
        }
    }

    #[test]
    fn invalid_numbers_are_named() {
        let cases: [(&[u8], &str); 6] = [
            (b"1 two 3", "length 2 in l\\u{1b}.txt is not a number: \"two\""),
            (
                b"18446744073709551616",
                "length 1 in l\\u{1b}.txt is above the limit of 18446744073709551615: \
                 \"18446744073709551616\"",
            ),
            (b"1 -2", "length 2 in l\\u{1b}.txt is not a number: \"-2\""),
            (b"1 \xff", "length 2 in l\\u{1b}.txt is not a number: \"\u{fffd}\""),
            (b"  \n", "the list is empty"),
            (b"", "the list is empty"),
        ];
        for (text, expected) in cases {
            assert_eq!(lengths_in(text), Err(expected.to_owned()));
        }
        assert!(u32::parse("4294967296").unwrap_err().contains("limit of 4294967295"));
    }

    #[test]
    fn endless_words_are_rejected() {
        let mut numbers = list("length").numbers::<u64>(io::repeat(0), None).unwrap();
        let error = numbers.next().unwrap().unwrap_err().to_string();
        let zeros = "\\0".repeat(40);
        let fault = "length 1 in l\\u{1b}.txt is longer than 4096 bytes";
        assert_eq!(error, format!("{fault}: \"{zeros}\"…"));
    }

    #[test]
    fn too_many_numbers_are_rejected() {
        let read = |n_numbers| {
            let budget = MemoryBudget { n_numbers, bytes: 1 << 30 };
            let loaded = budget.load(Box::new([1, 2, 3].into_iter().map(Ok)), "l.txt");
            loaded.map_err(|error| error.to_string())
        };
        assert_eq!(read(3), Ok(vec![1, 2, 3]));
        let expected = "l.txt has more than 2 numbers, too many for the memory limit of 1.00 GiB";
        assert_eq!(read(2), Err(expected.to_owned()));
    }

    /// Builds an array with this header text.
    fn array(header: &str, bytes: &[u8]) -> Vec<u8> {
        let n_bytes = u16::try_from(header.len()).unwrap().to_le_bytes();
        [b"\x93NUMPY\x01\0", &n_bytes[..], header.as_bytes(), bytes].concat()
    }

    fn header_bytes(shape: &[u64]) -> Vec<u8> {
        NpyHeader { dtype: NpyDtype::for_element::<i64>(), shape: shape.to_vec() }.to_bytes()
    }

    fn array_of(dtype: &str, len: usize, bytes: &[u8]) -> Vec<u8> {
        let header =
            format!("{{'descr': '{dtype}', 'fortran_order': False, 'shape': ({len},), }}\n");
        array(&header, bytes)
    }

    /// All types and versions of headers are tested where they are read, in data-loader.
    #[test]
    fn arrays_hold_lengths_or_reals() {
        assert_eq!(lengths_in(array_of("|i1", 2, &[3, 127])), Ok(vec![3, 127]));
        assert_eq!(lengths_in(array_of("<u8", 1, &[255; 8])), Ok(vec![u64::MAX]));
        let halves = [0.5_f32, -2.25].into_iter().flat_map(f32::to_le_bytes).collect::<Vec<_>>();
        for (dtype, bytes, expected) in
            [("<f4", halves, vec![0.5, -2.25]), ("<u2", vec![9, 1], vec![265.0])]
        {
            let array = array_of(dtype, expected.len(), &bytes);
            assert_eq!(read::<f64>(&array, None), Ok(expected), "{dtype}");
        }
    }

    #[test]
    fn other_arrays_are_rejected() {
        let header = |descr: &str, order: &str, shape: &str| {
            array(
                &format!("{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}, }}"),
                &[],
            )
        };
        let cases = [
            (header("'<f8'", "False", "(1,)"), "dtype '<f8', which is not a dtype of integers"),
            (header("'<i8'", "False", "(2, 3)"), "shape [2, 3], which must have one dimension"),
            (header("'<i8'", "False", "()"), "shape []"),
            (b"\x93NUMPY\x01\0\x80\0{".to_vec(), "ends within its NumPy header"),
            (b"\x93".to_vec(), "ends within its NumPy header"),
            (array_of("<i2", 2, &[1, 0, 255, 255]), "length 2 in l\\u{1b}.txt is negative: \"-1\""),
            (array_of("<i8", 3, &[0; 20]), "ends after 2 of 3 numbers"),
            (array_of("<i8", 1, &[0; 9]), "has bytes after its 1 numbers"),
        ];
        for (bytes, expected) in cases {
            let error = lengths_in(&bytes).unwrap_err();
            assert!(error.contains(expected), "{expected:?} is not in {error:?}");
        }
        let classes = read::<u32>(&array_of("<i8", 1, &[0, 0, 0, 0, 1, 0, 0, 0]), None);
        assert!(classes.unwrap_err().contains("above the limit of 4294967295: \"4294967296\""));
    }

    #[test]
    fn json_is_a_list_or_sample_output() {
        assert_eq!(lengths_in("[3, 4,\n5]"), Ok(vec![3, 4, 5]));
        let answer = r#"{"format_version":1,"len":3,"indices":[2,0],"padding":[false,true]}"#;
        assert_eq!(lengths_in(answer), Ok(vec![2, 0]));
        assert_eq!(read::<f64>(b"[0.5, 2]", None), Ok(vec![0.5, 2.0]));
        let cases = [
            ("[3, 4.5]", "a list of numbers"),
            ("[-1]", "a list of numbers"),
            ("[1", "a list of numbers"),
            (r#"{"format_version":2,"indices":[2]}"#, "a list of numbers"),
            (r#"{"format_version":1,"entries":[[0,2]]}"#, "a list of numbers"),
            ("[]", "the list is empty"),
        ];
        for (text, expected) in cases {
            let error = lengths_in(text).unwrap_err();
            assert!(error.contains(expected), "{text}: {error}");
        }
    }

    #[test]
    fn fields_are_numbers_or_counted_lists() {
        let field = |lines: &str| read::<u64>(lines.as_bytes(), Some("tokens"));
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
        assert_eq!(field("\n"), Err("the list is empty".into()));
    }

    #[test]
    fn header_length_allocates_nothing() {
        let header = header_bytes(&[u64::MAX]);
        let source = io::Cursor::new(header).chain(io::repeat(0));
        let numbers = list("length").numbers::<u64>(source, None).unwrap();
        assert!(numbers.take(3).all(|number| number.unwrap() == 0));
    }

    #[test]
    fn endless_lines_are_rejected() {
        let line = io::Cursor::new(b"{}\n").chain(io::repeat(b'['));
        let mut numbers = list("length").numbers::<u64>(line, Some("tokens")).unwrap();
        let mut error = || numbers.next().unwrap().unwrap_err().to_string();
        assert!(error().contains("no such field"));
        assert_eq!(error(), "line 2 of l\\u{1b}.txt is longer than 67108864 bytes");
    }

    /// Encodes numbers in every format: bytes, and field of the lines.
    fn forms(numbers: &[u64]) -> Vec<(Vec<u8>, Option<&'static str>)> {
        let words: Vec<String> = numbers.iter().map(u64::to_string).collect();
        let lines: Vec<String> = words.iter().map(|n| format!(r#"{{"a":[[]],"n":{n}}}"#)).collect();
        let answer = format!(r#"{{"indices":[{}],"format_version":1}}"#, words.join(", "));
        let bytes: Vec<u8> = numbers.iter().flat_map(|n| n.to_le_bytes()).collect();
        let array = array_of("<u8", numbers.len(), &bytes);
        vec![
            (words.join("\n").into(), None),
            (format!("[{}]\n", words.join(",")).into(), None),
            (answer.into(), None),
            (array, None),
            (lines.join("\n").into(), Some("n")),
        ]
    }

    /// Generates an inserted, removed or changed byte of a file.
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
        fn all_formats_hold_the_same_numbers(
            numbers in vec(prop_oneof![0..300_u64, any::<u64>()], 1..20),
        ) {
            for (bytes, field) in forms(&numbers) {
                prop_assert_eq!(read(&bytes, field), Ok(numbers.clone()));
            }
        }

        /// Checks that a damaged file is rejected with a short message, or read as fewer numbers
        /// than bytes.
        #[test]
        fn damaged_files_never_panic(
            numbers in vec(0..1000_u64, 1..4),
            damages in vec(damage(), 1..6),
        ) {
            for (bytes, field) in forms(&numbers) {
                let bytes = damaged(bytes, &damages);
                for field in [field, None] {
                    match read::<u64>(&bytes, field) {
                        Ok(numbers) => prop_assert!(numbers.len() <= bytes.len()),
                        Err(error) => prop_assert!(error.len() < 1000, "{}", error),
                    }
                    // The other number types accept other bytes.
                    drop(read::<u32>(&bytes, field));
                    drop(count_reals(&bytes, field));
                }
            }
        }
    }

    /// Counts the real numbers in these bytes. They may be NaN, so [`read`] cannot compare them.
    fn count_reals(bytes: &[u8], field: Option<&str>) -> Result<usize> {
        let source = io::Cursor::new(bytes.to_vec());
        let mut numbers = list("weight").numbers::<f64>(source, field)?;
        numbers.try_fold(0, |n, number| number.map(|_| n + 1))
    }
}
