//! Mixtures: several data sets, interleaved by weights that may change.
//!
//! The order is over global positions: a turn is counted over all ranks, so the mixture is the same
//! in every world, and a resumed mixture continues at its turn. Grain's `mix` also interleaves in
//! exact proportions; Mosaic's streams are drawn, so their proportions hold on average.

mod cycle;

use core_types::{Fingerprint, Seed};
use cycle::TurnCycle;

use super::{
    length::{part_at, push_starts},
    permutation::KeyedPermutation,
};
use crate::error::{Error, Result};

/// A data set of a mixture, and its weight.
///
/// # Examples
///
/// ```
/// use dist_sampler::MixturePart;
///
/// let books = MixturePart::new(1_000_000, 3); // three samples for each of a part of weight 1
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MixturePart {
    len: u64,
    weight: u64,
}

impl MixturePart {
    /// Creates a part of `len` samples; weight 0 excludes it until the weights change.
    pub fn new(len: u64, weight: u64) -> Self {
        Self { len, weight }
    }
}

/// The end of an epoch of a mixture.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum MixtureEnd {
    /// The epoch ends with the first part that has no sample left for its turn: no sample is
    /// repeated.
    FirstExhausted,
    /// The epoch has `len` samples over all ranks; a part that ends is read again, in a new order.
    Repeat {
        /// Length of the epoch.
        len: u64,
    },
}

/// Weights of a mixture from a position on, as in a state.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub(crate) struct PhaseWeights {
    pub(crate) from: u64,
    pub(crate) weights: Vec<u64>,
}

/// The order of an epoch of a mixture.
#[derive(Clone, Debug)]
pub(crate) struct MixtureOrder {
    /// First index of each part in the concatenation of the parts, and the length of all.
    starts: Vec<u64>,
    end: MixtureEnd,
    is_shuffled: bool,
    /// Phases in ascending order; the first one begins at position 0.
    phases: Vec<Phase>,
    seed: Seed,
}

/// The positions that are mixed by the same weights.
#[derive(Clone, Debug)]
struct Phase {
    from: u64,
    cycle: TurnCycle,
    /// Number of samples of each part in earlier phases.
    n_before: Vec<u64>,
}

impl Phase {
    /// Returns the number of samples of `part` before `position`, which is not before the phase.
    fn count(&self, part: usize, position: u64) -> u64 {
        self.n_before[part] + self.cycle.count(part, position - self.from)
    }

    /// Returns the first position of this phase, or of its continuation, that needs more than
    /// `len` samples of `part`.
    fn exhaustion(&self, part: usize, len: u64) -> u64 {
        let n_left = len.saturating_sub(self.n_before[part]);
        let turn = self.cycle.nth_turn(part, n_left);
        turn.and_then(|turn| turn.checked_add(self.from)).unwrap_or(u64::MAX)
    }
}

impl MixtureOrder {
    /// Creates the order of the epoch of `seed`.
    pub(super) fn new(
        parts: &[MixturePart],
        end: MixtureEnd,
        is_shuffled: bool,
        seed: Seed,
    ) -> Result<Self> {
        if parts.iter().any(|part| part.len == 0) {
            return Err(Error::EmptyDataSet);
        }
        let mut starts = Vec::new();
        push_starts(parts.iter().map(|part| part.len), &mut starts)?;
        let mut order = Self { starts, end, is_shuffled, phases: Vec::new(), seed };
        let weights: Vec<u64> = parts.iter().map(|part| part.weight).collect();
        order.set_weights_from(0, &weights)?;
        Ok(order)
    }

