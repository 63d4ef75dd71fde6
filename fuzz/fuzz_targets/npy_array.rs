//! Untrusted NumPy arrays: none panics, a header takes memory in proportion to the input, and an
//! accepted array has the numbers of a naive reader.
//!
//! An input with a valid header is also read with as many bytes as its shape needs.

#![no_main]

use std::{alloc::System, fs, path::Path};

use core_types::files::AtomicFolder;
use data_loader::{Dataset, NpyDataset, NpyElement, NpyHeader};
use libfuzzer_sys::fuzz_target;
use stats_alloc::{INSTRUMENTED_SYSTEM, Region, StatsAlloc};

/// The largest array that is completed.
const MAX_DATA_BYTES: u64 = 4096;

/// The bytes that reading a header may allocate for any input, and for each byte of it.
const FIXED_BYTES: usize = 16384;
const BYTES_PER_BYTE: usize = 64;

#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

fuzz_target!(|bytes: &[u8]| {
    let folder = AtomicFolder::new(std::env::temp_dir().join("npy_array")).expect("a folder");
    let path = folder.path().join("array.npy");
    check_file(&path, bytes);
    let Some((header, data)) = read_header(bytes) else { return };
    let written = header.to_bytes();
    assert_eq!(read_header(&written), Some((header.clone(), &[][..])));
    let sizes = header.shape.iter().copied();
    let n_bytes = sizes.fold(header.dtype.n_bytes() as u64, u64::saturating_mul);
    if n_bytes <= MAX_DATA_BYTES {
        let data = data.iter().copied().chain(std::iter::repeat(7)).take(n_bytes as usize);
        check_file(&path, &written.into_iter().chain(data).collect::<Vec<u8>>());
    }
});

/// Returns the header and the bytes behind it.
fn read_header(bytes: &[u8]) -> Option<(NpyHeader, &[u8])> {
    let mut rest = bytes;
    let region = Region::new(ALLOCATOR);
    let header = NpyHeader::read(&mut rest);
    let allocated = region.change().bytes_allocated;
    let limit = FIXED_BYTES + BYTES_PER_BYTE * bytes.len();
    assert!(allocated <= limit, "{allocated} bytes were allocated to read {}", bytes.len());
    header.ok().map(|header| (header, rest))
}

fn check_file(path: &Path, bytes: &[u8]) {
    fs::write(path, bytes).expect("a file");
    check::<f32>(bytes, &|| NpyDataset::open(path));
    check::<i16>(bytes, &|| NpyDataset::open(path));
    check::<f64>(bytes, &|| NpyDataset::open_as(path));
    check::<u8>(bytes, &|| NpyDataset::open_as(path));
}

/// Checks the rows of an array, and its windows of two rows.
fn check<T: NpyElement>(bytes: &[u8], open: &dyn Fn() -> data_loader::Result<NpyDataset<T>>) {
    let Ok(rows) = open() else { return };
    let windows = open().and_then(|array| array.windows(2, 1)).expect("it has just been opened");
    let (header, data) = read_header(bytes).expect("an array has a header");
    assert_eq!(rows.len(), header.shape[0]);
    assert_eq!(windows.len(), rows.len().saturating_sub(1));
    let row_bytes = data.len().checked_div(rows.len() as usize).unwrap_or(0);
    for n in 0..rows.len().min(64) {
        let start = n as usize * row_bytes;
        check_sample(&rows, n, &header, &data[start..start + row_bytes]);
        if n < windows.len() {
            check_sample(&windows, n, &header, &data[start..start + 2 * row_bytes]);
        }
    }
    assert!(rows.read(rows.len()).is_err());
}

/// Checks the numbers of a sample, equal to `data` if all of its numbers fit the type.
fn check_sample<T: NpyElement>(array: &NpyDataset<T>, n: u64, header: &NpyHeader, data: &[u8]) {
    let numbers = data.chunks_exact(header.dtype.n_bytes()).map(|bytes| {
        let mut word = [0; 8];
        word[..bytes.len()].copy_from_slice(bytes);
        header.dtype.decode(word)
    });
    let expected: Option<Vec<T>> = numbers.map(T::from_number).collect();
    match (array.read(n), expected) {
        (Ok(sample), Some(expected)) => {
            assert_eq!(format!("{:?}", sample.values), format!("{expected:?}"), "also for NaN");
            assert_eq!(sample.shape.iter().product::<usize>(), expected.len());
        }
        (Err(_), None) => {}
        (sample, expected) => panic!("{sample:?}, expected {expected:?}"),
    }
}
