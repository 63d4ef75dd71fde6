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

use crate::{limits::Row, pack::Rows, sort::histogram::Histogram};

/// How many choices a search may try for one row; each limit gets its turn. A long search fills the
/// row better, a short one ends while the long sequences are still together and leaves the short
/// ones to later rows. Which is better depends on the lengths. The limit is also one on how deep
/// the search recurses.
pub(super) const MAX_STEPS: [u32; 7] = [100, 200, 300, 400, 600, 1000, 4000];

/// Sequences of one length that are in no row yet.
struct Stock {
    length: u64,
    count: u64,
    /// The first of them in the descending order of all sequences.
    start: usize,
}

/// So many sequences of that entry of the stock.
#[derive(Clone, Copy)]
struct Piece {
    entry: usize,
    count: u64,
}

/// All rows, each as full as a search of at most `max_steps` choices makes it.
pub(super) fn search(histogram: &Histogram, empty: Row, max_steps: u32) -> Rows {
    let mut rows = Rows { row_of: vec![0; histogram.count() as usize], left: Vec::new() };
    let mut stock = descending(histogram);
    while !stock.is_empty() {
        let pieces = Search::new(&stock, empty, max_steps).run();
        let n_rows = times(&pieces, &stock);
        let mut room = empty;
        for Piece { entry, count } in pieces {
            let Stock { length, count: left, start } = &mut stock[entry];
            room = room.without(*length, count);
            for nth in 0..n_rows {
                // From the back, so that what is left still begins at `start`.
                *left -= count;
                let begin = *start + *left as usize;
                rows.row_of[begin..begin + count as usize].fill((rows.left.len() + nth) as u32);
            }
        }
        rows.left.extend(std::iter::repeat_n(room, n_rows));
        stock.retain(|stock| stock.count > 0);
    }
    rows
}

/// How many such rows the stock has sequences for, one at least.
#[expect(clippy::expect_used, reason = "every sequence fits an empty row, and the search takes it")]
fn times(pieces: &[Piece], stock: &[Stock]) -> usize {
    let times = pieces.iter().map(|piece| stock[piece.entry].count / piece.count);
    times.min().expect("a row holds the longest sequence at least") as usize
}

fn descending(histogram: &Histogram) -> Vec<Stock> {
    let mut start = 0;
    let stock = histogram.runs().iter().rev().map(|run| {
        start += run.count as usize;
        Stock { length: run.length, count: run.count, start: start - run.count as usize }
    });
    stock.collect()
}

/// A depth-first search for the pieces that fill a row best.
struct Search<'a> {
    stock: &'a [Stock],
    row: Row,
    /// What is in the row, and what was when it was fullest.
    taken: Vec<Piece>,
    best: Vec<Piece>,
    least_room: u64,
    /// How many more choices it may try.
    steps: u32,
}

impl<'a> Search<'a> {
    fn new(stock: &'a [Stock], row: Row, max_steps: u32) -> Self {
        Self {
            stock,
            row,
            taken: Vec::new(),
            best: Vec::new(),
            least_room: u64::MAX,
            steps: max_steps,
        }
    }

    fn run(mut self) -> Vec<Piece> {
        self.take(0, self.row);
        self.best
    }

    /// Takes sequences of this entry, as many as fit first, and then what goes best beside them;
    /// returns whether the search is over.
    fn take(&mut self, entry: usize, room: Row) -> bool {
        let Stock { length, count, .. } = self.stock[entry];
        let most = count.min(room.capacity(length));
        (1..=most).rev().any(|count| {
            self.steps = self.steps.saturating_sub(1);
            self.taken.push(Piece { entry, count });
            let room = room.without(length, count);
            let is_over = self.fill(entry + 1, room);
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
        let shorter = &self.stock[from..];
        let fitting = from + shorter.partition_point(|stock| stock.length > room.tokens);
        (fitting..self.stock.len()).any(|entry| self.take(entry, room))
    }
}
