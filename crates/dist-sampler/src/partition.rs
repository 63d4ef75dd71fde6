//! The positions of the order that each rank reads.

use std::ops::Range;

use core_types::{Placement, Rank, WorldSize, split::balanced};

use crate::{
    config::{Partition, Tail},
    error::{Error, Result},
    reshard::UnreadRanges,
    split::{self, Strided},
};

/// The rule that assigns positions to ranks.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "snake_case"))]
pub(crate) enum PartitionRule {
    Contiguous(Tail),
    Strided(Tail),
    /// Contiguous ranges in proportion to a weight per rank.
    Proportional(Vec<u64>),
}

impl PartitionRule {
    pub(crate) fn new(partition: Partition, tail: Tail) -> Self {
        match partition {
            Partition::Contiguous => Self::Contiguous(tail),
            Partition::Strided => Self::Strided(tail),
        }
    }
}

/// The assignment of `len` positions to the ranks of a world.
///
/// Positions from `len` on are the repetitions of [`Tail::Pad`].
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct ShareRule {
    len: u64,
    world_size: WorldSize,
    rule: PartitionRule,
}

impl ShareRule {
    /// Creates the assignment of `len` positions, at most 2^63, so that padding cannot overflow.
    pub(crate) fn new(len: u64, world_size: WorldSize, rule: PartitionRule) -> Result<Self> {
        if let PartitionRule::Proportional(weights) = &rule {
            if weights.len() != world_size.as_usize() {
                return Err(Error::RankWeights { weights: weights.len(), world_size });
            }
            if weights.iter().all(|&weight| weight == 0) {
                return Err(Error::no_weight(weights.len()));
            }
        }
        Ok(Self { len, world_size, rule })
    }

    /// Returns the assignment of `len` positions by the same rule.
    pub(crate) fn with_len(&self, len: u64) -> Self {
        Self { len, ..self.clone() }
    }

    pub(crate) fn world_size(&self) -> WorldSize {
        self.world_size
    }

    pub(crate) fn rule(&self) -> &PartitionRule {
        &self.rule
    }

    /// Returns the positions of one rank.
    pub(crate) fn positions(&self, placement: Placement) -> RankPositions {
        let regular = match &self.rule {
            PartitionRule::Contiguous(Tail::LastRank) => {
                split::last_takes_rest(self.len, placement).into()
            }
            PartitionRule::Contiguous(tail) => balanced(self.n_even(*tail), placement).into(),
            PartitionRule::Strided(tail) => Strided::new(self.n_even(*tail), placement),
            PartitionRule::Proportional(weights) => {
                let mut parts = split::proportional(self.len, weights);
                #[expect(clippy::expect_used, reason = "`new` checks the number of weights")]
                let part = parts.nth(placement.rank().as_usize()).expect("a weight for each rank");
                part.into()
            }
        };
        let takes_rest = self.rule == PartitionRule::Strided(Tail::LastRank) && placement.is_last();
        RankPositions {
            regular,
            rest: if takes_rest { self.full_rounds()..self.len } else { 0..0 },
        }
    }

