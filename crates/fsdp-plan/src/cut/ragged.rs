//! Equal parts of a buffer whose bounds are moved to the nearest granule of the parameter they fall
//! into.

use std::ops::Range;

use crate::{
    arithmetic::mul_div,
    cut::shares::{OwnedRun, Shares},
    elem::ElemType,
    param::ParameterInfo,
};

/// A parameter as the bytes `start..end` of a buffer that is divided by [`Shares`].
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ragged {
    start: u64,
    end: u64,
    buffer_bytes: u64,
    granule: u64,
    round_up_from: u64,
    dtype: ElemType,
}

/// Neighbors in the middle of a parameter that hold nothing else of its buffer: all have equally
/// many granules of it, or one more.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Middle {
    pub(crate) stride: Stride,
    /// With which rest the first member begins.
    rest: u64,
}

/// How the members in the middle of a parameter take their granules, but for where they begin.
///
/// What is left of a granule grows by `step` from bound to bound, and whenever it reaches `granule`
/// it is given to a member. Both are counted in fractions of a byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Stride {
    first: u64,
    end: u64,
    /// The elements that each has at least.
    pub(crate) numel: u64,
    /// The elements that some have besides.
    pub(crate) granule_numel: u64,
    step: u64,
    granule: u64,
}

impl Middle {
    /// How many members have a granule more than the others.
    pub(crate) fn n_larger(&self) -> u64 {
        let Stride { first, end, step, granule, .. } = self.stride;
        (self.rest + step * (end - first)) / granule
    }

    /// The members that have a granule more than the others.
    pub(crate) fn larger(&self) -> impl Iterator<Item = u64> + use<> {
        let Self { stride: Stride { first, step, granule, .. }, rest } = *self;
        (1..=self.n_larger()).map(move |nth| first - 1 + (nth * granule - rest).div_ceil(step))
    }
}

impl Stride {
    pub(crate) fn members(&self) -> Range<u64> {
        self.first..self.end
    }

    /// For each member in turn, in how many of these it has a granule more. They have this stride.
    ///
    /// All rests grow alike, so one of them is enough: where it passes what another is short of a
    /// granule, that one gives its granule.
    pub(crate) fn granules(&self, middles: &[Middle]) -> impl Iterator<Item = usize> + use<> {
        let Self { step, granule, .. } = *self;
        let mut short: Vec<u64> = middles.iter().map(|middle| granule - middle.rest).collect();
        short.sort_unstable();
        let (mut grown, mut whole, mut given) = (0, 0, 0);
        self.members().map(move |_| {
            grown += step;
            if granule <= grown {
                grown -= granule;
                whole += short.len();
            }
            let all = whole + short.partition_point(|&short| short <= grown);
            all - std::mem::replace(&mut given, all)
        })
    }
}

impl Ragged {
    pub(super) fn new(
        info: &ParameterInfo,
        start: u64,
        buffer_bytes: u64,
        granule: u64,
        round_up_from: u64,
    ) -> Self {
        let end = start + info.bytes();
        Self { start, end, buffer_bytes, granule, round_up_from, dtype: info.dtype() }
    }

    /// The elements that lie in `run`.
    pub(super) fn part(&self, run: OwnedRun) -> Range<u64> {
        self.bound(run.start, run.total)..self.bound(run.end, run.total)
    }

    /// The position of the run in which the parameter begins.
    pub(super) fn first_position(&self, shares: &Shares) -> u64 {
        shares.position(mul_div(self.start, shares.total(), self.buffer_bytes))
    }

