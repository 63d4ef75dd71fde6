//! The reduction loop over several summands, block by block, in the order of the summands.

#[cfg(feature = "mpi")]
use std::mem;
use std::ops::Range;

use candle_core::{CpuStorage, Result, Storage, Tensor, WithDType, bail};

use crate::reduce::{Reduction, element::ReduceElement};

/// The number of items per block: 32 KiB of single-precision sums, which stay in the nearest caches
/// while the items of all summands are added. With blocks of half this size, a reduction takes a
/// tenth longer: each block takes the locks of all summands, and the locks move from core to core.
pub(super) const BLOCK: usize = 8192;

/// The inputs of a reduction: lists of items of equal length.
pub(super) trait Summands<T> {
    /// Returns the number of summands.
    fn count(&self) -> usize;

    /// Calls `read` with a range of the items of summand number `index`.
    fn lend<R>(&self, index: usize, range: Range<usize>, read: impl FnOnce(&[T]) -> R)
    -> Result<R>;
}

/// The output of a reduction, written from the first sum to the last.
pub(super) trait SumDestination<T> {
    /// Copies items to the next places of the output, and returns the copy.
    fn push_items(&mut self, items: &[T]) -> &mut [T];
}

/// Appends to a vector, which has capacity for all items.
impl<T: Copy> SumDestination<T> for Vec<T> {
    fn push_items(&mut self, items: &[T]) -> &mut [T] {
        let start = self.len();
        self.extend_from_slice(items);
        &mut self[start..]
    }
}

/// Overwrites a slice from its first item on.
#[cfg(feature = "mpi")]
impl<T: Copy> SumDestination<T> for &mut [T] {
    fn push_items(&mut self, items: &[T]) -> &mut [T] {
        let (places, rest) = mem::take(self).split_at_mut(items.len());
        *self = rest;
        places.copy_from_slice(items);
        places
    }
}

/// The items of contiguous tensors on the processor.
///
/// `lend` locks one summand at a time. A thread that waited for a second lock while it held a first
/// one could deadlock with a `Var::set` that waits for the first lock.
impl<T: WithDType> Summands<T> for [Tensor] {
    fn count(&self) -> usize {
        self.len()
    }

    fn lend<R>(
        &self,
        index: usize,
        range: Range<usize>,
        read: impl FnOnce(&[T]) -> R,
    ) -> Result<R> {
        let (storage, layout) = self[index].storage_and_layout();
        let Storage::Cpu(storage) = &*storage else { bail!("a summand is not on the processor") };
        Ok(read(typed_items::<T>(storage, layout.start_offset() + range.start, range.len())?))
    }
}

/// Slices of equal length.
#[cfg(feature = "mpi")]
impl<T> Summands<T> for [&[T]] {
    fn count(&self) -> usize {
        self.len()
    }

    fn lend<R>(
        &self,
        index: usize,
        range: Range<usize>,
        read: impl FnOnce(&[T]) -> R,
    ) -> Result<R> {
        match self[index].get(range) {
            Some(items) => Ok(read(items)),
            None => bail!("summands differ in size"),
        }
    }
}

fn typed_items<T: WithDType>(storage: &CpuStorage, start: usize, len: usize) -> Result<&[T]> {
    match storage.as_slice::<T>()?.get(start..start + len) {
        Some(items) => Ok(items),
        None => bail!("summands differ in size"),
    }
}

/// Reduces the items in `range` of all summands, in the order of the summands.
///
/// The first summand is copied to the destination, and the others are added to it in place, so that
/// no sum is copied again.
pub(super) fn reduce<T: ReduceElement>(
    summands: &(impl Summands<T> + ?Sized),
    reduction: Reduction,
    range: Range<usize>,
    sums: &mut impl SumDestination<T>,
) -> Result<()> {
    let combine = block_operation::<T>(reduction);
    for start in range.clone().step_by(BLOCK) {
        let block = start..range.end.min(start + BLOCK);
        let first_items = summands.lend(0, block.clone(), |items| sums.push_items(items))?;
        T::with_sums(first_items, |block_sums| {
            for index in 1..summands.count() {
                summands.lend(index, block.clone(), |items| combine(block_sums, items))?;
            }
            if reduction == Reduction::Mean {
                for sum in block_sums {
                    *sum = T::divide(*sum, summands.count());
                }
            }
            Ok(())
        })?;
    }
    Ok(())
}

/// Returns the function that combines a block of items into the sums.
fn block_operation<T: ReduceElement>(reduction: Reduction) -> fn(&mut [T::Sum], &[T]) {
    match reduction {
        Reduction::Sum | Reduction::Mean => |sums, items| accumulate(sums, items, T::plus),
        Reduction::Max => |sums, items| accumulate(sums, items, T::larger),
        Reduction::Min => |sums, items| accumulate(sums, items, T::smaller),
    }
}

/// Combines a block of items into the sums. `combine` is a generic argument, so that the loop of
/// each operation compiles to vector instructions.
fn accumulate<T: ReduceElement>(
    sums: &mut [T::Sum],
    items: &[T],
    combine: impl Fn(T::Sum, T::Sum) -> T::Sum,
) {
    sums.iter_mut().zip(items).for_each(|(sum, item)| *sum = combine(*sum, item.widen()));
}