    /// Returns the rank that reads `position`, or `None` if no rank does.
    pub(crate) fn owner(&self, position: u64) -> Option<Rank> {
        let world = self.world_size.as_u64();
        let rank = match &self.rule {
            PartitionRule::Contiguous(Tail::LastRank) => {
                split::last_takes_rest_owner(self.len, world, position)?
            }
            PartitionRule::Contiguous(tail) => {
                split::balanced_owner(self.n_even(*tail), world, position)?
            }
            PartitionRule::Strided(tail) if position < self.n_even(*tail) => position % world,
            PartitionRule::Strided(Tail::LastRank) if position < self.len => world - 1,
            PartitionRule::Strided(_) => return None,
            PartitionRule::Proportional(weights) => {
                let mut parts = (0..).zip(split::proportional(self.len, weights));
                parts.find(|(_, part)| part.contains(&position))?.0
            }
        };
        #[expect(
            clippy::expect_used,
            reason = "every rule assigns positions to ranks of the world"
        )]
        let owner = Placement::new(rank, world).expect("a rank of the world");
        Some(owner.rank())
    }

    /// Returns the positions that are unread after every rank has read its first `consumed`
    /// positions, or all its positions if it has fewer.
    pub(crate) fn unread_after(&self, consumed: u64) -> UnreadRanges {
        let mut unread = UnreadRanges::default();
        match &self.rule {
            PartitionRule::Strided(tail) => {
                unread.push(self.first_unread(*tail, consumed)..self.len);
            }
            PartitionRule::Contiguous(tail) => {
                self.push_unread_stretches(*tail, consumed, &mut unread);
            }
            PartitionRule::Proportional(weights) => {
                for part in split::proportional(self.len, weights) {
                    unread.push(part.start.saturating_add(consumed)..part.end);
                }
            }
        }
        unread
    }

    /// Adds the unread ends of the ranks' ranges, and the dropped positions.
    fn push_unread_stretches(&self, tail: Tail, consumed: u64, unread: &mut UnreadRanges) {
        let world = self.world_size.as_u64();
        let size = self.len / world;
        let extra = self.len % world;
        match tail {
            Tail::Drop => {
                unread.push_stretches(0, size, world, consumed);
                unread.push(size * world..self.len);
            }
            Tail::LastRank => {
                unread.push_stretches(0, size, world - 1, consumed);
                unread.push((size * (world - 1)).saturating_add(consumed)..self.len);
            }
            Tail::Spread => {
                unread.push_stretches(0, size + 1, extra, consumed);
                unread.push_stretches((size + 1) * extra, size, world - extra, consumed);
            }
            // Padding is beyond the end and is not read again.
            Tail::Pad => {
                let size = self.len.div_ceil(world).max(1);
                let n_full = self.len / size;
                unread.push_stretches(0, size, n_full, consumed);
                unread.push((size * n_full).saturating_add(consumed)..self.len);
            }
        }
    }

    /// Returns the first unread position of a strided partition after every rank has read
    /// `consumed`.
    fn first_unread(&self, tail: Tail, consumed: u64) -> u64 {
        let world = self.world_size.as_u64();
        let regular = consumed.saturating_mul(world).min(self.n_even(tail));
        let rest =
            if tail == Tail::LastRank { consumed.saturating_sub(self.len / world) } else { 0 };
        regular.saturating_add(rest).min(self.len)
    }

    /// Returns the number of positions that are assigned evenly, including padding.
    fn n_even(&self, tail: Tail) -> u64 {
        match tail {
            Tail::Drop | Tail::LastRank => self.full_rounds(),
            Tail::Spread => self.len,
            Tail::Pad => self.len.div_ceil(self.world_size.as_u64()) * self.world_size.as_u64(),
        }
    }

    /// Returns the number of positions in complete rounds.
    fn full_rounds(&self) -> u64 {
        self.len / self.world_size.as_u64() * self.world_size.as_u64()
    }
}

/// The positions of one rank, in reading order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RankPositions {
    /// Evenly spaced positions.
    regular: Strided,
    /// Incomplete last round, if the last rank reads all of it.
    rest: Range<u64>,
}

impl RankPositions {
    pub(crate) fn len(&self) -> u64 {
        self.regular.len + (self.rest.end - self.rest.start)
    }

    /// Returns the `n`-th position, or `None` beyond the last.
    pub(crate) fn get(&self, n: u64) -> Option<u64> {
        self.regular.get(n).or_else(|| {
            let position = (n - self.regular.len).checked_add(self.rest.start)?;
            self.rest.contains(&position).then_some(position)
        })
    }

    /// Returns the step between positions, and the number of positions before the incomplete last
    /// round.
    pub(crate) fn stride(&self) -> (u64, u64) {
        (self.regular.step, self.regular.len)
    }
}
