//! Best-fit decreasing: the longest sequence that is left, into the fullest row that has room for
//! it.
//!
//! It needs at most 11/9 of the fewest rows, and 6/9 of a row (Johnson et al., "Worst-case
//! performance bounds for simple one-dimensional packing algorithms", 1974; Dósa, 2007). Sequences
//! of equal length are placed together, and rows found by the room they have left, so that it takes
//! O(n + capacity) steps instead of O(n · rows).

#![expect(
    clippy::cast_possible_truncation,
    reason = "counts, places and table entries fit the memory that holds them"
)]

use crate::{
    lengths::histogram::{Histogram, Run},
    limits::Row,
    pack::Rows,
};

/// No row.
const NONE: u32 = u32::MAX;

pub(super) fn assign(histogram: &Histogram, row: Row) -> Rows {
    let Some(shortest) = histogram.runs().first() else {
        return Rows { row_of: Vec::new(), left: Vec::new() };
    };
    let mut open = Open::new(row, shortest.length);
    let mut row_of = Vec::with_capacity(histogram.count() as usize);
    for &Run { length, count } in histogram.runs().iter().rev() {
        let mut left = count;
        while left > 0 {
            let (row, taken) = open.place(length, left);
            row_of.extend(std::iter::repeat_n(row, taken as usize));
            left -= taken;
        }
    }
    Rows { row_of, left: open.left }
}

/// Rows by the room they have left.
struct Open {
    row: Row,
    /// The last row that came to have so much room, or [`NONE`].
    heads: Vec<u32>,
    rooms: BitSet,
    /// For each row: the one that had the same room before, and its room.
    next: Vec<u32>,
    left: Vec<Row>,
}

impl Open {
    fn new(row: Row, shortest: u64) -> Self {
        // No row has more room for what is yet to come than a new one with one of the shortest
        // sequences in it.
        let most_room = (row.tokens - shortest) as usize;
        Self {
            row,
            heads: vec![NONE; most_room + 1],
            rooms: BitSet::new(most_room + 1),
            next: Vec::new(),
            left: Vec::new(),
        }
    }

    /// Puts as many sequences of `length`, up to `count`, as fit into the fullest row with room for
    /// one.
    ///
    /// One by one they would go there too: a row that has taken one is fuller than all others with
    /// room.
    fn place(&mut self, length: u64, count: u64) -> (u32, u64) {
        let row = match self.rooms.first_from(length as usize) {
            Some(room) => self.pop(room),
            None => self.push_new(),
        };
        let left = &mut self.left[row as usize];
        let taken = count.min(left.capacity(length));
        *left = left.without(length, taken);
        let Row { tokens, sequences } = *left;
        if sequences > 0 {
            self.push(row, tokens as usize);
        }
        (row, taken)
    }

    fn push_new(&mut self) -> u32 {
        self.next.push(NONE);
        self.left.push(self.row);
        self.next.len() as u32 - 1
    }

    fn push(&mut self, row: u32, room: usize) {
        self.next[row as usize] = std::mem::replace(&mut self.heads[room], row);
        self.rooms.insert(room);
    }

    fn pop(&mut self, room: usize) -> u32 {
        let row = self.heads[room];
        self.heads[room] = self.next[row as usize];
        if self.heads[room] == NONE {
            self.rooms.remove(room);
        }
        row
    }
}

/// A set of numbers below a limit that finds the next one: a bit for each, and above them a bit for
/// each word that has one, and so on.
struct BitSet {
    levels: Vec<Vec<u64>>,
}

impl BitSet {
    fn new(len: usize) -> Self {
        let mut levels = vec![vec![0; len.div_ceil(64)]];
        while let Some(longer) = levels.last().map(Vec::len).filter(|&len| len > 1) {
            levels.push(vec![0; longer.div_ceil(64)]);
        }
        Self { levels }
    }

    fn insert(&mut self, mut number: usize) {
        for level in &mut self.levels {
            level[number / 64] |= 1 << (number % 64);
            number /= 64;
        }
    }

