//! Orders of an epoch: the sample at each position.

mod cached;
mod exact;
pub(crate) mod length;
mod mixture;
mod permutation;
mod sharded;
mod spdl;
mod stratified;
mod streaming;
mod swaps;
mod table;
mod torch;
mod weighted;

use cached::{CachedOrder, OrderRule};
use core_types::{Epoch, Seed};
use mixture::MixtureOrder;
pub(crate) use mixture::PhaseWeights;
pub use mixture::{MixtureEnd, MixturePart};
use sharded::ShardedOrder;
pub(crate) use spdl::SpdlDraws;
pub(crate) use stratified::ClassStrata;
pub use stratified::Quota;
use streaming::{SHORTEST, StreamingOrder};
use weighted::AliasTable;

use crate::{
    config::Order,
    error::{Error, Result},
};

/// Minimum length for [`Order::Shuffled`] to stream; below it the exact shuffle takes less than 64
/// KiB.
const STREAMING_FROM: u64 = 1 << 14;

/// The order of one epoch.
#[derive(Clone, Debug)]
pub(crate) enum EpochOrder {
    Sequential,
    Streaming {
        len: u64,
        permutation: StreamingOrder,
    },
    Cached(CachedOrder),
    /// Weighted draws, `len` per epoch.
    Weighted {
        len: u64,
        table: AliasTable,
        seed: Seed,
    },
    Sharded(ShardedOrder),
    Mixture(MixtureOrder),
}

impl EpochOrder {
    pub(crate) fn new(len: u64, order: Order, seed: Seed, epoch: Epoch) -> Result<Self> {
        let cached = |rule| CachedOrder::new(rule, len, seed, epoch).map(Self::Cached);
        match order {
            Order::Sequential => Ok(Self::Sequential),
            Order::Exact => cached(OrderRule::Exact),
            Order::Torch => cached(OrderRule::Torch),
            Order::Shuffled if len < STREAMING_FROM => cached(OrderRule::Exact),
            Order::Streaming if len < SHORTEST => cached(OrderRule::Exact),
            Order::Shuffled | Order::Streaming => {
                let permutation = StreamingOrder::new(len, seed.derive(epoch.as_u64()));
                Ok(Self::Streaming { len, permutation })
            }
        }
    }

    /// Creates an epoch of `len` weighted draws.
    pub(crate) fn weighted(weights: &[f64], len: u64, seed: Seed, epoch: Epoch) -> Result<Self> {
        let table = AliasTable::new(weights)?;
        Ok(Self::Weighted { len, table, seed: seed.derive(epoch.as_u64()) })
    }

    /// Creates an epoch of stratified draws from these classes.
    pub(crate) fn stratified(strata: ClassStrata, seed: Seed, epoch: Epoch) -> Result<Self> {
        let len = strata.len();
        CachedOrder::new(OrderRule::Stratified(Box::new(strata)), len, seed, epoch)
            .map(Self::Cached)
    }

    /// Creates an epoch that reads shards of these lengths in `lanes` lanes; see
    /// [`DistributedSampler::sharded`](crate::DistributedSampler::sharded).
    pub(crate) fn sharded(lens: &[u64], lanes: u64, seed: Seed, epoch: Epoch) -> Result<Self> {
        ShardedOrder::new(lens, lanes, seed.derive(epoch.as_u64())).map(Self::Sharded)
    }

    /// Creates an epoch of a mixture; the parts are read in order or shuffled.
    pub(crate) fn mixture(
        parts: &[MixturePart],
        end: MixtureEnd,
        order: Order,
        seed: Seed,
        epoch: Epoch,
    ) -> Result<Self> {
        let is_shuffled = order != Order::Sequential;
        let seed = seed.derive(epoch.as_u64());
        MixtureOrder::new(parts, end, is_shuffled, seed).map(Self::Mixture)
    }

    /// Creates an epoch of SPDL's draws.
    pub(crate) fn spdl(draws: SpdlDraws, seed: Seed, epoch: Epoch) -> Result<Self> {
        let len = draws.rounded_draws();
        CachedOrder::new(OrderRule::Spdl(Box::new(draws)), len, seed, epoch).map(Self::Cached)
    }

    /// Returns the length of the epoch if the order determines it, else `len`.
    pub(crate) fn len_or(&self, len: u64) -> u64 {
        match self {
            Self::Cached(order) => order.len(),
            Self::Sharded(order) => order.len(),
            Self::Mixture(order) => order.len(),
            Self::Sequential | Self::Streaming { .. } | Self::Weighted { .. } => len,
        }
    }

    /// Returns true if an epoch of `state_len` positions can be continued by this order, which has
    /// `len`.
    pub(crate) fn accepts_len(&self, state_len: u64, len: u64) -> bool {
        match self {
            // A `MixtureEnd` changes the length of a mixture, not the samples at its positions.
            Self::Mixture(_) => length::check_len(state_len).is_ok(),
            Self::Cached(order) => order.accepts_len(state_len),
            _ => state_len == len,
        }
    }

