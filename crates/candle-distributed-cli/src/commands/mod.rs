//! The subcommands, one module each.

pub(crate) mod batch;
pub(crate) mod completions;
pub(crate) mod generate;
#[cfg(unix)]
pub(crate) mod launch;
pub(crate) mod man;
pub(crate) mod mesh;
pub(crate) mod plan;
pub(crate) mod report;
pub(crate) mod sample;
pub(crate) mod train;

use crate::error::{Error, Result};

/// Returns the number of results to print out of `len`: from `start` on, at most `count`. Errors
/// name the results with `noun`.
pub(crate) fn n_to_print(start: u64, count: Option<u64>, len: u64, noun: &str) -> Result<u64> {
    let left = len.checked_sub(start).ok_or_else(|| {
        Error::usage(format!("--start {start} is beyond the end of {len} {noun}"))
    })?;
    Ok(count.map_or(left, |count| count.min(left)))
}

/// Converts a number of results, at most the length of an iterator, to `usize`.
#[expect(clippy::expect_used, reason = "the message gives the reason")]
pub(crate) fn iterator_count(n: u64) -> usize {
    usize::try_from(n).expect("at most the length of an iterator, which is a usize")
}
