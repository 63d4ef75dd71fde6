//! Reductions of one tensor.

use std::mem;

use bytemuck::cast_slice_mut;
use candle_core::{DType, Result};

use super::transfer::{MessageKind, MpiCall};
use crate::{
    reduce::{self, Reduction, parts::balanced},
    sync::lock,
};

/// The size, in bytes, of the part that each member reduces per chunk. Parts of this size are added
/// while the received summands are still in a second-level cache of about a megabyte.
const PART_BYTES: usize = 256 << 10;

impl MpiCall<'_> {
    /// Reduces the `x` of all members, which have equal lengths, into `sums`. Of each chunk, each
    /// member reduces one part and sends the result to all others.
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
        let summands = self.collect_summands(|rank| &x[span(rank)], &mut parts);
        let mut results = split(sums, (0..size).map(|rank| span(rank).len()));
        reduce::reduce_raw_items(dtype, &summands, reduction, results[own_rank])?;
        let own = &*mem::take(&mut results[own_rank]);
        let others = results.into_iter().enumerate().filter(|(from, _)| *from != own_rank);
        self.transfer(
            others.map(|(from, part)| (from, MessageKind::Data, part)),
            self.others().map(|to| (to, MessageKind::Data, own)),
        );
        Ok(())
    }

    /// Sends `part_for(n)` to each other rank n. Returns the parts of all ranks for this rank, by
    /// rank, including its own. The other ranks' parts are received into `buffer`.
    ///
    /// All parts for this rank have the same length; returns an empty list if this length is 0.
    fn collect_summands<'x>(
        &self,
        part_for: impl Fn(usize) -> &'x [u8],
        buffer: &'x mut Vec<u64>,
    ) -> Vec<&'x [u8]> {
        let own_rank = self.ctx.rank;
        let own = part_for(own_rank);
        let arrived = resize_bytes(buffer, own.len() * (self.ctx.size() - 1));
        // `max` only avoids a panic for the length 0: an empty buffer has no chunks of any length.
        let places = arrived.chunks_exact_mut(own.len().max(1)).enumerate();
        self.transfer(
            // The n-th place belongs to the n-th other rank.
            places.map(|(n, part)| (n + usize::from(n >= own_rank), MessageKind::Data, part)),
            self.others().map(|to| (to, MessageKind::Data, part_for(to))),
        );
        let mut all: Vec<&[u8]> = arrived.chunks_exact(own.len().max(1)).collect();
        if !own.is_empty() {
            all.insert(own_rank, own);
        }
        all
    }
}

/// Returns the first `n_bytes` bytes of a buffer of words, which grows if it is too small.
fn resize_bytes(buffer: &mut Vec<u64>, n_bytes: usize) -> &mut [u8] {
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
