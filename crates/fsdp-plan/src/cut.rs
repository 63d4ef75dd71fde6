//! How one parameter is divided over the ranks, and which part of it a rank holds.

use std::ops::Range;

use core_types::{Placement, Rank, WorldSize, split};
use serde::{Deserialize, Serialize};

use crate::ParameterInfo;

/// How one parameter is divided over the ranks of a world.
///
/// This is all that a plan stores for a parameter, however many ranks there are; the part of a rank is computed when
/// it is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Cut {
    /// Along dim 0 by [`split::chunk`]: as `fully_shard` (FSDP2) does it.
    Dim0,
    /// As a part of its unit's parameters laid end to end, which are cut by [`split::chunk`]: as
    /// `FullyShardedDataParallel` (FSDP1) does it.
    Flat {
        /// Elements of the unit before this parameter.
        offset: u64,
        /// Elements of the whole unit.
        unit_numel: u64,
    },
    /// Not at all: one rank owns the whole.
    Whole {
        /// The rank that owns it.
        owner: Rank,
    },
    /// Not at all: every rank keeps a copy.
    Replicated,
}

/// The part of a parameter that one rank holds, counted in elements of the parameter in row-major order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[non_exhaustive]
pub struct ShardAssignment {
    /// The rank that holds it.
    pub owner_rank: Rank,
    /// Which of the parameter's shards it is, from 0; ranks that hold nothing of it are not counted.
    pub shard_index: u64,
    /// Elements of the parameter before the shard.
    pub start_offset: u64,
    /// Elements in the shard; never 0.
    pub shard_size: u64,
    /// The first row, if the shard consists of whole rows: always, but in a flat layout or without dims.
    pub dim0_start: Option<u64>,
    /// The number of rows, if the shard consists of whole rows.
    pub dim0_rows: Option<u64>,
}

impl ShardAssignment {
    /// The part of `info` that `place` holds under `cut`, if it holds any.
    pub(crate) fn of(info: &ParameterInfo, cut: Cut, place: Placement) -> Option<Self> {
        let part = cut.part(info, place);
        let (start_offset, shard_size) = (part.start, part.end - part.start);
        if shard_size == 0 {
            return None;
        }
        let row_numel = (!matches!(cut, Cut::Flat { .. }) && !info.shape().is_empty()).then(|| info.row_numel());
        Some(Self {
            owner_rank: place.rank(),
            shard_index: cut.shard_index(info, place),
            start_offset,
            shard_size,
            dim0_start: row_numel.map(|row| start_offset / row),
            dim0_rows: row_numel.map(|row| shard_size / row),
        })
    }
}

impl Cut {
    /// The elements of `info` that `place` holds.
    fn part(self, info: &ParameterInfo, place: Placement) -> Range<u64> {
        match self {
            Self::Whole { owner } if owner != place.rank() => 0..0,
            Self::Whole { .. } | Self::Replicated => 0..info.numel(),
            Self::Dim0 | Self::Flat { .. } => self.span(info).map_or(0..0, |span| span.part(place)),
        }
    }

    fn shard_index(self, info: &ParameterInfo, place: Placement) -> u64 {
        let span = self.span(info);
        span.map_or(0, |span| place.rank().as_u64() - span.start / span.chunk_items(place.world_size()))
    }

    /// What a cut parameter is a span of; `None` if it is kept whole.
    pub(crate) fn span(self, info: &ParameterInfo) -> Option<Span> {
        match self {
            Self::Dim0 => {
                let rows = info.shape().first().copied().unwrap_or(1);
                Some(Span { start: 0, end: rows, total: rows, item_numel: info.row_numel() })
            }
            Self::Flat { offset, unit_numel } => {
                Some(Span { start: offset, end: offset + info.numel(), total: unit_numel, item_numel: 1 })
            }
            Self::Whole { .. } | Self::Replicated => None,
        }
    }
}

/// A parameter as a run of items, part of `total` items that are cut over the world in chunks.
///
/// The items are the rows of the parameter, or the elements of its unit.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Span {
    start: u64,
    end: u64,
    total: u64,
    item_numel: u64,
}

impl Span {
    /// Elements that the chunk of a rank has room for, whether or not there are enough for all ranks.
    pub(crate) fn chunk_numel(&self, world_size: WorldSize) -> u64 {
        self.chunk_items(world_size) * self.item_numel
    }

    /// Whether the first of all items lies in this span.
    pub(crate) fn is_first(&self) -> bool {
        self.start == 0 && self.end > 0
    }

    /// Ranks next to each other that hold equally many elements, with that number.
    ///
    /// A span has at most three of these runs: part of a chunk, whole chunks, part of a chunk. So a sum over all ranks
    /// takes as long for a thousand of them as for two.
    pub(crate) fn runs(&self, world_size: WorldSize) -> impl Iterator<Item = (Range<u64>, u64)> + use<> {
        let Self { start, end, item_numel, .. } = *self;
        let chunk = self.chunk_items(world_size);
        let runs = if start == end {
            [(0..0, 0), (0..0, 0), (0..0, 0)]
        } else {
            let (first, last) = (start / chunk, (end - 1) / chunk);
            let head_end = end.min(first.saturating_add(1).saturating_mul(chunk));
            [
                (first..first + 1, head_end - start),
                (first + 1..last, chunk),
                (last.max(first + 1)..last + 1, end - last * chunk),
            ]
        };
        runs.into_iter().filter(|(ranks, _)| !ranks.is_empty()).map(move |(ranks, items)| (ranks, items * item_numel))
    }

    fn chunk_items(&self, world_size: WorldSize) -> u64 {
        // Chunks are as long as the first of them.
        world_size.placements().next().map_or(0, |first| split::chunk(self.total, first).end)
    }

    fn part(&self, place: Placement) -> Range<u64> {
        let chunk = split::chunk(self.total, place);
        let within = |item: u64| (item.clamp(self.start, self.end) - self.start) * self.item_numel;
        within(chunk.start)..within(chunk.end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_say_for_all_ranks_what_parts_say_for_each() {
        for (total, world) in (0..=12).flat_map(|total| (1..=7).map(move |world| (total, world))) {
            let world_size = WorldSize::new(world).unwrap();
            for (start, end) in (0..=total).flat_map(|end| (0..=end).map(move |start| (start, end))) {
                let span = Span { start, end, total, item_numel: 3 };
                let by_runs =
                    |rank| span.runs(world_size).filter(|(ranks, _)| ranks.contains(&rank)).map(|(_, n)| n).sum();
                for place in world_size.placements() {
                    let numel: u64 = by_runs(place.rank().as_u64());
                    assert_eq!(numel, span.part(place).count() as u64, "{span:?} {place}");
                }
            }
        }
    }

    #[test]
    fn spans_at_the_end_of_the_number_range_do_not_overflow() {
        let span = Span { start: u64::MAX - 1, end: u64::MAX, total: u64::MAX, item_numel: 1 };
        for world in [1, 2, 3] {
            let runs: Vec<_> = span.runs(WorldSize::new(world).unwrap()).collect();
            assert_eq!(runs, [(world - 1..world, 1)]);
        }
    }
}
