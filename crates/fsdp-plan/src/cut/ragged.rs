//! Equal parts of a buffer whose bounds are moved to the nearest granule of the parameter they fall into.

use std::ops::Range;

use crate::{
    ElemType, ParameterInfo,
    arithmetic::mul_div,
    shares::{Run, Shares},
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

impl Ragged {
    pub(super) fn new(info: &ParameterInfo, start: u64, buffer_bytes: u64, granule: u64, round_up_from: u64) -> Self {
        let end = start + info.bytes();
        Self { start, end, buffer_bytes, granule, round_up_from, dtype: info.dtype() }
    }

    /// The elements that lie in `run`.
    pub(super) fn part(&self, run: Run) -> Range<u64> {
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
        let ragged = *self;
        // The granule of the first element may belong to any run that reaches into it, and to none that ends before it.
        let granule_start = self.dtype.bytes_of_blocks(within.start) / self.granule * self.granule;
        let at = mul_div(self.start.saturating_add(granule_start), shares.total(), self.buffer_bytes);
        let first = shares.position(at).saturating_sub(1);
        let mut end = ragged.bound(shares.run(first).start, shares.total());
        let parts = (first..shares.len()).map_while(move |position| {
            let (run, start) = (shares.run(position), end);
            if start >= within.end {
                return None;
            }
            end = ragged.bound(run.end, run.total);
            Some((run.owner, start.max(within.start)..end.min(within.end)))
        });
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
            let (granules, rest) = ((at - self.start) / self.granule, (at - self.start) % self.granule);
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
