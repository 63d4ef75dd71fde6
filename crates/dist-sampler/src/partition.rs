//! Which positions of the epoch's order a rank reads.

use std::ops::Range;

use core_types::{
    Placement,
    split::{self, Strided},
};

use crate::config::{Partition, Tail};

/// The positions of one rank, in the order in which it reads them.
///
/// Positions at and beyond the data set's length are the repetitions that [`Tail::Pad`] asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Positions {
    dealt: Strided,
    /// The incomplete last round, where it goes to the last rank in one piece.
    rest: Range<u64>,
}

impl Positions {
    /// The positions of `place` in an order of `len` samples, `len` at most 2^63 so that padding cannot overflow.
    pub(crate) fn new(len: u64, place: Placement, partition: Partition, tail: Tail) -> Self {
        let world = place.world_size().as_u64();
        let full_rounds = len / world * world;
        let total = match tail {
            Tail::Drop | Tail::LastRank => full_rounds,
            Tail::Spread => len,
            Tail::Pad => len.div_ceil(world) * world,
        };
        let dealt = match (partition, tail) {
            (Partition::Contiguous, Tail::LastRank) => split::last_takes_rest(len, place).into(),
            (Partition::Contiguous, _) => split::balanced(total, place).into(),
            (Partition::Strided, _) => split::strided(total, place),
        };
        let takes_rest = partition == Partition::Strided && tail == Tail::LastRank && place.is_last();
        Self { dealt, rest: if takes_rest { full_rounds..len } else { 0..0 } }
    }

    pub(crate) fn len(&self) -> u64 {
        self.dealt.len() + (self.rest.end - self.rest.start)
    }

    /// The `n`-th position of this rank, or `None` beyond its last.
    pub(crate) fn get(&self, n: u64) -> Option<u64> {
        self.dealt.get(n).or_else(|| {
            let position = (n - self.dealt.len()).checked_add(self.rest.start)?;
            self.rest.contains(&position).then_some(position)
        })
    }
}
