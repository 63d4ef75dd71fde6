//! Memory of cached orders.

use crate::error::{Error, Result};

/// Limit on the length: indices have 32 bits.
pub(super) const MAX_LEN: u64 = 1 << 32;

/// Reserves memory for an order of `len` samples.
pub(super) fn allocate(len: u64) -> Result<Vec<u32>> {
    check_len(len)?;
    reserve(len)
}

pub(super) fn check_len(len: u64) -> Result<()> {
    if len > MAX_LEN {
        return Err(Error::TooLongToShuffle { len, max: MAX_LEN });
    }
    Ok(())
}

/// Reserves memory for exactly `len` entries; returns an error if `Vec` would abort the process.
pub(super) fn reserve<T>(len: u64) -> Result<Vec<T>> {
    let out_of_memory =
        Error::OutOfMemory { len, bytes: len.saturating_mul(size_of::<T>() as u64) };
    let Ok(n_slots) = usize::try_from(len) else { return Err(out_of_memory) };
    let mut table = Vec::new();
    table.try_reserve_exact(n_slots).map_err(|_| out_of_memory)?;
    Ok(table)
}

/// Fills `table` with 0, 1, 2, …, `len` − 1.
#[expect(clippy::cast_possible_truncation, reason = "a table has at most 2^32 slots")]
pub(super) fn fill_identity(table: &mut Vec<u32>, len: u64) {
    table.clear();
    table.extend((0..len as usize).map(|sample| sample as u32));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_beyond_32_bits_are_rejected() {
        assert_eq!(check_len(MAX_LEN), Ok(()));
        let len = MAX_LEN + 1;
        assert_eq!(allocate(len), Err(Error::TooLongToShuffle { len, max: MAX_LEN }));
    }

    #[test]
    fn missing_memory_is_an_error() {
        let len = 1 << 60;
        assert_eq!(reserve::<u64>(len), Err(Error::OutOfMemory { len, bytes: 1 << 63 }));
    }
}
