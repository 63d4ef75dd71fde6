//! Lengths of data sets and orders.

use crate::error::{Error, Result};

/// Limit on the length of an order, so that padding cannot overflow.
const MAX_LEN: u64 = 1 << 63;

/// Checks that an order has samples, and not too many.
pub(crate) fn check_len(len: u64) -> Result<()> {
    match len {
        0 => Err(Error::EmptyDataSet),
        1..=MAX_LEN => Ok(()),
        len => Err(Error::DataSetTooLong { len, max: MAX_LEN }),
    }
}

/// Appends the sum of the earlier `lens` for each of them, and the sum of all, to `starts`.
pub(super) fn push_starts(
    lens: impl IntoIterator<Item = u64>,
    starts: &mut Vec<u64>,
) -> Result<u64> {
    let mut end = 0_u64;
    for len in lens {
        starts.push(end);
        end = end.saturating_add(len);
    }
    starts.push(end);
    check_len(end)?;
    Ok(end)
}

/// Returns the part that contains `index`, where part n begins at `starts[n]`.
///
/// Of several parts with the same start, only the last one can have samples.
pub(super) fn part_at(starts: &[u64], index: u64) -> usize {
    starts.partition_point(|&start| start <= index) - 1
}
