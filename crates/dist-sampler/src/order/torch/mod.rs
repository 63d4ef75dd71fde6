//! The order of PyTorch's `DistributedSampler`: bit for bit the permutation of `torch.randperm` on
//! a CPU.
//!
//! The rule, held by golden tests: slot i is swapped with another one for every i, drawn by plain
//! remainder from the words of [`Mt19937`] under seed + epoch. Below 2^32 / 20 samples a word
//! chooses among the slots from i on; from there on, where its remainder would favor some slots too
//! much, two words choose among those up to i.
//!
//! We differ in cost, not in result. An index takes 4 bytes, not 8, with no list of Python integers
//! on top, and the slots of many steps are computed first and fetched together, so that the cache
//! misses overlap: 1e8 samples take 0.75 s, of which fetching alone takes 0.65 s. One step after
//! the other takes 1.15 s, PyTorch's sampler 8 s.

mod mersenne;

use core_types::swap_ahead;
use mersenne::{BLOCK, Mt19937};

use super::table;

/// The length from which a step takes two words.
const WIDE_FROM: usize = (u32::MAX / 20) as usize;

/// Fills `table` with the permutation that PyTorch draws from a generator seeded with `seed`.
///
/// `seed` is PyTorch's seed + epoch; its generator uses the low 32 bits.
pub(super) fn shuffle(table: &mut [u32], seed: u64) {
    #[expect(clippy::cast_possible_truncation, reason = "as PyTorch does")]
    let generator = Mt19937::new(seed as u32);
    let slots_of = slots_for(table.len());
    swap_all(table, generator, slots_of);
}

/// Turns the words of a block, in place, into the slots of as many steps as they suffice for, from
/// step `start` on.
type Slots = fn(words: &mut [u32; BLOCK], start: usize, len: usize) -> &[u32];

fn slots_for(len: usize) -> Slots {
    if len < WIDE_FROM { narrow } else { wide }
}

fn swap_all(table: &mut [u32], mut generator: Mt19937, slots_of: Slots) {
    table::reset(table);
    let mut start = 0;
    while start < table.len() {
        let mut words = generator.block();
        let slots = slots_of(&mut words, start, table.len());
        swap_ahead(table, start, slots);
        start += slots.len();
    }
}

/// A slot from i on for each word: Fisher and Yates' shuffle from the front.
#[expect(clippy::cast_possible_truncation, reason = "the length is below `WIDE_FROM`")]
fn narrow(words: &mut [u32; BLOCK], start: usize, len: usize) -> &[u32] {
    let steps = BLOCK.min(len - start);
    for (word, i) in words[..steps].iter_mut().zip(start as u32..) {
        *word = i + remainder(*word, len as u32 - i);
    }
    &words[..steps]
}

/// A slot up to i for each pair of words, the high one first: the shuffle inside out.
#[expect(clippy::cast_possible_truncation, reason = "a table has at most 2^32 slots")]
fn wide(words: &mut [u32; BLOCK], start: usize, len: usize) -> &[u32] {
    let steps = (BLOCK / 2).min(len - start);
    for step in 0..steps {
        let draw = u64::from(words[2 * step]) << 32 | u64::from(words[2 * step + 1]);
        // A division, because it hides behind the cache misses: floating point was no faster here.
        words[step] = (draw % (start + step + 1) as u64) as u32;
    }
    &words[..steps]
}

/// `word % divisor` for a divisor below 2^31, by floating point, of which processors divide several
/// at once.
///
/// The quotient is off by at most 2^-21. So, rounded, it is the true one or the next, and the rest
/// at least -divisor.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_possible_wrap,
    clippy::cast_sign_loss,
    reason = "modulo 2^32"
)]
fn remainder(word: u32, divisor: u32) -> u32 {
    /// Numbers from here on are 1 apart: adding it rounds to an integer, found in the low bits.
    const ROUND: f64 = (1_u64 << 52) as f64;
    let quotient = (f64::from(word) / f64::from(divisor) + ROUND).to_bits() as u32;
    let rest = word.wrapping_sub(quotient.wrapping_mul(divisor)) as i32;
    (rest + (rest >> 31 & divisor as i32)) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    fn permutation(len: usize, seed: u64) -> Vec<u32> {
        let mut table = vec![0; len];
        shuffle(&mut table, seed);
        table
    }

    /// The rule itself: one step after the other, by the processor's own remainder.
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

    /// Lengths around one and two blocks, of either kind.
    const LENS: [usize; 13] = [0, 1, 2, 311, 312, 313, 623, 624, 625, 1247, 1248, 1249, 20_000];

    #[test]
    fn permutations_are_torchs() {
        assert_eq!(permutation(10, 0), [4, 1, 7, 5, 3, 9, 0, 8, 6, 2]);
        assert_eq!(permutation(10, 45), [7, 6, 5, 3, 4, 9, 0, 8, 2, 1]);
        assert_eq!(permutation(17, 7), [9, 5, 3, 11, 7, 8, 6, 16, 12, 10, 13, 1, 15, 14, 4, 2, 0]);
    }

    #[test]
    fn the_generator_sees_32_bits_of_the_seed() {
        assert_eq!(permutation(17, (1 << 32) + 6), permutation(17, 6));
        assert_eq!(permutation(17, u64::MAX), permutation(17, u64::from(u32::MAX)));
    }

    #[test]
    fn one_word_chooses_among_the_slots_from_here_on() {
        for len in LENS {
            let expected = step_by_step(len as u64, 5, |draw, i, len| i + draw() % (len - i));
            assert_eq!(permutation(len, 5), expected, "{len}");
        }
    }

    #[test]
    fn two_words_choose_among_the_slots_up_to_here() {
        for len in LENS {
            let mut table = vec![7; len];
            swap_all(&mut table, Mt19937::new(5), wide);
            let expected =
                step_by_step(len as u64, 5, |draw, i, _| ((draw() << 32) + draw()) % (i + 1));
            assert_eq!(table, expected, "{len}");
        }
    }

    #[test]
    fn two_words_are_drawn_from_a_twentieth_of_their_range_on() {
        let is_wide = |len| std::ptr::fn_addr_eq(slots_for(len), wide as Slots);
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
