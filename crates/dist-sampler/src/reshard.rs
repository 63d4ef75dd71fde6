//! The positions that several worlds, of any sizes, have left unread.
//!
//! In a contiguous partition a world leaves the ends of its ranks' ranges unread. Most of these
//! ends have equal lengths and distances, so a few [`RangeRun`]s describe all ends. If several
//! worlds read one epoch in turn, each world's unread ranges are stored as indexes into the
//! positions that the previous world left unread. Stored as positions, they could need one range
//! per rank.

use std::ops::Range;

/// Ranges of equal length at equal distances.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct RangeRun {
    start: u64,
    /// Distance between the starts of ranges; at least `range_len`, which is above 0.
    period: u64,
    range_len: u64,
    n_ranges: u64,
}

impl RangeRun {
    fn len(self) -> u64 {
        self.range_len * self.n_ranges
    }

    /// Returns the end of the last range.
    fn end(self) -> u64 {
        self.start + self.period * (self.n_ranges - 1) + self.range_len
    }

    /// Returns the `n`-th position; `n` must be less than the length.
    fn get(self, n: u64) -> u64 {
        self.start + n / self.range_len * self.period + n % self.range_len
    }

    /// Returns the number of positions before `position`, or `None` if no range contains it.
    fn index_of(self, position: u64) -> Option<u64> {
        let offset = position.checked_sub(self.start)?;
        let range = offset / self.period;
        let in_range = offset % self.period;
        let is_inside = range < self.n_ranges && in_range < self.range_len;
        is_inside.then(|| range * self.range_len + in_range)
    }
}

/// The positions that one world leaves unread.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct UnreadRanges {
    /// Runs in ascending order.
    runs: Vec<RangeRun>,
    /// Number of positions before each run.
    n_earlier: Vec<u64>,
    len: u64,
}

impl UnreadRanges {
    /// Adds the positions of `range`, which must begin at or after the end of all earlier ranges.
    pub(crate) fn push(&mut self, range: Range<u64>) {
        let Some(range_len @ 1..) = range.end.checked_sub(range.start) else { return };
        match self.runs.last_mut() {
            Some(last) if last.n_ranges == 1 && last.end() == range.start => {
                last.range_len += range_len;
                last.period = last.range_len;
                self.len += range_len;
            }
            _ => {
                self.push_run(RangeRun {
                    start: range.start,
                    period: range_len,
                    range_len,
                    n_ranges: 1,
                });
            }
        }
    }

    /// Adds the unread ends of `n_stretches` adjacent stretches of `len` positions each. The first
    /// stretch begins at `start`, and the first `consumed` positions of each stretch are read.
    pub(crate) fn push_stretches(&mut self, start: u64, len: u64, n_stretches: u64, consumed: u64) {
        if consumed == 0 || n_stretches < 2 {
            // The unread positions are one range.
            let end = start + len * n_stretches;
            self.push(start.saturating_add(consumed)..end);
        } else if consumed < len {
            self.push_run(RangeRun {
                start: start + consumed,
                period: len,
                range_len: len - consumed,
                n_ranges: n_stretches,
            });
        }
    }

    fn push_run(&mut self, run: RangeRun) {
        self.n_earlier.push(self.len);
        self.len += run.len();
        self.runs.push(run);
    }

    /// Returns the positions as one range, if they have no gaps.
    fn only_range(&self) -> Option<Range<u64>> {
        match self.runs[..] {
            [run @ RangeRun { n_ranges: 1, .. }] => Some(run.start..run.end()),
            _ => None,
        }
    }

    /// Shifts all positions by `distance`.
    fn shift(mut self, distance: u64) -> Self {
        for run in &mut self.runs {
            run.start += distance;
        }
        self
    }

    fn get(&self, n: u64) -> u64 {
        let run = self.n_earlier.partition_point(|&n_earlier| n_earlier <= n) - 1;
        self.runs[run].get(n - self.n_earlier[run])
    }

    fn index_of(&self, position: u64) -> Option<u64> {
        let run = self.runs.partition_point(|run| run.end() <= position);
        let in_run = self.runs.get(run)?.index_of(position)?;
        Some(self.n_earlier[run] + in_run)
    }
}

/// The unread positions of an order after several worlds, in ascending order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct UnreadPositions {
    /// Positions that each world left unread, as indexes into the positions that the previous world
    /// left unread; at least one entry.
    worlds: Vec<UnreadRanges>,
}

impl From<Range<u64>> for UnreadPositions {
    fn from(range: Range<u64>) -> Self {
        let mut unread = UnreadRanges::default();
        unread.push(range);
        Self { worlds: vec![unread] }
    }
}

