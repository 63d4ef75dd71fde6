//! Rows that are filled as the sequences come.

use crate::{batch::Sequence, limits::Row};

/// A few rows that still take sequences.
#[derive(Clone, Debug)]
pub(crate) struct OpenRows {
    empty: Row,
    max_open: usize,
    /// Each row with the room it has left, in the order in which they were opened.
    rows: Vec<(Row, Vec<Sequence>)>,
}

impl OpenRows {
    pub(crate) fn new(empty: Row, max_open: usize) -> Self {
        Self { empty, max_open, rows: Vec::new() }
    }

    /// Puts the sequence into the fullest row that has room for it, and hands out rows that are
    /// full. If none has room and no more may be open, the fullest one goes.
    pub(crate) fn push(&mut self, sequence: Sequence, mut done: impl FnMut(Vec<Sequence>)) {
        let nth = match self.fullest(|room| room.capacity(sequence.length) > 0) {
            Some(nth) => nth,
            None => self.open(&mut done),
        };
        let (room, sequences) = &mut self.rows[nth];
        *room = room.without(sequence.length, 1);
        sequences.push(sequence);
        if room.tokens == 0 || room.sequences == 0 {
            done(self.rows.remove(nth).1);
        }
    }

    /// The fullest of these rows, the first one of equals.
    fn fullest(&self, is_meant: impl Fn(&Row) -> bool) -> Option<usize> {
        let meant = (0..self.rows.len()).filter(|&nth| is_meant(&self.rows[nth].0));
        meant.min_by_key(|&nth| self.rows[nth].0.tokens)
    }

    /// Opens one more row, in place of the fullest one if there are as many as may be.
    fn open(&mut self, done: &mut impl FnMut(Vec<Sequence>)) -> usize {
        if self.rows.len() == self.max_open {
            #[expect(clippy::expect_used, reason = "a configuration with none is refused")]
            let fullest = self.fullest(|_| true).expect("at least one row may be open");
            done(self.rows.remove(fullest).1);
        }
        self.rows.push((self.empty, Vec::new()));
        self.rows.len() - 1
    }

    /// Hands out what is left.
    pub(crate) fn finish(&mut self, done: impl FnMut(Vec<Sequence>)) {
        self.rows.drain(..).map(|(_, sequences)| sequences).for_each(done);
    }
}
