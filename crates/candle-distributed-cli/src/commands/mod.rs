//! The subcommands, one file each.

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

/// How many results to print out of `len`, from `start` on and at most `count`; an error calls them
/// `what`.
pub(crate) fn count(start: u64, count: Option<u64>, len: u64, what: &str) -> Result<u64> {
    let left = len
        .checked_sub(start)
        .ok_or_else(|| Error::usage(format!("start {start} is beyond {len} {what}")))?;
    Ok(count.map_or(left, |count| count.min(left)))
}

/// A number of results that an iterator has.
#[expect(clippy::expect_used, reason = "says why it cannot fail")]
pub(crate) fn of_iterator(n: u64) -> usize {
    usize::try_from(n).expect("no more than the results, whose number is a usize")
}
