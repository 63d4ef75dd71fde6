//! The order of an epoch: a permutation of the data set that depends on seed and epoch alone.

mod exact;

use core_types::{Epoch, Seed};

use crate::{config::Order, error::Result};

/// Which sample stands at each position of the epoch.
#[derive(Clone, Debug)]
pub(crate) enum Permutation {
    Identity,
    /// The permutation itself, held in memory.
    Table(Vec<u32>),
}

impl Permutation {
    pub(crate) fn new(len: u64, order: Order, seed: Seed, epoch: Epoch) -> Result<Self> {
        let mut permutation = match order {
            Order::Sequential => Self::Identity,
            Order::Exact => Self::Table(exact::table(len)?),
        };
        permutation.reseed(seed, epoch);
        Ok(permutation)
    }

    /// Turns this into the permutation of another epoch, in the memory it has.
    pub(crate) fn reseed(&mut self, seed: Seed, epoch: Epoch) {
        match self {
            Self::Identity => {}
            Self::Table(table) => exact::shuffle(table, seed.derive(epoch.as_u64())),
        }
    }

    /// The sample at `position`, which must be below the length.
    pub(crate) fn get(&self, position: u64) -> u64 {
        match self {
            Self::Identity => position,
            #[allow(clippy::cast_possible_truncation, reason = "a position is below the table's length, a `usize`")]
            Self::Table(table) => u64::from(table[position as usize]),
        }
    }
}
