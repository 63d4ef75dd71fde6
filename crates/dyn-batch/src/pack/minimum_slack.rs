//! Minimum bin slack: each row is filled with the longest remaining sequence and with the sequences
//! that leave the least space.
//!
//! The rule is MBS′ of Fleszar and Hindi ("New heuristics for one-dimensional bin-packing", 2002).
//! The search runs over lengths instead of sequences, and a found row is repeated as often as its
//! sequences allow. Each search uses up at least one length, so there are no more searches than
//! lengths.

#![expect(
    clippy::cast_possible_truncation,
    reason = "counts, positions and table entries fit into the memory that has them"
)]

use crate::{
    lengths::histogram::LengthHistogram,
    limits::{RowItem, RowSpace},
    pack::PackedRows,
};

/// Limits on the choices of a search for one row, tried in turn. A long search fills the row
/// better; a short one keeps long sequences together and leaves short ones for later rows. The
/// better limit depends on the lengths. The limit also bounds the recursion depth.
pub(super) const MAX_STEPS: [u32; 7] = [100, 200, 300, 400, 600, 1000, 4000];

/// Limit on the choices of all searches of a plan, plus a limit per sequence: about 0.3 s and 0.3
/// µs. A million sequences of the eight test sets need at most 6 per sequence.
pub(super) const CHOICES: u64 = 1 << 24;
pub(super) const CHOICES_PER_SEQUENCE: u64 = 16;

/// Returns the space of a sequence; `BatchLimits` rejects limits on the cost of these rows.
fn without_cost(length: u64) -> RowItem {
    RowItem { length, cost: 0 }
}

/// The sequences that are not in a row yet.
struct UnpackedLengths {
    /// Entry per length, descending.
    entries: Vec<LengthEntry>,
    /// Links over the entries and the end: a nonempty entry links to itself, any other entry to a
    /// later one with only empty entries in between.
    next: Vec<usize>,
    /// Number of nonempty entries.
    n_left: usize,
}

/// The sequences of one length.
struct LengthEntry {
    length: u64,
    count: u64,
    /// Position of the first of these sequences in the descending order of all sequences.
    start: usize,
}

impl UnpackedLengths {
    fn new(histogram: &LengthHistogram) -> Self {
        let mut start = 0;
        let entries = histogram.runs().iter().rev().map(|run| {
            start += run.count as usize;
            LengthEntry { length: run.length, count: run.count, start: start - run.count as usize }
        });
        let entries: Vec<LengthEntry> = entries.collect();
        let n_left = entries.len();
        Self { entries, next: (0..=n_left).collect(), n_left }
    }

    /// Removes the empty entries once they are at least half of all entries.
    fn compact(&mut self) {
        if self.n_left <= self.entries.len() / 2 {
            self.entries.retain(|entry| entry.count > 0);
            self.next.clear();
            self.next.extend(0..=self.n_left);
        }
    }

    /// Returns the first nonempty entry from this one on.
    ///
    /// Removing entries at once would cost one pass over the lengths per row. Instead searches step
    /// over empty entries and halve the path for the next search (Tarjan and van Leeuwen,
    /// "Worst-case analysis of set union algorithms", 1984).
    fn left_from(&mut self, mut entry: usize) -> Option<usize> {
        while self.next[entry] != entry {
            self.next[entry] = self.next[self.next[entry]];
            entry = self.next[entry];
        }
        (entry < self.entries.len()).then_some(entry)
    }

    /// Returns the first nonempty entry from this one on with sequences that fit.
    fn fitting_from(&mut self, entry: usize, space: RowSpace) -> Option<usize> {
        let n_longer = self.entries[entry..].partition_point(|entry| space.tokens < entry.length);
        self.left_from(entry + n_longer)
    }

    /// Returns how many equal rows the remaining sequences allow, at least one.
    #[expect(clippy::expect_used, reason = "a search takes the longest sequence, which fits")]
    fn max_repeats(&self, pieces: &[RowPiece]) -> usize {
        let repeats = pieces.iter().map(|piece| self.entries[piece.entry].count / piece.count);
        repeats.min().expect("a row has at least the longest sequence") as usize
    }

