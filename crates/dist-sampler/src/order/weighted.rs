//! Weighted draws: every position draws one sample, each sample as often as its weight asks.
//!
//! Draws are made **with replacement**, as by PyTorch's `WeightedRandomSampler` with its default
//! and by NumPy's `choice(p=…)`: an epoch may bring a sample twice and another not at all, and a
//! weight counts in expectation only.
//!
//! The alias method (Walker, "An Efficient Method for Generating Discrete Random Variables with
//! General Distributions", 1977) makes one slot for each sample, all equally likely, and lets at
//! most two samples share a slot, so that a draw is one look-up whatever their number. We build the
//! slots in one sweep (as Vose, 1991, in linear time, but without his two lists: Hübschle-Schneider
//! and Sanders, "Parallel Weighted Random Sampling", 2019) and differ from all of them in that we
//! count in integers: weights become whole masses that add up to exactly the capacity of all slots.
//! So nothing is left over by rounding that could go to a sample of weight 0, and the table is the
//! same on every machine. PyTorch takes at most 2^24 weights and draws an epoch as a whole; here a
//! position is hashed, so that a rank draws its own share alone and resumes anywhere.

use std::sync::OnceLock;

use core_types::{Fingerprint, Seed};

use super::table;
use crate::error::{Error, Result};

/// The most weights a table is made of: a slot names a sample in 32 bits.
const MAX_LEN: u64 = 1 << 32;

/// What weights are scaled to add up to about, before they become masses.
const SCALE_BITS: u32 = 62;

/// How many slots are read ahead of the draws that they decide.
const AHEAD: usize = 128;

/// The distribution that weights describe, 8 bytes per weight.
///
/// # Accuracy
///
/// Out of n samples, one of relative weight p is drawn with a probability within p·(2^-51 +
/// n·2^-61) + 2^-60 of p, and one of weight 0 is never drawn.
#[derive(Clone, Debug)]
pub(crate) struct AliasTable {
    slots: Vec<u64>,
    layout: Layout,
    /// Made when a state is, which is seldom: it would be a sixth of the time to make the table.
    fingerprint: OnceLock<u64>,
}

impl AliasTable {
    /// Returns the table that draws sample i in proportion to `weights[i]`.
    ///
    /// # Complexity
    ///
    /// O(n) time, and a bit per weight beside the table.
    ///
    /// # Errors
    ///
    /// - [`Error::EmptyDataSet`], [`Error::TooManyWeights`] and [`Error::OutOfMemory`], for no
    ///   weights, more than 2^32, or more than fit into memory.
    /// - [`Error::InvalidWeight`], if one is negative, infinite or not a number.
    /// - [`Error::NoWeight`] and [`Error::WeightSumOverflow`], if their sum is 0 or infinite.
    pub(crate) fn new(weights: &[f64]) -> Result<Self> {
        let layout = Layout::new(weights.len() as u64)?;
        let total = total(weights)?;
        let mut slots = table::reserve(weights.len() as u64)?;
        slots.extend(weights.iter().map(|&weight| scaled(weight, total)));
        let is_heavy = to_masses(&mut slots, layout);
        sweep(&mut slots, &is_heavy, layout);
        Ok(Self { slots, layout, fingerprint: OnceLock::new() })
    }

    /// The sample at `position`, which depends on the weights, `seed` and `position` alone.
    #[inline]
    pub(crate) fn draw(&self, seed: Seed, position: u64) -> u64 {
        let (slot, place) = self.throw(seed, position);
        self.layout.sample(self.word(slot), slot, place)
    }

    /// Which slot the draw at `position` hits, and where.
    #[expect(
        clippy::cast_possible_truncation,
        reason = "the halves of the product are what the method is about"
    )]
    #[inline]
    fn throw(&self, seed: Seed, position: u64) -> (u64, u64) {
        // The upper half chooses a slot; how far the product stands above that slot's first one,
        // the lower half, chooses within it, and is precise to 2^-64 over all slots together.
        let product = u128::from(seed.derive(position).as_u64()) * self.slots.len() as u128;
        ((product >> 64) as u64, product as u64)
    }

    #[expect(clippy::cast_possible_truncation, reason = "the number of a slot of the table")]
    #[inline]
    fn word(&self, slot: u64) -> u64 {
        self.slots[slot as usize]
    }

    /// Writes the samples at `first`, `first` + `step`, … .
    ///
    /// The slots of many draws are read before the first draw is decided, so that their loads
    /// overlap: which of two samples a draw brings cannot be foreseen, and a processor that has
    /// guessed wrong drops the loads that it has begun.
    pub(crate) fn fill(&self, seed: Seed, first: u64, step: u64, out: &mut [u64]) {
        let mut words = [0; AHEAD];
        for (block, out) in (0..).zip(out.chunks_mut(AHEAD)) {
            let first = first + block * AHEAD as u64 * step;
            let throw = |n| self.throw(seed, first + n * step);
            for (n, word) in (0..).zip(&mut words[..out.len()]) {
                *word = self.word(throw(n).0);
            }
            for ((n, drawn), &word) in (0..).zip(out).zip(&words) {
                let (slot, place) = throw(n);
                *drawn = self.layout.sample(word, slot, place);
            }
        }
    }

    /// Tells a saved position whether it belongs to these weights.
    ///
    /// Weights that make the same table have the same fingerprint, for example those that differ
    /// by a power of two.
    pub(crate) fn fingerprint(&self) -> u64 {
        *self.fingerprint.get_or_init(|| {
            let fingerprint: Fingerprint = self.slots.iter().copied().collect();
            fingerprint.finish()
        })
    }
}

