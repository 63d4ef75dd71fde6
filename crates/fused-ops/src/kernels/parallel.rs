//! The division of work among threads: into blocks with sizes that depend only on the shape, so
//! that no bit of a result depends on the number of threads.
//!
//! The threads belong to the caller's rayon pool.

use rayon::prelude::*;

/// Elements per block: a few inputs and an output of this many f32 fit into a core's second-level
/// cache.
const BLOCK: usize = 1 << 14;

/// The fewest rows per block. A backward pass adds up one row of sums per block, which is cheap
/// compared to the work for this many rows.
const FEWEST_ROWS: usize = 16;

/// Returns the number of rows of `width` elements per task.
pub(crate) fn rows_per_block(width: usize) -> usize {
    (BLOCK / width.max(1)).max(FEWEST_ROWS)
}

/// The number of elements per task for elementwise work.
pub(crate) const ELEMENTS_PER_BLOCK: usize = BLOCK;

/// Returns block number `block` of `x`, with blocks of `len` elements.
pub(crate) fn block_of<T>(x: &[T], block: usize, len: usize) -> &[T] {
    let start = (block * len).min(x.len());
    &x[start..(start + len).min(x.len())]
}

/// Returns the results of `f` for each chunk of `slice` and its index, in order. The chunks run in
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
