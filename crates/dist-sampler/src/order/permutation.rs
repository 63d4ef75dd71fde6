//! Keyed permutations that are made for one lookup, without an allocation.

use std::array;

use core_types::Seed;

use super::{
    exact,
    streaming::{SHORTEST, StreamingOrder},
};

#[expect(clippy::cast_possible_truncation, reason = "a small number")]
const TABLE_LEN: usize = SHORTEST as usize;

/// A permutation of [0, `len`): exact for few samples, else streaming.
pub(super) enum KeyedPermutation {
    Short([u8; TABLE_LEN]),
    Long(StreamingOrder),
}

impl KeyedPermutation {
    pub(super) fn new(len: u64, seed: Seed) -> Self {
        if len < SHORTEST {
            Self::Short(shuffle_short(len, seed))
        } else {
            Self::Long(StreamingOrder::new(len, seed))
        }
    }

    /// Returns the sample at `position`, which must be less than the length.
    #[expect(clippy::cast_possible_truncation, reason = "a position in a short table")]
    pub(super) fn get(&self, position: u64) -> u64 {
        match self {
            Self::Short(samples) => u64::from(samples[position as usize]),
            Self::Long(permutation) => permutation.get(position),
        }
    }

    /// Returns the position of `sample`, which must be less than the length.
    #[expect(clippy::expect_used, reason = "the table contains every sample below the length")]
    pub(super) fn position(&self, sample: u64) -> u64 {
        match self {
            Self::Short(samples) => {
                let position = samples.iter().position(|&entry| u64::from(entry) == sample);
                position.expect("a sample of the table") as u64
            }
            Self::Long(permutation) => permutation.position(sample),
        }
    }
}

/// Returns a table that begins with a uniformly random permutation of [0, `len`).
#[expect(clippy::cast_possible_truncation, reason = "slots of a short table")]
fn shuffle_short(len: u64, seed: Seed) -> [u8; TABLE_LEN] {
    let mut samples = array::from_fn(|slot| slot as u8);
    let mut rng = exact::generator(seed);
    for slot in 0..len {
        let partner = slot + exact::draw_below(&mut rng, len - slot);
        samples.swap(slot as usize, partner as usize);
    }
    samples
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn permutations_have_an_inverse() {
        for len in (1..300).chain([1000, 4099]) {
            let permutation = KeyedPermutation::new(len, Seed::new(len));
            let mut samples: Vec<u64> = (0..len).map(|n| permutation.get(n)).collect();
            for (position, &sample) in (0..).zip(&samples) {
                assert_eq!(permutation.position(sample), position, "{len}");
            }
            samples.sort_unstable();
            assert!(samples.into_iter().eq(0..len), "{len}");
        }
    }
}
