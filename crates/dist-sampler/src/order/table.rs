//! An order that is held in memory: its allocation, and swapping many of its entries.

use std::hint::black_box;

use crate::error::{Error, Result};

/// The longest table: its indices are held in 32 bits.
pub(super) const MAX_LEN: u64 = 1 << 32;

/// Memory for an order of `len` samples.
pub(super) fn allocate(len: u64) -> Result<Vec<u32>> {
    if len > MAX_LEN {
        return Err(Error::TooLongToShuffle { len, max: MAX_LEN });
    }
    let out_of_memory = Error::OutOfMemory { len, bytes: len * size_of::<u32>() as u64 };
    let slots = usize::try_from(len).map_err(|_| out_of_memory.clone())?;
    let mut table = Vec::new();
    table.try_reserve_exact(slots).map_err(|_| out_of_memory)?;
    table.resize(slots, 0);
    Ok(table)
}

/// Writes 0, 1, 2, … .
#[allow(clippy::cast_possible_truncation, reason = "a table has at most 2^32 slots")]
pub(super) fn reset(table: &mut [u32]) {
    for (sample, slot) in table.iter_mut().enumerate() {
        *slot = sample as u32;
    }
}

/// Swaps the entries from `start` on with those at `slots`, one after the other.
///
/// The slots are read once before the first swap, which brings them into the cache: these loads do
/// not depend on each other, so the processor has many of them under way at once; the stores
/// between the loads of the swaps would hinder it. Any 300 to 1,200 slots at a time are as fast, 16
/// take half as long again, and 10,000 a third: they no longer stay where they were brought.
pub(super) fn swap(table: &mut [u32], start: usize, slots: &[u32]) {
    black_box(slots.iter().fold(0, |all, &slot| all ^ table[slot as usize]));
    for (i, &slot) in (start..).zip(slots) {
        table.swap(i, slot as usize);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_beyond_32_bits_are_refused() {
        let len = MAX_LEN + 1;
        assert_eq!(allocate(len), Err(Error::TooLongToShuffle { len, max: MAX_LEN }));
    }
}
