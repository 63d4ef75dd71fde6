//! Several data sets read as one, in proportion to weights.

use std::iter::FusedIterator;

use crate::{
    error::{Error, Result},
    sampler::DistributedSampler,
    state::SamplerState,
};

/// The samplers of several data sets, interleaved by weight.
///
/// At any point each data set has been read in proportion to its weight, to less than one sample.
/// The mixture ends where the first data set has no more samples, so that the proportions hold to
/// the end.
///
/// # Determinism
///
/// The interleaving depends on the weights alone: all ranks read from the same data set at the same
/// time.
///
/// # Complexity
///
/// O(1) for each entry, wherever it is; memory for a cycle of the interleaving, the sum of the
/// weights over their greatest common divisor.
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
/// assert_eq!(mixture.len(), 10); // then the second data set has been read
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # References
///
/// The interleaving is the smooth weighted round-robin of load balancers. `Grain`'s `mix` and
/// `Mosaic`'s streams mix by weight as well; the former orders by the same idea, the latter draws
/// at random, so its proportions hold on average.
#[derive(Clone, Debug)]
pub struct Mixture {
    samplers: Vec<DistributedSampler>,
    weights: Vec<u64>,
    cycle: Vec<CycleEntry>,
    len: u64,
}

/// One entry of the cycle: which data set is read, and how often it was read in the cycle before.
#[derive(Clone, Copy, Debug)]
struct CycleEntry {
    source: usize,
    before: u64,
}

impl Mixture {
    /// The longest cycle of an interleaving.
    const MAX_CYCLE: u64 = 1 << 20;

    /// Interleaves `samplers`, all of them of the same rank, with one weight each; a weight of 0
    /// leaves its sampler out.
    ///
    /// # Errors
    ///
    /// [`Error::MixtureWeights`] if there are more or fewer weights than samplers,
    /// [`Error::NoMixtureWeight`] if none is above 0, and [`Error::MixtureCycle`] if a cycle would
    /// be longer than 2^20 entries.
    pub fn new(samplers: Vec<DistributedSampler>, weights: &[u64]) -> Result<Self> {
        if weights.len() != samplers.len() {
            return Err(Error::MixtureWeights { weights: weights.len(), samplers: samplers.len() });
        }
        let divisor = weights.iter().copied().fold(0, greatest_common_divisor);
        if divisor == 0 {
            return Err(Error::NoMixtureWeight);
        }
        let weights: Vec<u64> = weights.iter().map(|weight| weight / divisor).collect();
        let cycle = cycle(&weights)?;
        let mut mixture = Self { samplers, weights, cycle, len: 0 };
        mixture.len = mixture.first_exhausted();
        Ok(mixture)
    }

    /// The first entry whose data set has no more samples.
    #[expect(clippy::expect_used, reason = "`new` refuses weights that are all 0")]
    fn first_exhausted(&self) -> u64 {
        let missing = |(turn, &CycleEntry { source, before }): (u64, &CycleEntry)| {
            // A turn comes around as often as its data set has samples for it.
            let samples = self.samplers[source].len().saturating_sub(before);
            let rounds = samples.div_ceil(self.weights[source]);
            rounds.saturating_mul(self.cycle.len() as u64).saturating_add(turn)
        };
        (0..).zip(&self.cycle).map(missing).min().expect("a weight above 0 has a turn")
    }

    /// The number of entries.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether one of the data sets has no samples for this rank.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The `n`-th entry: which data set, and which of its samples; `None` beyond the end.
    pub fn get(&self, n: u64) -> Option<(usize, u64)> {
        (n < self.len).then(|| self.entry(n))
    }

    /// The `n`-th entry, which must exist.
    #[expect(clippy::expect_used, reason = "the mixture ends where the first data set ends")]
    fn entry(&self, n: u64) -> (usize, u64) {
        let (round, turn) = self.place(n);
        let CycleEntry { source, before } = self.cycle[turn];
        let index = self.samplers[source].get(round * self.weights[source] + before);
        (source, index.expect("a data set has samples for all of its entries"))
    }