    /// The owners of the elements `within`, each with those it has, in order.
    pub(crate) fn parts<'a>(
        &self,
        shares: &'a Shares,
        within: Range<u64>,
    ) -> impl Iterator<Item = (u64, Range<u64>)> + use<'a> {
        // The granule of the first element may belong to any run that reaches into it, and to none
        // that ends before it.
        let granule_start = self.dtype.bytes_of_blocks(within.start) / self.granule * self.granule;
        let at =
            mul_div(self.start.saturating_add(granule_start), shares.total(), self.buffer_bytes);
        let first = shares.position(at).saturating_sub(1);
        let parts = self.parts_of_runs(shares, first..shares.len(), within.end);
        let clipped = parts.map(move |(owner, part)| {
            (owner, part.start.max(within.start)..part.end.min(within.end))
        });
        clipped.filter(|(_, part)| !part.is_empty())
    }

    /// The owners of the runs at `positions`, each with the elements that lie in it, in order and
    /// up to those at `end`.
    fn parts_of_runs<'a>(
        &self,
        shares: &'a Shares,
        positions: Range<u64>,
        end: u64,
    ) -> impl Iterator<Item = (u64, Range<u64>)> + use<'a> {
        let ragged = *self;
        let mut next = ragged.bound(shares.run(positions.start).start, shares.total());
        positions.map_while(move |position| {
            let run = shares.run(position);
            let start = next;
            if start >= end {
                return None;
            }
            next = ragged.bound(run.end, run.total);
            Some((run.owner, start..next))
        })
    }

    /// The members whose bounds both lie within the parameter, if shares are equal.
    ///
    /// `None` if there are none, or if numbers get too large for 64 bits.
    pub(crate) fn middle(&self, shares: &Shares) -> Option<Middle> {
        let total = shares.total();
        let first = self.first_position(shares) + 1;
        // No bound may lie in the last granule, which may be shorter than others.
        let last = mul_div(self.end.checked_sub(self.granule)?, total, self.buffer_bytes);
        if shares.table().is_some() || first >= last {
            return None;
        }
        // In fractions of a byte, of which `total` make one, everything is whole: a bound lies
        // after as many granules as there are in `at`.
        let granule = self.granule.checked_mul(total)?;
        self.buffer_bytes.checked_mul(total)?.checked_add(granule)?; // nothing below is larger
        let at = self.buffer_bytes * first + (self.granule - self.round_up_from) * total
            - self.start * total;
        let stride = Stride {
            first,
            end: last,
            numel: self.elements(self.buffer_bytes / granule * self.granule),
            granule_numel: self.elements(self.granule),
            step: self.buffer_bytes % granule,
            granule,
        };
        Some(Middle { stride, rest: at % granule })
    }

    /// The owners of what lies before and behind the `middle`, each with the elements it has, in
    /// order.
    pub(crate) fn outer_parts<'a>(
        &self,
        shares: &'a Shares,
        middle: Option<&Middle>,
    ) -> impl Iterator<Item = (u64, Range<u64>)> + use<'a> {
        let first = self.first_position(shares);
        let end = self.elements(self.end - self.start);
        let middle = match middle {
            None => first..first,
            Some(middle) => middle.stride.members(),
        };
        let before = self.parts_of_runs(shares, first..middle.start, end);
        let parts = before.chain(self.parts_of_runs(shares, middle.end..shares.len(), end));
        parts.filter(|(_, part)| !part.is_empty())
    }

    /// The element at which the part `at` of `total` of the buffer ends.
    fn bound(&self, at: u64, total: u64) -> u64 {
        let at = mul_div(self.buffer_bytes, at, total);
        let bytes = if at <= self.start {
            0
        } else if at >= self.end {
            self.end - self.start
        } else {
            let granules = (at - self.start) / self.granule;
            let rest = (at - self.start) % self.granule;
            let start = granules * self.granule;
            let end = start.saturating_add(self.granule).min(self.end - self.start);
            if rest < self.round_up_from { start } else { end }
        };
        self.elements(bytes)
    }

    /// The elements in so many bytes, which are whole blocks.
    fn elements(&self, bytes: u64) -> u64 {
        match (self.dtype.block_bytes(), self.dtype.block_numel()) {
            (2, 1) => bytes / 2, // the same as below, without a division: nearly all parameters
            (block_bytes, block_numel) => bytes / block_bytes * block_numel,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeMap, slice};

    use core_types::WorldSize;

    use super::*;
    use crate::arithmetic::index;

    /// The elements of each owner, from the middle and what lies around it.
    fn owned(ragged: Ragged, shares: &Shares) -> BTreeMap<u64, u64> {
        let middle = ragged.middle(shares);
        let outer = ragged
            .outer_parts(shares, middle.as_ref())
            .map(|(owner, part)| (owner, part.end - part.start));
        let inner = middle.iter().flat_map(|middle| {
            let stride = &middle.stride;
            let granules: Vec<usize> = stride.granules(slice::from_ref(middle)).collect();
            let mut larger = vec![0; granules.len()];
            middle.larger().for_each(|member| larger[index(member - stride.first)] += 1);
            assert_eq!(granules, larger);
            let numel = move |n_granules| stride.numel + n_granules as u64 * stride.granule_numel;
            stride.members().zip(granules.into_iter().map(numel))
        });
        let mut owned = BTreeMap::new();
        outer.chain(inner).for_each(|(member, numel)| *owned.entry(member).or_insert(0) += numel);
        owned.retain(|_, numel| *numel > 0);
        owned
    }

    #[test]
    fn the_middle_and_what_lies_around_it_are_all_parts() {
        let mut n_middles = 0;
        let grid = [1, 2, 3, 7, 16]
            .into_iter()
            .flat_map(|members| (1..=40).map(move |numel| (members, numel)));
        for (members, numel) in grid {
            let shares = Shares::even(WorldSize::new(members).unwrap());
            let info = ParameterInfo::new("w", [numel], ElemType::U8).unwrap();
            for (start, behind, granule) in
                [(0, 0, 1), (0, 0, 3), (1, 0, 2), (10, 3, 1), (7, 20, 5), (0, 50, 4)]
            {
                for round_up_from in 1..=granule {
                    let ragged =
                        Ragged::new(&info, start, start + numel + behind, granule, round_up_from);
                    let parts = ragged
                        .parts(&shares, 0..numel)
                        .map(|(owner, part)| (owner, part.end - part.start));
                    assert_eq!(
                        owned(ragged, &shares),
                        parts.collect(),
                        "{ragged:?} over {members}"
                    );
                    n_middles += u64::from(ragged.middle(&shares).is_some());
                }
            }
        }
        assert!(n_middles > 1000);
    }

    #[test]
    fn granules_of_several_are_those_of_each() {
        for (members, numel, granule) in [(7, 40, 1), (7, 90, 11), (16, 40, 3), (4, 200, 7)] {
            let shares = Shares::even(WorldSize::new(members).unwrap());
            let info = ParameterInfo::new("w", [numel], ElemType::U8).unwrap();
            let middles: Vec<Middle> = (1..=granule)
                .chain(1..=granule)
                .map(|round_up_from| Ragged::new(&info, 3, numel + 5, granule, round_up_from))
                .map(|ragged| ragged.middle(&shares).unwrap())
                .collect();
            let stride = &middles[0].stride;
            assert!(middles.iter().all(|middle| middle.stride == *stride));
            let mut sums = vec![0; stride.members().count()];
            for middle in &middles {
                let granules = stride.granules(slice::from_ref(middle));
                sums.iter_mut().zip(granules).for_each(|(sum, granules)| *sum += granules);
            }
            let together: Vec<usize> = stride.granules(&middles).collect();
            assert_eq!(together, sums, "{members} members, {numel} elements, {granule} each");
        }
    }
}
