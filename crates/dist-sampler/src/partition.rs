//! Which positions of the epoch's order a rank reads.

use std::ops::Range;

use core_types::{
    Placement, Rank, WorldSize,
    split::{self, Strided},
};

use crate::{
    config::{Partition, Tail},
    error::{Error, Result},
    reshard::Left,
};

/// The rule by which positions are dealt out to ranks.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "snake_case"))]
pub(crate) enum Rule {
    Contiguous(Tail),
    Strided(Tail),
    /// Contiguous stretches in proportion to a weight for each rank.
    Proportional(Vec<u64>),
}

impl Rule {
    pub(crate) fn new(partition: Partition, tail: Tail) -> Self {
        match partition {
            Partition::Contiguous => Self::Contiguous(tail),
            Partition::Strided => Self::Strided(tail),
        }
    }
}

/// How `len` positions are dealt out to the ranks of a world.
///
/// Positions at and beyond `len` are the repetitions that [`Tail::Pad`] asks for.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct ShareRule {
    len: u64,
    world_size: WorldSize,
    rule: Rule,
}

impl ShareRule {
    /// Positions that ranks share, `len` of them, which are at most 2^63, so that padding cannot overflow.
    pub(crate) fn new(len: u64, world_size: WorldSize, rule: Rule) -> Result<Self> {
        if let Rule::Proportional(weights) = &rule {
            if weights.len() != world_size.as_usize() {
                return Err(Error::RankWeights { weights: weights.len(), world_size });
            }
            if weights.iter().all(|&weight| weight == 0) {
                return Err(Error::NoRankWeight { world_size });
            }
        }
        Ok(Self { len, world_size, rule })
    }

    /// The same rule for another number of positions.
    pub(crate) fn of_len(&self, len: u64) -> Self {
        Self { len, ..self.clone() }
    }

    pub(crate) fn world_size(&self) -> WorldSize {
        self.world_size
    }

    pub(crate) fn rule(&self) -> &Rule {
        &self.rule
    }

    /// The positions of one rank.
    pub(crate) fn positions(&self, placement: Placement) -> Positions {
        let dealt = match &self.rule {
            Rule::Contiguous(Tail::LastRank) => split::last_takes_rest(self.len, placement).into(),
            Rule::Contiguous(tail) => split::balanced(self.total(*tail), placement).into(),
            Rule::Strided(tail) => split::strided(self.total(*tail), placement),
            Rule::Proportional(weights) => {
                split::proportional(self.len, weights, placement.rank()).into()
            }
        };
        let takes_rest = self.rule == Rule::Strided(Tail::LastRank) && placement.is_last();
        Positions { dealt, rest: if takes_rest { self.full_rounds()..self.len } else { 0..0 } }
    }

    /// The rank that reads `position`, or `None` if nobody does.
    pub(crate) fn owner(&self, position: u64) -> Option<Rank> {
        match &self.rule {
            Rule::Contiguous(Tail::LastRank) => {
                split::last_takes_rest_owner(self.len, self.world_size, position)
            }
            Rule::Contiguous(tail) => {
                split::balanced_owner(self.total(*tail), self.world_size, position)
            }
            Rule::Strided(tail) if position < self.total(*tail) => {
                Some(split::strided_owner(self.world_size, position))
            }
            Rule::Strided(Tail::LastRank) if position < self.len => {
                self.world_size.placements().next_back().map(Placement::rank)
            }
            Rule::Strided(_) => None,
            Rule::Proportional(weights) => {
                let parts = split::proportional_parts(self.len, weights);
                let mut owned = self.world_size.placements().zip(parts);
                owned.find(|(_, part)| part.contains(&position)).map(|(place, _)| place.rank())
            }
        }
    }

    /// The positions that nobody has read when every rank has read its first `consumed`, or all if
    /// it has fewer.
    pub(crate) fn unread_after(&self, consumed: u64) -> Left {
        let mut left = Left::default();
        match &self.rule {
            Rule::Strided(tail) => left.push(self.unread_rounds(*tail, consumed)..self.len),
            Rule::Contiguous(tail) => self.push_unread_stretches(*tail, consumed, &mut left),
            Rule::Proportional(weights) => {
                for part in split::proportional_parts(self.len, weights) {
                    left.push(part.start.saturating_add(consumed)..part.end);
                }
            }
        }
        left
    }

    /// Adds what is unread of the ranks' stretches, and what is dropped.
    fn push_unread_stretches(&self, tail: Tail, consumed: u64, left: &mut Left) {
        let world = self.world_size.as_u64();
        let size = self.len / world;
        let extra = self.len % world;
        match tail {
            Tail::Drop => {
                left.push_stretches(0, size, world, consumed);
                left.push(size * world..self.len);
            }
            Tail::LastRank => {
                left.push_stretches(0, size, world - 1, consumed);
                left.push((size * (world - 1)).saturating_add(consumed)..self.len);
            }
            Tail::Spread => {
                left.push_stretches(0, size + 1, extra, consumed);
                left.push_stretches((size + 1) * extra, size, world - extra, consumed);
            }
            // Padding, which lies beyond the end, is not read again.
            Tail::Pad => {
                let size = self.len.div_ceil(world).max(1);
                let n_full = self.len / size;
                left.push_stretches(0, size, n_full, consumed);
                left.push((size * n_full).saturating_add(consumed)..self.len);
            }
        }
    }

    /// The first position that nobody has read when every rank has read `consumed`, dealt
    /// round-robin.
    fn unread_rounds(&self, tail: Tail, consumed: u64) -> u64 {
        let world = self.world_size.as_u64();
        let dealt = consumed.saturating_mul(world).min(self.total(tail));
        let rest =
            if tail == Tail::LastRank { consumed.saturating_sub(self.len / world) } else { 0 };
        dealt.saturating_add(rest).min(self.len)
    }

    /// The positions that are dealt out evenly.
    fn total(&self, tail: Tail) -> u64 {
        match tail {
            Tail::Drop | Tail::LastRank => self.full_rounds(),
            Tail::Spread => self.len,
            Tail::Pad => self.len.div_ceil(self.world_size.as_u64()) * self.world_size.as_u64(),
        }
    }

    fn full_rounds(&self) -> u64 {
        self.len / self.world_size.as_u64() * self.world_size.as_u64()
    }
}

/// The positions of one rank, in the order in which it reads them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Positions {
    dealt: Strided,
    /// The incomplete last round, where it goes to the last rank in one piece.
    rest: Range<u64>,
}

impl Positions {
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

    /// The distance between neighbors, and how many positions are that far apart before the rest
    /// begins.
    pub(crate) fn stride(&self) -> (u64, u64) {
        (self.dealt.step(), self.dealt.len())
    }
}
