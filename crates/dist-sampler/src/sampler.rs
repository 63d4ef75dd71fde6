//! One rank's view of the data set, epoch by epoch.

use std::{iter::FusedIterator, ops::Range};

use core_types::{Epoch, Placement};

use crate::{
    config::SamplerConfig,
    error::{Error, Result},
    partition::Positions,
    permutation::Permutation,
};

/// Which samples one rank reads in one epoch.
///
/// All ranks make the same sampler, each with its own [`Placement`], and never need to talk: what they read is
/// disjoint, and together the whole data set (but for what [`Tail`](crate::Tail) drops or repeats).
///
/// # Determinism
///
/// The indices depend on data-set length, placement, configuration and epoch alone; they are the same on every
/// machine, and pinned by tests.
///
/// # Complexity
///
/// [`Order::Sequential`](crate::Order::Sequential) takes no memory. [`Order::Exact`](crate::Order::Exact) takes 4 bytes
/// for each sample of the data set and shuffles them in [`new`](Self::new) and [`set_epoch`](Self::set_epoch);
/// reading is O(1) either way.
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
/// PyTorch's `torch.utils.data.DistributedSampler` and SPDL's `DistributedDeterministicSampler` have the same purpose.
/// Here seed and epoch are hashed, not added, so that (seed 0, epoch 1) is not (seed 1, epoch 0).
#[derive(Clone, Debug)]
pub struct DistributedSampler {
    data_set_len: u64,
    placement: Placement,
    config: SamplerConfig,
    epoch: Epoch,
    positions: Positions,
    permutation: Permutation,
}

impl DistributedSampler {
    /// The longest data set: 2^63 samples.
    pub const MAX_LEN: u64 = 1 << 63;

    /// Returns the sampler of `placement` over a data set of `data_set_len` samples, at epoch 0.
    ///
    /// # Errors
    ///
    /// - [`Error::EmptyDataSet`] and [`Error::DataSetTooLong`], if the length is 0 or above [`MAX_LEN`](Self::MAX_LEN).
    /// - [`Error::TooLongToShuffle`] and [`Error::OutOfMemory`], if the order has to be held in memory and can't be.
    pub fn new(data_set_len: u64, placement: Placement, config: SamplerConfig) -> Result<Self> {
        match data_set_len {
            0 => return Err(Error::EmptyDataSet),
            1..=Self::MAX_LEN => {}
            len => return Err(Error::DataSetTooLong { len, max: Self::MAX_LEN }),
        }
        let epoch = Epoch::ZERO;
        let positions = Positions::new(data_set_len, placement, config.partition, config.tail);
        let permutation = Permutation::new(data_set_len, config.order, config.seed, epoch)?;
        Ok(Self { data_set_len, placement, config, epoch, positions, permutation })
    }

    /// Moves to another epoch, and so to another order if the sampler shuffles.
    ///
    /// Call it at the start of every epoch, on all ranks alike. Moving to the current epoch costs nothing.
    pub fn set_epoch(&mut self, epoch: Epoch) {
        if epoch != self.epoch {
            self.epoch = epoch;
            self.permutation.reseed(self.config.seed, epoch);
        }
    }

    /// The epoch whose samples are read now.
    pub fn epoch(&self) -> Epoch {
        self.epoch
    }

    /// The rank whose samples these are, and its world.
    #[doc(alias = "num_replicas")]
    pub fn placement(&self) -> Placement {
        self.placement
    }

    /// The choices the sampler was made with.
    pub fn config(&self) -> SamplerConfig {
        self.config
    }

    /// The number of samples in the whole data set.
    pub fn data_set_len(&self) -> u64 {
        self.data_set_len
    }

    /// The number of indices this rank reads in an epoch, repetitions included.
    pub fn len(&self) -> u64 {
        self.positions.len()
    }

    /// Whether this rank reads nothing, because the data set is smaller than the world.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The `n`-th index this rank reads, or `None` beyond its last.
    pub fn get(&self, n: u64) -> Option<u64> {
        self.positions.get(n).map(|position| self.permutation.get(position % self.data_set_len))
    }

    /// The indices this rank reads, in order; `nth` skips in O(1).
    pub fn iter(&self) -> Indices<'_> {
        Indices { sampler: self, remaining: 0..self.len() }
    }
}

impl<'a> IntoIterator for &'a DistributedSampler {
    type Item = u64;
    type IntoIter = Indices<'a>;

    fn into_iter(self) -> Indices<'a> {
        self.iter()
    }
}

/// The indices that one rank reads in one epoch; made by [`DistributedSampler::iter`].
#[derive(Clone, Debug)]
#[must_use = "iterators are lazy and do nothing unless consumed"]
pub struct Indices<'a> {
    sampler: &'a DistributedSampler,
    remaining: Range<u64>,
}

impl Iterator for Indices<'_> {
    type Item = u64;

    fn next(&mut self) -> Option<u64> {
        self.nth(0)
    }

    fn nth(&mut self, n: usize) -> Option<u64> {
        self.remaining.nth(n).and_then(|n| self.sampler.get(n))
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        self.remaining.size_hint()
    }
}

impl DoubleEndedIterator for Indices<'_> {
    fn next_back(&mut self) -> Option<u64> {
        self.nth_back(0)
    }

    fn nth_back(&mut self, n: usize) -> Option<u64> {
        self.remaining.nth_back(n).and_then(|n| self.sampler.get(n))
    }
}

/// Exact where `usize` has 64 bits; elsewhere only below 2^32 indices.
impl ExactSizeIterator for Indices<'_> {}

impl FusedIterator for Indices<'_> {}
