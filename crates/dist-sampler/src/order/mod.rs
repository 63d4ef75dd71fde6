//! Orders of an epoch: the sample at each position.

mod cached;
mod exact;
mod stratified;
mod streaming;
mod swaps;
mod table;
mod torch;
mod weighted;

use cached::{CachedOrder, OrderRule};
use core_types::{Epoch, Seed};
pub(crate) use stratified::ClassStrata;
pub use stratified::Quota;
use streaming::{SHORTEST, StreamingOrder};
use weighted::AliasTable;

use crate::{config::Order, error::Result};

/// Length from which [`Order::Shuffled`] streams; below it the exact shuffle takes less than 64
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

    /// Creates an epoch of the strata.
    pub(crate) fn stratified(strata: ClassStrata, seed: Seed, epoch: Epoch) -> Result<Self> {
        let len = strata.len();
        CachedOrder::new(OrderRule::Stratified(Box::new(strata)), len, seed, epoch)
            .map(Self::Cached)
    }

    /// Changes to the order of another epoch, reusing the memory.
    pub(crate) fn reseed(&mut self, seed: Seed, epoch: Epoch) {
        let epoch_seed = seed.derive(epoch.as_u64());
        match self {
            Self::Sequential => {}
            Self::Weighted { seed, .. } => *seed = epoch_seed,
            Self::Streaming { len, permutation } => {
                *permutation = StreamingOrder::new(*len, epoch_seed);
            }
            Self::Cached(order) => order.reseed(seed, epoch),
        }
    }

    /// Returns a hash of the weights or classes; 0 for orders without them.
    pub(crate) fn fingerprint(&self) -> u64 {
        match self {
            Self::Weighted { table, .. } => table.fingerprint(),
            Self::Cached(order) => order.fingerprint(),
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
        }
    }

    /// Writes the samples at `first`, `first` + `step`, …; all positions must be less than the
    /// length.
    pub(crate) fn fill(&self, first: u64, step: u64, out: &mut [u64]) {
        match self {
            Self::Streaming { permutation, .. } => permutation.fill(first, step, out),
            Self::Weighted { table, seed, .. } => table.fill(*seed, first, step, out),
            Self::Sequential => fill_with(out, |n| first + n * step),
            Self::Cached(order) => {
                let samples = order.samples();
                fill_with(out, |n| sample_at(samples, first + n * step));
            }
        }
    }

    /// Returns the first position of `sample`, or `None` if the order does not contain it.
    pub(crate) fn position(&self, sample: u64) -> Option<u64> {
        match self {
            Self::Sequential => Some(sample),
            Self::Streaming { len, permutation } => {
                (sample < *len).then(|| permutation.position(sample))
            }
            Self::Weighted { len, table, seed } => {
                (0..*len).find(|&position| table.draw(*seed, position) == sample)
            }
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
