//! The order of an epoch: which sample stands at each position.

mod cached;
mod exact;
mod stratified;
mod streaming;
mod swaps;
mod table;
mod torch;
mod weighted;

use cached::{CachedOrder, Rule};
use core_types::{Epoch, Seed};
pub use stratified::Quota;
pub(crate) use stratified::Strata;
use streaming::{SHORTEST, Streaming};
use weighted::AliasTable;

use crate::{config::Order, error::Result};

/// From this length on [`Order::Shuffled`] streams: below it the exact shuffle takes less than 64
/// KiB.
const STREAMING_FROM: u64 = 1 << 14;

/// The order of one epoch.
#[derive(Clone, Debug)]
pub(crate) enum EpochOrder {
    Sequential,
    Streaming {
        len: u64,
        permutation: Streaming,
    },
    Cached(CachedOrder),
    /// Draws by weight, `len` of them per epoch.
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
            Order::Exact => cached(Rule::Exact),
            Order::Torch => cached(Rule::Torch),
            Order::Shuffled if len < STREAMING_FROM => cached(Rule::Exact),
            Order::Streaming if len < SHORTEST => cached(Rule::Exact),
            Order::Shuffled | Order::Streaming => {
                let permutation = Streaming::new(len, seed.derive(epoch.as_u64()));
                Ok(Self::Streaming { len, permutation })
            }
        }
    }

    /// An epoch of `len` draws by weight.
    pub(crate) fn weighted(weights: &[f64], len: u64, seed: Seed, epoch: Epoch) -> Result<Self> {
        let table = AliasTable::new(weights)?;
        Ok(Self::Weighted { len, table, seed: seed.derive(epoch.as_u64()) })
    }

    /// An epoch of what the strata hold.
    pub(crate) fn stratified(strata: Strata, seed: Seed, epoch: Epoch) -> Result<Self> {
        let len = strata.len();
        CachedOrder::new(Rule::Stratified(Box::new(strata)), len, seed, epoch).map(Self::Cached)
    }

    /// Turns this into the order of another epoch, in the memory it has.
    pub(crate) fn reseed(&mut self, seed: Seed, epoch: Epoch) {
        let epoch_seed = seed.derive(epoch.as_u64());
        match self {
            Self::Sequential => {}
            Self::Weighted { seed, .. } => *seed = epoch_seed,
            Self::Streaming { len, permutation } => *permutation = Streaming::new(*len, epoch_seed),
            Self::Cached(order) => order.reseed(seed, epoch),
        }
    }

    /// Tells the weights or classes of one data set from those of another; 0 for orders that have
    /// neither.
    pub(crate) fn fingerprint(&self) -> u64 {
        match self {
            Self::Weighted { table, .. } => table.fingerprint(),
            Self::Cached(order) => order.fingerprint(),
            Self::Sequential | Self::Streaming { .. } => 0,
        }
    }

    /// The sample at `position`, which must be below the length.
    pub(crate) fn get(&self, position: u64) -> u64 {
        match self {
            Self::Sequential => position,
            Self::Streaming { permutation, .. } => permutation.get(position),
            Self::Weighted { table, seed, .. } => table.draw(*seed, position),
            Self::Cached(order) => entry(order.samples(), position),
        }
    }

    /// Writes the samples at `first`, `first` + `step`, … ; all of these positions must be below
    /// the length.
    pub(crate) fn fill(&self, first: u64, step: u64, out: &mut [u64]) {
        match self {
            Self::Streaming { permutation, .. } => permutation.fill(first, step, out),
            Self::Weighted { table, seed, .. } => table.fill(*seed, first, step, out),
            Self::Sequential => write(out, |n| first + n * step),
            Self::Cached(order) => {
                let samples = order.samples();
                write(out, |n| entry(samples, first + n * step));
            }
        }
    }

    /// The first position of `sample`, or `None` if it stands nowhere.
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
    reason = "a position is below the table's length, a `usize`"
)]
fn entry(samples: &[u32], position: u64) -> u64 {
    u64::from(samples[position as usize])
}

fn write(out: &mut [u64], sample: impl Fn(u64) -> u64) {
    (0..).zip(out).for_each(|(n, slot)| *slot = sample(n));
}
