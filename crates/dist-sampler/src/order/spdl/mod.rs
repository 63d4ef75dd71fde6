//! The order of SPDL's `DistributedRandomSampler`, equal to the bit: NumPy's `Generator.choice`.
//!
//! Without weights, NumPy draws distinct samples: few of many by Floyd's algorithm ("A sample of
//! brilliance", 1987) and a shuffle, else by the end of a Fisher–Yates shuffle. With weights it
//! searches a random number in the running sum.

mod generator;

use core_types::Fingerprint;
use generator::NumpyGenerator;

use super::{swaps, table, weighted::checked_sum};
use crate::error::{Error, Result};

/// Longest data set that is always drawn by Floyd's algorithm.
const ALWAYS_FLOYD: u64 = 10_000;

/// The draws of an epoch.
#[derive(Clone, Debug)]
pub(crate) struct SpdlDraws {
    n_samples: u64,
    /// Number of draws before the incomplete last round is dropped.
    draws: u64,
    /// Number of draws for the world that created the sampler.
    rounded_draws: u64,
    /// Running sum of the weights, as fractions of their sum; empty without weights.
    cumulative: Vec<f64>,
}

impl SpdlDraws {
    /// Creates `draws` draws; an epoch has `rounded_draws` of them.
    pub(crate) fn new(
        n_samples: u64,
        draws: u64,
        rounded_draws: u64,
        weights: Option<&[f64]>,
    ) -> Result<Self> {
        table::check_len(n_samples)?;
        let cumulative = match weights {
            Some(weights) if weights.len() as u64 != n_samples => {
                let n_weights = weights.len();
                let reason = format!("{n_weights} weights were given for {n_samples} samples");
                return Err(Error::weights(reason));
            }
            Some(weights) => cumulate(weights)?,
            None if draws > n_samples => {
                return Err(Error::DrawsExceedDataSet { draws, len: n_samples });
            }
            None => Vec::new(),
        };
        Ok(Self { n_samples, draws, rounded_draws, cumulative })
    }

    /// Returns the number of draws for the world that created the sampler.
    pub(super) fn rounded_draws(&self) -> u64 {
        self.rounded_draws
    }

    /// Returns the number of draws before the incomplete last round is dropped.
    pub(super) fn draws(&self) -> u64 {
        self.draws
    }

    /// Returns the number of table entries that [`fill`](Self::fill) needs.
    pub(super) fn capacity(&self) -> u64 {
        if self.is_shuffle(self.draws) { self.n_samples } else { self.draws }
    }

    /// Returns a hash of the data set, the draws and the weights.
    pub(super) fn fingerprint(&self) -> u64 {
        let weights = self.cumulative.iter().map(|sum| sum.to_bits());
        [self.n_samples, self.draws].into_iter().chain(weights).collect::<Fingerprint>().finish()
    }

    /// Fills `table` with the first `draws` draws for SPDL's `seed`; without weights, another
    /// number of draws has another order.
    #[expect(clippy::cast_possible_truncation, reason = "a table has at most 2^32 slots")]
    pub(super) fn fill(&self, table: &mut Vec<u32>, draws: u64, seed: u64) {
        let mut rng = NumpyGenerator::new(seed);
        table.clear();
        if !self.cumulative.is_empty() {
            table.extend((0..draws).map(|_| search(&self.cumulative, rng.unit())));
        } else if self.is_shuffle(draws) {
            table::fill_identity(table, self.n_samples);
            shuffle_end(table, draws, &mut rng);
            table.drain(..(self.n_samples - draws) as usize);
        } else {
            draw_distinct(table, self.n_samples, draws, &mut rng);
            shuffle_end(table, draws, &mut rng);
        }
    }

    /// Returns true if the draws are the end of a shuffle of all samples.
    fn is_shuffle(&self, draws: u64) -> bool {
        self.cumulative.is_empty() && ALWAYS_FLOYD < self.n_samples && self.n_samples / 50 < draws
    }
}

/// Shuffles the last `n` slots of a table: from its end, each slot is swapped with itself or an
/// earlier slot.
#[expect(clippy::cast_possible_truncation, reason = "a table has at most 2^32 slots")]
fn shuffle_end(table: &mut [u32], n: u64, rng: &mut NumpyGenerator) {
    let mut end = table.len() as u64;
    let first = (end - n).max(1);
    let mut pairs = [(0, 0); swaps::AHEAD];
    while first < end {
        let count = pairs.len().min((end - first) as usize);
        for pair in &mut pairs[..count] {
            end -= 1;
            *pair = (end as usize, rng.below(end + 1) as usize);
        }
        swaps::swap_ahead(table, pairs[..count].iter().copied());
    }
}

