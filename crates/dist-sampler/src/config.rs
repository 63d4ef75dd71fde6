//! The choices of a sampler: order, partition, tail, seed.

use core_types::{Epoch, Seed};

/// In which order the samples of an epoch come, over all ranks.
///
/// The order depends on seed, epoch and data-set length alone, never on the world that reads it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "snake_case"))]
#[doc(alias = "shuffle")]
#[non_exhaustive]
pub enum Order {
    /// 0, 1, 2, …, the same in every epoch.
    Sequential,
    /// [`Order::Exact`] for fewer than 16,384 samples and [`Order::Streaming`] from there on.
    #[default]
    Shuffled,
    /// A uniformly random permutation, another one in every epoch.
    ///
    /// Each of the N! orders is equally likely (Fisher–Yates). The sampler holds it in memory, 4
    /// bytes per sample of the whole data set, and computes it when an epoch is first read: neither
    /// in `new` nor in `set_epoch`, of which a run that resumes calls both.
    Exact,
    /// A keyed pseudorandom permutation, another one in every epoch, that is made at once and takes
    /// no memory.
    ///
    /// Any position can be read on its own, and the position of any sample can be found.
    /// Statistical tests do not tell it from [`Order::Exact`], but with fewer than a few thousand
    /// samples only some of the N! orders can occur. With fewer than 128 samples the exact shuffle
    /// takes its place.
    Streaming,
    /// The permutation of PyTorch's `DistributedSampler`, bit for bit: for runs that must repeat
    /// what PyTorch did.
    ///
    /// It costs what [`Order::Exact`] costs. As in PyTorch seed and epoch are added, so (0, 1) is
    /// (1, 0).
    Torch,
}

/// How the positions of the order are dealt out to the ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "snake_case"))]
#[non_exhaustive]
pub enum Partition {
    /// Rank 0 reads the first range of the order, rank 1 the next, and so on.
    #[default]
    Contiguous,
    /// Round-robin: rank r reads positions r, r + world, r + 2·world, …, as in PyTorch and SPDL.
    Strided,
}

/// What happens to the remainder when the world size does not divide the data set.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "snake_case"))]
#[doc(alias = "drop_last")]
#[non_exhaustive]
pub enum Tail {
    /// No rank reads it in this epoch (`drop_last = true`): all ranks read equally many.
    Drop,
    /// The last rank reads it on top of its own share.
    #[default]
    LastRank,
    /// The first ranks read one sample of it each: every sample is read once and shares differ by
    /// at most one.
    Spread,
    /// Every rank reads equally many samples and none is left out: positions beyond the end read
    /// the order again from its start (PyTorch's `drop_last = false`).
    Pad,
}

/// The choices of a [`DistributedSampler`](crate::DistributedSampler) besides data set and rank.
///
/// # Examples
///
/// ```
/// use dist_sampler::{Order, SamplerConfig, Tail};
///
/// let evaluation = SamplerConfig::default().with_order(Order::Sequential).with_tail(Tail::Spread);
/// assert_eq!(evaluation.tail, Tail::Spread);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct SamplerConfig {
    /// The order of the samples; [`Order::Shuffled`] by default.
    pub order: Order,
    /// Which positions of the order a rank reads; [`Partition::Contiguous`] by default.
    pub partition: Partition,
    /// What happens to the remainder; [`Tail::LastRank`] by default.
    pub tail: Tail,
    /// The root of the shuffle's randomness; 0 by default.
    pub seed: Seed,
    /// The epoch at which the sampler starts; 0 by default.
    pub epoch: Epoch,
}

impl SamplerConfig {
    /// The choices of SPDL's `DistributedDeterministicSampler` with its defaults: sequential,
    /// strided, the incomplete last round dropped, so that all ranks read equally many samples.
    ///
    /// `drop_last_distributed_round=False` is `with_tail(Tail::Spread)`: every sample is read, and
    /// some ranks read one more.
    pub fn spdl_deterministic() -> Self {
        Self {
            order: Order::Sequential,
            partition: Partition::Strided,
            tail: Tail::Drop,
            ..Self::default()
        }
    }

    /// The choices of SPDL's `DistributedRandomSampler`: shuffled, strided, the incomplete last
    /// round dropped.
    ///
    /// SPDL counts its iterations and reshuffles by itself; here
    /// [`set_epoch`](crate::DistributedSampler::set_epoch) with the next number does that. The
    /// order is another one than SPDL's.
    pub fn spdl_random() -> Self {
        Self::spdl_deterministic().with_order(Order::Shuffled)
    }

    /// The choices of PyTorch's `DistributedSampler` with its defaults, with whose index lists the
    /// sampler then agrees to the bit: shuffled, strided, padded.
    ///
    /// `shuffle=False` is `with_order(Order::Sequential)`, `drop_last=True` is
    /// `with_tail(Tail::Drop)`. PyTorch's seeds are signed; here they are cast to `u64`.
    pub fn torch() -> Self {
        Self {
            order: Order::Torch,
            partition: Partition::Strided,
            tail: Tail::Pad,
            ..Self::default()
        }
    }

    /// Sets the order of the samples.
    #[must_use]
    pub fn with_order(self, order: Order) -> Self {
        Self { order, ..self }
    }

    /// Sets which positions of the order a rank reads.
    #[must_use]
    pub fn with_partition(self, partition: Partition) -> Self {
        Self { partition, ..self }
    }

    /// Sets what happens to the remainder.
    #[must_use]
    pub fn with_tail(self, tail: Tail) -> Self {
        Self { tail, ..self }
    }

    /// Sets the root of the shuffle's randomness.
    #[must_use]
    pub fn with_seed(self, seed: Seed) -> Self {
        Self { seed, ..self }
    }

    /// Sets the epoch at which the sampler starts: an order held in memory is then shuffled once,
    /// not twice.
    #[must_use]
    pub fn with_epoch(self, epoch: Epoch) -> Self {
        Self { epoch, ..self }
    }
}
