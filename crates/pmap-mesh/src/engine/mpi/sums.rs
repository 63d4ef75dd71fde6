//! Collectives that add up.

use std::mem;

use bytemuck::cast_slice_mut;
use candle_core::{DType, Result};

use super::transfer::{Call, Kind};
use crate::{
    reduce::{self, Reduction, parts::balanced},
    sync::lock,
};

/// How much of a sum each member makes at a time: what arrives is added up before it leaves a
/// second cache of a megabyte or so.
const PART_BYTES: usize = 256 << 10;

impl Call<'_> {
    /// The reduction of all members' `x`, which are of one length: each member makes a part of it,
    /// a chunk at a time.
    pub(super) fn reduce(
        &self,
        dtype: DType,
        x: &[u8],
        sums: &mut [u8],
        reduction: Reduction,
    ) -> Result<()> {
        let chunk = self.site.size() * PART_BYTES;
        for (x, sums) in x.chunks(chunk).zip(sums.chunks_mut(chunk)) {
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
        let size = self.site.size();
        let own_rank = self.site.rank;
        let item = dtype.size_in_bytes();
        let place = |rank| {
            let items = balanced(x.len() / item, rank, size);
            items.start * item..items.end * item
        };
        let mut parts = lock(&self.engine.parts);
        let summands = self.collect(|rank| &x[place(rank)], &mut parts);
        let mut results = split(sums, (0..size).map(|rank| place(rank).len()));
        reduce::bytes(dtype, &summands, reduction, results[own_rank])?;
        let own = &*mem::take(&mut results[own_rank]);
        let others = results.into_iter().enumerate().filter(|(from, _)| *from != own_rank);
        self.transfer(
            others.map(|(from, part)| (from, Kind::Data, part)),
            self.others().map(|to| (to, Kind::Data, own)),
        );
        Ok(())
    }

    /// Sends `x(n)` to each rank n; returns what all, this one included, have for this one, by
    /// rank.
    ///
    /// What they have is of one length, and nothing is returned if it is nothing.
    fn collect<'x>(&self, x: impl Fn(usize) -> &'x [u8], parts: &'x mut Vec<u64>) -> Vec<&'x [u8]> {
        let own_rank = self.site.rank;
        let own = x(own_rank);
        let arrived = words(parts, own.len() * (self.site.size() - 1));
        // Chunks must not be empty; of nothing there are none, whatever their size.
        let places = arrived.chunks_exact_mut(own.len().max(1)).enumerate();
        self.transfer(
            places.map(|(n, part)| (n + usize::from(n >= own_rank), Kind::Data, part)),
            self.others().map(|to| (to, Kind::Data, x(to))),
        );
        let mut all: Vec<&[u8]> = arrived.chunks_exact(own.len().max(1)).collect();
        if !own.is_empty() {
            all.insert(own_rank, own);
        }
        all
    }
}

/// So many bytes of a buffer of words, which grows if it must.
fn words(buffer: &mut Vec<u64>, bytes: usize) -> &mut [u8] {
    let n_words = bytes.div_ceil(size_of::<u64>());
    if buffer.len() < n_words {
        buffer.resize(n_words, 0);
    }
    &mut cast_slice_mut(buffer)[..bytes]
}

/// Parts of these lengths, one after the other.
pub(super) fn split(mut bytes: &mut [u8], lens: impl Iterator<Item = usize>) -> Vec<&mut [u8]> {
    let part = |len| {
        let (part, rest) = mem::take(&mut bytes).split_at_mut(len);
        bytes = rest;
        part
    };
    lens.map(part).collect()
}
