//! Vectors that are written once, without clearing them first.
//!
//! Clearing memory before a kernel overwrites it took a sixth of a training step.

#![allow(
    unsafe_code,
    reason = "fresh memory must be declared initialized; `FillBlock` counts the initialized elements"
)]

use std::mem::MaybeUninit;

use super::{float::Float, parallel::map_chunks};

/// Memory that is being written from its start to its end.
#[derive(Debug)]
pub(crate) struct FillBlock<'a, T> {
    memory: &'a mut [MaybeUninit<T>],
    /// The number of initialized elements at the start.
    written: usize,
}

impl<'a, T: Float> FillBlock<'a, T> {
    /// Wraps uninitialized memory.
    fn new(memory: &'a mut [MaybeUninit<T>]) -> Self {
        Self { memory, written: 0 }
    }

    /// Returns true if all elements are initialized.
    fn is_full(&self) -> bool {
        self.written == self.memory.len()
    }

    /// Returns the next `len` elements, which are not initialized.
    #[inline(always)]
    fn next(&mut self, len: usize) -> &mut [MaybeUninit<T>] {
        &mut self.memory[self.written..][..len]
    }

    /// Declares the next `len` elements written, and returns them.
    ///
    /// # Safety
    ///
    /// The caller must have initialized these elements.
    #[inline(always)]
    unsafe fn advance(&mut self, len: usize) -> &mut [T] {
        let written = &mut self.memory[self.written..][..len];
        self.written += len;
        // SAFETY: the caller has written them.
        unsafe { written.assume_init_mut() }
    }

    /// Appends `f` of each element of `x`, and returns the appended elements.
    #[inline(always)]
    pub(crate) fn push1(&mut self, x: &[T], f: impl Fn(T) -> T) -> &mut [T] {
        for (out, &x) in self.next(x.len()).iter_mut().zip(x) {
            out.write(f(x));
        }
        // SAFETY: the loop is as long as the shorter of two slices of this length.
        unsafe { self.advance(x.len()) }
    }

    /// Appends `f` of the elements of two slices of one length.
    #[inline(always)]
    pub(crate) fn push2(&mut self, x: &[T], y: &[T], f: impl Fn(T, T) -> T) -> &mut [T] {
        assert_eq!(x.len(), y.len());
        for ((out, &x), &y) in self.next(x.len()).iter_mut().zip(x).zip(y) {
            out.write(f(x, y));
        }
        // SAFETY: the loop is as long as the shortest of three slices of this length.
        unsafe { self.advance(x.len()) }
    }

    /// Appends `f` of the elements of three slices of one length.
    #[inline(always)]
    pub(crate) fn push3(
        &mut self,
        x: &[T],
        y: &[T],
        z: &[T],
        f: impl Fn(T, T, T) -> T,
    ) -> &mut [T] {
        assert!(x.len() == y.len() && y.len() == z.len());
        for (((out, &x), &y), &z) in self.next(x.len()).iter_mut().zip(x).zip(y).zip(z) {
            out.write(f(x, y, z));
        }
        // SAFETY: the loop is as long as the shortest of four slices of this length.
        unsafe { self.advance(x.len()) }
    }

    /// Appends `f` of the elements of four slices of one length.
    #[inline(always)]
    #[expect(clippy::many_single_char_names, reason = "four of a kind, and a function of them")]
    pub(crate) fn push4(
        &mut self,
        x: &[T],
        y: &[T],
        z: &[T],
        w: &[T],
        f: impl Fn(T, T, T, T) -> T,
    ) -> &mut [T] {
        assert!(x.len() == y.len() && y.len() == z.len() && z.len() == w.len());
        let inputs = x.iter().zip(y).zip(z).zip(w);
        for (out, (((&x, &y), &z), &w)) in self.next(x.len()).iter_mut().zip(inputs) {
            out.write(f(x, y, z, w));
        }
        // SAFETY: the loop is as long as the shortest of five slices of this length.
        unsafe { self.advance(x.len()) }
    }

    /// Appends a pair for each pair of elements of `x`: the result of `f` for the pair and one
    /// element each of `y` and `z`, which have half the length of `x`.
    #[inline(always)]
    pub(crate) fn push_pairs(
        &mut self,
        x: &[T],
        y: &[T],
        z: &[T],
        f: impl Fn(T, T, T, T) -> (T, T),
    ) -> &mut [T] {
        assert!(x.len() == 2 * y.len() && y.len() == z.len());
        let inputs = x.as_chunks::<2>().0.iter().zip(y).zip(z);
        let out = self.next(x.len()).as_chunks_mut::<2>().0;
        for (out, ((&[a, b], &y), &z)) in out.iter_mut().zip(inputs) {
            let (first, second) = f(a, b, y, z);
            out[0].write(first);
            out[1].write(second);
        }
        // SAFETY: the loop writes two elements for each pair, and the length is even.
        unsafe { self.advance(x.len()) }
    }
}

