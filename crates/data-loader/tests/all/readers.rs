//! Readers equal naive ones, and reject files that changed or are malformed.

use std::{
    fs::{self, File},
    io::{Seek, SeekFrom, Write},
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, SystemTime},
};

use core_types::{Epoch, Seed};
use data_loader::{
    BoxError, DataLoader, Dataset, Error, IndexPlace, JsonlDataset, NpyDataset, NpyDtype, NpyFault,
    NpyHeader, OnError, SampleBatch, ShardSource, ShardedDataset, TextConfig, TextDataset,
    TextUnit, TokenDataset, TokenType, concat,
};
use dyn_batch::SequenceLengths;
use proptest::prelude::*;
use tempfile::TempDir;

const UNITS: [TextUnit; 3] = [TextUnit::Line, TextUnit::Paragraph, TextUnit::Document];

fn write(folder: &TempDir, name: &str, content: impl AsRef<[u8]>) -> PathBuf {
    let path = folder.path().join(name);
    fs::write(&path, content).unwrap();
    path
}

fn all<D: Dataset>(dataset: &D) -> Vec<D::Item> {
    dataset.samples().map(Result::unwrap).collect()
}

fn error_of<T: std::fmt::Debug>(result: Result<T, BoxError>) -> Error {
    *result.unwrap_err().downcast().unwrap()
}

fn is_blank(text: &str) -> bool {
    text.bytes().all(|byte| byte.is_ascii_whitespace())
}

/// Returns the samples of a text, without an index.
fn naive(text: &str, unit: TextUnit) -> Vec<String> {
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    match unit {
        TextUnit::Line => text.lines().map(str::to_owned).collect(),
        TextUnit::Paragraph => {
            let text = text.replace("\r\n", "\n");
            let paragraphs = text.split("\n\n").filter(|text| !is_blank(text));
            paragraphs.map(|text| text.trim_matches('\n').to_owned()).collect()
        }
        _ if text.is_empty() => Vec::new(),
        _ => vec![text.replace("\r\n", "\n")],
    }
}

fn check_text(folder: &TempDir, text: &str) {
    let path = write(folder, "text.txt", text);
    for unit in UNITS {
        let config = TextConfig { unit, ..TextConfig::default() };
        let expected = naive(text, unit);
        let dataset = TextDataset::open_with(&path, &config).unwrap();
        assert_eq!(all(&dataset), expected, "{unit:?} of {text:?}");
        let index = IndexPlace::At(folder.path().join(format!("{unit:?}")));
        let indexed = TextConfig { index, ..config.clone() };
        for _ in 0..2 {
            let kept = TextDataset::open_with(&path, &indexed);
            assert_eq!(all(&kept.unwrap()), expected, "kept {unit:?} of {text:?}");
        }
        let lengths = (0..dataset.count()).map(|n| dataset.length(n).unwrap());
        assert!(lengths.clone().sum::<u64>() <= text.len() as u64);
        let exact = unit == TextUnit::Line && !text.contains(['\r', '\u{feff}']);
        for (length, text) in lengths.zip(&expected) {
            let n_bytes = text.len() as u64;
            assert!(
                length == n_bytes || length > n_bytes && !exact,
                "{unit:?}: {length} of {text:?}"
            );
        }
        assert_eq!(dataset.length(dataset.count()), None);
        check_cut_text(&path, &config, &expected, text);
    }
}

/// Pieces of a text are its text again, except for line ends where they touch.
fn check_cut_text(path: &Path, config: &TextConfig, expected: &[String], text: &str) {
    let config = TextConfig { max_bytes: Some(8), ..config.clone() };
    let pieces = all(&TextDataset::open_with(path, &config).unwrap());
    assert!(pieces.iter().all(|piece| piece.len() <= 8), "{pieces:?}");
    let joined = |texts: &[String]| texts.concat().replace('\n', "");
    assert_eq!(joined(&pieces), joined(expected), "{config:?} of {text:?}");
}

