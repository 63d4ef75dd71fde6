//! Mixtures of several data sets by weight.

use std::iter::FusedIterator;

use crate::{
    error::{Error, Result},
    sampler::DistributedSampler,
    state::SamplerState,
};

/// A weighted interleaving of the samplers of several data sets.
///
/// At every point each data set has been read in proportion to its weight, within less than one
/// sample. The mixture ends with the first exhausted data set, so the proportions hold to the end.
///
/// # Determinism
///
/// The interleaving depends only on the weights: all ranks read from the same data set at the same
/// time.
///
/// # Complexity
///
/// O(1) per entry at any position. Memory is linear in the cycle of the interleaving, which has as
/// many entries as the sum of the weights over their greatest common divisor.
///
/// # Examples
///
/// ```
/// # use core_types::Placement;
/// # use dist_sampler::{DistributedSampler, Mixture, Order, SamplerConfig};
/// let config = SamplerConfig::default().with_order(Order::Sequential);
/// let sampler = |len| DistributedSampler::new(len, Placement::SINGLE, config);
/// let mixture = Mixture::new(vec![sampler(100)?, sampler(3)?], &[2, 1])?;
/// let entries: Vec<_> = mixture.iter().take(6).collect();
/// assert_eq!(entries, [(0, 0), (1, 0), (0, 1), (0, 2), (1, 1), (0, 3)]);
/// assert_eq!(mixture.len(), 10); // the second data set is exhausted
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # References
///
/// The interleaving is the smooth weighted round-robin of load balancers. `Grain`'s `mix` and
/// `Mosaic`'s streams also mix by weight; `Grain` orders similarly, and `Mosaic` draws at random,
/// so its proportions hold on average.
#[derive(Clone, Debug)]
pub struct Mixture {
    samplers: Vec<DistributedSampler>,
    weights: Vec<u64>,
    cycle: Vec<CycleEntry>,
    len: u64,
}

/// An entry of the cycle: a data set, and the number of its earlier entries in the cycle.
#[derive(Clone, Copy, Debug)]
struct CycleEntry {
    source: usize,
    n_earlier: u64,
}

impl Mixture {
    /// Limit on the length of the cycle.
    const MAX_CYCLE: u64 = 1 << 20;

    /// Interleaves `samplers` of the same rank with one weight each; weight 0 excludes a sampler.
    ///
    /// # Errors
    ///
    /// [`Error::MixtureWeights`] if the numbers of weights and samplers differ,
    /// [`Error::NoMixtureWeight`] if all weights are 0, and [`Error::MixtureCycle`] if the cycle
    /// exceeds 2^20 entries.
    pub fn new(samplers: Vec<DistributedSampler>, weights: &[u64]) -> Result<Self> {
        if weights.len() != samplers.len() {
            return Err(Error::MixtureWeights { weights: weights.len(), samplers: samplers.len() });
        }
        let divisor = weights.iter().copied().fold(0, greatest_common_divisor);
        if divisor == 0 {
            return Err(Error::NoMixtureWeight);
        }
        let weights: Vec<u64> = weights.iter().map(|weight| weight / divisor).collect();
        let cycle = build_cycle(&weights)?;
        let mut mixture = Self { samplers, weights, cycle, len: 0 };
        mixture.len = mixture.first_exhausted();
        Ok(mixture)
    }

    /// Returns the number of the first entry whose data set has no sample left for it.
    fn first_exhausted(&self) -> u64 {
        let mut first = u64::MAX;
        for (position, &CycleEntry { source, n_earlier }) in (0..).zip(&self.cycle) {
            // An entry of the cycle repeats as long as its data set has samples left for it.
            let samples = self.samplers[source].len().saturating_sub(n_earlier);
            let rounds = samples.div_ceil(self.weights[source]);
            let first_without_sample =
                rounds.saturating_mul(self.cycle.len() as u64).saturating_add(position);
            first = first.min(first_without_sample);
        }
        first
    }

    /// Returns the number of entries.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Returns true if a data set has no samples for this rank.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the data set and the sample of the `n`-th entry, or `None` beyond the end.
    pub fn get(&self, n: u64) -> Option<(usize, u64)> {
        (n < self.len).then(|| self.entry(n))
    }

    /// Returns the `n`-th entry, which must exist.
    #[expect(clippy::expect_used, reason = "the mixture ends with the first exhausted data set")]
    fn entry(&self, n: u64) -> (usize, u64) {
        let (round, position) = self.round_and_position(n);
        let CycleEntry { source, n_earlier } = self.cycle[position];
        let index = self.samplers[source].get(round * self.weights[source] + n_earlier);
        (source, index.expect("a data set has samples for all of its entries"))
    }

    /// Returns the round of the cycle and the position in it.
    #[expect(clippy::cast_possible_truncation, reason = "a position is an index into the cycle")]
    fn round_and_position(&self, n: u64) -> (u64, usize) {
        let cycle_len = self.cycle.len() as u64;
        (n / cycle_len, (n % cycle_len) as usize)
    }

    /// Returns the entries in order.
    pub fn iter(&self) -> impl DoubleEndedIterator<Item = (usize, u64)> + FusedIterator {
        (0..self.len).map(|n| self.entry(n))
    }

    /// Returns the state of each sampler after `n` entries, or after all if there are fewer.
    ///
    /// The states do not contain the position in the cycle: a mixture of resumed samplers starts a
    /// new cycle.
    pub fn states(&self, n: u64) -> Vec<SamplerState> {
        let (round, position) = self.round_and_position(n.min(self.len));
        let mut n_read: Vec<u64> = self.weights.iter().map(|weight| round * weight).collect();
        for entry in &self.cycle[..position] {
            n_read[entry.source] += 1;
        }
        self.samplers.iter().zip(n_read).map(|(sampler, n_read)| sampler.state(n_read)).collect()
    }
}