    fn remove(&mut self, mut number: usize) {
        for level in &mut self.levels {
            level[number / 64] &= !(1 << (number % 64));
            if level[number / 64] != 0 {
                break;
            }
            number /= 64;
        }
    }

    /// The smallest number that is not below `from`.
    fn first_from(&self, from: usize) -> Option<usize> {
        let mut number = from;
        for (height, level) in self.levels.iter().enumerate() {
            let word = level.get(number / 64)? >> (number % 64);
            if word != 0 {
                number += word.trailing_zeros() as usize;
                // Down again: the first bit of each word below.
                let below = self.levels[..height].iter().rev();
                return Some(below.fold(number, |word, level| {
                    word * 64 + level[word].trailing_zeros() as usize
                }));
            }
            number = number / 64 + 1;
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use core_types::Seed;

    use super::*;

    #[test]
    fn the_set_finds_what_an_ordered_set_finds() {
        for len in [1, 63, 64, 65, 4096, 4097, 300_000] {
            let (mut bits, mut set) = (BitSet::new(len), BTreeSet::new());
            for step in 0..2000 {
                let draw = Seed::new(len as u64).derive(step).as_u64() as usize;
                let number = draw / 4 % len;
                if draw % 4 == 0 {
                    bits.remove(number);
                    set.remove(&number);
                } else if draw % 4 == 1 {
                    bits.insert(number);
                    set.insert(number);
                }
                assert_eq!(
                    bits.first_from(number),
                    set.range(number..).next().copied(),
                    "{number} of {len}"
                );
            }
        }
    }

    /// The rows by the definition: item by item, each row looked at.
    fn reference(lengths: &[u64], row: Row) -> Vec<u32> {
        let mut sorted = lengths.to_vec();
        sorted.sort_unstable_by(|a, b| b.cmp(a));
        let mut rows: Vec<Row> = Vec::new();
        let mut place = |length: u64| {
            let fitting = (0..rows.len())
                .filter(|&nth| rows[nth].tokens >= length && rows[nth].sequences > 0);
            let tightest = fitting.min_by_key(|&nth| rows[nth].tokens).unwrap_or_else(|| {
                rows.push(row);
                rows.len() - 1
            });
            rows[tightest].tokens -= length;
            rows[tightest].sequences -= 1;
            rows[tightest].tokens
        };
        // Which of equally full rows it was does not matter, so the room left describes the choice.
        sorted.into_iter().map(|length| place(length) as u32).collect()
    }

    /// Packs random lengths; returns the room that each sequence leaves in its row, and the same by
    /// the definition.
    fn pack(seed: u64, sequences: u64) -> (Vec<u32>, Vec<u32>) {
        let draw = |i| Seed::new(seed).derive(i).as_u64();
        let row = Row { tokens: 20 + draw(0) % 100, sequences };
        let lengths: Vec<u64> = (0..seed).map(|i| draw(i + 2) % (row.tokens + 1)).collect();
        let rows = assign(&Histogram::new(lengths.iter().copied()), row);
        let mut sorted = lengths.clone();
        sorted.sort_unstable_by(|a, b| b.cmp(a));
        let mut rooms = vec![row; rows.left.len()];
        let rooms = sorted.iter().zip(&rows.row_of).map(|(length, &of)| {
            let room = &mut rooms[of as usize];
            *room = Row { tokens: room.tokens - length, sequences: room.sequences - 1 };
            room.tokens as u32
        });
        (rooms.collect(), reference(&lengths, row))
    }

    #[test]
    fn every_choice_is_the_tightest() {
        for seed in 0..300 {
            let (rooms, expected) = pack(seed, u64::MAX);
            assert_eq!(rooms, expected, "seed {seed}");
        }
    }

    #[test]
    fn no_row_takes_more_sequences_than_it_may() {
        // Which of two rows with the same room may take more sequences is left open, so only sums
        // can be compared.
        for seed in 0..300 {
            let (rooms, _) = pack(seed, 1 + seed % 7);
            assert_eq!(rooms.len() as u64, seed);
        }
    }
}
