//! Which positions of the epoch's order a rank reads.

use std::ops::Range;

use core_types::{
    Placement, Rank, WorldSize,
    split::{self, Strided},
};

use crate::{
    config::{Partition, Tail},
    error::{Error, Result},
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
pub(crate) struct Deal {
    len: u64,
    world_size: WorldSize,
    rule: Rule,
}

impl Deal {
    /// A deal of `len` positions, which are at most 2^63, so that padding cannot overflow.
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

    /// The same deal of another number of positions.
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
            Rule::Proportional(weights) => self.proportional_owner(weights, position),
        }
    }

    fn proportional_owner(&self, weights: &[u64], position: u64) -> Option<Rank> {
        let places: Vec<Placement> = self.world_size.placements().collect();
        let ends_before = |place: &Placement| {
            split::proportional(self.len, weights, place.rank()).end <= position
        };
        places.get(places.partition_point(ends_before)).map(|place| place.rank())
    }

    /// The positions that nobody has read when every rank has read its first `consumed`, or all if
    /// it has fewer.
    pub(crate) fn unread_after(&self, consumed: u64) -> Unread {
        if let Rule::Strided(tail) = self.rule {
            return Unread::from(self.unread_rounds(tail, consumed)..self.len);
        }
        let of_ranks =
            self.world_size.placements().map(|place| self.positions(place).unread(consumed));
        let is_dropped = self.rule == Rule::Contiguous(Tail::Drop);
        let dropped = if is_dropped { self.full_rounds()..self.len } else { 0..0 };
        let all = of_ranks.chain([dropped]);
        // Padding, which lies beyond the end, is not read again.
        Unread::new(all.map(|range| range.start.min(self.len)..range.end.min(self.len)))
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

    /// The range from the `consumed`-th position to the last; there must be no gaps in it.
    fn unread(&self, consumed: u64) -> Range<u64> {
        match self.get(consumed) {
            Some(first) => first..first + (self.len() - consumed),
            None => 0..0,
        }
    }
}

/// The positions of an order that are still to be read: ranges in ascending order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Unread {
    ranges: Vec<Range<u64>>,
    /// How many positions stand before each range.
    before: Vec<u64>,
    len: u64,
}

impl From<Range<u64>> for Unread {
    fn from(range: Range<u64>) -> Self {
        Self::new(std::iter::once(range))
    }
}

impl Unread {
    /// The positions of `ranges`, which ascend; neighbors that touch become one range.
    pub(crate) fn new(ranges: impl IntoIterator<Item = Range<u64>>) -> Self {
        let mut unread = Self { ranges: Vec::new(), before: Vec::new(), len: 0 };
        ranges
            .into_iter()
            .filter(|range| range.start < range.end)
            .for_each(|range| unread.push(range));
        unread
    }

    fn push(&mut self, range: Range<u64>) {
        let len = range.end - range.start;
        match self.ranges.last_mut() {
            Some(last) if last.end == range.start => last.end = range.end,
            _ => {
                self.ranges.push(range);
                self.before.push(self.len);
            }
        }
        self.len += len;
    }

    pub(crate) fn len(&self) -> u64 {
        self.len
    }

    /// Where the positions begin, if they have no gaps.
    pub(crate) fn start_of_only_range(&self) -> Option<u64> {
        if let [range] = &self.ranges[..] { Some(range.start) } else { None }
    }

    /// The `n`-th unread position; `n` must be below the length.
    pub(crate) fn get(&self, n: u64) -> u64 {
        let range = self.before.partition_point(|&before| before <= n) - 1;
        self.ranges[range].start + (n - self.before[range])
    }

    /// The number of unread positions before `position`, or `None` if that has been read.
    pub(crate) fn index_of(&self, position: u64) -> Option<u64> {
        let range = self.ranges.partition_point(|range| range.end <= position);
        let start = self.ranges.get(range).map(|range| range.start)?;
        Some(self.before[range] + position.checked_sub(start)?)
    }

    /// The positions that are still unread when of these, counted from 0, only `later` are.
    pub(crate) fn then(&self, later: &Self) -> Self {
        Self::new(later.ranges.iter().flat_map(|range| self.slice(range.clone())))
    }

    /// The positions from the `range.start`-th to the `range.end`-th.
    fn slice(&self, range: Range<u64>) -> impl Iterator<Item = Range<u64>> {
        self.ranges.iter().zip(&self.before).map(move |(of_order, &before)| {
            let clamp = |n: u64| (of_order.start + n.saturating_sub(before)).min(of_order.end);
            clamp(range.start)..clamp(range.end)
        })
    }
}
