//! Packing in the order of arrival.

use crate::{
    batch::Sequence,
    limits::{RowItem, RowSpace},
};

/// A few open rows.
#[derive(Clone, Debug)]
pub(crate) struct OpenRows {
    empty: RowSpace,
    max_open: usize,
    /// Free space and sequences of each row, in the order of opening.
    rows: Vec<(RowSpace, Vec<Sequence>)>,
}

impl OpenRows {
    pub(crate) fn new(empty: RowSpace, max_open: usize) -> Self {
        Self { empty, max_open, rows: Vec::new() }
    }

    /// Puts a sequence into the fullest row with enough space, and passes full rows to `done`. If
    /// no row has space and no more rows may be opened, the fullest row is passed to `done` first.
    pub(crate) fn push(
        &mut self,
        sequence: Sequence,
        item: RowItem,
        mut done: impl FnMut(Vec<Sequence>),
    ) {
        let index = match self.fullest(|space| space.holds(item)) {
            Some(index) => index,
            None => self.open(&mut done),
        };
        let (space, sequences) = &mut self.rows[index];
        *space = space.after_adding(item, 1);
        sequences.push(sequence);
        if space.tokens == 0 || space.sequences == 0 {
            done(self.rows.remove(index).1);
        }
    }

    /// Returns the fullest row that passes the `filter`, the first one of ties.
    fn fullest(&self, filter: impl Fn(&RowSpace) -> bool) -> Option<usize> {
        let matching = (0..self.rows.len()).filter(|&index| filter(&self.rows[index].0));
        matching.min_by_key(|&index| self.rows[index].0.tokens)
    }

    /// Opens a row, after closing the fullest row if the maximum number of rows is open.
    fn open(&mut self, done: &mut impl FnMut(Vec<Sequence>)) -> usize {
        if self.rows.len() == self.max_open {
            #[expect(clippy::expect_used, reason = "`BatchLimits` rejects zero open rows")]
            let fullest = self.fullest(|_| true).expect("at least one row may be open");
            done(self.rows.remove(fullest).1);
        }
        self.rows.push((self.empty, Vec::new()));
        self.rows.len() - 1
    }

    /// Passes the remaining rows to `done`.
    pub(crate) fn finish(&mut self, mut done: impl FnMut(Vec<Sequence>)) {
        for (_, sequences) in self.rows.drain(..) {
            done(sequences);
        }
    }
}
