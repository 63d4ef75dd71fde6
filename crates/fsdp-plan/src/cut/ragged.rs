//! Ragged cuts: equal parts of a buffer, with each bound rounded to a granule of the parameter it
//! falls into.

use std::ops::Range;

use core_types::WorldSize;

use crate::{arithmetic::mul_div, elem::ElemType, param::ParameterInfo};

/// A parameter as the bytes `start..end` of a buffer of which every member of a group owns an equal
/// part.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RaggedCut {
    start: u64,
    end: u64,
    buffer_bytes: u64,
    granule: u64,
    /// A bound rounds up if at least this many bytes of its granule precede it.
    min_bytes_to_round_up: u64,
    dtype: ElemType,
}

/// A run of neighboring members that hold parts of one parameter and nothing else of its buffer.
/// Each has the same number of granules, or one more.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RaggedMiddle {
    pub(crate) stride: GranuleStride,
    /// Remainder at the first bound, as in [`GranuleStride`]: the distance of the bound from the
    /// last whole granule before it.
    remainder: u64,
}

/// The part of a [`RaggedMiddle`] that parameters of similar units have in common.
///
/// The remainder grows by `scaled_step` from bound to bound. Whenever it reaches `scaled_granule`,
/// a member gets one more granule and the remainder shrinks by `scaled_granule`. All three are in
/// units of a byte over the number of members.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct GranuleStride {
    first: u64,
    end: u64,
    /// Elements that each member has at least.
    pub(crate) numel: u64,
    /// Additional elements of the members with one more granule.
    pub(crate) granule_numel: u64,
    scaled_step: u64,
    scaled_granule: u64,
}

impl RaggedMiddle {
    /// Returns the number of members with one more granule.
    pub(crate) fn n_larger(&self) -> u64 {
        let GranuleStride { first, end, scaled_step, scaled_granule, .. } = self.stride;
        (self.remainder + scaled_step * (end - first)) / scaled_granule
    }

    /// Returns the members with one more granule.
    pub(crate) fn larger(&self) -> impl Iterator<Item = u64> + use<> {
        let Self { stride: GranuleStride { first, scaled_step, scaled_granule, .. }, remainder } =
            *self;
        // The remainder passes `nth` granules after this many steps, which is at the end of the
        // member.
        let n_steps = move |nth: u64| (nth * scaled_granule - remainder).div_ceil(scaled_step);
        (1..=self.n_larger()).map(move |nth| first - 1 + n_steps(nth))
    }
}

impl GranuleStride {
    /// Returns the members in the middle.
    pub(crate) fn members(&self) -> Range<u64> {
        self.first..self.end
    }

    /// Returns for each member the number of `middles` in which it has one more granule. All
    /// `middles` must have this stride.
    ///
    /// All remainders grow alike, so tracking one is enough: a middle gives one more granule
    /// whenever the growth passes the distance from its first remainder to a full granule.
    pub(crate) fn extra_granules_per_member(
        &self,
        middles: &[RaggedMiddle],
    ) -> impl Iterator<Item = usize> + use<> {
        let Self { scaled_step, scaled_granule, .. } = *self;
        let mut distances: Vec<u64> =
            middles.iter().map(|middle| scaled_granule - middle.remainder).collect();
        distances.sort_unstable();
        // Growth of the remainders since the first bound, without whole granules.
        let mut growth = 0;
        // Granules of all middles for the whole granules of growth.
        let mut n_complete = 0;
        // Granules that the members up to the last one have got.
        let mut n_given = 0;
        self.members().map(move |_| {
            growth += scaled_step;
            if scaled_granule <= growth {
                growth -= scaled_granule;
                n_complete += distances.len();
            }
            let n_total = n_complete + distances.partition_point(|&distance| distance <= growth);
            let n_new = n_total - n_given;
            n_given = n_total;
            n_new
        })
    }
}

impl RaggedCut {
    pub(super) fn new(
        info: &ParameterInfo,
        start: u64,
        buffer_bytes: u64,
        granule: u64,
        round_up_from: u64,
    ) -> Self {
        let end = start + info.bytes();
        Self {
            start,
            end,
            buffer_bytes,
            granule,
            min_bytes_to_round_up: round_up_from,
            dtype: info.dtype(),
        }
    }

