//! The exact shuffle: each of the N! orders is equally likely.
//!
//! The algorithm is Fisher and Yates' over PCG-DXSM (O'Neill, "PCG", 2014). The algorithm and the
//! draws below `n` are implemented here, because a library may change them between versions, and a
//! started epoch must be resumable for years.

use core_types::Seed;
use rand::Rng;
use rand_pcg::Pcg64Dxsm;

use super::{swaps, table};

/// Fills `table` with a uniformly random permutation of `len` positions.
#[expect(clippy::cast_possible_truncation, reason = "a table has at most 2^32 slots")]
pub(super) fn shuffle(table: &mut Vec<u32>, len: u64, seed: Seed) {
    table::fill_identity(table, len);
    let mut rng = generator(seed);
    swaps::shuffle(table, |start, partners| {
        for (slot, partner) in (start as u64..).zip(partners) {
            *partner = (slot + draw_below(&mut rng, len - slot)) as u32;
        }
    });
}

/// Creates the generator of the shuffle for `seed`.
pub(super) fn generator(seed: Seed) -> Pcg64Dxsm {
    Pcg64Dxsm::new(u128::from(seed.derive(0).as_u64()), u128::from(seed.derive(1).as_u64()))
}

/// Returns a uniformly random number less than `n` (Lemire, "Fast Random Integer Generation in an
/// Interval", 2019).
#[expect(clippy::cast_possible_truncation, reason = "the method uses the halves of the product")]
pub(super) fn draw_below(rng: &mut Pcg64Dxsm, n: u64) -> u64 {
    let mut product = u128::from(rng.next_u64()) * u128::from(n);
    if (product as u64) < n {
        // Reject 2^64 mod n of the 2^64 draws, which would favor some results.
        let favored = n.wrapping_neg() % n;
        while (product as u64) < favored {
            product = u128::from(rng.next_u64()) * u128::from(n);
        }
    }
    (product >> 64) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shuffled(len: u64, seed: u64) -> Vec<u32> {
        let mut table = table::allocate(len).unwrap();
        shuffle(&mut table, len, Seed::new(seed));
        table
    }

    #[test]
    fn first_values_are_pinned() {
        assert_eq!(shuffled(10, 0), [2, 4, 0, 1, 6, 3, 9, 8, 5, 7]);
        assert_eq!(shuffled(1_000_000, 42)[..4], [352_376, 63_191, 8_315, 620_493]);
    }

    #[test]
    fn shuffle_is_uniform() {
        let mut counts = std::collections::BTreeMap::new();
        for seed in 0..24_000 {
            *counts.entry(shuffled(4, seed)).or_insert(0_u32) += 1;
        }
        assert_eq!(counts.len(), 24);
        // Chi-square with 23 degrees of freedom exceeds 58 once in 16,000 times.
        let chi_square: f64 =
            counts.values().map(|&n| (f64::from(n) - 1000.0).powi(2) / 1000.0).sum();
        assert!(chi_square < 58.0, "{chi_square}");
    }
}