/// How a slot's two samples, and the border between them, share one word.
///
/// The slot's own sample has the part below the border. The more slots there are, the more bits
/// name the other sample, but the smaller is a slot: the border is always known to 2^-63 of the
/// whole.
#[derive(Clone, Copy, Debug)]
struct Layout {
    n_slots: u64,
    alias_bits: u32,
}

impl Layout {
    fn new(n_slots: u64) -> Result<Self> {
        match n_slots {
            0 => Err(Error::EmptyDataSet),
            1..=MAX_LEN => {
                Ok(Self { n_slots, alias_bits: u64::BITS - (n_slots - 1).leading_zeros() })
            }
            weights => Err(Error::TooManyWeights { weights, max: MAX_LEN }),
        }
    }

    /// The mass that makes one slot full.
    fn capacity(self) -> u64 {
        1 << (63 - self.alias_bits)
    }

    /// The mass that makes all slots full, at most 2^63.
    fn total(self) -> u64 {
        self.n_slots * self.capacity()
    }

    fn pack(self, border: u64, alias: u64) -> u64 {
        border << self.alias_bits | alias
    }

    fn unpack(self, word: u64) -> (u64, u64) {
        (word >> self.alias_bits, word & ((1 << self.alias_bits) - 1))
    }

    /// The sample of slot number `slot` at `place`, a fraction of the slot in 64 bits.
    #[inline]
    fn sample(self, word: u64, slot: u64, place: u64) -> u64 {
        let (border, alias) = self.unpack(word);
        if place >> (self.alias_bits + 1) < border { slot } else { alias }
    }
}

/// The sum of the weights, if they are weights.
fn total(weights: &[f64]) -> Result<f64> {
    let mut total = 0.0;
    for (index, &weight) in weights.iter().enumerate() {
        if !(0.0..f64::INFINITY).contains(&weight) {
            return Err(Error::InvalidWeight { index, weight: format!("{weight:?}") });
        }
        total += weight;
        if total == f64::INFINITY {
            return Err(Error::WeightSumOverflow { index, weight: format!("{weight:?}") });
        }
    }
    if 0.0 < total { Ok(total) } else { Err(Error::NoWeight { weights: weights.len() }) }
}

/// Turns scaled weights into whole numbers in the same proportions, which add up to the capacity of
/// all slots: masses. Returns which of them are larger than a slot, a bit for each.
///
/// Each mass is the difference of two neighbors among rounded partial sums, not rounded itself. So
/// nothing is lost on the way, and a weight of 0 has no mass.
#[expect(
    clippy::cast_possible_truncation,
    reason = "the scaled sum is about 2^62 and the masses' at most 2^63, about"
)]
fn to_masses(weights: &mut [u64], layout: Layout) -> Vec<u64> {
    let (mass_total, capacity) = (layout.total(), layout.capacity());
    let scaled_total: u64 = weights.iter().sum();
    // Rounded up: the last sum reaches the total, to which it is cut, and so would any weight 0
    // behind it.
    let ratio = (u128::from(mass_total) << SCALE_BITS).div_ceil(u128::from(scaled_total)) as u64;
    let (mut scaled_sum, mut mass_sum) = (0, 0);
    let mut to_mass = |weight: &mut u64| {
        scaled_sum += *weight;
        let sum = (u128::from(scaled_sum) * u128::from(ratio)) >> SCALE_BITS;
        let before = std::mem::replace(&mut mass_sum, mass_total.min(sum as u64));
        *weight = mass_sum - before;
        u64::from(capacity < *weight)
    };
    let words = weights.chunks_mut(u64::BITS as usize);
    words
        .map(|word| (0..).zip(word).fold(0, |bits, (nth, weight)| bits | to_mass(weight) << nth))
        .collect()
}

/// A weight as a part of 2^62. Division and multiplication are rounded alike on all machines (IEEE
/// 754).
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a weight is at most the sum of them"
)]
fn scaled(weight: f64, total: f64) -> u64 {
    // By way of `i64`, to which every processor converts in one step.
    (weight / total * (1_u64 << SCALE_BITS) as f64) as i64 as u64
}

