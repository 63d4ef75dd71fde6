//! The iterator over the indices that a rank reads.

use std::{iter::FusedIterator, ops::Range};

use core_types::split::Strided;

use crate::sampler::DistributedSampler;

/// How many indices are computed together: as many as the streaming order permutes at a time.
const BLOCK: usize = 256;

/// The indices that one rank, or one of its workers, reads; made by [`DistributedSampler::iter`].
#[derive(Clone, Debug)]
#[must_use = "iterators are lazy and do nothing unless consumed"]
pub struct Indices<'a> {
    sampler: &'a DistributedSampler,
    /// Which of the rank's indices are read, by their number.
    numbers: Strided,
    /// Which of these numbers are still to come.
    remaining: Range<u64>,
    /// The indices of the numbers `in_block`, computed ahead.
    block: [u64; BLOCK],
    in_block: Range<u64>,
}

impl<'a> Indices<'a> {
    pub(crate) fn new(sampler: &'a DistributedSampler, numbers: Strided) -> Self {
        Self { sampler, numbers, remaining: 0..numbers.len(), block: [0; BLOCK], in_block: 0..0 }
    }

    /// The `n`-th index, from the block that begins with it unless it lies in the last one.
    #[expect(
        clippy::cast_possible_truncation,
        reason = "a block holds no more than `BLOCK` indices"
    )]
    fn read(&mut self, n: u64) -> u64 {
        if !self.in_block.contains(&n) {
            let count = (self.numbers.len() - n).min(BLOCK as u64);
            let first = number(self.numbers, n);
            let block = &mut self.block[..count as usize];
            self.sampler.fill_every(self.numbers.step(), first, block);
            self.in_block = n..n + count;
        }
        self.block[(n - self.in_block.start) as usize]
    }
}

/// The `n`-th of `numbers`.
#[expect(clippy::expect_used, reason = "what remains begins with all numbers and only shrinks")]
fn number(numbers: Strided, n: u64) -> u64 {
    numbers.get(n).expect("one of the numbers that remain")
}

impl Iterator for Indices<'_> {
    type Item = u64;

    fn next(&mut self) -> Option<u64> {
        let n = self.remaining.next()?;
        Some(self.read(n))
    }

    fn nth(&mut self, n: usize) -> Option<u64> {
        let n = self.remaining.nth(n)?;
        Some(self.read(n))
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        self.remaining.size_hint()
    }
}

impl DoubleEndedIterator for Indices<'_> {
    fn next_back(&mut self) -> Option<u64> {
        self.nth_back(0)
    }

    fn nth_back(&mut self, n: usize) -> Option<u64> {
        let n = self.remaining.nth_back(n)?;
        self.sampler.get(number(self.numbers, n))
    }
}

/// Exact where `usize` has 64 bits; elsewhere only below 2^32 indices.
impl ExactSizeIterator for Indices<'_> {}

impl FusedIterator for Indices<'_> {}