    /// Sets the weights of all positions from `from` on.
    ///
    /// The first weights stay, also without a position of their own: states that have them belong to
    /// this mixture.
    pub(super) fn set_weights_from(&mut self, from: u64, weights: &[u64]) -> Result<()> {
        let n_parts = self.n_parts();
        if weights.len() != n_parts {
            let n_weights = weights.len();
            return Err(Error::weights(format!(
                "{n_weights} weights were given for {n_parts} parts of the mixture"
            )));
        }
        let cycle = TurnCycle::new(weights)?;
        let n_earlier = self.phases.partition_point(|phase| phase.from < from);
        self.phases.truncate(n_earlier.max(1));
        let n_before = match self.phases.last() {
            Some(last) if last.cycle.weights() == cycle.weights() => return Ok(()),
            Some(last) => (0..n_parts).map(|part| last.count(part, from)).collect(),
            None => vec![0; n_parts],
        };
        self.phases.push(Phase { from, cycle, n_before });
        Ok(())
    }

    pub(super) fn set_seed(&mut self, seed: Seed) {
        self.seed = seed;
    }

    pub(super) fn phases(&self) -> Vec<PhaseWeights> {
        let phases = self.phases.iter();
        phases
            .map(|phase| PhaseWeights { from: phase.from, weights: phase.cycle.weights().to_vec() })
            .collect()
    }

    /// Returns the length of the epoch over all ranks.
    pub(super) fn len(&self) -> u64 {
        match self.end {
            MixtureEnd::Repeat { len } => len,
            MixtureEnd::FirstExhausted => self.first_exhaustion(),
        }
    }

    /// Returns the number of samples of all parts.
    pub(super) fn n_samples(&self) -> u64 {
        self.starts[self.n_parts()]
    }

    /// Returns the first position without a sample left in its part.
    fn first_exhaustion(&self) -> u64 {
        let next_starts = self.phases.iter().skip(1).map(|phase| phase.from).chain([u64::MAX]);
        let ends = self.phases.iter().zip(next_starts).map(|(phase, next_start)| {
            let parts = 0..self.n_parts();
            let end = parts.map(|part| phase.exhaustion(part, self.part_len(part))).min();
            end.filter(|&end| end < next_start)
        });
        ends.flatten().next().unwrap_or(u64::MAX)
    }

    /// Returns a hash of the lengths of the parts.
    pub(super) fn fingerprint(&self) -> u64 {
        self.starts.iter().copied().collect::<Fingerprint>().finish()
    }

    /// Returns the index at `position`.
    pub(super) fn get(&self, position: u64) -> u64 {
        let n_phases = self.phases.partition_point(|phase| phase.from <= position);
        let phase = &self.phases[n_phases - 1];
        let (part, in_phase) = phase.cycle.turn(position - phase.from);
        let (n_read, len) = (phase.n_before[part] + in_phase, self.part_len(part));
        let sample = match self.permutation(part, n_read / len) {
            Some(permutation) => permutation.get(n_read % len),
            None => n_read % len,
        };
        self.starts[part] + sample
    }

    /// Returns the first position of `index`, or `None` if the mixture does not contain it.
    pub(super) fn position(&self, index: u64) -> Option<u64> {
        let part = self.part_of(index)?;
        let sample = index - self.starts[part];
        let n_read = match self.permutation(part, 0) {
            Some(permutation) => permutation.position(sample),
            None => sample,
        };
        let n_phases = self.phases.partition_point(|phase| phase.n_before[part] <= n_read);
        let phase = &self.phases[n_phases - 1];
        let turn = phase.cycle.nth_turn(part, n_read - phase.n_before[part])?;
        phase.from.checked_add(turn)
    }

    /// Returns the part that contains `index`.
    pub(super) fn part_of(&self, index: u64) -> Option<usize> {
        let part = part_at(&self.starts, index);
        (part < self.n_parts()).then_some(part)
    }

    /// Returns the order of a pass over a part, or `None` if it is sequential.
    fn permutation(&self, part: usize, pass: u64) -> Option<KeyedPermutation> {
        let seed = self.seed.derive(part as u64).derive(pass);
        self.is_shuffled.then(|| KeyedPermutation::new(self.part_len(part), seed))
    }

    fn n_parts(&self) -> usize {
        self.starts.len() - 1
    }

    fn part_len(&self, part: usize) -> u64 {
        self.starts[part + 1] - self.starts[part]
    }
}
