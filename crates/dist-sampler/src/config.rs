//! Configuration of a sampler: order, partition, tail and seed.

use core_types::{Epoch, Seed};

/// The order of the samples in an epoch, over all ranks.
///
/// The order depends only on seed, epoch and data set length, never on the world that reads it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "snake_case"))]
#[doc(alias = "shuffle")]
#[non_exhaustive]
pub enum Order {
    /// 0, 1, 2, …, the same in every epoch.
    Sequential,
    /// [`Order::Exact`] for fewer than 16,384 samples, else [`Order::Streaming`].
    #[default]
    Shuffled,
    /// A uniformly random permutation, different in every epoch.
    ///
    /// Each of the N! orders is equally likely (Fisher–Yates). The sampler stores the order with 4
    /// bytes per sample of the whole data set. It computes the order when an epoch is first read,
    /// not in `new` or `set_epoch`, because a resuming run calls both.
    Exact,
    /// A keyed pseudorandom permutation, different in every epoch, that needs no preparation and no
    /// memory.
    ///
    /// Any position can be read directly, and the position of any sample can be found. Statistical
    /// tests cannot distinguish it from [`Order::Exact`], but with fewer than a few thousand
    /// samples only some of the N! orders can occur. Fewer than 128 samples are shuffled exactly.
    Streaming,
    /// The permutation of PyTorch's `DistributedSampler`, bit for bit, for runs that must reproduce
    /// PyTorch.
    ///
    /// It costs as much as [`Order::Exact`]. Like PyTorch it adds seed and epoch, so epoch 1 of
    /// seed 0 equals epoch 0 of seed 1.
    Torch,
}

/// The assignment of positions of the order to ranks.
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

/// The policy for the remainder if the world size does not divide the data set.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "snake_case"))]
#[doc(alias = "drop_last")]
#[non_exhaustive]
pub enum Tail {
    /// No rank reads the remainder (`drop_last = true`): all ranks read equally many samples.
    Drop,
    /// The last rank reads the remainder in addition to its share.
    #[default]
    LastRank,
    /// The first ranks read one sample of the remainder each: every sample is read once, and shares
    /// differ by at most one.
    Spread,
    /// Every rank reads equally many samples, and all are read: positions beyond the end repeat the
    /// order from its start (PyTorch's `drop_last = false`).
    Pad,
}

/// The configuration of a [`DistributedSampler`](crate::DistributedSampler).
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
    /// Order of the samples; [`Order::Shuffled`] by default.
    pub order: Order,
    /// Positions that a rank reads; [`Partition::Contiguous`] by default.
    pub partition: Partition,
    /// Policy for the remainder; [`Tail::LastRank`] by default.
    pub tail: Tail,
    /// Seed of the shuffle; 0 by default.
    pub seed: Seed,
    /// First epoch; 0 by default.
    pub epoch: Epoch,
}

impl SamplerConfig {
    /// Returns the conventions of SPDL's samplers: sequential, strided, the incomplete last round
    /// dropped, so that all ranks read equally many samples.
    ///
    /// `ddp_drop_last_distributed_round=False` is `with_tail(Tail::Spread)`: every sample is read,
    /// and some ranks read one more. [`DistributedSampler::spdl_random`] and
    /// [`DistributedSampler::spdl_deterministic`] also reject all inputs that SPDL
    /// rejects.
    ///
    /// [`DistributedSampler::spdl_random`]: crate::DistributedSampler::spdl_random
    /// [`DistributedSampler::spdl_deterministic`]: crate::DistributedSampler::spdl_deterministic
    pub fn spdl() -> Self {
        Self {
            order: Order::Sequential,
            partition: Partition::Strided,
            tail: Tail::Drop,
            ..Self::default()
        }
    }

    /// Returns the defaults of PyTorch's `DistributedSampler`: shuffled, strided, padded. The index
    /// lists are equal to the bit.
    ///
    /// `shuffle=False` is `with_order(Order::Sequential)`, `drop_last=True` is
    /// `with_tail(Tail::Drop)`. PyTorch's seeds are signed; cast them to `u64`.
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

    /// Sets the positions that a rank reads.
    #[must_use]
    pub fn with_partition(self, partition: Partition) -> Self {
        Self { partition, ..self }
    }

    /// Sets the policy for the remainder.
    #[must_use]
    pub fn with_tail(self, tail: Tail) -> Self {
        Self { tail, ..self }
    }

    /// Sets the seed of the shuffle.
    #[must_use]
    pub fn with_seed(self, seed: Seed) -> Self {
        Self { seed, ..self }
    }

    /// Sets the first epoch.
    #[must_use]
    pub fn with_epoch(self, epoch: Epoch) -> Self {
        Self { epoch, ..self }
    }
}
