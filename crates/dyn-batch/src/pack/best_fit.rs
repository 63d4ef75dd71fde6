//! Best-fit decreasing: each sequence, longest first, goes into the fullest row with enough space.
//!
//! The algorithm needs at most 11/9 of the optimum plus 6/9 of a row (Johnson et al., "Worst-case
//! performance bounds for simple one-dimensional packing algorithms", 1974; Dósa, 2007). Sequences
//! of equal length are placed together, and rows are indexed by free space, so it takes O(n +
//! capacity) steps instead of O(n · rows).

#![expect(
    clippy::cast_possible_truncation,
    reason = "counts, positions and table entries fit into the memory that has them"
)]

use crate::{
    lengths::histogram::{LengthHistogram, LengthRun},
    limits::{BatchLimits, RowItem, RowSpace},
    pack::PackedRows,
};

/// The end of a list of rows.
const NONE: u32 = u32::MAX;

/// Limit on the rows with enough tokens that are passed over because of `max_cost`, so that a
/// placement takes constant time. Without this limit on costs, none is passed over.
const MAX_PASSED_OVER: usize = 64;

pub(super) fn assign(histogram: &LengthHistogram, limits: &BatchLimits) -> PackedRows {
    let Some(shortest) = histogram.runs().first() else {
        return PackedRows { row_of: Vec::new(), free_space: Vec::new() };
    };
    let mut open = RowsBySpace::new(limits.empty_row(), limits.row_item(shortest.length));
    let mut row_of = Vec::with_capacity(histogram.count() as usize);
    for &LengthRun { length, count } in histogram.runs().iter().rev() {
        let item = limits.row_item(length);
        let mut n_unplaced = count;
        while n_unplaced > 0 {
            let (row, n_placed) = open.place(item, n_unplaced);
            row_of.extend(std::iter::repeat_n(row, n_placed as usize));
            n_unplaced -= n_placed;
        }
    }
    PackedRows { row_of, free_space: open.free_space }
}

/// The rows indexed by free space.
struct RowsBySpace {
    row: RowSpace,
    /// Least cost of a sequence; rows with less are closed.
    least_cost: u64,
    /// Last row with this much free space, or [`NONE`].
    heads: Vec<u32>,
    spaces: BitSet,
    /// For each row, the next row with the same free space.
    next: Vec<u32>,
    /// Free space of each row.
    free_space: Vec<RowSpace>,
}

impl RowsBySpace {
    fn new(row: RowSpace, shortest: RowItem) -> Self {
        // The most useful free space is in a row with one of the shortest sequences; emptier rows
        // are new.
        let max_space = (row.tokens - shortest.length) as usize;
        Self {
            row,
            least_cost: shortest.cost,
            heads: vec![NONE; max_space + 1],
            spaces: BitSet::new(max_space + 1),
            next: Vec::new(),
            free_space: Vec::new(),
        }
    }

    /// Puts up to `count` sequences like this one into the fullest row with enough space; returns the
    /// row and the number placed.
    ///
    /// Placed one by one, the sequences would go to the same row, because a row that takes one
    /// sequence becomes fuller than all other rows with space.
    fn place(&mut self, item: RowItem, count: u64) -> (u32, u64) {
        let row = match self.pop_fullest(item) {
            Some(row) => row,
            None => self.push_new(),
        };
        let free_space = &mut self.free_space[row as usize];
        let n_placed = count.min(free_space.capacity(item));
        *free_space = free_space.after_adding(item, n_placed);
        let RowSpace { tokens, sequences, cost } = *free_space;
        if sequences > 0 && cost >= self.least_cost {
            self.push(row, tokens as usize);
        }
        (row, n_placed)
    }

    /// Removes the fullest row with enough space from the index.
    fn pop_fullest(&mut self, item: RowItem) -> Option<u32> {
        let mut passed_over = Vec::new();
        let mut found = None;
        while found.is_none() && passed_over.len() < MAX_PASSED_OVER {
            let Some(space) = self.spaces.first_from(item.length as usize) else { break };
            let row = self.pop(space);
            if self.free_space[row as usize].cost >= item.cost {
                found = Some(row);
            } else {
                passed_over.push(row);
            }
        }
        for row in passed_over.into_iter().rev() {
            self.push(row, self.free_space[row as usize].tokens as usize);
        }
        found
    }

