//! An order that is held in memory.

use crate::error::{Error, Result};

/// The longest table: its indices are held in 32 bits.
pub(super) const MAX_LEN: u64 = 1 << 32;

/// Memory for an order of `len` samples.
pub(super) fn allocate(len: u64) -> Result<Vec<u32>> {
    check_len(len)?;
    zeros(len)
}

fn check_len(len: u64) -> Result<()> {
    if len > MAX_LEN {
        return Err(Error::TooLongToShuffle { len, max: MAX_LEN });
    }
    Ok(())
}

/// `len` zeros.
#[expect(clippy::cast_possible_truncation, reason = "there is memory for so many")]
pub(super) fn zeros<T: Copy + Default>(len: u64) -> Result<Vec<T>> {
    let mut table = reserve(len)?;
    table.resize(len as usize, T::default());
    Ok(table)
}

/// Memory for exactly `len` entries, or an error where a `Vec` would abort the process.
pub(super) fn reserve<T>(len: u64) -> Result<Vec<T>> {
    let out_of_memory =
        Error::OutOfMemory { len, bytes: len.saturating_mul(size_of::<T>() as u64) };
    let Ok(n_slots) = usize::try_from(len) else { return Err(out_of_memory) };
    let mut table = Vec::new();
    table.try_reserve_exact(n_slots).map_err(|_| out_of_memory)?;
    Ok(table)
}

/// Writes 0, 1, 2, … .
#[expect(clippy::cast_possible_truncation, reason = "a table has at most 2^32 slots")]
pub(super) fn reset(table: &mut [u32]) {
    for (sample, slot) in table.iter_mut().enumerate() {
        *slot = sample as u32;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_beyond_32_bits_are_refused() {
        assert_eq!(check_len(MAX_LEN), Ok(()));
        let len = MAX_LEN + 1;
        assert_eq!(allocate(len), Err(Error::TooLongToShuffle { len, max: MAX_LEN }));
    }

    #[test]
    fn memory_that_is_not_there_is_an_error() {
        let len = 1 << 60;
        assert_eq!(zeros::<u64>(len), Err(Error::OutOfMemory { len, bytes: 1 << 63 }));
    }
}