/// Returns a vector of `len` elements that `write` fills block by block, and the results of `write`
/// in the order of the blocks.
///
/// `write` gets the index of the block. Blocks are written in parallel; all but the last have
/// `block_len` elements.
pub(crate) fn vec_of_blocks<T: Float, R: Send>(
    len: usize,
    block_len: usize,
    write: impl Fn(usize, &mut FillBlock<'_, T>) -> R + Sync,
) -> (Vec<T>, Vec<R>) {
    let mut memory = Box::new_uninit_slice(len);
    let results = map_chunks(&mut memory, block_len, |block, chunk| {
        let mut fill = FillBlock::new(chunk);
        let result = write(block, &mut fill);
        assert!(fill.is_full(), "a kernel left a part of its output unwritten");
        result
    });
    // SAFETY: the chunks are all of the memory, and each was full.
    (unsafe { memory.assume_init() }.into_vec(), results)
}

/// Returns two vectors as long as `slice`. `write` fills a block of each, and may read and change the same
/// block of `slice`. Blocks are written in parallel, as in [`vec_of_blocks`].
pub(crate) fn two_vecs_of_blocks<T: Float>(
    slice: &mut [T],
    block_len: usize,
    write: impl Fn(usize, &mut [T], [&mut FillBlock<'_, T>; 2]) + Sync,
) -> [Vec<T>; 2] {
    let mut memories = [(); 2].map(|()| Box::new_uninit_slice(slice.len()));
    let [first, second] = &mut memories;
    let outputs = first.chunks_mut(block_len).zip(second.chunks_mut(block_len));
    let mut blocks: Vec<_> = slice.chunks_mut(block_len).zip(outputs).collect();
    map_chunks(&mut blocks, 1, |block, parts| {
        for (slice, (first, second)) in parts {
            let (mut first, mut second) = (FillBlock::new(first), FillBlock::new(second));
            write(block, slice, [&mut first, &mut second]);
            let is_full = first.is_full() && second.is_full();
            assert!(is_full, "a kernel left a part of its output unwritten");
        }
    });
    // SAFETY: the chunks are all of both memories, and each was full.
    memories.map(|memory| unsafe { memory.assume_init() }.into_vec())
}

/// Returns a vector of `len` elements that `write` fills at the address that it gets.
///
/// # Safety
///
/// `write` must initialize all elements.
pub(super) unsafe fn vec_written_by<T: Float>(len: usize, write: impl FnOnce(*mut T)) -> Vec<T> {
    let mut memory = Box::<[T]>::new_uninit_slice(len);
    write(memory.as_mut_ptr().cast());
    // SAFETY: as the caller promises.
    unsafe { memory.assume_init() }.into_vec()
}

/// Returns three vectors of these lengths, which `write` fills together.
///
/// # Safety
///
/// `write` must initialize all elements of all three.
pub(super) unsafe fn three_vecs_written_by<T: Float>(
    lens: [usize; 3],
    write: impl FnOnce([*mut T; 3]),
) -> [Vec<T>; 3] {
    let mut memories = lens.map(Box::<[T]>::new_uninit_slice);
    write(memories.each_mut().map(|memory| memory.as_mut_ptr().cast()));
    // SAFETY: as the caller promises.
    memories.map(|memory| unsafe { memory.assume_init() }.into_vec())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_joined_in_order() {
        let (vec, blocks) = vec_of_blocks(7, 3, |block, fill| {
            let len = if block == 2 { 1 } else { 3 };
            fill.push1(&[block as f32; 3][..len], |x| x + 1.0);
            block
        });
        assert_eq!(vec, [1.0, 1.0, 1.0, 2.0, 2.0, 2.0, 3.0]);
        assert_eq!(blocks, [0, 1, 2]);
    }

    #[test]
    fn empty_input_gives_empty_vector() {
        let (vec, blocks) = vec_of_blocks::<f32, _>(0, 3, |_, _| ());
        assert!(vec.is_empty() && blocks.is_empty());
    }

    #[test]
    #[should_panic(expected = "unwritten")]
    fn incomplete_block_panics() {
        vec_of_blocks::<f32, _>(2, 2, |_, fill| fill.push1(&[1.0], |x| x).len());
    }

    #[test]
    fn two_vectors_are_joined_beside_a_slice() {
        let mut x = vec![1.0_f32, 2.0, 3.0, 4.0, 5.0];
        let [negated, halves] = two_vecs_of_blocks(&mut x, 2, |block, x, [negated, halves]| {
            negated.push1(x, |x| -x);
            halves.push1(x, |x| x / 2.0);
            for x in x {
                *x += block as f32;
            }
        });
        assert_eq!(negated, [-1.0, -2.0, -3.0, -4.0, -5.0]);
        assert_eq!(halves, [0.5, 1.0, 1.5, 2.0, 2.5]);
        assert_eq!(x, [1.0, 2.0, 4.0, 5.0, 7.0]);
        let empty = two_vecs_of_blocks::<f32>(&mut [], 2, |_, _, _| ());
        assert!(empty.iter().all(Vec::is_empty));
    }

    #[test]
    #[should_panic(expected = "unwritten")]
    fn incomplete_second_vector_panics() {
        let mut x = [1.0_f32; 2];
        two_vecs_of_blocks(&mut x, 2, |_, x, [first, _]| {
            first.push1(x, |x| x);
        });
    }
}
