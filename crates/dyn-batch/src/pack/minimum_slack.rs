//! Minimum bin slack: row after row, each filled with the longest sequence that is left and with
//! those that leave the least room beside it.
//!
//! The rule is Fleszar and Hindi's MBS′ ("New heuristics for one-dimensional bin-packing", 2002).
//! The search runs over lengths instead of sequences, and a row that was found is made as often as
//! there are sequences for it. So one length at least is used up each time, and there are no more
//! searches than lengths.

#![expect(
    clippy::cast_possible_truncation,
    reason = "counts, places and table entries fit the memory that holds them"
)]

use crate::{lengths::histogram::Histogram, limits::Row, pack::Rows};

/// How many choices a search may try for one row; each limit gets its turn. A long search fills the
/// row better, a short one ends while the long sequences are still together and leaves the short
/// ones to later rows. Which is better depends on the lengths. The limit is also one on how deep
/// the search recurses.
pub(super) const MAX_STEPS: [u32; 7] = [100, 200, 300, 400, 600, 1000, 4000];

/// How many choices all searches of a plan may try together, and how many more for each sequence:
/// about 0.3 s, and 0.3 µs. A million sequences of the eight sets of the tests need 6 for each at
/// most.
pub(super) const CHOICES: u64 = 1 << 24;
pub(super) const CHOICES_PER_SEQUENCE: u64 = 16;

/// The sequences that are in no row yet.
struct Unpacked {
    /// One for each length, descending.
    entries: Vec<Entry>,
    /// For each entry, and for the end behind the last: itself if something is left of it, or else
    /// another one behind it, with nothing left in between.
    next: Vec<usize>,
    /// The entries of which something is left.
    n_left: usize,
}

/// Sequences of one length.
struct Entry {
    length: u64,
    count: u64,
    /// The first of them in the descending order of all sequences.
    start: usize,
}

impl Unpacked {
    fn new(histogram: &Histogram) -> Self {
        let mut start = 0;
        let entries = histogram.runs().iter().rev().map(|run| {
            start += run.count as usize;
            Entry { length: run.length, count: run.count, start: start - run.count as usize }
        });
        let entries: Vec<Entry> = entries.collect();
        let n_left = entries.len();
        Self { entries, next: (0..=n_left).collect(), n_left }
    }

    /// Drops the entries of which nothing is left, as soon as they are half of all.
    fn compact(&mut self) {
        if self.n_left <= self.entries.len() / 2 {
            self.entries.retain(|entry| entry.count > 0);
            self.next.truncate(self.n_left + 1);
            (0..).zip(&mut self.next).for_each(|(entry, next)| *next = entry);
        }
    }

    /// The first entry from this one on of which something is left.
    ///
    /// To take entries out of the list at once would cost as much as there are lengths for each
    /// row. What is used up is stepped over, and each such walk halves the next (Tarjan and van
    /// Leeuwen, "Worst-case analysis of set union algorithms", 1984).
    fn left_from(&mut self, mut entry: usize) -> Option<usize> {
        while self.next[entry] != entry {
            self.next[entry] = self.next[self.next[entry]];
            entry = self.next[entry];
        }
        (entry < self.entries.len()).then_some(entry)
    }

    /// The first entry from this one on of which something is left and a sequence fits.
    fn fitting_from(&mut self, entry: usize, room: Row) -> Option<usize> {
        let longer = self.entries[entry..].partition_point(|entry| entry.length > room.tokens);
        self.left_from(entry + longer)
    }

    /// How many such rows there are sequences for, one at least.
    #[expect(clippy::expect_used, reason = "a search takes the longest sequence, which fits")]
    fn max_repeats(&self, pieces: &[Piece]) -> usize {
        let repeats = pieces.iter().map(|piece| self.entries[piece.entry].count / piece.count);
        repeats.min().expect("a row holds the longest sequence at least") as usize
    }

    /// Takes out some sequences, and returns the first one's place in the descending order. They
    /// come from the back, so that what is left still begins at its start.
    fn take(&mut self, piece: Piece) -> usize {
        let Entry { count, start, .. } = &mut self.entries[piece.entry];
        *count -= piece.count;
        let place = *start + *count as usize;
        if *count == 0 {
            self.next[piece.entry] = piece.entry + 1;
            self.n_left -= 1;
        }
        place
    }
}

/// So many sequences of that entry of the unpacked.
#[derive(Clone, Copy)]
struct Piece {
    entry: usize,
    count: u64,
}

/// All rows, each as full as a search of at most `max_steps` choices makes it; `None` if that takes
/// more than `choices` over all rows, which are counted down.
pub(super) fn search(
    histogram: &Histogram,
    empty: Row,
    max_steps: u32,
    choices: &mut u64,
) -> Option<Rows> {
    let mut rows = Rows { row_of: vec![0; histogram.count() as usize], left: Vec::new() };
    let mut unpacked = Unpacked::new(histogram);
    while let Some(longest) = unpacked.left_from(0) {
        let mut search = Search::new(&mut unpacked, max_steps);
        search.take(longest, empty);
        let Search { best, steps, .. } = search;
        *choices = choices.checked_sub((max_steps - steps).into())?;
        make(&best, &mut unpacked, &mut rows, empty);
        unpacked.compact();
    }
    Some(rows)
}

/// Makes as many rows of these pieces as the unpacked has sequences for.
fn make(pieces: &[Piece], unpacked: &mut Unpacked, rows: &mut Rows, empty: Row) {
    let taken =
        |room: Row, piece: &Piece| room.without(unpacked.entries[piece.entry].length, piece.count);
    let room = pieces.iter().fold(empty, taken);
    for _ in 0..unpacked.max_repeats(pieces) {
        for &piece in pieces {
            let place = unpacked.take(piece);
            rows.row_of[place..place + piece.count as usize].fill(rows.left.len() as u32);
        }
        rows.left.push(room);
    }
}

/// A depth-first search for the pieces that fill a row best.
struct Search<'a> {
    unpacked: &'a mut Unpacked,
    /// What is in the row, and what was when it was fullest.
    taken: Vec<Piece>,
    best: Vec<Piece>,
    least_room: u64,
    /// How many more choices it may try.
    steps: u32,
}

impl<'a> Search<'a> {
    fn new(unpacked: &'a mut Unpacked, max_steps: u32) -> Self {
        Self {
            unpacked,
            taken: Vec::new(),
            best: Vec::new(),
            least_room: u64::MAX,
            steps: max_steps,
        }
    }

    /// Takes sequences of this entry, as many as fit first, and then what goes best beside them;
    /// returns whether the search is over.
    fn take(&mut self, entry: usize, room: Row) -> bool {
        let Entry { length, count, .. } = self.unpacked.entries[entry];
        let most = count.min(room.capacity(length));
        (1..=most).rev().any(|count| {
            self.steps = self.steps.saturating_sub(1);
            self.taken.push(Piece { entry, count });
            let is_over = self.fill(entry + 1, room.without(length, count));
            self.taken.pop();
            is_over
        })
    }

    fn fill(&mut self, from: usize, room: Row) -> bool {
        if room.tokens < self.least_room {
            self.least_room = room.tokens;
            self.best.clone_from(&self.taken);
        }
        if room.tokens == 0 || self.steps == 0 {
            return true;
        }
        let mut next = self.unpacked.fitting_from(from, room);
        while let Some(entry) = next.filter(|_| room.sequences > 0) {
            if self.take(entry, room) {
                return true;
            }
            next = self.unpacked.left_from(entry + 1);
        }
        false
    }
}
