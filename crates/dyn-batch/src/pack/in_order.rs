//! Rows that are filled as the sequences come.

use crate::{batch::Sequence, pack::Row};

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
        let has_room = |row: &Row| row.tokens >= sequence.length && row.sequences > 0;
        let fullest = (0..self.rows.len()).min_by_key(|&nth| self.rows[nth].0.tokens);
        let fitting = (0..self.rows.len()).filter(|&nth| has_room(&self.rows[nth].0));
        let nth = fitting.min_by_key(|&nth| self.rows[nth].0.tokens).unwrap_or_else(|| {
            if let Some(fullest) = fullest.filter(|_| self.rows.len() == self.max_open) {
                done(self.rows.remove(fullest).1);
            }
            self.rows.push((self.empty, Vec::new()));
            self.rows.len() - 1
        });
        let (room, sequences) = &mut self.rows[nth];
        *room = Row { tokens: room.tokens - sequence.length, sequences: room.sequences - 1 };
        sequences.push(sequence);
        if room.tokens == 0 || room.sequences == 0 {
            done(self.rows.remove(nth).1);
        }
    }

    /// Hands out what is left.
    pub(crate) fn finish(&mut self, done: impl FnMut(Vec<Sequence>)) {
        self.rows.drain(..).map(|(_, sequences)| sequences).for_each(done);
    }
}
