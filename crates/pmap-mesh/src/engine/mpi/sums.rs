//! Reductions of one tensor.

use std::mem;

use bytemuck::cast_slice_mut;
use candle_core::{DType, Result};

use super::transfer::{MessageKind, MpiCall};
use crate::{
    reduce::{self, Reduction, parts::balanced},
    sync::lock,
};

/// The bytes of the sum that each member computes per chunk. Received summands are then added while
/// they are still in a second-level cache of about a megabyte.
const PART_BYTES: usize = 256 << 10;

impl MpiCall<'_> {
    /// Reduces the `x` of all members, which have equal length. Each member computes a part, chunk
    /// by chunk.
    pub(super) fn reduce(
        &self,
        dtype: DType,
        x: &[u8],
        sums: &mut [u8],
        reduction: Reduction,
    ) -> Result<()> {
        let chunk_bytes = self.ctx.size() * PART_BYTES;
        for (x, sums) in x.chunks(chunk_bytes).zip(sums.chunks_mut(chunk_bytes)) {
            self.reduce_chunk(dtype, x, sums, reduction)?;
        }
        Ok(())
    }

    fn reduce_chunk(
        &self,
        dtype: DType,
        x: &[u8],
        sums: &mut [u8],
        reduction: Reduction,
    ) -> Result<()> {
        let size = self.ctx.size();
        let own_rank = self.ctx.rank;
        let item_bytes = dtype.size_in_bytes();
        let span = |rank| {
            let items = balanced(x.len() / item_bytes, rank, size);
            items.start * item_bytes..items.end * item_bytes
        };
        let mut parts = lock(&self.engine.parts);
        let summands = self.collect(|rank| &x[span(rank)], &mut parts);
        let mut results = split(sums, (0..size).map(|rank| span(rank).len()));
        reduce::raw_items(dtype, &summands, reduction, results[own_rank])?;
        let own = &*mem::take(&mut results[own_rank]);
        let others = results.into_iter().enumerate().filter(|(from, _)| *from != own_rank);
        self.transfer(
            others.map(|(from, part)| (from, MessageKind::Data, part)),
            self.others().map(|to| (to, MessageKind::Data, own)),
        );
        Ok(())
    }

    /// Sends `x(n)` to each rank n. Returns the part that each rank sends to this one, by rank, with
    /// this rank's own part among them.
    ///
    /// The parts have equal length; returns an empty list if it is 0.
    fn collect<'x>(&self, x: impl Fn(usize) -> &'x [u8], parts: &'x mut Vec<u64>) -> Vec<&'x [u8]> {
        let own_rank = self.ctx.rank;
        let own = x(own_rank);
        let arrived = grown_bytes(parts, own.len() * (self.ctx.size() - 1));
        // The chunk length must not be 0; an empty part has no chunks for any length.
        let places = arrived.chunks_exact_mut(own.len().max(1)).enumerate();
        self.transfer(
            // The n-th place belongs to the n-th other rank.
            places.map(|(n, part)| (n + usize::from(n >= own_rank), MessageKind::Data, part)),
            self.others().map(|to| (to, MessageKind::Data, x(to))),
        );
        let mut all: Vec<&[u8]> = arrived.chunks_exact(own.len().max(1)).collect();
        if !own.is_empty() {
            all.insert(own_rank, own);
        }
        all
    }
}

/// Returns the first `n_bytes` bytes of a buffer of words, which grows if needed.
fn grown_bytes(buffer: &mut Vec<u64>, n_bytes: usize) -> &mut [u8] {
    let n_words = n_bytes.div_ceil(size_of::<u64>());
    if buffer.len() < n_words {
        buffer.resize(n_words, 0);
    }
    &mut cast_slice_mut(buffer)[..n_bytes]
}

/// Splits `bytes` into consecutive parts of these lengths.
pub(super) fn split(mut bytes: &mut [u8], lens: impl Iterator<Item = usize>) -> Vec<&mut [u8]> {
    lens.map(|len| {
        let (part, rest) = mem::take(&mut bytes).split_at_mut(len);
        bytes = rest;
        part
    })
    .collect()
}
