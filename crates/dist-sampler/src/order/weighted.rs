//! Weighted draws: each position draws a sample with a probability in proportion to its weight.
//!
//! Draws are **with replacement**, like the default of PyTorch's `WeightedRandomSampler` and
//! NumPy's `choice(p=…)`: an epoch may contain a sample twice and another not at all, and
//! proportions hold only in expectation.
//!
//! The alias method (Walker, "An Efficient Method for Generating Discrete Random Variables with
//! General Distributions", 1977) has one slot per sample, all equally likely, and at most two
//! samples share a slot, so a draw is one lookup. Vose (1991) builds the slots in linear time from a
//! list of light samples and a list of heavy samples. This implementation replaces both lists by
//! one sweep with two cursors (Hübschle-Schneider and Sanders, "Parallel Weighted Random Sampling",
//! 2019). It also counts in integers: weights become whole masses that add up to exactly the
//! capacity of all slots. So rounding never gives mass to a sample of weight 0, and the table is
//! equal on every machine. PyTorch allows 2^24 weights and draws an epoch as a whole; here a
//! position is hashed, so a rank draws only its share and resumes anywhere.

use std::sync::OnceLock;

use core_types::{Fingerprint, Seed};

use super::table;
use crate::error::{Error, Result};

/// Limit on the number of weights: a slot refers to a sample by 32 bits.
const MAX_LEN: u64 = 1 << 32;

/// Weights are scaled to a sum of about 2 to this power before they become masses.
const SCALE_BITS: u32 = 62;

/// Number of slots to prefetch.
const AHEAD: usize = 128;

/// The distribution of weighted draws, 8 bytes per weight.
///
/// # Accuracy
///
/// Among n samples, one of relative weight p is drawn with a probability within p·(2^-51 + n·2^-61)
/// + 2^-60 of p, and a sample of weight 0 is never drawn.
#[derive(Clone, Debug)]
pub(crate) struct AliasTable {
    slots: Vec<u64>,
    layout: SlotLayout,
    /// Computed on demand, because states are rare and hashing takes a sixth of the time to build
    /// the table.
    fingerprint: OnceLock<u64>,
}

impl AliasTable {
    /// Builds the table that draws sample i in proportion to `weights[i]`.
    ///
    /// # Complexity
    ///
    /// O(n) time, and a bit per weight besides the table.
    ///
    /// # Errors
    ///
    /// - [`Error::EmptyDataSet`], [`Error::TooMany`] and [`Error::OutOfMemory`] for no
    ///   weights, more than 2^32, or more than fit into memory.
    /// - [`Error::InvalidWeights`] if a weight is negative, infinite or not a number, or if the sum is 0
    ///   or infinite.
    pub(crate) fn new(weights: &[f64]) -> Result<Self> {
        let layout = SlotLayout::new(weights.len() as u64)?;
        let total = checked_sum(weights)?;
        let mut slots = table::reserve(weights.len() as u64)?;
        slots.extend(weights.iter().map(|&weight| scale_weight(weight, total)));
        let heavy_bits = to_masses(&mut slots, layout);
        sweep(&mut slots, &heavy_bits, layout);
        Ok(Self { slots, layout, fingerprint: OnceLock::new() })
    }

    /// Returns the sample at `position`, which depends only on the weights, `seed` and `position`.
    #[inline]
    pub(crate) fn draw(&self, seed: Seed, position: u64) -> u64 {
        let (slot, fraction) = self.random_point(seed, position);
        self.layout.sample(self.word(slot), slot, fraction)
    }

