//! How work is cut for threads: into blocks whose size depends on the shape alone, so that no bit
//! of a result depends on the number of threads.
//!
//! The threads are those of the rayon pool that the caller is in.

use rayon::prelude::*;

/// Elements per block: a few inputs and an output of so many f32 fit into a core's second-level
/// cache.
const BLOCK: usize = 1 << 14;

/// The fewest rows per block. Backward passes add up a row of their own in each block, which this
/// makes cheap beside the block's rows.
const FEWEST_ROWS: usize = 16;

/// How many rows of `width` elements one task works on.
pub(crate) fn rows_per_block(width: usize) -> usize {
    (BLOCK / width.max(1)).max(FEWEST_ROWS)
}

/// How many elements one task works on where each is computed alone.
pub(crate) const ELEMENTS_PER_BLOCK: usize = BLOCK;

/// The part of `x` that stands at block number `block` of blocks of `len` elements.
pub(crate) fn block_of<T>(x: &[T], block: usize, len: usize) -> &[T] {
    let start = (block * len).min(x.len());
    &x[start..(start + len).min(x.len())]
}

/// What `f` returns for each chunk of `slice` and its index, in order; chunks are worked on in
/// parallel.
pub(crate) fn map_chunks<T: Send, R: Send>(
    slice: &mut [T],
    chunk_len: usize,
    f: impl Fn(usize, &mut [T]) -> R + Sync,
) -> Vec<R> {
    let chunk_len = chunk_len.max(1);
    if slice.len() <= chunk_len {
        return slice.chunks_mut(chunk_len).map(|chunk| f(0, chunk)).collect();
    }
    slice.par_chunks_mut(chunk_len).enumerate().map(|(index, chunk)| f(index, chunk)).collect()
}
