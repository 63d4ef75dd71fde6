//! Lengths of samples that must be read to be known.

use std::{panic::resume_unwind, thread};

use core_types::{Placement, WorldSize, split};

use crate::{
    dataset::Dataset,
    error::{Error, Result},
};

/// Reads all samples once, on several threads, and returns their lengths, for
/// [`LoaderBuilder::batches`](crate::LoaderBuilder::batches).
///
/// Use it if the length depends on the content, such as a number of tokens.
///
/// # Errors
///
/// [`Error::Sample`] for the first sample that cannot be read or is longer than 2^32 − 1, and
/// [`Error::Setting`] for 0 threads.
///
/// # Examples
///
/// ```
/// let texts = vec!["to be", "or", "not to be"];
/// let lengths = data_loader::measure(&texts, 2, |text| text.len() as u64)?;
/// assert_eq!(lengths, [5, 2, 9]);
/// # Ok::<(), data_loader::Error>(())
/// ```
pub fn measure<D: Dataset>(
    dataset: &D,
    threads: usize,
    length: impl Fn(&D::Item) -> u64 + Sync,
) -> Result<Vec<u32>> {
    let threads = WorldSize::new(threads as u64)
        .map_err(|_| Error::setting("the number of threads", &threads, "at least 1"))?;
    let measure_range = |placement: Placement| {
        let range = split::balanced(dataset.len(), placement);
        range.map(|index| measure_sample(dataset, index, &length)).collect::<Result<Vec<u32>>>()
    };
    let measure_range = &measure_range;
    let parts: Vec<_> = thread::scope(|scope| {
        let mut handles = Vec::new();
        for placement in threads.placements() {
            handles.push(scope.spawn(move || measure_range(placement)));
        }
        handles.into_iter().map(thread::ScopedJoinHandle::join).collect()
    });
    let mut lengths = Vec::new();
    for part in parts {
        lengths.extend(part.unwrap_or_else(|panic| resume_unwind(panic))?);
    }
    Ok(lengths)
}

fn measure_sample<D: Dataset>(
    dataset: &D,
    index: u64,
    length: impl Fn(&D::Item) -> u64,
) -> Result<u32> {
    let sample = dataset.read(index).map_err(|source| Error::Sample { index, source })?;
    u32::try_from(length(&sample)).map_err(|source| Error::Sample { index, source: source.into() })
}
