//! The loop that adds up several summands, block by block, in the order of the summands.

#[cfg(feature = "mpi")]
use std::mem;
use std::ops::Range;

use candle_core::{CpuStorage, Result, Storage, Tensor, WithDType, bail};

use crate::reduce::{Reduction, element::Element};

/// How many items are worked on at a time: 32 KiB of single-precision sums, which stay in the
/// nearest caches while the same items of all summands pass by. Half as many took a tenth longer,
/// because each block takes the locks of all summands, which pass from core to core.
pub(super) const BLOCK: usize = 8192;

/// What is added up: lists of items of one length.
pub(super) trait Summands<T> {
    fn count(&self) -> usize;

    /// What `see` makes of the items in a range of one summand.
    fn lend<R>(&self, index: usize, range: Range<usize>, see: impl FnOnce(&[T]) -> R) -> Result<R>;
}

/// Where sums are written, from the first one to the last.
pub(super) trait Destination<T> {
    /// Copies the next items; returns them where they lie now.
    fn take(&mut self, items: &[T]) -> &mut [T];
}

/// One that has the capacity for all of them.
impl<T: Copy> Destination<T> for Vec<T> {
    fn take(&mut self, items: &[T]) -> &mut [T] {
        let start = self.len();
        self.extend_from_slice(items);
        &mut self[start..]
    }
}

/// One whose items are overwritten from the first one on.
#[cfg(feature = "mpi")]
impl<T: Copy> Destination<T> for &mut [T] {
    fn take(&mut self, items: &[T]) -> &mut [T] {
        let (places, rest) = mem::take(self).split_at_mut(items.len());
        *self = rest;
        places.copy_from_slice(items);
        places
    }
}

/// The items of contiguous tensors on the processor.
///
/// One summand is locked at a time: a thread that waits for one lock while it holds another could
/// wait for a `Var::set` that waits for this one.
impl<T: WithDType> Summands<T> for [Tensor] {
    fn count(&self) -> usize {
        self.len()
    }

    fn lend<R>(&self, index: usize, range: Range<usize>, see: impl FnOnce(&[T]) -> R) -> Result<R> {
        let (storage, layout) = self[index].storage_and_layout();
        let Storage::Cpu(storage) = &*storage else { bail!("a summand is not on the processor") };
        Ok(see(items_of::<T>(storage, layout.start_offset() + range.start, range.len())?))
    }
}

/// Slices of one length.
#[cfg(feature = "mpi")]
impl<T> Summands<T> for [&[T]] {
    fn count(&self) -> usize {
        self.len()
    }

    fn lend<R>(&self, index: usize, range: Range<usize>, see: impl FnOnce(&[T]) -> R) -> Result<R> {
        match self[index].get(range) {
            Some(items) => Ok(see(items)),
            None => bail!("summands differ in size"),
        }
    }
}

fn items_of<T: WithDType>(storage: &CpuStorage, start: usize, len: usize) -> Result<&[T]> {
    match storage.as_slice::<T>()?.get(start..start + len) {
        Some(items) => Ok(items),
        None => bail!("summands differ in size"),
    }
}

/// Reduces the items in `range` of all summands, always in the order of the summands.
///
/// The first summand is copied to where the sums are to be, and the others are added to it there:
/// in a copy elsewhere each sum would be written twice.
pub(super) fn reduce<T: Element>(
    summands: &(impl Summands<T> + ?Sized),
    reduction: Reduction,
    range: Range<usize>,
    sums: &mut impl Destination<T>,
) -> Result<()> {
    let combine = combination::<T>(reduction);
    for start in range.clone().step_by(BLOCK) {
        let block = start..range.end.min(start + BLOCK);
        let block_sums = summands.lend(0, block.clone(), |items| sums.take(items))?;
        T::as_sums(block_sums, |sums| {
            for index in 1..summands.count() {
                summands.lend(index, block.clone(), |items| combine(sums, items))?;
            }
            if reduction == Reduction::Mean {
                for sum in sums {
                    *sum = T::divide(*sum, summands.count());
                }
            }
            Ok(())
        })?;
    }
    Ok(())
}

fn combination<T: Element>(reduction: Reduction) -> fn(&mut [T::Sum], &[T]) {
    match reduction {
        Reduction::Sum | Reduction::Mean => |sums, items| accumulate(sums, items, T::plus),
        Reduction::Max => |sums, items| accumulate(sums, items, T::larger),
        Reduction::Min => |sums, items| accumulate(sums, items, T::smaller),
    }
}

/// A loop over a block with one operation, so that each compiles to vector instructions.
fn accumulate<T: Element>(
    sums: &mut [T::Sum],
    items: &[T],
    combine: impl Fn(T::Sum, T::Sum) -> T::Sum,
) {
    sums.iter_mut().zip(items).for_each(|(sum, item)| *sum = combine(*sum, item.widen()));
}