    /// The round of the cycle and the turn in it.
    #[expect(clippy::cast_possible_truncation, reason = "a turn is an index into the cycle")]
    fn place(&self, n: u64) -> (u64, usize) {
        let turns = self.cycle.len() as u64;
        (n / turns, (n % turns) as usize)
    }

    /// The entries in order.
    pub fn iter(&self) -> impl DoubleEndedIterator<Item = (usize, u64)> + FusedIterator {
        (0..self.len).map(|n| self.entry(n))
    }

    /// Returns the state of each sampler after `n` entries, or after all of them if there are fewer.
    ///
    /// The states do not hold the place in the cycle: a mixture of resumed samplers starts a new one.
    pub fn states(&self, n: u64) -> Vec<SamplerState> {
        let (round, turn) = self.place(n.min(self.len));
        let in_round =
            |source| self.cycle[..turn].iter().filter(|turn| turn.source == source).count() as u64;
        (0..self.samplers.len())
            .map(|source| {
                self.samplers[source].state(round * self.weights[source] + in_round(source))
            })
            .collect()
    }
}

/// The order in which data sets of these weights take turns: the one furthest behind is next.
#[expect(clippy::expect_used, reason = "there is a weight above 0, so there is a data set")]
fn cycle(weights: &[u64]) -> Result<Vec<CycleEntry>> {
    let turns = weights.iter().fold(0_u64, |sum, &weight| sum.saturating_add(weight));
    if turns > Mixture::MAX_CYCLE {
        return Err(Error::MixtureCycle { turns, max: Mixture::MAX_CYCLE });
    }
    let mut read = vec![0; weights.len()];
    let next = |turn: u64| {
        let due = |source: usize| {
            i128::from(weights[source] * (turn + 1)) - i128::from(read[source] * turns)
        };
        let source =
            (0..weights.len()).rev().max_by_key(|&source| due(source)).expect("a data set");
        read[source] += 1;
        CycleEntry { source, before: read[source] - 1 }
    };
    Ok((0..turns).map(next).collect())
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
    fn every_prefix_holds_the_proportions_to_less_than_one_sample() {
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
    fn the_first_of_equal_data_sets_is_read_first() {
        let mixture = mixture(&[2, 2], &[1, 1]).unwrap();
        assert_eq!(mixture.iter().collect::<Vec<_>>(), [(0, 0), (1, 0), (0, 1), (1, 1)]);
    }

    #[test]
    fn it_ends_with_the_first_data_set_that_has_no_more() {
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
    fn its_states_are_those_of_the_samplers() {
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
    fn states_beyond_the_end_equal_the_last() {
        let mixture = mixture(&[5, 50], &[2, 1]).unwrap();
        let last = mixture.states(mixture.len());
        for beyond in [1, 2, 3, 100] {
            assert_eq!(mixture.states(mixture.len() + beyond), last);
        }
    }

    #[test]
    fn weights_that_mix_nothing_are_refused() {
        assert_eq!(
            mixture(&[5], &[1, 2]).unwrap_err(),
            Error::MixtureWeights { weights: 2, samplers: 1 }
        );
        assert_eq!(mixture(&[5, 5], &[0, 0]).unwrap_err(), Error::NoMixtureWeight);
        assert_eq!(mixture(&[], &[]).unwrap_err(), Error::NoMixtureWeight);
        let (turns, max) = (Mixture::MAX_CYCLE + 1, Mixture::MAX_CYCLE);
        assert_eq!(mixture(&[5, 5], &[max, 1]).unwrap_err(), Error::MixtureCycle { turns, max });
        assert!(mixture(&[5, 5], &[max - 1, 1]).is_ok(), "the longest cycle");
        assert!(mixture(&[5, 5], &[u64::MAX, u64::MAX]).is_ok(), "equal weights are 1 and 1");
        assert!(mixture(&[5, 5], &[u64::MAX, 1]).is_err());
    }
}
