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
    check(path, bytes, |number| f32::from_le_bytes(number.try_into().expect("4 bytes")));
    check(path, bytes, |number| f64::from_le_bytes(number.try_into().expect("8 bytes")));
    check(path, bytes, |number| i16::from_le_bytes(number.try_into().expect("2 bytes")));
    check(path, bytes, |number| number[0]);
}

/// Checks the rows of an array, and its windows of two rows. `decode` decodes a number.
fn check<T: NpyElement>(path: &Path, bytes: &[u8], decode: fn(&[u8]) -> T) {
    let open = || NpyDataset::<T>::open(path);
    let Ok(rows) = open() else { return };
    let windows = open().and_then(|array| array.windows(2, 1)).expect("it has just been opened");
    let (header, data) = read_header(bytes).expect("an array has a header");
    assert_eq!(rows.len(), header.shape[0]);
    assert_eq!(windows.len(), rows.len().saturating_sub(1));
    let numbers = |data: &[u8]| data.chunks_exact(size_of::<T>()).map(decode).collect::<Vec<T>>();
    let row_bytes = data.len().checked_div(rows.len() as usize).unwrap_or(0);
    for n in 0..rows.len().min(64) {
        let start = n as usize * row_bytes;
        check_sample(&rows, n, &numbers(&data[start..start + row_bytes]));
        if n < windows.len() {
            check_sample(&windows, n, &numbers(&data[start..start + 2 * row_bytes]));
        }
    }
    assert!(rows.read(rows.len()).is_err());
}

/// Checks the numbers of a sample.
fn check_sample<T: NpyElement>(array: &NpyDataset<T>, n: u64, expected: &[T]) {
    let sample = array.read(n).expect("the array has this sample");
    assert_eq!(format!("{:?}", sample.values), format!("{expected:?}"), "also for NaN");
    assert_eq!(sample.shape.iter().product::<usize>(), expected.len());
}
