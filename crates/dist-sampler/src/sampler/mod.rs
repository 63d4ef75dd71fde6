//! One rank's view of the data set, epoch by epoch.

pub(crate) mod indices;

use std::fmt::Debug;

use core_types::{Epoch, Placement, Rank, split};

use crate::{
    config::{Partition, SamplerConfig},
    error::{Error, Result},
    order::{EpochOrder, Quota, Strata},
    partition::{Positions, Rule, ShareRule},
    reshard::Unread,
    sampler::indices::Indices,
    state::{SamplerState, Stage},
};

/// Which samples one rank reads in one epoch.
///
/// All ranks make the same sampler, each with its own [`Placement`], and never need to communicate:
/// what they read is disjoint, and together the whole data set (but for what [`Tail`](crate::Tail)
/// drops or repeats).
///
/// # Determinism
///
/// The indices depend on data-set length, placement, configuration and epoch alone; they are the
/// same on every machine, and pinned by tests. The order of the samples does not depend on the
/// placement.
///
/// # Complexity
///
/// [`Order`](crate::Order) says what an order costs. With
/// [`Order::Streaming`](crate::Order::Streaming) and
/// [`Order::Sequential`](crate::Order::Sequential) making a sampler, moving to an epoch and going
/// to any place in it are O(1) in time and memory. An order that is held in memory is made by the
/// first call that reads a sample of an epoch; if several threads do, one makes it while the others
/// wait. A copy of a sampler has an order of its own.
///
/// # Examples
///
/// ```
/// use core_types::{Epoch, Placement};
/// use dist_sampler::{DistributedSampler, SamplerConfig, Tail};
///
/// let config = SamplerConfig::default().with_tail(Tail::Drop);
/// let mut sampler = DistributedSampler::new(1000, Placement::new(2, 4)?, config)?;
/// for epoch in 0..3 {
///     sampler.set_epoch(Epoch::new(epoch));
///     assert_eq!(sampler.iter().len(), 250);
/// }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # References
///
/// PyTorch's `torch.utils.data.DistributedSampler` and SPDL's `DistributedDeterministicSampler`
/// have the same purpose. Here seed and epoch are hashed, not added, so that (seed 0, epoch 1) is
/// not (seed 1, epoch 0).
#[derive(Clone, Debug)]
pub struct DistributedSampler {
    len: u64,
    placement: Placement,
    config: SamplerConfig,
    epoch: Epoch,
    samples: EpochOrder,
    /// The other worlds that have read a part of the epoch; none unless this sampler was resumed
    /// from one.
    earlier: Vec<Stage>,
    /// The positions that they have not read.
    unread: Unread,
    /// How these are dealt out to this world.
    shares: ShareRule,
    /// This rank's part, of which it has read `consumed`.
    positions: Positions,
    consumed: u64,
}

impl DistributedSampler {
    /// The longest data set: 2^63 samples.
    pub(crate) const MAX_LEN: u64 = 1 << 63;

    /// Returns the sampler of `placement` over a data set of `len` samples, at the epoch of the
    /// configuration.
    ///
    /// # Errors
    ///
    /// - [`Error::EmptyDataSet`] and [`Error::DataSetTooLong`], if the length is 0 or above
    ///   2^63.
    /// - [`Error::TooLongToShuffle`] and [`Error::OutOfMemory`], if the order has to be held in
    ///   memory and can't be.
    /// - [`Error::RankWeights`] and [`Error::NoRankWeight`], if a proportional partition does not
    ///   fit the world.
    pub fn new(len: u64, placement: Placement, config: SamplerConfig) -> Result<Self> {
        check_len(len)?;
        let samples = EpochOrder::new(len, config.order, config.seed, config.epoch)?;
        Self::over(len, samples, placement, config)
    }

