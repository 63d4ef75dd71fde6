//! The order of PyTorch's `DistributedSampler`, equal to `torch.randperm` on a CPU to the bit.
//!
//! Golden tests check the rule: for every i, slot i is swapped with a slot that is drawn by
//! remainder from the words of [`Mt19937`] with seed + epoch. Below 2^32 / 20 samples, one word
//! chooses slot i or a later one. For longer orders, where the remainder of one word would be too
//! biased, two words choose slot i or an earlier one.
//!
//! Only the cost differs from PyTorch. An index takes 4 bytes, instead of 8 and a Python integer in
//! a list, and [`swaps`] gets the slots of many steps at once, so that cache misses overlap.

mod mersenne;

use mersenne::{BLOCK, Mt19937};

use super::{swaps, table};

/// Minimum length for steps of two words.
const WIDE_FROM: u64 = u32::MAX as u64 / 20;

const _: () = assert!(swaps::BATCH % BLOCK == 0, "a batch ends with a block of words");

/// Fills `table` with the permutation of `len` positions that PyTorch draws for `seed`.
///
/// `seed` is PyTorch's seed + epoch; the generator uses the low 32 bits.
pub(super) fn shuffle(table: &mut Vec<u32>, len: u64, seed: u64) {
    table::fill_identity(table, len);
    #[expect(clippy::cast_possible_truncation, reason = "PyTorch truncates the seed, too")]
    let generator = Mt19937::new(seed as u32);
    if is_wide(len) { swap_wide(table, generator) } else { swap_narrow(table, generator) }
}

fn is_wide(len: u64) -> bool {
    WIDE_FROM <= len
}

/// Swaps by one word per step, which chooses slot i or a later one: Fisher–Yates from the front.
#[expect(clippy::cast_possible_truncation, reason = "the length is below `WIDE_FROM`")]
fn swap_narrow(table: &mut [u32], mut generator: Mt19937) {
    let len = table.len() as u32;
    swaps::shuffle(table, |start, slots| {
        for (start, slots) in (start..).step_by(BLOCK).zip(slots.chunks_mut(BLOCK)) {
            let words = generator.block();
            for ((slot, word), i) in slots.iter_mut().zip(&words).zip(start as u32..) {
                *slot = i + remainder(*word, len - i);
            }
        }
    });
}

/// Swaps by two words per step, the high one first, which choose slot i or an earlier one: the
/// inside-out shuffle.
#[expect(clippy::cast_possible_truncation, reason = "a table has at most 2^32 slots")]
fn swap_wide(table: &mut [u32], mut generator: Mt19937) {
    let len = table.len();
    for start in (0..len).step_by(BLOCK / 2) {
        let words = generator.block();
        let steps = (start..len).zip(words.chunks_exact(2));
        let mut slots = [(0, 0); BLOCK / 2];
        let n_slots = steps.len();
        for (slot, (i, pair)) in slots.iter_mut().zip(steps) {
            let draw = (u64::from(pair[0]) << 32) | u64::from(pair[1]);
            // The cache misses take longer than the integer division, so floating point was no
            // faster.
            *slot = (i, (draw % (i + 1) as u64) as usize);
        }
        swaps::swap_ahead(table, slots[..n_slots].iter().copied());
    }
}

/// Computes `word % divisor` for a divisor below 2^31 by floating point, which processors
/// vectorize.
///
/// The error of the quotient is at most 2^-21. So the rounded quotient is exact or one too large,
/// and the remainder is at least -divisor.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_possible_wrap,
    clippy::cast_sign_loss,
    reason = "modulo 2^32"
)]
fn remainder(word: u32, divisor: u32) -> u32 {
    /// Floats from here on are 1 apart: adding it rounds to an integer in the low bits.
    const ROUND: f64 = (1_u64 << 52) as f64;
    let quotient = (f64::from(word) / f64::from(divisor) + ROUND).to_bits() as u32;
    let rest = word.wrapping_sub(quotient.wrapping_mul(divisor)) as i32;
    (rest + ((rest >> 31) & divisor as i32)) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    fn permutation(len: usize, seed: u64) -> Vec<u32> {
        let mut table = Vec::new();
        shuffle(&mut table, len as u64, seed);
        table
    }

    /// Applies the definition, step by step with integer remainders.
    fn step_by_step(
        len: u64,
        seed: u32,
        slot: fn(&mut dyn FnMut() -> u64, u64, u64) -> u64,
    ) -> Vec<u32> {
        let mut generator = Mt19937::new(seed);
        let mut words = std::iter::repeat_with(|| generator.block()).flatten().map(u64::from);
        let mut table: Vec<u32> = (0..).take(usize::try_from(len).unwrap()).collect();
        for i in 0..len {
            let slot = slot(&mut || words.next().unwrap(), i, len);
            table.swap(usize::try_from(i).unwrap(), usize::try_from(slot).unwrap());
        }
        table
    }

    /// Lengths around one and two blocks of both kinds.
    const LENS: [usize; 13] = [0, 1, 2, 311, 312, 313, 623, 624, 625, 1247, 1248, 1249, 20_000];

    #[test]
    fn permutations_match_torch() {
        assert_eq!(permutation(10, 0), [4, 1, 7, 5, 3, 9, 0, 8, 6, 2]);
        assert_eq!(permutation(10, 45), [7, 6, 5, 3, 4, 9, 0, 8, 2, 1]);
        assert_eq!(permutation(17, 7), [9, 5, 3, 11, 7, 8, 6, 16, 12, 10, 13, 1, 15, 14, 4, 2, 0]);
    }

    #[test]
    fn seed_is_truncated_to_32_bits() {
        assert_eq!(permutation(17, (1 << 32) + 6), permutation(17, 6));
        assert_eq!(permutation(17, u64::MAX), permutation(17, u64::from(u32::MAX)));
    }

    #[test]
    fn narrow_shuffle_matches_the_definition() {
        for len in LENS {
            let expected = step_by_step(len as u64, 5, |draw, i, len| i + draw() % (len - i));
            assert_eq!(permutation(len, 5), expected, "{len}");
        }
    }

    #[test]
    fn wide_shuffle_matches_the_definition() {
        for len in LENS {
            let mut table = Vec::new();
            table::fill_identity(&mut table, len as u64);
            swap_wide(&mut table, Mt19937::new(5));
            let expected =
                step_by_step(len as u64, 5, |draw, i, _| ((draw() << 32) + draw()) % (i + 1));
            assert_eq!(table, expected, "{len}");
        }
    }

    #[test]
    fn wide_shuffle_starts_at_its_threshold() {
        assert!(!is_wide(214_748_363));
        assert!(is_wide(214_748_364));
    }

    #[test]
    fn remainders_are_exact() {
        let divisors = (1..2000).chain((11..=31).flat_map(|bits| (1_u32 << bits) - 3..1 << bits));
        for divisor in divisors {
            let largest = u32::MAX / divisor;
            for quotient in [0, 1, 2, largest / 3, largest / 2, largest - largest.min(1), largest] {
                let multiple = quotient * divisor;
                for offset in [0, 1, divisor / 2, divisor / 2 + 1, divisor - 1, divisor] {
                    let word = multiple.saturating_add(offset);
                    assert_eq!(remainder(word, divisor), word % divisor, "{word} % {divisor}");
                }
            }
        }
    }
}
