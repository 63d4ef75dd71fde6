//! Rows of a table, and the sum of gradients for each.

use super::{
    float::Float,
    memory::vec_of_blocks,
    parallel::{block_of, map_chunks, rows_per_block},
};

/// Into how many parts the rows of a table are cut when gradients are added up. Each part looks through all indices, so
/// more would be slower on few cores.
const PARTS: usize = 8;

/// The rows of `indices`, each of which the table has.
pub(crate) fn forward<T: Float>(table: &[T], width: usize, indices: &[usize]) -> Vec<T> {
    let rows = rows_per_block(width);
    let (out, _) = vec_of_blocks(indices.len() * width, rows * width, |block, out| {
        for &index in block_of(indices, block, rows) {
            out.push1(&table[index * width..][..width], |x| x);
        }
    });
    out
}

/// The gradient of a table of `len` elements: each row's are added in the order in which it was read.
pub(crate) fn backward<T: Float>(
    len: usize,
    width: usize,
    indices: &[usize],
    grad: &[T],
) -> Vec<T> {
    let mut sums = vec![T::ZERO; len];
    let rows = (len / width.max(1)).div_ceil(PARTS);
    map_chunks(&mut sums, rows * width, |part, sums| {
        let range = part * rows..part * rows + sums.len() / width;
        for (index, grad) in indices.iter().zip(grad.chunks_exact(width)) {
            if range.contains(index) {
                let sum = &mut sums[(index - range.start) * width..][..width];
                for (sum, &grad) in sum.iter_mut().zip(grad) {
                    *sum += grad;
                }
            }
        }
    });
    sums
}