    /// Returns the slot of the draw at `position`, and a fraction within it.
    #[expect(
        clippy::cast_possible_truncation,
        reason = "the method uses the halves of the product"
    )]
    #[inline]
    fn random_point(&self, seed: Seed, position: u64) -> (u64, u64) {
        // The upper half of the product chooses a slot. The lower half is the fraction within it,
        // precise to 2^-64 over all slots together.
        let product = u128::from(seed.derive(position).as_u64()) * self.slots.len() as u128;
        ((product >> 64) as u64, product as u64)
    }

    #[expect(clippy::cast_possible_truncation, reason = "the index of a slot of the table")]
    #[inline]
    fn word(&self, slot: u64) -> u64 {
        self.slots[slot as usize]
    }

    /// Writes the samples at `first`, `first` + `step`, ….
    ///
    /// It reads the slots of many draws before it decides the first draw, so that the loads
    /// overlap. The processor cannot predict which of two samples a draw returns, and after a wrong
    /// guess it would discard the loads in flight.
    pub(crate) fn fill(&self, seed: Seed, first: u64, step: u64, out: &mut [u64]) {
        let mut words = [0; AHEAD];
        for (block, out) in (0..).zip(out.chunks_mut(AHEAD)) {
            let first = first + block * AHEAD as u64 * step;
            let point = |n| self.random_point(seed, first + n * step);
            for (n, word) in (0..).zip(&mut words[..out.len()]) {
                *word = self.word(point(n).0);
            }
            for ((n, sample), &word) in (0..).zip(out).zip(&words) {
                let (slot, fraction) = point(n);
                *sample = self.layout.sample(word, slot, fraction);
            }
        }
    }

    /// Returns a hash of the weights.
    ///
    /// Weights with equal tables have equal hashes, for example weights that differ by a power of
    /// two.
    pub(crate) fn fingerprint(&self) -> u64 {
        *self.fingerprint.get_or_init(|| {
            let fingerprint: Fingerprint = self.slots.iter().copied().collect();
            fingerprint.finish()
        })
    }
}

/// The encoding of a slot's two samples and the border between them in one word.
///
/// The slot's own sample has the part below the border. With more slots, the other sample's index
/// leaves fewer bits for the border, but each slot is smaller: the border is always precise to
/// 2^-63 of all slots.
#[derive(Clone, Copy, Debug)]
struct SlotLayout {
    n_slots: u64,
    alias_bits: u32,
}

impl SlotLayout {
    fn new(n_slots: u64) -> Result<Self> {
        match n_slots {
            0 => Err(Error::EmptyDataSet),
            1..=MAX_LEN => {
                Ok(Self { n_slots, alias_bits: u64::BITS - (n_slots - 1).leading_zeros() })
            }
            count => Err(Error::TooMany { count, what: "weights", max: MAX_LEN }),
        }
    }

    /// Returns the mass of a full slot.
    fn capacity(self) -> u64 {
        1 << (63 - self.alias_bits)
    }

    /// Returns the mass of all full slots, at most 2^63.
    fn total(self) -> u64 {
        self.n_slots * self.capacity()
    }

    fn pack(self, border: u64, alias: u64) -> u64 {
        (border << self.alias_bits) | alias
    }

    fn unpack(self, word: u64) -> (u64, u64) {
        (word >> self.alias_bits, word & ((1 << self.alias_bits) - 1))
    }

    /// Returns the sample of a slot at `fraction`, in units of 2^-64 of the slot.
    #[inline]
    fn sample(self, word: u64, slot: u64, fraction: u64) -> u64 {
        let (border, alias) = self.unpack(word);
        if fraction >> (self.alias_bits + 1) < border { slot } else { alias }
    }
}

/// Checks the weights and returns their sum.
pub(super) fn checked_sum(weights: &[f64]) -> Result<f64> {
    let mut total = 0.0;
    for (index, &weight) in weights.iter().enumerate() {
        if !(0.0..f64::INFINITY).contains(&weight) {
            let reason = format!("weight {weight:?} at index {index} is negative or not finite");
            return Err(Error::weights(reason));
        }
        total += weight;
        if total == f64::INFINITY {
            let reason =
                format!("the sum of the weights overflows at index {index}, weight {weight:?}");
            return Err(Error::weights(reason));
        }
    }
    if 0.0 < total { Ok(total) } else { Err(Error::no_weight(weights.len())) }
}

/// Turns scaled weights into masses: integers in the same proportions that add up to the capacity
/// of all slots. Returns a bit per mass, set if the mass exceeds a slot.
///
/// Each mass is the difference of neighboring rounded partial sums, so no rounding error
/// accumulates, and a weight of 0 has no mass.
#[expect(
    clippy::cast_possible_truncation,
    reason = "the sum of scaled weights is about 2^62, and of masses at most about 2^63"
)]
fn to_masses(weights: &mut [u64], layout: SlotLayout) -> Vec<u64> {
    let mass_total = layout.total();
    let scaled_total: u64 = weights.iter().sum();
    // Round up, so that the last sum reaches the total and is clamped to it. A trailing weight of 0
    // then has no mass either.
    let ratio = (u128::from(mass_total) << SCALE_BITS).div_ceil(u128::from(scaled_total)) as u64;
    let mut scaled_sum = 0;
    let mut mass_sum = 0;
    let mut heavy_bits = Vec::with_capacity(weights.len().div_ceil(u64::BITS as usize));
    for chunk in weights.chunks_mut(u64::BITS as usize) {
        let mut bits = 0;
        for (bit, weight) in (0..).zip(chunk) {
            scaled_sum += *weight;
            let sum = (u128::from(scaled_sum) * u128::from(ratio)) >> SCALE_BITS;
            let previous = std::mem::replace(&mut mass_sum, mass_total.min(sum as u64));
            *weight = mass_sum - previous;
            bits |= u64::from(layout.capacity() < *weight) << bit;
        }
        heavy_bits.push(bits);
    }
    heavy_bits
}