    fn push_new(&mut self) -> u32 {
        self.next.push(NONE);
        self.free_space.push(self.row);
        self.next.len() as u32 - 1
    }

    fn push(&mut self, row: u32, space: usize) {
        self.next[row as usize] = std::mem::replace(&mut self.heads[space], row);
        self.spaces.insert(space);
    }

    fn pop(&mut self, space: usize) -> u32 {
        let row = self.heads[space];
        self.heads[space] = self.next[row as usize];
        if self.heads[space] == NONE {
            self.spaces.remove(space);
        }
        row
    }
}

/// A set of bounded numbers with fast successor search: one bit per number, and above it one bit
/// per nonzero word, and so on.
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

    /// Returns the smallest number that is at least `from`.
    fn first_from(&self, from: usize) -> Option<usize> {
        let mut number = from;
        for (height, level) in self.levels.iter().enumerate() {
            let word = level.get(number / 64)? >> (number % 64);
            if word != 0 {
                number += word.trailing_zeros() as usize;
                // Descend to the first bit of each word below.
                for level in self.levels[..height].iter().rev() {
                    number = number * 64 + level[number].trailing_zeros() as usize;
                }
                return Some(number);
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
    use crate::config::{BatchConfig, DynamicBatchStrategy, Packing};

    #[test]
    fn bit_set_matches_ordered_set() {
        for len in [1, 63, 64, 65, 4096, 4097, 300_000] {
            let mut bits = BitSet::new(len);
            let mut set = BTreeSet::new();
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

    /// Packs by the definition: item by item, looking at each row; returns the space after each
    /// item.
    fn reference(lengths: &[u64], row: RowSpace) -> Vec<u32> {
        let mut sorted = lengths.to_vec();
        sorted.sort_unstable_by(|a, b| b.cmp(a));
        let mut rows: Vec<RowSpace> = Vec::new();
        let mut spaces = Vec::new();
        for length in sorted {
            let fitting = (0..rows.len())
                .filter(|&nth| rows[nth].tokens >= length && rows[nth].sequences > 0);
            let tightest = fitting.min_by_key(|&nth| rows[nth].tokens).unwrap_or_else(|| {
                rows.push(row);
                rows.len() - 1
            });
            rows[tightest].tokens -= length;
            rows[tightest].sequences -= 1;
            // Equally full rows are interchangeable, so the free space describes the choice.
            spaces.push(rows[tightest].tokens as u32);
        }
        spaces
    }

    /// Packs random lengths; returns the space that each sequence leaves in its row, and the space
    /// by the definition.
    fn pack(seed: u64, sequences: u64) -> (Vec<u32>, Vec<u32>) {
        let draw = |i| Seed::new(seed).derive(i).as_u64();
        let config = BatchConfig::default()
            .with_strategy(DynamicBatchStrategy::Pack(Packing::BestFit))
            .with_max_tokens(20 + draw(0) % 100)
            .with_max_batch_size(sequences);
        let limits = BatchLimits::new(config).unwrap();
        let row = limits.empty_row();
        let lengths: Vec<u64> = (0..seed).map(|i| draw(i + 2) % (row.tokens + 1)).collect();
        let rows = assign(&LengthHistogram::new(lengths.iter().copied()), &limits);
        let mut sorted = lengths.clone();
        sorted.sort_unstable_by(|a, b| b.cmp(a));
        let mut rooms = vec![row; rows.free_space.len()];
        let mut spaces = Vec::new();
        for (length, &row) in sorted.iter().zip(&rows.row_of) {
            let room = &mut rooms[row as usize];
            *room = room.after_adding(limits.row_item(*length), 1);
            spaces.push(room.tokens as u32);
        }
        (spaces, reference(&lengths, row))
    }

    #[test]
    fn choices_are_tightest() {
        for seed in 0..300 {
            let (rooms, expected) = pack(seed, u64::MAX);
            assert_eq!(rooms, expected, "seed {seed}");
        }
    }

    #[test]
    fn rows_keep_the_sequence_limit() {
        // Rows with equal space may take different numbers of sequences, so only sums can be
        // compared.
        for seed in 0..300 {
            let (rooms, _) = pack(seed, 1 + seed % 7);
            assert_eq!(rooms.len() as u64, seed);
        }
    }
}
