//! Equal chunks: rows of a parameter, or elements of a flat unit.

use std::ops::Range;

use core_types::{Placement, WorldSize, split};

use crate::param::ParameterInfo;

/// A parameter as a range of items, within `total` items that are cut into one chunk per member of
/// the shard group.
///
/// The items are the rows of the parameter, or the elements of its unit.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ChunkedCut {
    start: u64,
    end: u64,
    total: u64,
    item_numel: u64,
}

impl ChunkedCut {
    /// Cuts the rows of a parameter.
    pub(super) fn rows(info: &ParameterInfo) -> Self {
        let rows = info.shape()[0]; // plans never cut a parameter without dims along dim 0
        Self { start: 0, end: rows, total: rows, item_numel: info.row_numel() }
    }

    /// Cuts the elements of a flat unit of `total` elements, in which the parameter begins at
    /// element `offset`.
    pub(super) fn elements(info: &ParameterInfo, offset: u64, total: u64) -> Self {
        Self { start: offset, end: offset + info.numel(), total, item_numel: 1 }
    }

    /// Returns the capacity of a chunk in elements, even if there are too few elements to fill
    /// every chunk.
    pub(crate) fn chunk_numel(&self, group: WorldSize) -> u64 {
        self.chunk_items(group) * self.item_numel
    }

    /// Returns true if the range contains the first item.
    pub(crate) fn is_first(&self) -> bool {
        self.start == 0 && self.end > 0
    }

    /// Returns runs of neighboring members that hold equally many elements, each with the number of
    /// elements per member.
    ///
    /// There are at most three runs: part of a chunk, whole chunks, part of a chunk. So a sum over
    /// members takes the same time for two members as for a thousand.
    pub(crate) fn runs(&self, group: WorldSize) -> impl Iterator<Item = (Range<u64>, u64)> + use<> {
        let Self { start, end, item_numel, .. } = *self;
        let chunk = self.chunk_items(group);
        let runs = if start == end {
            [(0..0, 0), (0..0, 0), (0..0, 0)]
        } else {
            let first = start / chunk;
            let last = (end - 1) / chunk;
            let head_end = end.min(first.saturating_add(1).saturating_mul(chunk));
            // A parameter in one chunk has only the first run, and a parameter in two neighboring
            // chunks has no whole chunk. The empty runs are removed below.
            [
                (first..first + 1, head_end - start),
                (first + 1..last, chunk),
                (last.max(first + 1)..last + 1, end - last * chunk),
            ]
        };
        runs.into_iter()
            .filter(|(members, _)| !members.is_empty())
            .map(move |(members, n)| (members, n * item_numel))
    }

    /// Splits the elements in `range` by owner, in order.
    pub(crate) fn parts(
        &self,
        group: WorldSize,
        range: Range<u64>,
    ) -> impl Iterator<Item = (u64, Range<u64>)> {
        let chunks = *self;
        let first_item = self.start + range.start / self.item_numel.max(1);
        let first = first_item / self.chunk_items(group).max(1);
        (first..group.as_u64()).map_while(move |member| {
            let part = chunks.part(group, member);
            let clipped = part.start.max(range.start)..part.end.min(range.end);
            (!clipped.is_empty()).then_some((member, clipped))
        })
    }

    /// Returns the first member that holds any element.
    pub(super) fn first_owner(&self, group: WorldSize) -> u64 {
        self.start / self.chunk_items(group).max(1)
    }

    /// Returns the elements of a member.
    pub(super) fn part(&self, group: WorldSize, member: u64) -> Range<u64> {
        #[expect(clippy::expect_used, reason = "callers pass members of the group")]
        let place = Placement::new(member, group.as_u64()).expect("a member of the group");
        let chunk = split::chunk(self.total, place);
        self.first_element(chunk.start)..self.first_element(chunk.end)
    }

    /// Returns the first element of an item, clamped to the parameter.
    fn first_element(&self, item: u64) -> u64 {
        (item.clamp(self.start, self.end) - self.start) * self.item_numel
    }

    /// Returns the number of items in the first chunk, which is the longest.
    fn chunk_items(&self, group: WorldSize) -> u64 {
        #[expect(clippy::expect_used, reason = "a group has at least one member")]
        let first = group.placements().next().expect("the first member");
        split::chunk(self.total, first).end
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_agree_with_parts() {
        for (total, members) in
            (0..=12).flat_map(|total| (1..=7).map(move |members| (total, members)))
        {
            let group = WorldSize::new(members).unwrap();
            for (start, end) in (0..=total).flat_map(|end| (0..=end).map(move |start| (start, end)))
            {
                let chunks = ChunkedCut { start, end, total, item_numel: 3 };
                for member in 0..members {
                    let part = chunks.part(group, member);
                    let runs = chunks.runs(group).filter(|(members, _)| members.contains(&member));
                    let n_elements: u64 = runs.map(|(_, n)| n).sum();
                    assert_eq!(n_elements, part.end - part.start, "{chunks:?} {member}");
                }
                let parts = (0..members).map(|member| (member, chunks.part(group, member)));
                let parts: Vec<_> = parts.filter(|(_, part)| !part.is_empty()).collect();
                let numel = (end - start) * 3;
                assert!(chunks.parts(group, 0..numel).eq(parts.iter().cloned()), "{chunks:?}");
                for (member, part) in parts {
                    assert!(chunks.parts(group, part.clone()).eq([(member, part)]), "{chunks:?}");
                }
            }
        }
    }

    #[test]
    fn huge_chunks_do_not_overflow() {
        let chunks =
            ChunkedCut { start: u64::MAX - 1, end: u64::MAX, total: u64::MAX, item_numel: 1 };
        for members in [1, 2, 3] {
            let runs: Vec<_> = chunks.runs(WorldSize::new(members).unwrap()).collect();
            assert_eq!(runs, [(members - 1..members, 1)]);
        }
    }
}