/// Scales a weight to a fraction of 2^62. Division and multiplication round equally on all machines
/// (IEEE 754).
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a weight is at most the sum of all weights"
)]
fn scale_weight(weight: f64, total: f64) -> u64 {
    // Convert through `i64`, which every processor supports in one step.
    (weight / total * (1_u64 << SCALE_BITS) as f64) as i64 as u64
}

/// Distributes the masses over the slots; each slot initially has the mass of its own sample.
///
/// One cursor visits the light samples, which leave space in their slots, and another cursor visits
/// the heavy samples, which exceed their slots. A heavy sample fills light slots until its
/// remaining mass fits its own slot. If that slot then has space left, the next heavy sample fills
/// it.
fn sweep(slots: &mut [u64], heavy_bits: &[u64], layout: SlotLayout) {
    let n_slots = slots.len();
    let capacity = layout.capacity();
    let mut light = ones(heavy_bits.iter().map(|word| !word)).take_while(|&slot| slot < n_slots);
    let mut heavy = ones(heavy_bits.iter().copied());
    let mut donor = heavy.next().map(|sample| (sample, slots[sample]));
    while let Some((sample, mass)) = donor {
        let rest = fill_up(slots, &mut light, (sample, mass), layout);
        donor = heavy.next().map(|next| (next, slots[next] - (capacity - rest)));
        // The rest of the last heavy sample fills its slot exactly, so this alias is never drawn.
        let alias = donor.map_or(sample, |(next, _)| next);
        slots[sample] = layout.pack(rest, alias as u64);
    }
    // The remaining masses equal the capacity of their slots.
    for slot in light {
        slots[slot] = layout.pack(slots[slot], slot as u64);
    }
}

/// Fills light slots from a heavy sample, and returns the rest of its mass once it fits the
/// sample's own slot.
#[expect(clippy::expect_used, reason = "the masses add up to exactly the capacity of all slots")]
fn fill_up(
    slots: &mut [u64],
    light: &mut impl Iterator<Item = usize>,
    (sample, mut mass): (usize, u64),
    layout: SlotLayout,
) -> u64 {
    while layout.capacity() < mass {
        let slot = light.next().expect("excess mass has space elsewhere");
        mass -= layout.capacity() - slots[slot];
        slots[slot] = layout.pack(slots[slot], sample as u64);
    }
    mass
}