/// Draws distinct samples: Floyd's algorithm.
#[expect(clippy::cast_possible_truncation, reason = "a sample has at most 32 bits")]
fn draw_distinct(table: &mut Vec<u32>, n_samples: u64, draws: u64, rng: &mut NumpyGenerator) {
    let mut seen = DrawnSamples::new(draws);
    for last in n_samples - draws..n_samples {
        let mut sample = rng.below(last + 1);
        if !seen.insert(sample) {
            sample = last;
            seen.insert(last);
        }
        table.push(sample as u32);
    }
}

/// A set of samples: a hash table with open addressing, since the standard one has a random order
/// and an ordered one is ten times slower.
struct DrawnSamples {
    slots: Vec<u64>,
}

impl DrawnSamples {
    const EMPTY: u64 = u64::MAX;

    #[expect(clippy::cast_possible_truncation, reason = "as many samples fit into a table")]
    fn new(len: u64) -> Self {
        Self { slots: vec![Self::EMPTY; (len as usize * 2).next_power_of_two()] }
    }

    /// Adds a sample; returns false if it was there.
    #[expect(clippy::cast_possible_truncation, reason = "a slot of the table")]
    fn insert(&mut self, sample: u64) -> bool {
        let mask = self.slots.len() - 1;
        let mut slot = sample as usize & mask;
        while self.slots[slot] != Self::EMPTY && self.slots[slot] != sample {
            slot = (slot + 1) & mask;
        }
        std::mem::replace(&mut self.slots[slot], sample) == Self::EMPTY
    }
}

/// Returns the number of sums that are at most `number`, the sample that it draws.
#[expect(clippy::cast_possible_truncation, reason = "there are at most 2^32 weights")]
fn search(cumulative: &[f64], number: f64) -> u32 {
    cumulative.partition_point(|&sum| sum <= number) as u32
}

/// Returns the running sum of the weights over their sum, rounded as in NumPy.
fn cumulate(weights: &[f64]) -> Result<Vec<f64>> {
    checked_sum(weights)?;
    let total = pairwise_sum(weights);
    let mut cumulative = table::reserve(weights.len() as u64)?;
    let mut sum = 0.0;
    for weight in weights {
        sum += weight / total;
        cumulative.push(sum);
    }
    for entry in &mut cumulative {
        *entry /= sum;
    }
    Ok(cumulative)
}

/// Adds numbers in NumPy's order, which rounds differently from a plain sum.
fn pairwise_sum(numbers: &[f64]) -> f64 {
    match numbers.len() {
        ..8 => numbers.iter().sum(),
        8..=128 => sum_in_lanes(numbers),
        len => {
            let (first, second) = numbers.split_at(len / 2 / 8 * 8);
            pairwise_sum(first) + pairwise_sum(second)
        }
    }
}

/// Adds numbers in eight lanes, and the rest at the end.
fn sum_in_lanes(numbers: &[f64]) -> f64 {
    let chunks = numbers.chunks_exact(8);
    let rest = chunks.remainder();
    let mut lanes = [0.0; 8];
    for chunk in chunks {
        for (lane, number) in lanes.iter_mut().zip(chunk) {
            *lane += number;
        }
    }
    let [first, second] = [0, 4].map(|n| {
        let half = &lanes[n..n + 4];
        (half[0] + half[1]) + (half[2] + half[3])
    });
    rest.iter().fold(first + second, |sum, number| sum + number)
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    /// Returns the digest of the golden tables.
    fn digest(numbers: &[f64]) -> u64 {
        let bytes = numbers.iter().flat_map(|number| number.to_bits().to_le_bytes());
        bytes.fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
        })
    }

    #[test]
    fn running_sums_match_numpy() {
        let golden = include_str!("../../../tests/golden/spdl_random_sampler.json");
        let golden: Value = serde_json::from_str(golden).unwrap();
        let digests = golden["cumulative_digests"].as_array().unwrap();
        let weights = golden["weight_bits"].as_array().unwrap();
        assert_eq!((weights.len(), digests.len()), (19, 19));
        for (weights, expected) in weights.iter().zip(digests) {
            let bits: Vec<u64> = serde_json::from_value(weights.clone()).unwrap();
            let weights: Vec<f64> = bits.into_iter().map(f64::from_bits).collect();
            let digest = format!("{:016x}", digest(&cumulate(&weights).unwrap()));
            assert_eq!(digest, expected.as_str().unwrap(), "{} weights", weights.len());
        }
    }

    #[test]
    fn drawn_samples_are_distinct() {
        let mut drawn = DrawnSamples::new(3);
        assert!(drawn.insert(8) && drawn.insert(0) && drawn.insert(16));
        assert!(!drawn.insert(8) && !drawn.insert(0) && !drawn.insert(16));
    }
}