    /// Returns the elements of a member.
    pub(super) fn part(&self, group: WorldSize, member: u64) -> Range<u64> {
        self.bound(group, member)..self.bound(group, member + 1)
    }

    /// Returns the member in whose part of the buffer the parameter begins.
    pub(super) fn first_owner(&self, group: WorldSize) -> u64 {
        mul_div(self.start, group.as_u64(), self.buffer_bytes)
    }

    /// Splits the elements in `range` by owner, in order.
    pub(crate) fn parts(
        &self,
        group: WorldSize,
        range: Range<u64>,
    ) -> impl Iterator<Item = (u64, Range<u64>)> + use<> {
        // No member whose part ends before the granule of the first element has a part of it. The
        // search begins one member earlier as a margin; its part before `range` is clipped.
        let granule_start = self.dtype.bytes_of_blocks(range.start) / self.granule * self.granule;
        let first_byte = self.start.saturating_add(granule_start);
        let first = mul_div(first_byte, group.as_u64(), self.buffer_bytes).saturating_sub(1);
        let parts = self.parts_of_members(group, first..group.as_u64(), range.end);
        let clipped = parts.map(move |(owner, part)| {
            (owner, part.start.max(range.start)..part.end.min(range.end))
        });
        clipped.filter(|(_, part)| !part.is_empty())
    }

    /// Returns the elements of `members` up to the element `end`, each range with its owner, in
    /// order.
    fn parts_of_members(
        &self,
        group: WorldSize,
        members: Range<u64>,
        end: u64,
    ) -> impl Iterator<Item = (u64, Range<u64>)> + use<> {
        let ragged = *self;
        let mut next_start = ragged.bound(group, members.start);
        members.map_while(move |member| {
            let start = next_start;
            if start >= end {
                return None;
            }
            next_start = ragged.bound(group, member + 1);
            Some((member, start..next_start))
        })
    }

    /// Returns the members with both bounds within the parameter.
    ///
    /// Returns `None` if there are none, or if the numbers would exceed 64 bits.
    pub(crate) fn middle(&self, group: WorldSize) -> Option<RaggedMiddle> {
        let n_members = group.as_u64();
        let first = self.first_owner(group) + 1;
        // A bound in the last granule is excluded, because that granule may be shorter than the
        // other granules.
        let last = mul_div(self.end.checked_sub(self.granule)?, n_members, self.buffer_bytes);
        if last <= first {
            return None;
        }
        // In units of a byte over the number of members, all numbers are integers.
        let scaled_granule = self.granule.checked_mul(n_members)?;
        // Nothing below is larger.
        self.buffer_bytes.checked_mul(n_members)?.checked_add(scaled_granule)?;
        let first_bound = self.buffer_bytes * first;
        let start = self.start * n_members;
        // With this shift, rounding down to granules rounds like `bound`.
        let shift = (self.granule - self.min_bytes_to_round_up) * n_members;
        let offset = first_bound + shift - start;
        let stride = GranuleStride {
            first,
            end: last,
            numel: self.elements(self.buffer_bytes / scaled_granule * self.granule),
            granule_numel: self.elements(self.granule),
            scaled_step: self.buffer_bytes % scaled_granule,
            scaled_granule,
        };
        Some(RaggedMiddle { stride, remainder: offset % scaled_granule })
    }

    /// Returns the elements before and after the `middle`, each range with its owner, in order.
    pub(crate) fn outer_parts(
        &self,
        group: WorldSize,
        middle: Option<&RaggedMiddle>,
    ) -> impl Iterator<Item = (u64, Range<u64>)> + use<> {
        let first = self.first_owner(group);
        let end = self.elements(self.end - self.start);
        let middle = match middle {
            None => first..first,
            Some(middle) => middle.stride.members(),
        };
        let leading = self.parts_of_members(group, first..middle.start, end);
        let trailing = self.parts_of_members(group, middle.end..group.as_u64(), end);
        leading.chain(trailing).filter(|(_, part)| !part.is_empty())
    }

