//! The positions of an order that worlds have left unread, however many ranks they had.
//!
//! What a world leaves of a contiguous partition are the ends of its ranks' stretches. Most of these
//! are equally long and equally far apart, so a few [`Run`]s describe them all. Worlds that read one
//! after the other are kept one above the other instead of being joined, which would need as many
//! ranges as there are ranks.

use std::ops::Range;

/// Equally long ranges at equal distances.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Run {
    start: u64,
    /// From the start of one range to that of the next; at least `range_len`, which is above 0.
    period: u64,
    range_len: u64,
    n_ranges: u64,
}

impl Run {
    fn len(self) -> u64 {
        self.range_len * self.n_ranges
    }

    /// The end of the last range.
    fn end(self) -> u64 {
        self.start + self.period * (self.n_ranges - 1) + self.range_len
    }

    /// The `n`-th position; `n` must be below the length.
    fn get(self, n: u64) -> u64 {
        self.start + n / self.range_len * self.period + n % self.range_len
    }

    /// The number of positions before `position`, or `None` if it is in none of the ranges.
    fn index_of(self, position: u64) -> Option<u64> {
        let offset = position.checked_sub(self.start)?;
        let range = offset / self.period;
        let in_range = offset % self.period;
        let is_inside = range < self.n_ranges && in_range < self.range_len;
        is_inside.then(|| range * self.range_len + in_range)
    }
}

/// What one world leaves of the positions that it was given.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Left {
    /// In ascending order.
    runs: Vec<Run>,
    /// How many positions stand before each run.
    before: Vec<u64>,
    len: u64,
}

impl Left {
    /// Adds the positions of `range`, which begins at or after the end of all others.
    pub(crate) fn push(&mut self, range: Range<u64>) {
        let Some(range_len @ 1..) = range.end.checked_sub(range.start) else { return };
        match self.runs.last_mut() {
            Some(last) if last.n_ranges == 1 && last.end() == range.start => {
                last.range_len += range_len;
                last.period = last.range_len;
                self.len += range_len;
            }
            _ => {
                self.push_run(Run {
                    start: range.start,
                    period: range_len,
                    range_len,
                    n_ranges: 1,
                });
            }
        }
    }

    /// Adds what is left of `n_stretches` of `len` positions each, side by side from `start` on,
    /// when the first `consumed` of each are read.
    pub(crate) fn push_stretches(&mut self, start: u64, len: u64, n_stretches: u64, consumed: u64) {
        if consumed == 0 || n_stretches < 2 {
            let end = start + len * n_stretches;
            self.push(start.saturating_add(consumed)..end);
        } else if consumed < len {
            self.push_run(Run {
                start: start + consumed,
                period: len,
                range_len: len - consumed,
                n_ranges: n_stretches,
            });
        }
    }

    fn push_run(&mut self, run: Run) {
        self.before.push(self.len);
        self.len += run.len();
        self.runs.push(run);
    }

    /// The range that these positions are, if they have no gaps.
    fn only_range(&self) -> Option<Range<u64>> {
        match self.runs[..] {
            [run @ Run { n_ranges: 1, .. }] => Some(run.start..run.end()),
            _ => None,
        }
    }

    /// The same, each `distance` further.
    fn shifted(mut self, distance: u64) -> Self {
        self.runs.iter_mut().for_each(|run| run.start += distance);
        self
    }

    fn get(&self, n: u64) -> u64 {
        let run = self.before.partition_point(|&before| before <= n) - 1;
        self.runs[run].get(n - self.before[run])
    }

    fn index_of(&self, position: u64) -> Option<u64> {
        let run = self.runs.partition_point(|run| run.end() <= position);
        let in_run = self.runs.get(run)?.index_of(position)?;
        Some(self.before[run] + in_run)
    }
}

/// The positions of an order that are still to be read after several worlds, in ascending order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Unread {
    /// What each world has left of what the one before it had left: at least one.
    worlds: Vec<Left>,
}

impl From<Range<u64>> for Unread {
    fn from(range: Range<u64>) -> Self {
        let mut left = Left::default();
        left.push(range);
        Self { worlds: vec![left] }
    }
}