/// Returns the positions of the set bits, ascending. A branch for each bit would be mispredicted
/// every other time.
fn ones(words: impl Iterator<Item = u64>) -> impl Iterator<Item = usize> {
    (0..).step_by(u64::BITS as usize).zip(words).flat_map(|(first, word)| {
        let rests = std::iter::successors(Some(word), |rest| Some(rest & rest.wrapping_sub(1)));
        rests.take_while(|&rest| rest != 0).map(move |rest| first + rest.trailing_zeros() as usize)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns each sample's share of the draws.
    fn shares(table: &AliasTable) -> Vec<f64> {
        let mut masses = vec![0_u128; table.slots.len()];
        for (slot, &word) in table.slots.iter().enumerate() {
            let (border, alias) = table.layout.unpack(word);
            masses[slot] += u128::from(border);
            masses[usize::try_from(alias).unwrap()] += u128::from(table.layout.capacity() - border);
        }
        masses.iter().map(|&mass| mass as f64 / table.layout.total() as f64).collect()
    }

    /// Returns weight lists, from equal weights to weights that differ by 18 powers of ten.
    fn distributions() -> Vec<Vec<f64>> {
        let uneven = |n: i32| (0..n).map(|i| 10_f64.powi(i % 19 - 9)).collect();
        let with_zeros = (0..100).map(|i| f64::from(i % 3)).collect();
        vec![
            vec![1.0],
            vec![0.0, 1.0],
            vec![1.0; 7],
            uneven(19),
            uneven(1000),
            with_zeros,
            vec![f64::MIN_POSITIVE; 5],
        ]
    }

    #[test]
    fn bulk_draws_match_single_draws() {
        let table = AliasTable::new(&[1.0, 0.5, 3.0, 0.0, 7.25]).unwrap();
        for (first, step) in [(0, 1), (3, 8)] {
            for len in [0, 1, AHEAD - 1, AHEAD, 3 * AHEAD + 7] {
                let mut out = vec![u64::MAX; len];
                table.fill(Seed::new(4), first, step, &mut out);
                let expected = (0..len as u64).map(|n| table.draw(Seed::new(4), first + n * step));
                assert!(out.into_iter().eq(expected), "{len} from {first} on by {step}");
            }
        }
    }

    #[test]
    fn table_shares_match_the_weights() {
        for weights in distributions() {
            let total: f64 = weights.iter().sum();
            for (share, weight) in
                shares(&AliasTable::new(&weights).unwrap()).into_iter().zip(&weights)
            {
                let expected = weight / total;
                assert!(
                    (share - expected).abs() <= expected * 1e-14 + 1e-17,
                    "{share} and {expected} of {}",
                    weights.len()
                );
                assert!(*weight > 0.0 || share == 0.0, "a weight of 0 has no share at all");
            }
        }
    }

    #[test]
    fn draws_follow_the_weights() {
        const DRAWS: u64 = 200_000;
        for weights in distributions() {
            let table = AliasTable::new(&weights).unwrap();
            let mut counts = vec![0_u32; weights.len()];
            (0..DRAWS).for_each(|position| {
                counts[usize::try_from(table.draw(Seed::new(5), position)).unwrap()] += 1;
            });
            let total: f64 = weights.iter().sum();
            for (&count, weight) in counts.iter().zip(&weights) {
                // A binomial count is off by 6 standard deviations less than once in 10^8 times;
                // the 1 covers rare samples.
                let expected = DRAWS as f64 * weight / total;
                assert!(
                    (f64::from(count) - expected).abs() <= 6.0 * expected.sqrt() + 1.0,
                    "{count} for {expected}"
                );
            }
        }
    }

    #[test]
    fn draws_are_pinned() {
        let table = AliasTable::new(&[1.0, 2.0, 3.0, 4.0]).unwrap();
        let mut bulk = [0; 10];
        table.fill(Seed::new(42), 3, 2, &mut bulk);
        assert_eq!(bulk, [0, 2, 3, 2, 3, 3, 0, 3, 2, 1]);
        assert!(
            bulk.iter().eq((0..10)
                .map(|n| table.draw(Seed::new(42), 3 + 2 * n))
                .collect::<Vec<_>>()
                .iter())
        );
    }

    #[test]
    fn fingerprints_differ_by_weights() {
        let fingerprint = |weights: &[f64]| AliasTable::new(weights).unwrap().fingerprint();
        assert_ne!(fingerprint(&[1.0, 2.0]), fingerprint(&[2.0, 1.0]));
        assert_ne!(fingerprint(&[1.0, 2.0]), fingerprint(&[1.0, 2.0, 0.0]));
        assert_eq!(fingerprint(&[1.0, 2.0]), fingerprint(&[1.0, 2.0]));
    }

    #[test]
    fn invalid_weights_are_rejected() {
        let error = |weights: &[f64]| AliasTable::new(weights).unwrap_err();
        assert_eq!(error(&[]), Error::EmptyDataSet);
        for (bad, text) in [(-1.0, "-1.0"), (f64::NAN, "NaN"), (f64::INFINITY, "inf")] {
            let expected = format!("weight {text} at index 1 is negative or not finite");
            assert_eq!(error(&[1.0, bad]).to_string(), expected);
        }
        assert_eq!(error(&[0.0, 0.0]), Error::no_weight(2));
        let overflow = error(&[f64::MAX, f64::MAX]).to_string();
        assert!(overflow.starts_with("the sum of the weights overflows at index 1"), "{overflow}");
        // No machine has enough memory for a real list.
        let count = MAX_LEN + 1;
        let too_many = Error::TooMany { count, what: "weights", max: MAX_LEN };
        assert_eq!(SlotLayout::new(count).unwrap_err(), too_many);
        assert_eq!(SlotLayout::new(MAX_LEN).unwrap().total(), 1 << 63);
    }
}
