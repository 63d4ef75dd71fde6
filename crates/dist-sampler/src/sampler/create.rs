//! Creation of samplers, one function per kind of order.

use core_types::Placement;

use super::DistributedSampler;
use crate::{
    config::{Order, Partition, SamplerConfig, Tail},
    error::{Error, Result},
    order::{
        ClassStrata, EpochOrder, MixtureEnd, MixturePart, Quota, SpdlDraws, length::check_len,
    },
    partition::{PartitionRule, ShareRule},
    reshard::UnreadPositions,
};

impl DistributedSampler {
    /// Creates the sampler of `placement` for a data set of `len` samples, at the configured epoch.
    ///
    /// # Errors
    ///
    /// - [`Error::EmptyDataSet`] and [`Error::DataSetTooLong`] if the length is 0 or above 2^63.
    /// - [`Error::TooLongToShuffle`] and [`Error::OutOfMemory`] if the order must be cached and is
    ///   too large.
    pub fn new(len: u64, placement: Placement, config: SamplerConfig) -> Result<Self> {
        check_len(len)?;
        let samples = EpochOrder::new(len, config.order, config.seed, config.epoch)?;
        Self::with_samples(len, samples, placement, config)
    }

    /// Creates a sampler of `draws` weighted draws per epoch, over all ranks.
    ///
    /// Draws are with replacement, like the default of PyTorch's `WeightedRandomSampler`: an epoch
    /// may contain a sample twice and another not at all, and proportions hold in expectation.
    /// Samples of weight 0 are never drawn. The order of `config` is ignored; partition, tail,
    /// seed, epochs and states apply to draws instead of samples.
    ///
    /// # Complexity
    ///
    /// 8 bytes per weight, and O(1) per draw at any position. There may be 2^32 weights; PyTorch
    /// allows 2^24.
    ///
    /// # Errors
    ///
    /// - [`Error::EmptyDataSet`] without weights or draws, and [`Error::DataSetTooLong`] for too
    ///   many draws.
    /// - [`Error::InvalidWeights`] and [`Error::TooMany`].
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
        Self::with_samples(
            draws,
            EpochOrder::weighted(weights, draws, config.seed, config.epoch)?,
            placement,
            config,
        )
    }

    /// Creates a sampler that mixes classes in proportion: every window of its order, and so every
    /// rank, contains each class in proportion, within about one sample.
    ///
    /// The n-th sample has class `labels[n]`; `quota` sets the number of samples of each class per
    /// epoch. In an epoch of M samples and C classes, L consecutive samples contain L·m/M samples
    /// of a class with m samples, give or take 1 + C·m/M. Each rank reads a contiguous window, so
    /// order and partition of `config` are ignored; tail, seed, epochs and states apply as usual.
    ///
    /// # Complexity
    ///
    /// 4 bytes per label and per sample of an epoch, and another 16 per sample while the order is
    /// sorted on its first read.
    ///
    /// # Errors
    ///
    /// [`Error::EmptyDataSet`] without labels or for a quota of 0, [`Error::TooLongToShuffle`] and
    /// [`Error::OutOfMemory`]. Memory for sorting is checked here and allocated at the first read of
    /// an epoch; if it is gone by then, the process aborts, as after any failed allocation.
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
        let strata = ClassStrata::new(labels, quota)?;
        check_len(strata.len())?;
        let len = strata.len();
        let samples = EpochOrder::stratified(strata, config.seed, config.epoch)?;
        Self::with_samples(len, samples, placement, config.with_partition(Partition::Contiguous))
    }

    /// Creates a sampler for a data set in shards, such as files, with few open at a time.
    ///
    /// Shard n has `shard_lens[n]` samples, and indices count through the shards in the given
    /// order. An epoch concatenates the shards in a random order, cuts them into `lanes` of equal
    /// length, and takes one sample of each lane in turn. A lane reads its shards in sequence, the
    /// samples of each in a random order. So about as many shards are open over all ranks as there
    /// are lanes.
    ///
    /// More lanes mix better, and need more open shards. If the world size divides `lanes`, a rank
    /// has lanes / world shards open. Otherwise ranks share lanes, and so open the same shards: use
    /// a number with many divisors, such as 240, near the number of samples per step. The order
    /// does not depend on the world, and one position is its state.
    ///
    /// Order and partition of `config` are ignored: ranks read in turn, as in
    /// [`Partition::Strided`].
    ///
    /// # Complexity
    ///
    /// 24 bytes per shard. A new epoch takes O(shards), and reading an index O(log shards).
    ///
    /// # Errors
    ///
    /// - [`Error::EmptyDataSet`] and [`Error::DataSetTooLong`] for no samples, or more than 2^63.
    /// - [`Error::NoLanes`] and [`Error::TooMany`] for 0 lanes, or 2^32 shards or more.
    /// - [`Error::OutOfMemory`].
    ///
    /// # Examples
    ///
    /// ```
    /// # use core_types::Placement;
    /// # use dist_sampler::{DistributedSampler, SamplerConfig};
    /// let shard_lens = [100; 50];
    /// let (me, config) = (Placement::new(1, 4)?, SamplerConfig::default());
    /// let sampler = DistributedSampler::sharded(&shard_lens, 8, me, config)?;
    /// let mut shards: Vec<u64> = sampler.iter().take(100).map(|index| index / 100).collect();
    /// shards.sort_unstable();
    /// shards.dedup();
    /// assert!(shards.len() <= 4, "two lanes have read 50 samples each");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn sharded(
        shard_lens: &[u64],
        lanes: u64,
        placement: Placement,
        config: SamplerConfig,
    ) -> Result<Self> {
        let samples = EpochOrder::sharded(shard_lens, lanes, config.seed, config.epoch)?;
        let len = samples.len_or(0);
        Self::with_samples(len, samples, placement, config.with_partition(Partition::Strided))
    }

    /// Creates a sampler that interleaves several data sets in proportion to their weights.
    ///
    /// Every prefix of the order contains each part in proportion, within less than one sample.
    /// Indices count through the parts in the given order; [`part_of`](Self::part_of) returns the
    /// part of an index. [`with_weights_from`](Self::with_weights_from) changes the weights at a
    /// position. The order does not depend on the world, and a state contains the weights and one
    /// position.
    ///
    /// [`Order::Sequential`] reads each part in order. Every other order shuffles each pass over a
    /// part as [`Order::Streaming`] does. The partition of `config` is ignored: ranks read in turn,
    /// as in [`Partition::Strided`].
    ///
    /// # Complexity
    ///
    /// O(1) per index at any position. Memory is 12 bytes per turn of the cycle, which has as many
    /// turns as the sum of the weights over their greatest common divisor.
    ///
    /// # Errors
    ///
    /// - [`Error::EmptyDataSet`] and
    ///   [`Error::DataSetTooLong`] if a part or the mixture has no
    ///   samples, or all have more than 2^63.
    /// - [`Error::InvalidWeights`] if all weights are 0, or if the cycle exceeds 2^20 turns.
    ///
    /// # Examples
    ///
    /// ```
    /// # use core_types::Placement;
    /// # use dist_sampler::{DistributedSampler, MixtureEnd, MixturePart, Order, SamplerConfig};
    /// let config = SamplerConfig::default().with_order(Order::Sequential);
    /// let parts = [MixturePart::new(100, 2), MixturePart::new(3, 1)];
    /// let end = MixtureEnd::FirstExhausted;
    /// let mixture = DistributedSampler::mixture(&parts, end, Placement::SINGLE, config)?;
    /// assert!(mixture.iter().take(6).eq([0, 100, 1, 2, 101, 3]));
    /// assert_eq!((mixture.part_of(99), mixture.part_of(100)), (Some(0), Some(1)));
    /// assert_eq!(mixture.len(), 10); // the second part is exhausted
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn mixture(
        parts: &[MixturePart],
        end: MixtureEnd,
        placement: Placement,
        config: SamplerConfig,
    ) -> Result<Self> {
        let samples = EpochOrder::mixture(parts, end, config.order, config.seed, config.epoch)?;
        let len = samples.len_or(0);
        check_len(len)?;
        Self::with_samples(len, samples, placement, config.with_partition(Partition::Strided))
    }

    /// Creates a sampler with the indices of SPDL's `DistributedRandomSampler`, equal to the bit to
    /// spdl 0.8.0 with NumPy 2.4.6.
    ///
    /// An epoch has `draws` draws (`num_draws`), or `n_samples`, over all ranks: different samples,
    /// or with `weights` draws with replacement. The tail of `config` is [`Tail::Drop`] for
    /// `ddp_drop_last_distributed_round=True`, else [`Tail::Spread`]. Order and partition of
    /// `config` are ignored. The seed is the sum of seed and epoch, as SPDL's `embed_shuffle` sets
    /// it for seed 0.
    ///
    /// With [`Tail::Drop`] SPDL's order depends on the number of draws in complete rounds, and so
    /// on the world. A state contains it: a resumed epoch continues in the same order in every
    /// world. [`with_placement`](Self::with_placement) keeps it, too.
    ///
    /// # Complexity
    ///
    /// 4 bytes per draw, or per sample if more than one sample in 50 is drawn, and 8 per weight. An
    /// epoch is generated on its first read.
    ///
    /// # Errors
    ///
    /// - [`Error::EmptyDataSet`] for 0 samples or draws.
    /// - [`Error::FewerSamplesThanRanks`] for fewer draws than
    ///   ranks with [`Tail::Drop`], as in SPDL.
    /// - [`Error::DrawsExceedDataSet`] for more draws than
    ///   samples without weights.
    /// - [`Error::InvalidWeights`].
    /// - [`Error::TooLongToShuffle`] above 2^32 samples or draws,
    ///   and [`Error::OutOfMemory`].
    ///
    /// # Examples
    ///
    /// ```
    /// # use core_types::Placement;
    /// # use dist_sampler::{DistributedSampler, SamplerConfig};
    /// // list(DistributedRandomSampler(9, rank=1, world_size=3)) == [8, 2, 6]
    /// let (me, config) = (Placement::new(1, 3)?, SamplerConfig::spdl());
    /// let sampler = DistributedSampler::spdl_random(9, None, None, me, config)?;
    /// assert!(sampler.iter().eq([8, 2, 6]));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn spdl_random(
        n_samples: u64,
        draws: Option<u64>,
        weights: Option<&[f64]>,
        placement: Placement,
        config: SamplerConfig,
    ) -> Result<Self> {
        check_len(n_samples)?;
        let draws = draws.unwrap_or(n_samples);
        let len = count_spdl_draws(draws, placement, config.tail)?;
        let draws = SpdlDraws::new(n_samples, draws, len, weights)?;
        let samples = EpochOrder::spdl(draws, config.seed, config.epoch)?;
        Self::with_samples(len, samples, placement, config.with_partition(Partition::Strided))
    }

    /// Creates a sampler with the indices of SPDL's `DistributedDeterministicSampler`: sequential
    /// and strided.
    ///
    /// The tail of `config` is [`Tail::Drop`] for `ddp_drop_last_distributed_round=True`, else
    /// [`Tail::Spread`]. Order and partition of `config` are ignored. Unlike [`new`](Self::new),
    /// this function rejects all inputs that SPDL rejects.
    ///
    /// # Errors
    ///
    /// - [`Error::EmptyDataSet`] and
    ///   [`Error::DataSetTooLong`].
    /// - [`Error::FewerSamplesThanRanks`] with [`Tail::Drop`].
    ///
    /// # Examples
    ///
    /// ```
    /// # use core_types::Placement;
    /// # use dist_sampler::{DistributedSampler, SamplerConfig};
    /// let (me, config) = (Placement::new(1, 3)?, SamplerConfig::spdl());
    /// let sampler = DistributedSampler::spdl_deterministic(10, me, config)?;
    /// assert!(sampler.iter().eq([1, 4, 7]));
    /// assert!(DistributedSampler::spdl_deterministic(2, me, config).is_err());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn spdl_deterministic(
        n_samples: u64,
        placement: Placement,
        config: SamplerConfig,
    ) -> Result<Self> {
        count_spdl_draws(n_samples, placement, config.tail)?;
        let config = config.with_order(Order::Sequential).with_partition(Partition::Strided);
        Self::new(n_samples, placement, config)
    }

    /// Creates a sampler with the given order.
    fn with_samples(
        len: u64,
        samples: EpochOrder,
        placement: Placement,
        config: SamplerConfig,
    ) -> Result<Self> {
        let shares = ShareRule::new(
            len,
            placement.world_size(),
            PartitionRule::new(config.partition, config.tail),
        )?;
        let positions = shares.positions(placement);
        Ok(Self {
            len,
            placement,
            config,
            epoch: config.epoch,
            samples,
            earlier: Vec::new(),
            unread: UnreadPositions::from(0..len),
            shares,
            positions,
            consumed: 0,
        })
    }

    /// Sets contiguous shares in proportion to `weights`, one per rank, for ranks of unequal speed.
    ///
    /// Shares are exact within one sample and cover the whole order, so partition and tail of the
    /// configuration are ignored. All ranks must pass the same weights.
    ///
    /// # Errors
    ///
    /// [`Error::RankWeights`] if the numbers of weights and ranks differ, [`Error::InvalidWeights`]
    /// if all are 0.
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
            PartitionRule::Proportional(weights.to_vec()),
        )?;
        self.move_to(Vec::new(), UnreadPositions::from(0..self.len), 0);
        Ok(self)
    }
}

/// Returns the number of `samples` that ranks read in SPDL; it is not 0.
fn count_spdl_draws(samples: u64, placement: Placement, tail: Tail) -> Result<u64> {
    check_len(samples)?;
    let world_size = placement.world_size();
    match tail {
        Tail::Drop if samples < world_size.as_u64() => {
            Err(Error::FewerSamplesThanRanks { samples, world_size })
        }
        Tail::Drop => Ok(samples - samples % world_size.as_u64()),
        _ => Ok(samples),
    }
}
