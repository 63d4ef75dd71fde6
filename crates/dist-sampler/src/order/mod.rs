//! The order of an epoch: which sample stands at each position.

mod exact;
mod stratified;
mod streaming;
mod table;
mod torch;
mod weighted;

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
pub(crate) enum Samples {
    Sequential,
    Streaming {
        len: u64,
        permutation: Streaming,
    },
    Table {
        table: Vec<u32>,
        refill: Refill,
    },
    /// Draws by weight, `len` of them per epoch.
    Weighted {
        len: u64,
        table: AliasTable,
        seed: Seed,
    },
}

/// How a table gets the order of another epoch.
#[derive(Clone, Debug)]
pub(crate) enum Refill {
    Exact,
    Torch,
    Stratified(Box<Strata>),
}

impl Samples {
    pub(crate) fn new(len: u64, order: Order, seed: Seed, epoch: Epoch) -> Result<Self> {
        let mut samples = match order {
            Order::Sequential => Self::Sequential,
            Order::Exact => Self::Table { table: table::allocate(len)?, refill: Refill::Exact },
            Order::Torch => Self::Table { table: table::allocate(len)?, refill: Refill::Torch },
            Order::Shuffled if len < STREAMING_FROM => {
                return Self::new(len, Order::Exact, seed, epoch);
            }
            Order::Streaming if len < SHORTEST => return Self::new(len, Order::Exact, seed, epoch),
            Order::Shuffled | Order::Streaming => {
                Self::Streaming { len, permutation: Streaming::new(len, seed) }
            }
        };
        samples.reseed(seed, epoch);
        Ok(samples)
    }

    /// An epoch of `len` draws by weight.
    pub(crate) fn weighted(weights: &[f64], len: u64, seed: Seed, epoch: Epoch) -> Result<Self> {
        let table = AliasTable::new(weights)?;
        Ok(Self::Weighted { len, table, seed: seed.derive(epoch.as_u64()) })
    }

    /// An epoch of what the strata hold.
    pub(crate) fn stratified(strata: Strata, seed: Seed, epoch: Epoch) -> Result<Self> {
        let table = strata.table(seed.derive(epoch.as_u64()))?;
        Ok(Self::Table { table, refill: Refill::Stratified(Box::new(strata)) })
    }

    /// Turns this into the order of another epoch, in the memory it has.
    pub(crate) fn reseed(&mut self, seed: Seed, epoch: Epoch) {
        let epoch_seed = seed.derive(epoch.as_u64());
        match self {
            Self::Sequential => {}
            Self::Weighted { seed, .. } => *seed = epoch_seed,
            Self::Streaming { len, permutation } => *permutation = Streaming::new(*len, epoch_seed),
            Self::Table { table, refill: Refill::Exact } => exact::shuffle(table, epoch_seed),
            Self::Table { table, refill: Refill::Stratified(strata) } => {
                strata.fill(table, epoch_seed);
            }
            Self::Table { table, refill: Refill::Torch } => {
                torch::shuffle(table, seed.as_u64().wrapping_add(epoch.as_u64()));
            }
        }
    }

    /// Tells the weights or classes of one data set from those of another; 0 for orders that have
    /// neither.
    pub(crate) fn fingerprint(&self) -> u64 {
        match self {
            Self::Weighted { table, .. } => table.fingerprint(),
            Self::Table { refill: Refill::Stratified(strata), .. } => strata.fingerprint(),
            Self::Sequential
            | Self::Streaming { .. }
            | Self::Table { refill: Refill::Exact | Refill::Torch, .. } => 0,
        }
    }

    /// The sample at `position`, which must be below the length.
    pub(crate) fn get(&self, position: u64) -> u64 {
        match self {
            Self::Sequential => position,
            Self::Streaming { permutation, .. } => permutation.get(position),
            Self::Weighted { table, seed, .. } => table.draw(*seed, position),
            #[expect(
                clippy::cast_possible_truncation,
                reason = "a position is below the table's length, a `usize`"
            )]
            Self::Table { table, .. } => u64::from(table[position as usize]),
        }
    }

    /// Writes the samples at `first`, `first` + `step`, … ; all of these positions must be below
    /// the length.
    pub(crate) fn fill(&self, first: u64, step: u64, out: &mut [u64]) {
        match self {
            Self::Streaming { permutation, .. } => permutation.fill(first, step, out),
            Self::Weighted { table, seed, .. } => table.fill(*seed, first, step, out),
            Self::Sequential | Self::Table { .. } => {
                (0..).zip(out).for_each(|(n, slot)| *slot = self.get(first + n * step));
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
            Self::Table { table, .. } => table
                .iter()
                .position(|&entry| u64::from(entry) == sample)
                .map(|position| position as u64),
        }
    }
}
