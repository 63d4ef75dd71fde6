//! Reductions of one tensor.

use std::{mem, slice};

use bytemuck::cast_slice_mut;
use candle_core::{DType, Result, Tensor};

use super::{
    bytes::{buffer, with_bytes},
    transfer::{MessageKind, MpiCall},
};
use crate::{
    reduce::{self, Reduction, parts::balanced},
    sync::lock,
};

/// The size, in bytes, of the part that each member reduces per chunk. Parts of this size are added
/// while the received summands are still in a second-level cache of about a megabyte.
const PART_BYTES: usize = 256 << 10;

impl MpiCall<'_> {
    /// Returns the reduction of one tensor on the processor. Small data are sent with the headers.
    pub(super) fn reduce_one(&self, x: &Tensor, reduction: Reduction) -> Result<Tensor> {
        let mut sums = buffer(x.dtype(), x.elem_count())?;
        with_bytes(x, |bytes| {
            let received = self.exchange_headers(slice::from_ref(x), 0, bytes)?;
            if received.headers[self.ctx.rank].is_inline {
                let summands = received.all_inline_data(bytes, self.ctx.rank);
                reduce::reduce_raw_items(x.dtype(), &summands, reduction, sums.bytes_mut())
            } else {
                self.reduce(x.dtype(), bytes, sums.bytes_mut(), reduction)
            }
        })?;
        sums.tensor(x.dims())
    }

    /// Returns the reductions of all tensors of a list on the processor.
    pub(super) fn reduce_list(&self, list: &[Tensor], reduction: Reduction) -> Result<Vec<Tensor>> {
        self.exchange_headers(list, 0, &[])?;
        let mut reduced = Vec::with_capacity(list.len());
        for x in list {
            let mut sums = buffer(x.dtype(), x.elem_count())?;
            with_bytes(x, |bytes| self.reduce(x.dtype(), bytes, sums.bytes_mut(), reduction))?;
            reduced.push(sums.tensor(x.dims())?);
        }
        Ok(reduced)
    }

    /// Reduces the `x` of all members, which have equal lengths, into `sums`. Of each chunk, each
    /// member reduces one part and sends the result to all others.
    fn reduce(&self, dtype: DType, x: &[u8], sums: &mut [u8], reduction: Reduction) -> Result<()> {
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