/// Deals the masses out to the slots, each of which holds that of its own sample until then.
///
/// Two cursors go over the samples: one over the light ones, which leave room in their slots, one
/// over the heavy ones, which have more than fits. A heavy sample fills up light slots until it
/// fits its own, if need be with room to spare, which the next heavy one fills.
fn sweep(slots: &mut [u64], is_heavy: &[u64], layout: Layout) {
    let (n_slots, capacity) = (slots.len(), layout.capacity());
    let mut light = ones(is_heavy.iter().map(|word| !word)).take_while(|&slot| slot < n_slots);
    let mut heavy = ones(is_heavy.iter().copied());
    let mut donor = heavy.next().map(|sample| (sample, slots[sample]));
    while let Some((sample, mass)) = donor {
        let rest = fill_up(slots, &mut light, (sample, mass), layout);
        donor = heavy.next().map(|next| (next, slots[next] - (capacity - rest)));
        // Room in the slot of the last heavy sample is its own.
        let alias = donor.map_or(sample, |(next, _)| next);
        slots[sample] = layout.pack(rest, alias as u64);
    }
    // As many masses are left as slots, and all fit: each is as large as its slot.
    light.for_each(|slot| slots[slot] = layout.pack(slots[slot], slot as u64));
}

/// Fills light slots up from a heavy sample, and returns what is left of its mass when that fits
/// its own slot.
#[expect(clippy::expect_used, reason = "the masses add up to exactly the capacity of all slots")]
fn fill_up(
    slots: &mut [u64],
    light: &mut impl Iterator<Item = usize>,
    (sample, mut mass): (usize, u64),
    layout: Layout,
) -> u64 {
    while layout.capacity() < mass {
        let slot = light.next().expect("where mass is in excess, there is room elsewhere");
        mass -= layout.capacity() - slots[slot];
        slots[slot] = layout.pack(slots[slot], sample as u64);
    }
    mass
}

/// The numbers of the bits that are set, ascending. A test of each bit would be guessed wrong every
/// other time.
fn ones(words: impl Iterator<Item = u64>) -> impl Iterator<Item = usize> {
    (0..).step_by(u64::BITS as usize).zip(words).flat_map(|(first, word)| {
        let rests = std::iter::successors(Some(word), |rest| Some(rest & rest.wrapping_sub(1)));
        rests.take_while(|&rest| rest != 0).map(move |rest| first + rest.trailing_zeros() as usize)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The share of all draws that each sample has in the table.
    fn shares(table: &AliasTable) -> Vec<f64> {
        let mut masses = vec![0_u128; table.slots.len()];
        for (slot, &word) in table.slots.iter().enumerate() {
            let (border, alias) = table.layout.unpack(word);
            masses[slot] += u128::from(border);
            masses[usize::try_from(alias).unwrap()] += u128::from(table.layout.capacity() - border);
        }
        masses.iter().map(|&mass| mass as f64 / table.layout.total() as f64).collect()
    }

    /// Some weights, from equal ones to ones that differ by 18 powers of ten.
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
    fn draws_of_many_are_those_of_each() {
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
    fn the_table_has_the_shares_of_the_weights() {
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
                // A binomial count is 6 standard deviations off less than once in 10^8 times; the 1
                // is for rare samples.
                let expected = DRAWS as f64 * weight / total;
                assert!(
                    (f64::from(count) - expected).abs() <= 6.0 * expected.sqrt() + 1.0,
                    "{count} for {expected}"
                );
            }
        }
    }

    #[test]
    fn draws_are_pinned_and_the_same_in_bulk() {
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
    fn other_weights_have_another_fingerprint() {
        let fingerprint = |weights: &[f64]| AliasTable::new(weights).unwrap().fingerprint();
        assert_ne!(fingerprint(&[1.0, 2.0]), fingerprint(&[2.0, 1.0]));
        assert_ne!(fingerprint(&[1.0, 2.0]), fingerprint(&[1.0, 2.0, 0.0]));
        assert_eq!(fingerprint(&[1.0, 2.0]), fingerprint(&[1.0, 2.0]));
    }

    #[test]
    fn what_is_no_weight_is_refused() {
        let error = |weights: &[f64]| AliasTable::new(weights).unwrap_err();
        assert_eq!(error(&[]), Error::EmptyDataSet);
        for (bad, text) in [(-1.0, "-1.0"), (f64::NAN, "NaN"), (f64::INFINITY, "inf")] {
            assert_eq!(error(&[1.0, bad]), Error::InvalidWeight { index: 1, weight: text.into() });
        }
        assert_eq!(error(&[0.0, 0.0]), Error::NoWeight { weights: 2 });
        assert!(matches!(error(&[f64::MAX, f64::MAX]), Error::WeightSumOverflow { index: 1, .. }));
        // Nobody has the memory for so many.
        let weights = MAX_LEN + 1;
        let too_many = Error::TooManyWeights { weights, max: MAX_LEN };
        assert_eq!(Layout::new(weights).unwrap_err(), too_many);
        assert_eq!(Layout::new(MAX_LEN).unwrap().total(), 1 << 63);
    }
}