    /// Returns a sampler that draws `draws` samples per epoch, over all ranks, in proportion to
    /// their weights.
    ///
    /// Draws are made with replacement, as by PyTorch's `WeightedRandomSampler` with its default:
    /// an epoch may bring a sample twice and another not at all, and weights count in expectation.
    /// A sample of weight 0 is never drawn. The order of `config` is ignored; partition, tail,
    /// seed, epochs and states work as for any other sampler, with draws in place of samples.
    ///
    /// # Complexity
    ///
    /// 8 bytes per weight, and O(1) per draw, wherever it is. At most 2^32 weights are taken;
    /// PyTorch takes 2^24.
    ///
    /// # Errors
    ///
    /// - [`Error::EmptyDataSet`], for no weights or no draws, and [`Error::DataSetTooLong`], for
    ///   too many draws.
    /// - [`Error::InvalidWeight`], [`Error::NoWeight`], [`Error::WeightSumOverflow`] and
    ///   [`Error::TooManyWeights`].
    /// - [`Error::OutOfMemory`].
    ///
    /// # Examples
    ///
    /// ```
    /// # use core_types::Placement;
    /// # use dist_sampler::{DistributedSampler, SamplerConfig};
    /// let weights = [1.0, 0.0, 3.0];
    /// let (me, config) = (Placement::new(0, 2)?, SamplerConfig::default());
    /// let sampler = DistributedSampler::weighted(&weights, 4000, me, config)?;
    /// let often = sampler.iter().filter(|&index| index == 2).count();
    /// assert!(sampler.iter().all(|index| index != 1) && (1400..1600).contains(&often));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn weighted(
        weights: &[f64],
        draws: u64,
        placement: Placement,
        config: SamplerConfig,
    ) -> Result<Self> {
        check_len(draws)?;
        Self::over(
            draws,
            EpochOrder::weighted(weights, draws, config.seed, config.epoch)?,
            placement,
            config,
        )
    }

    /// Returns a sampler in whose order the classes are mixed in proportion: every window of it,
    /// and so every rank, sees each class in proportion, to about one sample.
    ///
    /// The n-th sample is of class `labels[n]`, any number; `quota` says how many samples of each
    /// class an epoch has. Of L neighbors in an epoch of M samples of C classes, L·m/M are of a
    /// class of m, give or take 1 + C·m/M. Each rank reads a contiguous window, so order and
    /// partition of `config` are ignored; tail, seed, epochs and states work as for any other
    /// sampler.
    ///
    /// # Complexity
    ///
    /// 4 bytes per label and 4 per sample of an epoch, and another 16 per sample of an epoch while
    /// its order is made, by sorting: when it is first read.
    ///
    /// # Errors
    ///
    /// [`Error::EmptyDataSet`] for no labels or a quota of 0, [`Error::TooLongToShuffle`] and
    /// [`Error::OutOfMemory`]. If the memory for sorting is there now but no longer when an epoch is
    /// first read, the process aborts, as it does for every other allocation that fails.
    ///
    /// # Examples
    ///
    /// ```
    /// # use core_types::Placement;
    /// # use dist_sampler::{DistributedSampler, Quota, SamplerConfig};
    /// // One sample in ten is of class 1.
    /// let labels: Vec<u32> = (0..1000).map(|n| u32::from(n % 10 == 0)).collect();
    /// let (me, config) = (Placement::new(2, 5)?, SamplerConfig::default());
    /// let sampler = DistributedSampler::stratified(&labels, Quota::All, me, config)?;
    /// assert_eq!(sampler.iter().filter(|index| index % 10 == 0).count(), 20);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn stratified(
        labels: &[u32],
        quota: Quota,
        placement: Placement,
        config: SamplerConfig,
    ) -> Result<Self> {
        let strata = Strata::new(labels, quota)?;
        check_len(strata.len())?;
        let len = strata.len();
        let samples = EpochOrder::stratified(strata, config.seed, config.epoch)?;
        Self::over(len, samples, placement, config.with_partition(Partition::Contiguous))
    }

    fn over(
        len: u64,
        samples: EpochOrder,
        placement: Placement,
        config: SamplerConfig,
    ) -> Result<Self> {
        let shares =
            ShareRule::new(len, placement.world_size(), Rule::new(config.partition, config.tail))?;
        let positions = shares.positions(placement);
        Ok(Self {
            len,
            placement,
            config,
            epoch: config.epoch,
            samples,
            earlier: Vec::new(),
            unread: Unread::from(0..len),
            shares,
            positions,
            consumed: 0,
        })
    }

    /// Gives the ranks contiguous shares of the order in proportion to `weights`, one for each
    /// rank: for ranks of unequal speed.
    ///
    /// Shares are exact to one sample and cover the whole order, so partition and tail of the
    /// configuration are ignored. All ranks must be given the same weights.
    ///
    /// # Errors
    ///
    /// [`Error::RankWeights`] if there are more or fewer weights than ranks,
    /// [`Error::NoRankWeight`] if all are 0.
    ///
    /// # Examples
    ///
    /// ```
    /// # use core_types::Placement;
    /// # use dist_sampler::{DistributedSampler, SamplerConfig};
    /// let slow = DistributedSampler::new(100, Placement::new(1, 2)?, SamplerConfig::default())?;
    /// assert_eq!(slow.with_rank_weights(&[3, 1])?.len(), 25);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn with_rank_weights(mut self, weights: &[u64]) -> Result<Self> {
        self.shares = ShareRule::new(
            self.len,
            self.placement.world_size(),
            Rule::Proportional(weights.to_vec()),
        )?;
        self.move_to(Vec::new(), Unread::from(0..self.len), 0);
        Ok(self)
    }

    /// Moves to the start of an epoch, and so to another order if the sampler shuffles.
    ///
    /// Call it at the start of every epoch, on all ranks alike. At the current epoch it does
    /// nothing, so a loop that sets its first epoch does not undo a [`resume`](Self::resume).
    pub fn set_epoch(&mut self, epoch: Epoch) {
        if epoch != self.epoch {
            self.reorder(epoch);
            self.move_to(Vec::new(), Unread::from(0..self.len), 0);
        }
    }

    fn reorder(&mut self, epoch: Epoch) {
        if epoch != self.epoch {
            self.epoch = epoch;
            self.samples.reseed(self.config.seed, epoch);
        }
    }

    /// Deals out the positions that `earlier` worlds have left `unread`, and moves to the
    /// `consumed`-th index of this rank.
    fn move_to(&mut self, earlier: Vec<Stage>, unread: Unread, consumed: u64) {
        self.shares = self.shares.of_len(unread.len());
        self.positions = self.shares.positions(self.placement);
        self.earlier = earlier;
        self.unread = unread;
        self.consumed = consumed;
    }

    /// Where the sampler stands when this rank, and every other, has read `read` more indices.
    ///
    /// # Examples
    ///
    /// ```
    /// # use core_types::Placement;
    /// # use dist_sampler::{DistributedSampler, SamplerConfig};
    /// let (me, config) = (Placement::new(2, 4)?, SamplerConfig::default());
    /// let sampler = DistributedSampler::new(1_000_000, me, config)?;
    /// let state = sampler.state(1000); // write it beside the checkpoint
    ///
    /// let mut resumed = DistributedSampler::new(1_000_000, me, config)?;
    /// resumed.resume(&state)?;
    /// assert!(resumed.iter().take(9).eq(sampler.iter().skip(1000).take(9)));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn state(&self, read: u64) -> SamplerState {
        let stage = Stage {
            world_size: self.shares.world_size(),
            rule: self.shares.rule().clone(),
            consumed: self.consumed.saturating_add(read),
        };
        SamplerState {
            format_version: SamplerState::VERSION,
            order: self.config.order,
            len: self.len,
            fingerprint: self.samples.fingerprint(),
            seed: self.config.seed,
            epoch: self.epoch,
            stages: self.earlier.iter().cloned().chain([stage]).collect(),
        }
    }

    /// Moves to where another sampler stood in the middle of an epoch, of any rank of any world.
    ///
    /// If that world had the same size, partition and tail, every rank resumes exactly where it
    /// was. Otherwise the samples that world has not read, dropped ones included, are dealt out
    /// anew to this one: over all of its ranks, no sample is lost and none is read again (but for
    /// this sampler's own tail).
    ///
    /// # Complexity
    ///
    /// O(worlds that have read the epoch), whatever their sizes, and O(ranks) for each that had
    /// rank weights; apart from the order, if that is held in memory. An index then takes O(worlds)
    /// more, and O(log ranks) for each with rank weights.
    ///
    /// # Errors
    ///
    /// - [`Error::StateVersion`].
    /// - [`Error::StateMismatch`] if data set, order or seed are not those of the state.
    /// - [`Error::StateConsumed`], [`Error::RankWeights`] or [`Error::NoRankWeight`] if the state
    ///   contradicts itself.
    /// - [`Error::StateStages`] above 1,024 worlds.
    ///
    /// The sampler is then unchanged.
    pub fn resume(&mut self, state: &SamplerState) -> Result<()> {
        self.check(state)?;
        let (last, earlier) = state.last_and_earlier();
        let mut unread = Unread::from(0..self.len);
        for stage in earlier {
            unread = unread_after(stage, unread)?;
        }
        let unread_after_last = unread_after(last, unread.clone())?;
        self.reorder(state.epoch);
        if last.world_size == self.shares.world_size() && last.rule == *self.shares.rule() {
            self.move_to(earlier.to_vec(), unread, last.consumed);
        } else {
            self.move_to(state.stages.clone(), unread_after_last, 0);
        }
        Ok(())
    }

    fn check(&self, state: &SamplerState) -> Result<()> {
        let own = self.state(0);
        if state.format_version != own.format_version {
            return Err(Error::StateVersion {
                version: state.format_version,
                supported: own.format_version,
            });
        }
        if state.stages.len() > SamplerState::MAX_STAGES {
            return Err(Error::StateStages {
                stages: state.stages.len(),
                max: SamplerState::MAX_STAGES,
            });
        }
        same("order", &state.order, &own.order)?;
        same("data set length", &state.len, &own.len)?;
        same("weights or classes with fingerprint", &state.fingerprint, &own.fingerprint)?;
        same("seed", &state.seed.as_u64(), &own.seed.as_u64())
    }

    /// The epoch whose samples are read now.
    pub fn epoch(&self) -> Epoch {
        self.epoch
    }

    /// The rank whose samples these are, and its world.
    #[doc(alias = "num_replicas")]
    #[doc(hidden)]
    pub fn placement(&self) -> Placement {
        self.placement
    }

    /// The choices the sampler was made with.
    #[doc(hidden)]
    pub fn config(&self) -> SamplerConfig {
        self.config
    }

    /// The number of samples in the whole data set, or of draws in an epoch of all ranks.
    #[doc(hidden)]
    pub fn data_set_len(&self) -> u64 {
        self.len
    }

    /// The number of indices this rank reads from here to the end of the epoch, repetitions
    /// included.
    ///
    /// That is its share of an epoch, unless the sampler was resumed in the middle of one.
    pub fn len(&self) -> u64 {
        // A rank may have had fewer positions than every rank of its world has consumed by now.
        self.positions.len().saturating_sub(self.consumed)
    }

    /// Whether this rank reads nothing more: its share has ended, or the data set is smaller than
    /// the world.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The `n`-th index this rank reads from here on, or `None` beyond its last.
    pub fn get(&self, n: u64) -> Option<u64> {
        self.entry(n).map(|(index, _)| index)
    }

    /// The `n`-th index this rank reads from here on, and whether it is padding: a sample that
    /// another rank, or this one at another time, reads as well.
    ///
    /// Leave padding out of metrics, so that evaluation counts every sample once.
    ///
    /// # Examples
    ///
    /// ```
    /// # use core_types::Placement;
    /// # use dist_sampler::{DistributedSampler, Order, SamplerConfig};
    /// let config = SamplerConfig::torch().with_order(Order::Sequential);
    /// let sampler = DistributedSampler::new(5, Placement::new(2, 3)?, config)?;
    /// assert_eq!((sampler.entry(0), sampler.entry(1)), (Some((2, false)), Some((0, true))));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn entry(&self, n: u64) -> Option<(u64, bool)> {
        let position = self.positions.get(self.consumed.checked_add(n)?)?;
        let n_unread = self.unread.len();
        let sample = self.samples.get(self.unread.get(position % n_unread));
        Some((sample, position >= n_unread))
    }

    /// The indices this rank reads from here on, in order; `nth` skips in O(1).
    pub fn iter(&self) -> Indices<'_> {
        Indices::new(self, (0..self.len()).into())
    }

    /// Writes the indices this rank reads from its `start`-th on to `out`, and returns how many it
    /// has written.
    ///
    /// This is the fastest way to read many.
    ///
    /// # Examples
    ///
    /// ```
    /// # use core_types::Placement;
    /// # use dist_sampler::{DistributedSampler, Order, SamplerConfig};
    /// let config = SamplerConfig::default().with_order(Order::Sequential);
    /// let sampler = DistributedSampler::new(10, Placement::new(1, 2)?, config)?;
    /// let mut block = [0; 3];
    /// assert_eq!((sampler.fill(0, &mut block), block), (3, [5, 6, 7]));
    /// assert_eq!((sampler.fill(3, &mut block), &block[..2]), (2, &[8, 9][..]));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn fill(&self, start: u64, out: &mut [u64]) -> usize {
        let n_unread = self.len().saturating_sub(start);
        #[expect(clippy::cast_possible_truncation, reason = "at most the length of a slice")]
        let count = n_unread.min(out.len() as u64) as usize;
        if count > 0 {
            self.fill_every(1, start, &mut out[..count]);
        }
        count
    }

    /// [`fill`](Self::fill), spread over the threads of rayon's current pool; the result is the
    /// same.
    #[cfg(feature = "rayon")]
    pub fn par_fill(&self, start: u64, out: &mut [u64]) -> usize {
        use rayon::prelude::*;

        /// Indices that are worth a thread's attention: some 30 µs.
        const TASK: usize = 1 << 14;
        let tasks = out.par_chunks_mut(TASK).enumerate();
        tasks.map(|(task, out)| self.fill(start.saturating_add((task * TASK) as u64), out)).sum()
    }

    /// Writes the indices `start`, `start` + `every`, … of this rank; all of them must exist.
    #[expect(clippy::expect_used, reason = "the caller asks for indices that exist")]
    pub(crate) fn fill_every(&self, every: u64, start: u64, out: &mut [u64]) {
        let n_even = self.fill_evenly_spaced(every, start, out);
        for (n, slot) in (n_even as u64..).zip(&mut out[n_even..]) {
            *slot = self.get(start + n * every).expect("this index exists");
        }
    }

    /// Writes the indices `start`, `start` + `every`, … as far as their places in the order are
    /// evenly spaced, and returns how many these are.
    ///
    /// That ends where the incomplete last round or padding begins, and there are none while the
    /// unread positions have gaps, which earlier worlds have read.
    fn fill_evenly_spaced(&self, every: u64, start: u64, out: &mut [u64]) -> usize {
        let start = self.consumed + start;
        let (Some(offset), Some(first)) =
            (self.unread.start_of_only_range(), self.positions.get(start))
        else {
            return 0;
        };
        let (step, n_regular) = self.positions.stride();
        let before_rest = n_regular.saturating_sub(start).div_ceil(every);
        let step = step * every;
        let before_padding = self.unread.len().saturating_sub(first).div_ceil(step);
        #[expect(clippy::cast_possible_truncation, reason = "at most the length of a slice")]
        let count = before_rest.min(before_padding).min(out.len() as u64) as usize;
        self.samples.fill(offset + first, step, &mut out[..count]);
        count
    }

    /// The indices that one of several workers of this rank reads: round-robin, like ranks in a
    /// strided partition.
    ///
    /// # Examples
    ///
    /// ```
    /// # use core_types::Placement;
    /// # use dist_sampler::{DistributedSampler, Order, SamplerConfig};
    /// let config = SamplerConfig::default().with_order(Order::Sequential);
    /// let sampler = DistributedSampler::new(10, Placement::new(1, 2)?, config)?;
    /// let second_of_three = Placement::new(1, 3)?;
    /// assert_eq!(sampler.iter_worker(second_of_three).collect::<Vec<_>>(), [6, 9]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn iter_worker(&self, worker: Placement) -> Indices<'_> {
        Indices::new(self, split::strided(self.len(), worker))
    }

    /// The place of sample `index` in the order of the epoch, over all ranks, or `None` if it has
    /// none.
    ///
    /// # Complexity
    ///
    /// O(1), but O(N) for an order held in memory.
    pub fn position_of(&self, index: u64) -> Option<u64> {
        self.samples.position(index).filter(|&position| position < self.len)
    }

    /// The rank that reads sample `index` in the rest of this epoch, or `None` if none does.
    ///
    /// For a sample that is also read as padding it is the rank that reads it unpadded.
    ///
    /// # Complexity
    ///
    /// As [`position_of`](Self::position_of), and O(ranks) with rank weights.
    ///
    /// # Examples
    ///
    /// ```
    /// # use core_types::Placement;
    /// # use dist_sampler::{DistributedSampler, Order, SamplerConfig};
    /// let config = SamplerConfig::default().with_order(Order::Streaming);
    /// let sampler = DistributedSampler::new(1_000_000_000_000, Placement::new(3, 8)?, config)?;
    /// let index = sampler.get(5).expect("every rank reads more than 5");
    /// assert_eq!(sampler.rank_of(index), Some(sampler.placement().rank()));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn rank_of(&self, index: u64) -> Option<Rank> {
        let position = self.position_of(index)?;
        self.shares.owner(self.unread.index_of(position)?)
    }
}

fn check_len(len: u64) -> Result<()> {
    match len {
        0 => Err(Error::EmptyDataSet),
        1..=DistributedSampler::MAX_LEN => Ok(()),
        len => Err(Error::DataSetTooLong { len, max: DistributedSampler::MAX_LEN }),
    }
}

/// The positions of `unread` that nobody has read when the world of `stage` has read its part.
fn unread_after(stage: &Stage, unread: Unread) -> Result<Unread> {
    let len = unread.len();
    if stage.consumed > len {
        return Err(Error::StateConsumed { consumed: stage.consumed, len });
    }
    let shares = ShareRule::new(len, stage.world_size, stage.rule.clone())?;
    Ok(unread.then(shares.unread_after(stage.consumed)))
}

fn same<T: PartialEq + Debug>(what: &'static str, state: &T, sampler: &T) -> Result<()> {
    if state == sampler {
        return Ok(());
    }
    Err(Error::StateMismatch { what, state: format!("{state:?}"), sampler: format!("{sampler:?}") })
}

impl<'a> IntoIterator for &'a DistributedSampler {
    type Item = u64;
    type IntoIter = Indices<'a>;

    fn into_iter(self) -> Indices<'a> {
        self.iter()
    }
}