    /// Returns the element at which the part of `member` begins.
    fn bound(&self, group: WorldSize, member: u64) -> u64 {
        let exact = mul_div(self.buffer_bytes, member, group.as_u64());
        if exact <= self.start {
            return 0;
        }
        let len = self.end - self.start;
        if exact >= self.end {
            return self.elements(len);
        }
        let rest = (exact - self.start) % self.granule;
        let rounded_down = exact - self.start - rest;
        let rounded_up = rounded_down.saturating_add(self.granule).min(len);
        self.elements(if rest < self.min_bytes_to_round_up { rounded_down } else { rounded_up })
    }

    /// Returns the number of elements in `bytes`, which must be whole blocks.
    fn elements(&self, bytes: u64) -> u64 {
        match (self.dtype.block_bytes(), self.dtype.block_numel()) {
            (2, 1) => bytes / 2, // avoids a division by a variable for the most common dtypes
            (block_bytes, block_numel) => bytes / block_bytes * block_numel,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeMap, slice};

    use super::*;
    use crate::arithmetic::index;

    /// Adds up the elements of each owner from the middle and the outer parts.
    fn owned(ragged: RaggedCut, group: WorldSize) -> BTreeMap<u64, u64> {
        let middle = ragged.middle(group);
        let outer = ragged
            .outer_parts(group, middle.as_ref())
            .map(|(owner, part)| (owner, part.end - part.start));
        let inner = middle.iter().flat_map(|middle| {
            let stride = &middle.stride;
            let granules: Vec<usize> =
                stride.extra_granules_per_member(slice::from_ref(middle)).collect();
            let mut larger = vec![0; granules.len()];
            middle.larger().for_each(|member| larger[index(member - stride.first)] += 1);
            assert_eq!(granules, larger);
            let numels = granules
                .into_iter()
                .map(move |n_granules| stride.numel + n_granules as u64 * stride.granule_numel);
            stride.members().zip(numels)
        });
        let mut owned = BTreeMap::new();
        outer.chain(inner).for_each(|(member, numel)| *owned.entry(member).or_insert(0) += numel);
        owned.retain(|_, numel| *numel > 0);
        owned
    }

    #[test]
    fn middle_and_outer_parts_cover_everything() {
        let mut n_middles = 0;
        let grid = [1, 2, 3, 7, 16]
            .into_iter()
            .flat_map(|members| (1..=40).map(move |numel| (members, numel)));
        for (members, numel) in grid {
            let group = WorldSize::new(members).unwrap();
            let info = ParameterInfo::new("w", [numel], ElemType::U8).unwrap();
            for (start, trailing, granule) in
                [(0, 0, 1), (0, 0, 3), (1, 0, 2), (10, 3, 1), (7, 20, 5), (0, 50, 4)]
            {
                for round_up_from in 1..=granule {
                    let ragged = RaggedCut::new(
                        &info,
                        start,
                        start + numel + trailing,
                        granule,
                        round_up_from,
                    );
                    let parts = ragged
                        .parts(group, 0..numel)
                        .map(|(owner, part)| (owner, part.end - part.start));
                    assert_eq!(owned(ragged, group), parts.collect(), "{ragged:?} over {members}");
                    n_middles += u64::from(ragged.middle(group).is_some());
                }
            }
        }
        assert!(n_middles > 1000);
    }

    #[test]
    fn joint_granules_sum_single_granules() {
        for (members, numel, granule) in [(7, 40, 1), (7, 90, 11), (16, 40, 3), (4, 200, 7)] {
            let group = WorldSize::new(members).unwrap();
            let info = ParameterInfo::new("w", [numel], ElemType::U8).unwrap();
            let middles: Vec<RaggedMiddle> = (1..=granule)
                .chain(1..=granule)
                .map(|round_up_from| RaggedCut::new(&info, 3, numel + 5, granule, round_up_from))
                .map(|ragged| ragged.middle(group).unwrap())
                .collect();
            let stride = &middles[0].stride;
            assert!(middles.iter().all(|middle| middle.stride == *stride));
            let mut sums = vec![0; stride.members().count()];
            for middle in &middles {
                let granules = stride.extra_granules_per_member(slice::from_ref(middle));
                sums.iter_mut().zip(granules).for_each(|(sum, granules)| *sum += granules);
            }
            let joint: Vec<usize> = stride.extra_granules_per_member(&middles).collect();
            assert_eq!(joint, sums, "{members} members, {numel} elements, {granule} each");
        }
    }
}