    /// Switches to the order of an epoch of `state_len` positions. Only the draws of SPDL change
    /// with the length.
    pub(crate) fn set_len(&mut self, state_len: u64) {
        if let Self::Cached(order) = self {
            order.redraw(state_len);
        }
    }

    /// Returns the weights of a mixture; empty for other orders.
    pub(crate) fn phases(&self) -> Vec<PhaseWeights> {
        match self {
            Self::Mixture(order) => order.phases(),
            _ => Vec::new(),
        }
    }

    /// Sets the weights of a mixture from `position` on.
    pub(crate) fn set_weights_from(&mut self, position: u64, weights: &[u64]) -> Result<()> {
        match self {
            Self::Mixture(order) => order.set_weights_from(position, weights),
            _ => Err(Error::not_mixture()),
        }
    }

    /// Returns the number of samples in all parts of a mixture, or `None` for other orders. An
    /// epoch can skip some of the samples and repeat others.
    pub(crate) fn data_set_len(&self) -> Option<u64> {
        match self {
            Self::Mixture(order) => Some(order.n_samples()),
            _ => None,
        }
    }

    /// Returns the part of a mixture that contains `index`.
    pub(crate) fn part_of(&self, index: u64) -> Option<usize> {
        match self {
            Self::Mixture(order) => order.part_of(index),
            _ => None,
        }
    }

    /// Switches to the order of another epoch, reusing the memory.
    pub(crate) fn reseed(&mut self, seed: Seed, epoch: Epoch) {
        let epoch_seed = seed.derive(epoch.as_u64());
        match self {
            Self::Sequential => {}
            Self::Weighted { seed, .. } => *seed = epoch_seed,
            Self::Sharded(order) => order.deal(epoch_seed),
            Self::Mixture(order) => order.set_seed(epoch_seed),
            Self::Streaming { len, permutation } => {
                *permutation = StreamingOrder::new(*len, epoch_seed);
            }
            Self::Cached(order) => order.reseed(seed, epoch),
        }
    }

    /// Returns a hash of the weights, classes, shards or parts; 0 for orders without them.
    pub(crate) fn fingerprint(&self) -> u64 {
        match self {
            Self::Weighted { table, .. } => table.fingerprint(),
            Self::Cached(order) => order.fingerprint(),
            Self::Sharded(order) => order.fingerprint(),
            Self::Mixture(order) => order.fingerprint(),
            Self::Sequential | Self::Streaming { .. } => 0,
        }
    }

    /// Returns the sample at `position`, which must be less than the length.
    pub(crate) fn get(&self, position: u64) -> u64 {
        match self {
            Self::Sequential => position,
            Self::Streaming { permutation, .. } => permutation.get(position),
            Self::Weighted { table, seed, .. } => table.draw(*seed, position),
            Self::Cached(order) => sample_at(order.samples(), position),
            Self::Sharded(order) => order.get(position),
            Self::Mixture(order) => order.get(position),
        }
    }

    /// Writes the samples at `first`, `first` + `step`, …; all positions must be less than the
    /// length.
    pub(crate) fn fill(&self, first: u64, step: u64, out: &mut [u64]) {
        match self {
            Self::Streaming { permutation, .. } => permutation.fill(first, step, out),
            Self::Weighted { table, seed, .. } => table.fill(*seed, first, step, out),
            Self::Sequential => fill_with(out, |n| first + n * step),
            Self::Sharded(order) => fill_with(out, |n| order.get(first + n * step)),
            Self::Mixture(order) => fill_with(out, |n| order.get(first + n * step)),
            Self::Cached(order) => {
                let samples = order.samples();
                fill_with(out, |n| sample_at(samples, first + n * step));
            }
        }
    }

    /// Returns the first position of `sample`, or `None` if the order does not contain it.
    ///
    /// `Sequential` does not know its length: callers compare the position with it.
    pub(crate) fn position(&self, sample: u64) -> Option<u64> {
        match self {
            Self::Sequential => Some(sample),
            Self::Streaming { len, permutation } => {
                (sample < *len).then(|| permutation.position(sample))
            }
            Self::Weighted { len, table, seed } => {
                (0..*len).find(|&position| table.draw(*seed, position) == sample)
            }
            Self::Sharded(order) => order.position(sample),
            Self::Mixture(order) => order.position(sample),
            Self::Cached(order) => order
                .samples()
                .iter()
                .position(|&entry| u64::from(entry) == sample)
                .map(|position| position as u64),
        }
    }
}

#[expect(
    clippy::cast_possible_truncation,
    reason = "positions are less than the length of the table, a `usize`"
)]
fn sample_at(samples: &[u32], position: u64) -> u64 {
    u64::from(samples[position as usize])
}

/// Writes `sample` of each index to `out`.
fn fill_with(out: &mut [u64], sample: impl Fn(u64) -> u64) {
    for (n, slot) in (0..).zip(out) {
        *slot = sample(n);
    }
}
