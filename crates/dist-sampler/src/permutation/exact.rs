//! The exact shuffle: every one of the N! orders is equally likely.
//!
//! Fisher and Yates' algorithm (Knuth, TAOCP vol. 2, algorithm P) over PCG-DXSM (O'Neill, "PCG", 2014), written here
//! because a library may change its own between versions, and an epoch that was begun must be resumable for years.

use core_types::Seed;
use rand::Rng;
use rand_pcg::Pcg64Dxsm;

use crate::error::{Error, Result};

/// The longest table: its indices are held in 32 bits.
const MAX_LEN: u64 = 1 << 32;

/// Memory for a permutation of `len` samples.
pub(super) fn table(len: u64) -> Result<Vec<u32>> {
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

/// Fills `table` with a uniformly random permutation of its positions.
pub(super) fn shuffle(table: &mut [u32], seed: Seed) {
    for (sample, slot) in (0..).zip(table.iter_mut()) {
        *slot = sample;
    }
    let mut rng = Pcg64Dxsm::new(u128::from(seed.derive(0).as_u64()), u128::from(seed.derive(1).as_u64()));
    for i in 0..table.len().saturating_sub(1) {
        let j = i + below(&mut rng, table.len() - i);
        table.swap(i, j);
    }
}

/// A uniformly random number below `n` (Lemire, "Fast Random Integer Generation in an Interval", 2019).
#[allow(clippy::cast_possible_truncation, reason = "the halves of the product are what the method is about")]
fn below(rng: &mut Pcg64Dxsm, n: usize) -> usize {
    let n = n as u64;
    let mut product = u128::from(rng.next_u64()) * u128::from(n);
    if (product as u64) < n {
        // Of the 2^64 draws, the 2^64 mod n that would favor some results are drawn again.
        let favored = n.wrapping_neg() % n;
        while (product as u64) < favored {
            product = u128::from(rng.next_u64()) * u128::from(n);
        }
    }
    (product >> 64) as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shuffled(len: u64, seed: u64) -> Vec<u32> {
        let mut table = table(len).unwrap();
        shuffle(&mut table, Seed::new(seed));
        table
    }

    #[test]
    fn first_values_are_pinned() {
        assert_eq!(shuffled(10, 0), [2, 4, 0, 1, 6, 3, 9, 8, 5, 7]);
        assert_eq!(shuffled(1_000_000, 42)[..4], [352_376, 63_191, 8_315, 620_493]);
    }

    #[test]
    fn all_orders_of_four_are_equally_likely() {
        let mut counts = std::collections::BTreeMap::new();
        for seed in 0..24_000 {
            *counts.entry(shuffled(4, seed)).or_insert(0_u32) += 1;
        }
        assert_eq!(counts.len(), 24);
        // Chi-square with 23 degrees of freedom exceeds 58 once in 16,000 times.
        let chi_square: f64 = counts.values().map(|&n| (f64::from(n) - 1000.0).powi(2) / 1000.0).sum();
        assert!(chi_square < 58.0, "{chi_square}");
    }

    #[test]
    fn lengths_beyond_32_bits_are_refused() {
        let len = MAX_LEN + 1;
        assert_eq!(table(len), Err(Error::TooLongToShuffle { len, max: MAX_LEN }));
    }
}