impl Unread {
    pub(crate) fn len(&self) -> u64 {
        self.last().len
    }

    /// Where the positions begin, if they have no gaps.
    pub(crate) fn start_of_only_range(&self) -> Option<u64> {
        match &self.worlds[..] {
            [world] => world.only_range().map(|range| range.start),
            _ => None,
        }
    }

    /// The `n`-th unread position; `n` must be below the length.
    pub(crate) fn get(&self, n: u64) -> u64 {
        self.worlds.iter().rev().fold(n, |n, world| world.get(n))
    }

    /// The number of unread positions before `position`, or `None` if that has been read.
    pub(crate) fn index_of(&self, position: u64) -> Option<u64> {
        self.worlds.iter().try_fold(position, |position, world| world.index_of(position))
    }

    /// The positions that are still unread when of these, counted from 0, only `left` are.
    #[must_use]
    pub(crate) fn then(mut self, left: Left) -> Self {
        if left.len == self.len() {
            return self;
        }
        match self.last().only_range() {
            // Without gaps the two become one, so that what has none keeps none.
            Some(range) => {
                self.worlds.pop();
                self.worlds.push(left.shifted(range.start));
            }
            None => self.worlds.push(left),
        }
        self
    }

    #[expect(clippy::expect_used, reason = "made with one world, and a world is only replaced")]
    fn last(&self) -> &Left {
        self.worlds.last().expect("at least one world")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The positions of `left`, by the way it is read, and checked against the way back.
    fn positions(unread: &Unread, end: u64) -> Vec<u64> {
        let positions: Vec<u64> = (0..unread.len()).map(|n| unread.get(n)).collect();
        for position in 0..end {
            let expected = positions.iter().position(|&unread| unread == position);
            assert_eq!(unread.index_of(position), expected.map(|n| n as u64), "{unread:?}");
        }
        positions
    }

    #[test]
    fn stretches_leave_their_ends() {
        for (start, len, n_stretches) in [(0, 1, 1), (3, 4, 1), (0, 3, 5), (2, 1, 7), (5, 0, 4)] {
            let end = start + len * n_stretches;
            for consumed in 0..=len + 2 {
                let mut left = Left::default();
                left.push_stretches(start, len, n_stretches, consumed);
                let expected: Vec<u64> =
                    (start..end).filter(|n| (n - start) % len >= consumed).collect();
                assert_eq!(positions(&Unread { worlds: vec![left] }, end + 3), expected);
            }
        }
    }

    #[test]
    fn ranges_that_touch_are_one() {
        let mut left = Left::default();
        left.push(2..4);
        left.push(4..4);
        left.push(4..9);
        assert_eq!(left.only_range(), Some(2..9));
        left.push(10..11);
        assert_eq!((left.only_range(), left.len), (None, 8));
    }

    #[test]
    fn worlds_above_each_other_leave_what_none_of_them_has_read() {
        let mut first = Left::default();
        first.push_stretches(0, 6, 4, 2);
        first.push(24..27);
        let once = Unread::from(0..27).then(first);
        let all = positions(&once, 30);
        assert_eq!(all.len(), 19);

        let mut second = Left::default();
        second.push_stretches(0, 5, 3, 4);
        second.push(16..19);
        let expected: Vec<u64> =
            [4, 9, 14, 16, 17, 18].into_iter().map(|n: usize| all[n]).collect();
        assert_eq!(positions(&once.then(second), 30), expected);
    }

    #[test]
    fn a_gapless_rest_keeps_its_start() {
        let mut left = Left::default();
        left.push(3..20);
        let once = Unread::from(0..20).then(left.clone());
        assert_eq!(once.start_of_only_range(), Some(3));
        let mut later = Left::default();
        later.push(5..17);
        assert_eq!(once.clone().then(later).start_of_only_range(), Some(8));
        let mut all = Left::default();
        all.push(0..17);
        assert_eq!(once.clone().then(all), once);
        assert_eq!(once.then(Left::default()).len(), 0);
    }
}