impl UnreadPositions {
    pub(crate) fn len(&self) -> u64 {
        self.last().len
    }

    /// Returns the first position if the positions have no gaps.
    pub(crate) fn start_of_only_range(&self) -> Option<u64> {
        match &self.worlds[..] {
            [world] => world.only_range().map(|range| range.start),
            _ => None,
        }
    }

    /// Returns the start of the unread rest of an order of `len`.
    pub(crate) fn read_end(&self, len: u64) -> u64 {
        match &self.worlds[..] {
            [world] => world.only_range().filter(|range| range.end == len),
            _ => None,
        }
        .map_or(len, |range| range.start)
    }

    /// Returns true if the positions before [`read_end`](Self::read_end) are all read.
    pub(crate) fn is_suffix(&self, len: u64) -> bool {
        self.len() == len - self.read_end(len)
    }

    /// Returns the `n`-th unread position; `n` must be less than the length.
    pub(crate) fn get(&self, n: u64) -> u64 {
        self.worlds.iter().rev().fold(n, |n, world| world.get(n))
    }

    /// Returns the number of unread positions before `position`, or `None` if it was read.
    pub(crate) fn index_of(&self, position: u64) -> Option<u64> {
        self.worlds.iter().try_fold(position, |position, world| world.index_of(position))
    }

    /// Keeps only the positions at the indexes in `unread`.
    #[must_use]
    pub(crate) fn select(mut self, unread: UnreadRanges) -> Self {
        if unread.len == self.len() {
            return self;
        }
        match self.last().only_range() {
            // Indexes into a single range become positions when shifted, and replace the range.
            Some(range) => {
                self.worlds.pop();
                self.worlds.push(unread.shift(range.start));
            }
            None => self.worlds.push(unread),
        }
        self
    }

    #[expect(clippy::expect_used, reason = "created with one world, and worlds are only replaced")]
    fn last(&self) -> &UnreadRanges {
        self.worlds.last().expect("at least one world")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Reads all positions, and checks the inverse.
    fn positions(unread: &UnreadPositions, end: u64) -> Vec<u64> {
        let positions: Vec<u64> = (0..unread.len()).map(|n| unread.get(n)).collect();
        for position in 0..end {
            let expected = positions.iter().position(|&unread| unread == position);
            assert_eq!(unread.index_of(position), expected.map(|n| n as u64), "{unread:?}");
        }
        positions
    }

    #[test]
    fn partly_read_stretches_leave_ends() {
        for (start, len, n_stretches) in [(0, 1, 1), (3, 4, 1), (0, 3, 5), (2, 1, 7), (5, 0, 4)] {
            let end = start + len * n_stretches;
            for consumed in 0..=len + 2 {
                let mut left = UnreadRanges::default();
                left.push_stretches(start, len, n_stretches, consumed);
                let expected: Vec<u64> =
                    (start..end).filter(|n| (n - start) % len >= consumed).collect();
                assert_eq!(positions(&UnreadPositions { worlds: vec![left] }, end + 3), expected);
            }
        }
    }

    #[test]
    fn adjacent_ranges_are_merged() {
        let mut left = UnreadRanges::default();
        left.push(2..4);
        left.push(4..4);
        left.push(4..9);
        assert_eq!(left.only_range(), Some(2..9));
        left.push(10..11);
        assert_eq!((left.only_range(), left.len), (None, 8));
    }

    #[test]
    fn stacked_worlds_leave_common_positions() {
        let mut first = UnreadRanges::default();
        first.push_stretches(0, 6, 4, 2);
        first.push(24..27);
        let once = UnreadPositions::from(0..27).select(first);
        let all = positions(&once, 30);
        assert_eq!(all.len(), 19);

        let mut second = UnreadRanges::default();
        second.push_stretches(0, 5, 3, 4);
        second.push(16..19);
        let expected: Vec<u64> =
            [4, 9, 14, 16, 17, 18].into_iter().map(|n: usize| all[n]).collect();
        assert_eq!(positions(&once.select(second), 30), expected);
    }

    #[test]
    fn gapless_positions_keep_their_start() {
        let mut left = UnreadRanges::default();
        left.push(3..20);
        let once = UnreadPositions::from(0..20).select(left.clone());
        assert_eq!(once.start_of_only_range(), Some(3));
        let mut later = UnreadRanges::default();
        later.push(5..17);
        assert_eq!(once.clone().select(later).start_of_only_range(), Some(8));
        let mut all = UnreadRanges::default();
        all.push(0..17);
        assert_eq!(once.clone().select(all), once);
        assert_eq!(once.select(UnreadRanges::default()).len(), 0);
    }
}
