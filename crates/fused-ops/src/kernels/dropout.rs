//! Elements set to zero by a counter-based generator. No mask is stored, because the backward pass
//! generates the same numbers again.
//!
//! The generator is Philox 4×32 with ten rounds (Salmon, Moraes, Dror and Shaw, "Parallel random
//! numbers: as easy as 1, 2, 3", 2011), as in PyTorch and JAX on GPUs. One counter gives four
//! numbers. [`COUNTERS`] counters are processed together as a group; the numbers of a group are
//! used in this order: the first of every counter, then the second of every counter, and so on.

use std::iter;

use pulp::NullaryFnOnce;

use super::{
    float::Float,
    memory::{FillBlock, vec_of_blocks},
    parallel::{ELEMENTS_PER_BLOCK, block_of},
    vectorized,
};
use crate::config::DropoutKey;

/// Counters of a group: enough to fill the widest vector.
const COUNTERS: usize = 16;

/// Elements that one group of counters decides about. This number divides the elements of a block.
const GROUP: usize = 4 * COUNTERS;

/// The elements to drop.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DropSpec {
    pub(crate) seed: u64,
    pub(crate) call: u64,
    /// The index of the first element.
    pub(crate) offset: u64,
    /// An element is dropped if its random number is below this.
    pub(crate) threshold: u32,
    /// The factor for the other elements.
    pub(crate) scale: f64,
}

impl DropSpec {
    /// Drops elements with a probability that is at least 0 and less than 1.
    pub(crate) fn new(probability: f64, key: DropoutKey) -> Self {
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "below 2^32")]
        let threshold = (probability * 4_294_967_296.0) as u32;
        let scale = 1.0 / (1.0 - probability);
        Self { seed: key.seed, call: key.call, offset: key.offset, threshold, scale }
    }
}

/// Returns the elements of `x`, multiplied by 0 or the scale.
pub(crate) fn apply<T: Float>(x: &[T], drop: DropSpec) -> Vec<T> {
    let (result, _) =
        vec_of_blocks(x.len(), ELEMENTS_PER_BLOCK, |block, out: &mut FillBlock<'_, T>| {
            let x = block_of(x, block, ELEMENTS_PER_BLOCK);
            let groups_before = (block * (ELEMENTS_PER_BLOCK / GROUP)) as u64;
            let first_group = drop.offset / GROUP as u64 + groups_before;
            vectorized(ApplyDropout { x, drop, first_group, out });
        });
    result
}

struct ApplyDropout<'a, 'b, T> {
    x: &'a [T],
    drop: DropSpec,
    first_group: u64,
    out: &'a mut FillBlock<'b, T>,
}

impl<T: Float> NullaryFnOnce for ApplyDropout<'_, '_, T> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        let scale = T::round_from_f64(self.drop.scale);
        // The first element may be in the middle of a group. Blocks are whole groups, so each block
        // begins at the same place in its group.
        #[expect(clippy::cast_possible_truncation, reason = "less than a group")]
        let mut skipped = (self.drop.offset % GROUP as u64) as usize;
        let (head, rest) = self.x.split_at(self.x.len().min(GROUP - skipped));
        for (group, x) in iter::once(head).chain(rest.chunks(GROUP)).enumerate() {
            let numbers = random_numbers(self.drop, self.first_group + group as u64);
            let mut factors = [scale; GROUP];
            for (factor, number) in factors.iter_mut().zip(numbers) {
                *factor = if number < self.drop.threshold { T::ZERO } else { scale };
            }
            self.out.push2(x, &factors[skipped..][..x.len()], |x, factor| x * factor);
            skipped = 0;
        }
    }
}

/// Returns the random numbers of a group of elements.
#[inline(always)]
#[allow(clippy::cast_possible_truncation, reason = "counters and keys are cut into words")]
#[allow(clippy::needless_range_loop, reason = "a counter's words stand in four rows")]
fn random_numbers(drop: DropSpec, group: u64) -> [u32; GROUP] {
    let mut words = [[0; COUNTERS]; 4];
    for index in 0..COUNTERS {
        let counter = group * COUNTERS as u64 + index as u64;
        words[0][index] = counter as u32;
        words[1][index] = (counter >> 32) as u32;
        words[2][index] = drop.call as u32;
        words[3][index] = (drop.call >> 32) as u32;
    }
    philox(&mut words, [drop.seed as u32, (drop.seed >> 32) as u32]);
    let mut numbers = [0; GROUP];
    for (numbers, words) in numbers.as_chunks_mut::<COUNTERS>().0.iter_mut().zip(words) {
        *numbers = words;
    }
    numbers
}

/// Applies ten rounds to the four words of each counter.
#[inline(always)]
#[allow(clippy::cast_possible_truncation, reason = "a product is cut into its halves")]
#[allow(clippy::needless_range_loop, reason = "a counter's words stand in four rows")]
fn philox<const N: usize>(words: &mut [[u32; N]; 4], mut key: [u32; 2]) {
    for _ in 0..10 {
        for index in 0..N {
            let even = u64::from(words[0][index]) * 0xD251_1F53;
            let odd = u64::from(words[2][index]) * 0xCD9E_8D57;
            words[0][index] = (odd >> 32) as u32 ^ words[1][index] ^ key[0];
            words[1][index] = odd as u32;
            words[2][index] = (even >> 32) as u32 ^ words[3][index] ^ key[1];
            words[3][index] = even as u32;
        }
        key = [key[0].wrapping_add(0x9E37_79B9), key[1].wrapping_add(0xBB67_AE85)];
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Checks the published test vectors of Philox 4×32-10.
    #[test]
    fn philox_matches_known_numbers() {
        let run = |counter: [u32; 4], key| {
            let mut words = counter.map(|word| [word]);
            philox(&mut words, key);
            words.map(|[word]| word)
        };
        assert_eq!(run([0; 4], [0; 2]), [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        assert_eq!(
            run([u32::MAX; 4], [u32::MAX; 2]),
            [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]
        );
        assert_eq!(
            run([0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344], [0xa409_3822, 0x299f_31d0]),
            [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]
        );
    }

    #[test]
    fn groups_do_not_straddle_blocks() {
        assert_eq!(ELEMENTS_PER_BLOCK % GROUP, 0);
    }
}