#[test]
fn texts_equal_naive_ones() {
    let folder = TempDir::new().unwrap();
    for text in [
        "",
        "\n",
        "\r\n",
        "\n\n\n",
        "a",
        "a\n",
        "a\r\n\r\nb",
        "a\n\n\n\nb\n\n",
        "\n\na\nb\n \n\n\t\n\nc",
        "a\r",
        "a\r\r\n\r\nb",
        "\u{feff}",
        "\u{feff}a\nb",
        "\u{feff}\n\na",
        "long line of text with é, € and 😀😀😀😀\r\nand another one\r\n",
        "  \n\n  a  \n\n",
    ] {
        check_text(&folder, text);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn random_texts_equal_naive_ones(text in "(\u{feff})?(\r\n|\n|\n\n|[ab é€😀]{0,12}|\r){0,20}") {
        check_text(&TempDir::new().unwrap(), &text);
    }
}

#[test]
fn folder_is_its_files_in_order() {
    let folder = TempDir::new().unwrap();
    fs::create_dir(folder.path().join("b")).unwrap();
    for n in 0..200 {
        write(&folder, &format!("b/{n:03}.txt"), format!("text {n}\n"));
    }
    write(&folder, "a.txt", "first\nsecond");
    write(&folder, ".hidden", "no");
    let config = TextConfig { index: IndexPlace::Beside, ..TextConfig::default() };
    for _ in 0..2 {
        let dataset = TextDataset::open_with(folder.path(), &config).unwrap();
        let mut expected = vec!["first".to_owned(), "second".to_owned()];
        expected.extend((0..200).map(|n| format!("text {n}")));
        assert_eq!(all(&dataset), expected);
    }
    let config = TextConfig { index: IndexPlace::At("index".into()), ..TextConfig::default() };
    let error = TextDataset::open_with(folder.path(), &config).unwrap_err();
    assert!(matches!(error, Error::Setting { .. }), "{error}");
    let config = TextConfig { max_bytes: Some(7), ..TextConfig::default() };
    let error = TextDataset::open_with(folder.path(), &config).unwrap_err();
    assert!(matches!(error, Error::Setting { .. }), "{error}");
}

#[test]
fn invalid_utf8_names_its_line() {
    let folder = TempDir::new().unwrap();
    let mut text = b"line\n".repeat(5000);
    text.extend(b"\xff\n");
    let path = write(&folder, "text.txt", text);
    let dataset = TextDataset::open(&path).unwrap();
    let error = error_of(dataset.read(5000));
    assert!(matches!(error, Error::Line { line: 5001, .. }), "{error}");
    assert_eq!(dataset.read(4999).unwrap(), "line");
    assert!(matches!(error_of(dataset.read(5001)), Error::IndexOutOfRange { len: 5001, .. }));
}

#[test]
fn missing_files_are_named() {
    let missing = Path::new("/no/such/file");
    for error in [
        TextDataset::open(missing).unwrap_err(),
        JsonlDataset::<u32>::open(missing).unwrap_err(),
        NpyDataset::<f32>::open(missing).unwrap_err(),
        TokenDataset::open(missing, TokenType::U16, 1).unwrap_err(),
    ] {
        let message = error.to_string();
        assert!(message.starts_with("failed to access /no/such/file: "), "{message}");
    }
}

#[test]
fn json_lines_skip_blank_lines() {
    let folder = TempDir::new().unwrap();
    let path = write(&folder, "a.jsonl", "\u{feff}1\n\n \r\n2\r\n\"three\"\n\n4\n\n\n");
    let dataset = JsonlDataset::<u32>::open(&path).unwrap();
    assert_eq!(dataset.len(), 4);
    assert_eq!([0, 1, 3].map(|n| dataset.read(n).unwrap()), [1, 2, 4]);
    match error_of(dataset.read(2)) {
        Error::Line { path: found, line: 5, cause } => {
            assert_eq!(found, path);
            assert!(cause.to_string().starts_with("invalid type"), "{cause}");
        }
        error => panic!("{error}"),
    }
    let path = write(&folder, "cut.jsonl", "[1, 2]\n\n[3,");
    let dataset = JsonlDataset::<Vec<u32>>::open(&path).unwrap();
    assert!(matches!(error_of(dataset.read(1)), Error::Line { line: 3, .. }));
}

/// Writes a file of `n` lines and its index, and returns their paths.
fn indexed_lines(folder: &TempDir, n: u64) -> (PathBuf, PathBuf) {
    let lines: Vec<u8> = (0..n).flat_map(|n| format!("{n}\n").into_bytes()).collect();
    let path = write(folder, "numbers.jsonl", lines);
    JsonlDataset::<u64>::open_with(&path, &IndexPlace::Beside).unwrap();
    let index = folder.path().join("numbers.jsonl.line-index");
    assert!(index.exists());
    (path, index)
}

fn open_kept(path: &Path) -> JsonlDataset<u64> {
    JsonlDataset::open_with(path, &IndexPlace::Beside).unwrap()
}

#[test]
fn index_takes_four_bytes_a_line() {
    let folder = TempDir::new().unwrap();
    let (path, index) = indexed_lines(&folder, 20_000);
    assert!(index.metadata().unwrap().len() < 20_000 * 42 / 10);
    let kept = open_kept(&path);
    assert_eq!(kept.len(), 20_000);
    assert!((0..20_000).all(|n| kept.read(n).unwrap() == n));
}

#[test]
fn unfit_index_is_built_anew() {
    let folder = TempDir::new().unwrap();
    let (path, index) = indexed_lines(&folder, 5000);
    let valid = fs::read(&index).unwrap();
    let mut variants: Vec<Vec<u8>> = (0..72)
        .map(|at| {
            let mut bytes = valid.clone();
            bytes[at] ^= 1;
            bytes
        })
        .collect();
    variants.extend([0, 7, 71, 72, 100, valid.len() - 1].map(|len| valid[..len].to_vec()));
    variants.push([&valid[..], b"x"].concat());
    for bytes in variants {
        fs::write(&index, &bytes).unwrap();
        assert!((0..5000).step_by(499).all(|n| open_kept(&path).read(n).unwrap() == n));
        assert_eq!(fs::read(&index).unwrap(), valid);
    }
    // Another rule, another content and another time of the file.
    let config = TextConfig { index: IndexPlace::At(index.clone()), ..TextConfig::default() };
    assert_eq!(TextDataset::open_with(&path, &config).unwrap().len(), 5000);
    assert_ne!(fs::read(&index).unwrap(), valid);
    fs::write(&path, "7\n8\n").unwrap();
    assert_eq!(all(&open_kept(&path)), [7, 8]);
    let two_lines = fs::read(&index).unwrap();
    let later = SystemTime::now() + Duration::from_secs(100);
    File::options().write(true).open(&path).unwrap().set_modified(later).unwrap();
    assert_eq!(all(&open_kept(&path)), [7, 8]);
    assert_ne!(fs::read(&index).unwrap(), two_lines);
}

#[test]
fn corrupt_index_blocks_are_errors() {
    let folder = TempDir::new().unwrap();
    let (path, index) = indexed_lines(&folder, 9000);
    let mut bytes = fs::read(&index).unwrap();
    let last = bytes.len() - 100;
    bytes[last] ^= 64;
    fs::write(&index, bytes).unwrap();
    let kept = open_kept(&path);
    assert_eq!([0, 8191].map(|n| kept.read(n).unwrap()), [0, 8191], "other blocks are valid");
    for n in [8192, 8999] {
        let error = error_of(kept.read(n));
        assert!(matches!(error, Error::Content { .. }), "{error}");
    }
    fs::remove_file(&index).unwrap();
    assert_eq!(open_kept(&path).len(), 9000);
    assert_eq!(kept.read(8192).unwrap(), 8192, "of the index that was built anew");
}

#[test]
fn index_needs_a_writable_place() {
    let folder = TempDir::new().unwrap();
    let path = write(&folder, "a.jsonl", "1\n");
    let place = IndexPlace::At(folder.path().join("no/such/folder"));
    let error = JsonlDataset::<u32>::open_with(&path, &place).unwrap_err();
    assert!(matches!(error, Error::Io { .. }), "{error}");
}

/// Opens a data set, changes its file, and reads.
fn check_change<D: Dataset<Item: std::fmt::Debug>>(path: &Path, dataset: &D) {
    let content = fs::read(path).unwrap();
    let changes: [&dyn Fn(); 3] = [
        &|| fs::write(path, &content[..content.len() / 2]).unwrap(),
        &|| fs::write(path, [&content[..], &content[..]].concat()).unwrap(),
        &|| {
            fs::write(path, &content).unwrap();
            let later = SystemTime::now() + Duration::from_secs(100);
            File::options().write(true).open(path).unwrap().set_modified(later).unwrap();
        },
    ];
    assert!(dataset.read(0).is_ok());
    for change in changes {
        change();
        for index in [0, dataset.len() - 1] {
            let error = error_of(dataset.read(index));
            assert!(
                matches!(&error, Error::FileChanged { path: found, .. } if found == path),
                "{error}"
            );
        }
    }
}

#[test]
fn changed_files_are_errors() {
    let folder = TempDir::new().unwrap();
    let path = write(&folder, "a.txt", "one\ntwo\nthree\n");
    check_change(&path, &TextDataset::open(&path).unwrap());
    let path = write(&folder, "mapped.txt", "one\ntwo\nthree\n");
    check_change(&path, &TextDataset::open(&path).unwrap().map(Ok));
    let path = write(&folder, "a.jsonl", "1\n2\n3\n");
    check_change(&path, &JsonlDataset::<u32>::open(&path).unwrap());
    let path = write(&folder, "a.npy", npy(NpyDtype::for_element::<u8>(), &[4, 1], &[1, 2, 3, 4]));
    check_change(&path, &NpyDataset::<u8>::open(&path).unwrap());
    let path = write(&folder, "a.bin", [1, 0, 2, 0]);
    check_change(&path, &TokenDataset::open(&path, TokenType::U16, 1).unwrap());
}

/// Reads a batch of four samples, and writes their file `times` times after one of them.
fn check_change_in_batch<D>(path: &Path, times: usize, open: impl Fn(&Path) -> D)
where
    D: Dataset<Item: std::fmt::Debug> + 'static,
{
    let content = fs::read(path).unwrap();
    for last_before in 0..4 {
        fs::write(path, &content).unwrap();
        let (dataset, changed) = (open(path), content.repeat(times));
        let (written, n_read) = (path.to_owned(), AtomicUsize::new(0));
        let changing = Arc::new(dataset.map(move |sample| {
            if n_read.fetch_add(1, Ordering::Relaxed) == last_before {
                fs::write(&written, &changed)?;
            }
            Ok(sample)
        }));
        let halves = [vec![0, 1], vec![2, 3]].map(|half| Arc::clone(&changing).subset(half));
        let loader = DataLoader::builder(concat(halves)).batch_size(4);
        let mut loader = loader.collate(|samples: SampleBatch<_>| Ok(samples.items)).unwrap();
        loader.set_epoch(Epoch::ZERO).unwrap();
        // The samples of an empty file cannot be read.
        let expected = if times == 0 { (last_before as u64 + 1) % 4 } else { 0 };
        match loader.next().unwrap().unwrap_err() {
            Error::Sample { index, cause } if index == expected => {
                let error: Error = *cause.downcast().unwrap();
                assert!(matches!(error, Error::FileChanged { .. }), "{error}");
            }
            error => panic!("{error}"),
        }
        fs::write(path, &content).unwrap();
    }
}

#[test]
fn files_that_change_within_a_batch_are_errors() {
    let folder = TempDir::new().unwrap();
    for times in [0, 2] {
        let path = write(&folder, "a.txt", "one\ntwo\nthree\nfour\n");
        check_change_in_batch(&path, times, |path| TextDataset::open(path).unwrap());
        let path = write(&folder, "a.jsonl", "1\n2\n3\n4\n");
        check_change_in_batch(&path, times, |path| JsonlDataset::<u32>::open(path).unwrap());
    }
}

/// A text as the only shard.
struct OneShard(PathBuf);

impl ShardSource for OneShard {
    type Shard = TextDataset;

    fn shard_lens(&self) -> Vec<u64> {
        vec![2]
    }

    fn open(&self, _: usize) -> Result<TextDataset, BoxError> {
        Ok(TextDataset::open(&self.0)?)
    }
}

#[test]
fn changed_shards_are_errors_before_they_are_closed() {
    let folder = TempDir::new().unwrap();
    let path = write(&folder, "a.txt", "one\ntwo\n");
    let sharded = ShardedDataset::new(OneShard(path.clone()), 1).unwrap();
    assert_eq!(sharded.read_seeded(0, Seed::default()).unwrap(), "one");
    fs::write(&path, "six\nsix\nsix\n").unwrap();
    let error = error_of(sharded.read_seeded(1, Seed::default()));
    assert!(matches!(error, Error::FileChanged { .. }), "{error}");
}

/// A sample that cannot be read, in a batch that is read again because its file has changed.
#[test]
fn skipped_samples_count_once() {
    let folder = TempDir::new().unwrap();
    let path = write(&folder, "a.jsonl", "1\n2\n3\n4\n");
    let written = path.clone();
    let faulty = JsonlDataset::<u32>::open(&path).unwrap().map(move |n| match n {
        3 => Err("a fault".into()),
        n => {
            fs::write(&written, "5\n")?;
            Ok(n)
        }
    });
    let loader = DataLoader::builder(faulty).batch_size(4);
    let loader = loader.on_error(OnError::Skip { at_most: 9 });
    let mut loader = loader.collate(|samples: SampleBatch<_>| Ok(samples.items)).unwrap();
    loader.set_epoch(Epoch::ZERO).unwrap();
    assert!(matches!(loader.next(), Some(Err(Error::Collate { .. }))));
    assert_eq!(loader.skipped().count, 4);
}

fn npy(dtype: NpyDtype, shape: &[u64], data: &[u8]) -> Vec<u8> {
    [&NpyHeader { dtype, shape: shape.to_vec() }.to_bytes()[..], data].concat()
}

fn fault_of<T>(result: Result<T, Error>) -> NpyFault {
    match result.err().unwrap() {
        Error::Npy { cause, .. } => cause,
        error => panic!("{error}"),
    }
}

#[test]
fn rows_and_windows_equal_slices() {
    let folder = TempDir::new().unwrap();
    let values: Vec<f32> = (0_u8..60).map(f32::from).collect();
    let data: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    let path = write(&folder, "a.npy", npy(NpyDtype::for_element::<f32>(), &[10, 2, 3], &data));
    let rows = NpyDataset::<f32>::open(&path).unwrap();
    assert_eq!(rows.len(), 10);
    let row = rows.read(3).unwrap();
    assert_eq!((row.shape, &row.values[..]), (vec![2, 3], &values[18..24]));
    for (length, stride) in [(1, 1), (4, 1), (4, 3), (10, 1), (3, 20)] {
        let windows = NpyDataset::<f32>::open(&path).unwrap().windows(length, stride).unwrap();
        let starts: Vec<u64> =
            (0..=10 - length).step_by(usize::try_from(stride).unwrap()).collect();
        assert_eq!(windows.len(), starts.len() as u64);
        for (n, start) in (0..).zip(starts) {
            let window = windows.read(n).unwrap();
            assert_eq!(window.shape, [usize::try_from(length).unwrap(), 2, 3]);
            let range =
                usize::try_from(start * 6).unwrap()..usize::try_from((start + length) * 6).unwrap();
            assert_eq!(window.values, values[range]);
        }
        assert!(matches!(error_of(windows.read(windows.len())), Error::IndexOutOfRange { .. }));
    }
    let windows = |length, stride| NpyDataset::<f32>::open(&path).unwrap().windows(length, stride);
    assert_eq!(windows(11, 1).unwrap().len(), 0);
    assert!(windows(0, 1).is_err() && windows(1, 0).is_err());
}

#[test]
fn arrays_of_other_numbers_are_rejected() {
    let folder = TempDir::new().unwrap();
    let bytes = npy(NpyDtype::for_element::<i16>(), &[2], &[5, 0, 0xfe, 0xff]);
    let path = write(&folder, "a.npy", bytes);
    let fault = fault_of(NpyDataset::<f32>::open(&path));
    assert_eq!(fault.to_string(), "it has dtype <i2, it must be <f4");
    let rows = all(&NpyDataset::<i16>::open(&path).unwrap());
    assert_eq!(rows.into_iter().flat_map(|row| row.values).collect::<Vec<_>>(), [5, -2]);
}

/// Returns an array file with this header text.
fn array_with(header: &str) -> Vec<u8> {
    let size = u16::try_from(header.len()).unwrap().to_le_bytes();
    [b"\x93NUMPY\x01\x00", &size[..], header.as_bytes(), &[0; 8]].concat()
}

fn dictionary(descr: &str, order: &str, shape: &str) -> Vec<u8> {
    array_with(&format!("{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}, }}"))
}

#[test]
fn hostile_arrays_are_rejected() {
    type Check = fn(&NpyFault) -> bool;
    let no_header: Check = |fault| matches!(fault, NpyFault::Invalid(_) | NpyFault::Io(_));
    let invalid: Check =
        |fault| matches!(fault, NpyFault::Invalid(text) if text.starts_with("its header"));
    let wrong_shape: Check =
        |fault| matches!(fault, NpyFault::Invalid(text) if text.starts_with("it has shape"));
    let wrong_length: Check =
        |fault| matches!(fault, NpyFault::Invalid(text) if text.contains("its shape needs"));
    let wrong_dtype: Check = |fault| matches!(fault, NpyFault::DtypeMismatch { .. });
    let valid = dictionary("'<f4'", "False", "(2,)");
    let folder = TempDir::new().unwrap();
    for (bytes, check) in [
        (Vec::new(), no_header),
        (b"\x93NUMPY".to_vec(), no_header),
        (b"\x93NUMPY\x04\x00\x10\x00".to_vec(), no_header),
        (b"\x93NUMPY\x02\x00\xff\xff\xff\xff{}".to_vec(), no_header),
        (valid[..40].to_vec(), no_header),
        (valid[..valid.len() - 1].to_vec(), wrong_length),
        ([&valid[..], b"x"].concat(), wrong_length),
        (array_with("{}"), invalid),
        (array_with("{'descr': '<f4', 'fortran_order': False, 'shape': 2}"), invalid),
        (dictionary("'<f4'", "False", "(a,)"), invalid),
        (dictionary("'<f4'", "False", "(-2,)"), invalid),
        (dictionary("'<f4'", "False", "()"), wrong_shape),
        (dictionary("'<f4'", "False", "(9, 0)"), wrong_length),
        (dictionary("'<f4'", "False", "(4611686018427387904, 4)"), wrong_shape),
        (dictionary("'<f4'", "False", "(18446744073709551615,)"), wrong_shape),
        (dictionary("'<f4'", "False", "(99999999999999999999,)"), invalid),
        (dictionary("'<f4'", "False", "(1000000000000,)"), wrong_length),
        (
            dictionary("'<f4'", "True", "(2,)"),
            |fault| matches!(fault, NpyFault::Invalid(text) if text.contains("Fortran")),
        ),
        (dictionary("'|O'", "False", "(2,)"), wrong_dtype),
        (dictionary("'>f4'", "False", "(2,)"), wrong_dtype),
        (
            dictionary("[('a', '<f4')]", "False", "(2,)"),
            |fault| matches!(fault, NpyFault::DtypeMismatch { found, .. } if found == "[('a', '<f4')]"),
        ),
    ] {
        let path = write(&folder, "a.npy", &bytes);
        let fault = fault_of(NpyDataset::<f32>::open(&path));
        assert!(check(&fault), "{fault:?} of {:?}", String::from_utf8_lossy(&bytes));
    }
    let path = write(&folder, "a.npy", valid);
    assert_eq!(NpyDataset::<f32>::open(&path).unwrap().len(), 2);
    // Endless rows without bytes.
    let mut rows = dictionary("'<f4'", "False", "(1000000, 0)");
    rows.truncate(rows.len() - 8);
    let fault = fault_of(NpyDataset::<f32>::open(write(&folder, "b.npy", rows)));
    assert!(wrong_shape(&fault), "{fault:?}");
}

#[test]
fn numbers_beyond_4_gib_are_read() {
    let folder = TempDir::new().unwrap();
    let n_rows = (1_u64 << 32) + 16;
    let header = NpyHeader { dtype: NpyDtype::for_element::<u8>(), shape: vec![n_rows] }.to_bytes();
    let path = folder.path().join("sparse.npy");
    let mut file = File::create(&path).unwrap();
    file.write_all(&header).unwrap();
    file.seek(SeekFrom::Start(header.len() as u64 + n_rows - 3)).unwrap();
    file.write_all(&[7, 8, 9]).unwrap();
    let rows = NpyDataset::<u8>::open(&path).unwrap();
    assert_eq!(rows.read(n_rows - 2).unwrap().values, [8]);
    // The same bytes as tokens.
    let skipped = header.len() as u64;
    let tokens = TokenDataset::open(&path, TokenType::U8, 3).unwrap().stride(1).unwrap();
    assert_eq!(tokens.read(skipped + n_rows - 3).unwrap(), [7, 8, 9]);
}

#[test]
fn token_blocks_equal_slices() {
    let folder = TempDir::new().unwrap();
    let tokens: Vec<u32> = (0..50).map(|n| n * 1000).collect();
    let narrow: Vec<u8> =
        tokens.iter().flat_map(|&n| u16::try_from(n).unwrap().to_le_bytes()).collect();
    let wide: Vec<u8> = tokens.iter().flat_map(|n| n.to_le_bytes()).collect();
    let header =
        |code| [b"LITPKDS".to_vec(), vec![1, 0, 0, 0, 0, 0, 0, 0, code], vec![0; 8]].concat();
    for (token_type, bytes) in [
        (TokenType::U16, narrow.clone()),
        (TokenType::U32, wide.clone()),
        (TokenType::U16, [header(8), narrow.clone()].concat()),
        (TokenType::U32, [header(4), wide].concat()),
    ] {
        let path = write(&folder, "a.bin", bytes);
        for (block, stride) in [(1, 1), (5, 4), (7, 7), (50, 3)] {
            let dataset = TokenDataset::open(&path, token_type, block as u64).unwrap();
            let dataset = dataset.stride(stride as u64).unwrap();
            let expected: Vec<_> = tokens.windows(block).step_by(stride).collect();
            assert_eq!(all(&dataset), expected, "{token_type:?} {block} {stride}");
        }
        let open = |block| TokenDataset::open(&path, token_type, block);
        assert_eq!(open(51).unwrap().len(), 0);
        assert!(matches!(open(0), Err(Error::Setting { .. })));
        assert!(matches!(open(5).unwrap().stride(0), Err(Error::Setting { .. })));
    }
    for bytes in
        [narrow[..5].to_vec(), header(4), header(8)[..20].to_vec(), b"LITPKDS\x02".to_vec()]
    {
        let path = write(&folder, "b.bin", bytes);
        let error = TokenDataset::open(&path, TokenType::U16, 1).unwrap_err();
        assert!(matches!(error, Error::Content { .. }), "{error}");
    }
}

#[cfg(unix)]
#[test]
fn folders_that_contain_themselves_are_rejected() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::create_dir(folder.path().join("below")).unwrap();
    for name in ["below/one", "below/two"] {
        std::os::unix::fs::symlink(folder.path(), folder.path().join(name)).unwrap();
    }
    // Two links would have 2^40 paths.
    let error = TextDataset::open(folder.path()).unwrap_err();
    assert!(
        matches!(&error, Error::Io { path, .. } if path.starts_with(folder.path().join("below")))
    );
    assert!(error.to_string().ends_with("it is a link to a folder that contains it"), "{error}");
}
