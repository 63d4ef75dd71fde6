//! The iterator over the indices of a rank.

use std::{iter::FusedIterator, ops::Range};

use crate::{sampler::DistributedSampler, split::Strided};

/// Number of indices that are computed together, equal to the block of the streaming order.
const BLOCK: usize = 256;

/// The indices of one rank, or of one of its workers, from [`DistributedSampler::iter`].
#[derive(Clone, Debug)]
#[must_use = "iterators are lazy and do nothing unless consumed"]
pub struct Indices<'a> {
    sampler: &'a DistributedSampler,
    /// Numbers of the rank's indices to read.
    numbers: Strided,
    /// Remaining part of these numbers.
    remaining: Range<u64>,
    /// Precomputed indices of the numbers `in_block`.
    block: [u64; BLOCK],
    in_block: Range<u64>,
}

impl<'a> Indices<'a> {
    pub(crate) fn new(sampler: &'a DistributedSampler, numbers: Strided) -> Self {
        Self { sampler, numbers, remaining: 0..numbers.len, block: [0; BLOCK], in_block: 0..0 }
    }

    /// Returns the `n`-th index, from the last block or else from a new block that begins with it.
    #[expect(clippy::cast_possible_truncation, reason = "a block has at most `BLOCK` indices")]
    fn read(&mut self, n: u64) -> u64 {
        if !self.in_block.contains(&n) {
            let count = (self.numbers.len - n).min(BLOCK as u64);
            let first = number(self.numbers, n);
            let block = &mut self.block[..count as usize];
            self.sampler.fill_every(self.numbers.step, first, block);
            self.in_block = n..n + count;
        }
        self.block[(n - self.in_block.start) as usize]
    }
}

/// Returns the `n`-th of `numbers`.
#[expect(clippy::expect_used, reason = "the remaining range is within the numbers")]
fn number(numbers: Strided, n: u64) -> u64 {
    numbers.get(n).expect("a remaining number")
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

/// The size is exact if `usize` has 64 bits, else only below 2^32 indices.
impl ExactSizeIterator for Indices<'_> {}

impl FusedIterator for Indices<'_> {}