/// Returns the cycle of data sets with these weights: the next entry goes to the data set that is
/// furthest behind its share.
fn build_cycle(weights: &[u64]) -> Result<Vec<CycleEntry>> {
    let turns = weights.iter().fold(0_u64, |sum, &weight| sum.saturating_add(weight));
    if turns > Mixture::MAX_CYCLE {
        return Err(Error::MixtureCycle { turns, max: Mixture::MAX_CYCLE });
    }
    let mut n_read = vec![0; weights.len()];
    let mut entries = Vec::new();
    for turn in 1..=turns {
        let source = find_most_due(weights, &n_read, turn, turns);
        entries.push(CycleEntry { source, n_earlier: n_read[source] });
        n_read[source] += 1;
    }
    Ok(entries)
}

/// Returns the data set that is furthest behind its share at `turn` of `turns`, or the first such
/// data set.
#[expect(clippy::expect_used, reason = "there is a weight above 0, so there is a data set")]
fn find_most_due(weights: &[u64], n_read: &[u64], turn: u64, turns: u64) -> usize {
    let sources = (0..weights.len()).rev();
    let most_due = sources.max_by_key(|&source| {
        i128::from(weights[source] * turn) - i128::from(n_read[source] * turns)
    });
    most_due.expect("a data set")
}

fn greatest_common_divisor(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { greatest_common_divisor(b, a % b) }
}

#[cfg(test)]
mod tests {
    use core_types::Placement;

    use super::*;
    use crate::config::{Order, SamplerConfig};

    fn mixture(lens: &[u64], weights: &[u64]) -> Result<Mixture> {
        let config = SamplerConfig::default().with_order(Order::Sequential);
        let samplers =
            lens.iter().map(|&len| DistributedSampler::new(len, Placement::SINGLE, config));
        Mixture::new(samplers.collect::<Result<_>>()?, weights)
    }

    #[test]
    fn prefixes_keep_the_proportions() {
        for weights in [&[1, 1][..], &[3, 1, 2], &[10, 1], &[7], &[4, 0, 6], &[1, 2, 3, 4, 5]] {
            let lens = vec![1000; weights.len()];
            let mixture = mixture(&lens, weights).unwrap();
            let total: u64 = weights.iter().sum();
            let mut read = vec![0; weights.len()];
            for (n, (source, index)) in (1..).zip(mixture.iter()) {
                assert_eq!(index, read[source], "each data set is read in its own order");
                read[source] += 1;
                for (&read, &weight) in read.iter().zip(weights) {
                    assert!(
                        (read * total).abs_diff(n * weight) < total,
                        "{weights:?} after {n}: {read}"
                    );
                }
            }
        }
    }

    #[test]
    fn ties_go_to_the_first_source() {
        let mixture = mixture(&[2, 2], &[1, 1]).unwrap();
        assert_eq!(mixture.iter().collect::<Vec<_>>(), [(0, 0), (1, 0), (0, 1), (1, 1)]);
    }

    #[test]
    fn ends_with_the_first_exhausted_source() {
        for lens in [[5, 100], [100, 5], [1, 1], [33, 17]] {
            let mixture = mixture(&lens, &[2, 1]).unwrap();
            let mut read = [0; 2];
            mixture.iter().for_each(|(source, _)| read[source] += 1);
            assert_eq!(mixture.iter().count() as u64, mixture.len());
            assert!(read[0] == lens[0] || read[1] == lens[1], "{read:?} of {lens:?}");
            assert_eq!(mixture.get(mixture.len()), None);
            assert_eq!(mixture.get(u64::MAX), None);
        }
    }

    #[test]
    fn states_match_the_samplers() {
        let mixture = mixture(&[50, 50], &[2, 1]).unwrap();
        for n in 0..=mixture.len() {
            let mut read = [0; 2];
            mixture
                .iter()
                .take(usize::try_from(n).unwrap())
                .for_each(|(source, _)| read[source] += 1);
            assert_eq!(
                mixture.states(n).iter().map(SamplerState::consumed).collect::<Vec<_>>(),
                read
            );
        }
    }

    #[test]
    fn states_stop_at_the_end() {
        let mixture = mixture(&[5, 50], &[2, 1]).unwrap();
        let last = mixture.states(mixture.len());
        for excess in [1, 2, 3, 100] {
            assert_eq!(mixture.states(mixture.len() + excess), last);
        }
    }

    #[test]
    fn invalid_weights_are_rejected() {
        assert_eq!(
            mixture(&[5], &[1, 2]).unwrap_err(),
            Error::MixtureWeights { weights: 2, samplers: 1 }
        );
        assert_eq!(mixture(&[5, 5], &[0, 0]).unwrap_err(), Error::NoMixtureWeight);
        assert_eq!(mixture(&[], &[]).unwrap_err(), Error::NoMixtureWeight);
        let max = Mixture::MAX_CYCLE;
        let turns = max + 1;
        assert_eq!(mixture(&[5, 5], &[max, 1]).unwrap_err(), Error::MixtureCycle { turns, max });
        assert!(mixture(&[5, 5], &[max - 1, 1]).is_ok(), "the longest cycle");
        assert!(mixture(&[5, 5], &[u64::MAX, u64::MAX]).is_ok(), "equal weights are 1 and 1");
        assert!(mixture(&[5, 5], &[u64::MAX, 1]).is_err());
    }
}