    /// Takes some sequences, and returns the position of the first of them in the descending order.
    /// Sequences are taken from the end of their entry, so that the start of the entry stays valid.
    fn take(&mut self, piece: RowPiece) -> usize {
        let LengthEntry { count, start, .. } = &mut self.entries[piece.entry];
        *count -= piece.count;
        let position = *start + *count as usize;
        if *count == 0 {
            self.next[piece.entry] = piece.entry + 1;
            self.n_left -= 1;
        }
        position
    }
}

/// A number of sequences of one entry.
#[derive(Clone, Copy)]
struct RowPiece {
    entry: usize,
    count: u64,
}

/// Packs all rows, each as full as a search with at most `max_steps` choices makes it. Subtracts
/// the choices from `choices`, and returns `None` if they run out.
pub(super) fn search(
    histogram: &LengthHistogram,
    empty: RowSpace,
    max_steps: u32,
    choices: &mut u64,
) -> Option<PackedRows> {
    let mut rows =
        PackedRows { row_of: vec![0; histogram.count() as usize], free_space: Vec::new() };
    let mut unpacked = UnpackedLengths::new(histogram);
    while let Some(longest) = unpacked.left_from(0) {
        let mut search = RowSearch::new(&mut unpacked, max_steps);
        search.take(longest, empty);
        let RowSearch { best, steps, .. } = search;
        *choices = choices.checked_sub((max_steps - steps).into())?;
        add_rows(&best, &mut unpacked, &mut rows, empty);
        unpacked.compact();
    }
    Some(rows)
}

/// Adds as many rows with these pieces as the remaining sequences allow.
fn add_rows(
    pieces: &[RowPiece],
    unpacked: &mut UnpackedLengths,
    rows: &mut PackedRows,
    empty: RowSpace,
) {
    let mut space = empty;
    for piece in pieces {
        space = space.after_adding(without_cost(unpacked.entries[piece.entry].length), piece.count);
    }
    for _ in 0..unpacked.max_repeats(pieces) {
        for &piece in pieces {
            let start = unpacked.take(piece);
            rows.row_of[start..start + piece.count as usize].fill(rows.free_space.len() as u32);
        }
        rows.free_space.push(space);
    }
}

/// A depth-first search for the pieces that fill a row best.
struct RowSearch<'a> {
    unpacked: &'a mut UnpackedLengths,
    /// Pieces in the row.
    taken: Vec<RowPiece>,
    /// Pieces of the fullest row so far.
    best: Vec<RowPiece>,
    least_space: u64,
    /// Number of remaining choices.
    steps: u32,
}

impl<'a> RowSearch<'a> {
    fn new(unpacked: &'a mut UnpackedLengths, max_steps: u32) -> Self {
        Self {
            unpacked,
            taken: Vec::new(),
            best: Vec::new(),
            least_space: u64::MAX,
            steps: max_steps,
        }
    }

    /// Adds sequences of this entry, from as many as fit down to one, and fills the rest of the
    /// row. Returns true if the search is over.
    fn take(&mut self, entry: usize, space: RowSpace) -> bool {
        let LengthEntry { length, count, .. } = self.unpacked.entries[entry];
        for count in (1..=count.min(space.capacity(without_cost(length)))).rev() {
            self.steps = self.steps.saturating_sub(1);
            self.taken.push(RowPiece { entry, count });
            let is_over = self.fill(entry + 1, space.after_adding(without_cost(length), count));
            self.taken.pop();
            if is_over {
                return true;
            }
        }
        false
    }

    /// Fills the remaining space with entries from `start` on. Returns true if the search is over.
    fn fill(&mut self, start: usize, space: RowSpace) -> bool {
        if space.tokens < self.least_space {
            self.least_space = space.tokens;
            self.best.clone_from(&self.taken);
        }
        if space.tokens == 0 || self.steps == 0 {
            return true;
        }
        if space.sequences == 0 {
            return false;
        }
        let mut next = self.unpacked.fitting_from(start, space);
        while let Some(entry) = next {
            if self.take(entry, space) {
                return true;
            }
            next = self.unpacked.left_from(entry + 1);
        }
        false
    }
}
