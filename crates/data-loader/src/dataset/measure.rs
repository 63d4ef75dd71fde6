//! Lengths of samples that must be read to be known.

use std::{ops::Range, panic::resume_unwind, thread};

use core_types::{WorldSize, split};

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
    // Threads share the samples like the ranks of a world.
    let workers = WorldSize::new(threads as u64)
        .map_err(|_| Error::setting("the number of threads", &threads, "at least 1"))?;
    let parts: Result<Vec<_>> = thread::scope(|scope| {
        let length = &length;
        let parts = workers.placements().map(|placement| {
            let part = split::balanced(dataset.len(), placement);
            scope.spawn(move || measure_part(dataset, part, length))
        });
        let parts: Vec<_> = parts.collect();
        parts.into_iter().map(|part| part.join().unwrap_or_else(|e| resume_unwind(e))).collect()
    });
    Ok(parts?.concat())
}

fn measure_part<D: Dataset>(
    dataset: &D,
    part: Range<u64>,
    length: impl Fn(&D::Item) -> u64,
) -> Result<Vec<u32>> {
    part.map(|index| {
        let sample = dataset.read(index).map_err(|cause| Error::Sample { index, cause })?;
        let length = u32::try_from(length(&sample));
        length.map_err(|cause| Error::Sample { index, cause: cause.into() })
    })
    .collect()
}
