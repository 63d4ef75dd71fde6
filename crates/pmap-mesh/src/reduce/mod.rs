//! Adding up tensors of several replicas on a processor, in the order of the ranks.

// Tested in every build, against the kernel that it must agree with.
#[cfg(any(test, feature = "nccl"))]
pub(crate) mod elementwise;
pub(crate) mod joint;
pub(crate) mod outputs;
pub(crate) mod parts;
mod shared_buffer;

#[cfg(feature = "mpi")]
use std::mem;
use std::ops::Range;

use candle_core::{CpuStorage, DType, Device, Result, Shape, Storage, Tensor, WithDType, bail};
use half::{bf16, f16};

/// How several tensors become one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reduction {
    Sum,
    Mean,
    Max,
    Min,
}

/// How many items are worked on at a time: 16 KiB of single-precision sums, which stay in a first
/// cache of 32 KiB or more while the same items of all summands pass by.
const BLOCK: usize = 4096;

/// A number that can be reduced, in the type that its sums are kept in.
///
/// Halves are added up in single precision and rounded once; integers wrap, as candle's do.
trait Element: WithDType {
    type Sum: Copy + Default;
    fn widen(self) -> Self::Sum;
    fn narrow(sum: Self::Sum) -> Self;
    fn plus(sum: Self::Sum, next: Self::Sum) -> Self::Sum;
    fn larger(sum: Self::Sum, next: Self::Sum) -> Self::Sum;
    fn smaller(sum: Self::Sum, next: Self::Sum) -> Self::Sum;
    /// Means are for floats; an integer stays as it is, and is refused earlier.
    fn divide(sum: Self::Sum, count: usize) -> Self::Sum;
    /// Whether they differ in any bit.
    fn differs(self, other: Self) -> bool;
}

macro_rules! float_element {
    ($type:ty, $sum:ty, $widen:expr, $narrow:expr) => {
        impl Element for $type {
            type Sum = $sum;
            fn widen(self) -> $sum {
                $widen(self)
            }
            fn narrow(sum: $sum) -> Self {
                $narrow(sum)
            }
            fn plus(sum: $sum, next: $sum) -> $sum {
                sum + next
            }
            // A NaN stays, as in candle's and JAX's maximum.
            fn larger(sum: $sum, next: $sum) -> $sum {
                if next > sum || next.is_nan() { next } else { sum }
            }
            fn smaller(sum: $sum, next: $sum) -> $sum {
                if next < sum || next.is_nan() { next } else { sum }
            }
            fn divide(sum: $sum, count: usize) -> $sum {
                sum / count as $sum
            }
            fn differs(self, other: Self) -> bool {
                self.to_bits() != other.to_bits()
            }
        }
    };
}

macro_rules! integer_element {
    ($($type:ty),+) => {$(
        impl Element for $type {
            type Sum = $type;
            fn widen(self) -> $type {
                self
            }
            fn narrow(sum: $type) -> Self {
                sum
            }
            fn plus(sum: $type, next: $type) -> $type {
                sum.wrapping_add(next)
            }
            fn larger(sum: $type, next: $type) -> $type {
                sum.max(next)
            }
            fn smaller(sum: $type, next: $type) -> $type {
                sum.min(next)
            }
            fn divide(sum: $type, _: usize) -> $type {
                sum
            }
            fn differs(self, other: Self) -> bool {
                self != other
            }
        }
    )+};
}

float_element!(f32, f32, |x| x, |x| x);
float_element!(f64, f64, |x| x, |x| x);
float_element!(bf16, f32, bf16::to_f32, bf16::from_f32);
float_element!(f16, f32, f16::to_f32, f16::from_f32);
integer_element!(u8, u32, i16, i32, i64);

/// Calls a generic function with the element type of a tensor.
macro_rules! dispatch {
    ($dtype:expr, $function:ident($($argument:expr),*)) => {
        match $dtype {
            DType::F32 => $function::<f32>($($argument),*),
            DType::F64 => $function::<f64>($($argument),*),
            DType::BF16 => $function::<bf16>($($argument),*),
            DType::F16 => $function::<f16>($($argument),*),
            DType::U8 => $function::<u8>($($argument),*),
            DType::U32 => $function::<u32>($($argument),*),
            DType::I16 => $function::<i16>($($argument),*),
            DType::I32 => $function::<i32>($($argument),*),
            DType::I64 => $function::<i64>($($argument),*),
            other => bail!("tensors of type {} cannot be reduced", other.as_str()),
        }
    };
}

use dispatch;

/// Whether tensors of this type can be reduced.
pub(crate) fn has_kernel(dtype: DType) -> bool {
    use DType::{BF16, F16, F32, F64, I16, I32, I64, U8, U32};
    matches!(dtype, F32 | F64 | BF16 | F16 | U8 | U32 | I16 | I32 | I64)
}

/// The reduction of contiguous tensors on the processor, all by this thread.
pub(crate) fn whole(summands: &[Tensor], reduction: Reduction) -> Result<Tensor> {
    let [first, ..] = summands else { bail!("nothing to reduce") };
    run(summands, 0..first.elem_count(), first.shape(), reduction)
}

/// The reduction of these items of contiguous tensors on the processor, all by this thread.
pub(crate) fn run(
    summands: &[Tensor],
    items: Range<usize>,
    shape: &Shape,
    reduction: Reduction,
) -> Result<Tensor> {
    let [first, ..] = summands else { bail!("nothing to reduce") };
    dispatch!(first.dtype(), run_of(summands, items, shape, reduction))
}

fn run_of<T: Element>(
    summands: &[Tensor],
    items: Range<usize>,
    shape: &Shape,
    reduction: Reduction,
) -> Result<Tensor> {
    let mut sums = Vec::with_capacity(items.len());
    reduce::<T>(summands.len(), reduction, items, &of_tensors(summands), &mut |block| {
        sums.extend(block.iter().map(|&sum| T::narrow(sum)));
    })?;
    Tensor::from_vec(sums, shape, &Device::Cpu)
}

/// Whether two contiguous tensors on the processor, of one type and size, are equal to the bit.
pub(crate) fn same(left: &Tensor, right: &Tensor) -> Result<bool> {
    dispatch!(left.dtype(), same_of(&[left.clone(), right.clone()]))
}

fn same_of<T: Element>(pair: &[Tensor; 2]) -> Result<bool> {
    let len = pair[0].elem_count();
    let blocks = of_tensors::<T>(pair);
    let mut left = Vec::with_capacity(BLOCK.min(len));
    let mut differ = false;
    for start in (0..len).step_by(BLOCK) {
        let block = start..len.min(start + BLOCK);
        left.clear();
        // Kept, because one tensor is locked at a time.
        blocks(0, block.clone(), &mut |items: &[T]| left.extend_from_slice(items))?;
        blocks(1, block, &mut |right| {
            // Without a way out of the loop, so that it compiles to vector instructions.
            differ = left.iter().zip(right).fold(false, |any, (a, b)| any | a.differs(*b));
        })?;
        if differ {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Reduces what several ranks sent, as bytes of items of type `dtype`, into `sums`.
#[cfg(feature = "mpi")]
pub(crate) fn bytes(
    dtype: DType,
    summands: &[&[u8]],
    reduction: Reduction,
    sums: &mut [u8],
) -> Result<()> {
    dispatch!(dtype, bytes_of(summands, reduction, sums))
}

#[cfg(feature = "mpi")]
fn bytes_of<T: Element + bytemuck::Pod>(
    summands: &[&[u8]],
    reduction: Reduction,
    sums: &mut [u8],
) -> Result<()> {
    let cast = |bytes| bytemuck::try_cast_slice(bytes).map_err(candle_core::Error::msg);
    let summands: Vec<&[T]> = summands.iter().map(|bytes| cast(bytes)).collect::<Result<_>>()?;
    let mut rest: &mut [T] = bytemuck::try_cast_slice_mut(sums).map_err(candle_core::Error::msg)?;
    let len = rest.len();
    let block = |index: usize, range, see: &mut dyn FnMut(&[T])| match summands[index].get(range) {
        Some(items) => {
            see(items);
            Ok(())
        }
        None => bail!("summands differ in size"),
    };
    reduce::<T>(summands.len(), reduction, 0..len, &block, &mut |sums| {
        let (filled, left) = mem::take(&mut rest).split_at_mut(sums.len());
        filled.iter_mut().zip(sums).for_each(|(place, sum)| *place = T::narrow(*sum));
        rest = left;
    })
}

/// Lends the items in a range of one summand to its last argument.
type Blocks<'a, T> = dyn Fn(usize, Range<usize>, &mut dyn FnMut(&[T])) -> Result<()> + 'a;

/// The blocks of contiguous tensors on the processor.
///
/// One summand is locked at a time: a thread that waits for one lock while it holds another could
/// wait for a `Var::set` that waits for this one.
#[expect(clippy::type_complexity, reason = "what `Blocks` names, which cannot be named here")]
fn of_tensors<T: WithDType>(
    summands: &[Tensor],
) -> impl Fn(usize, Range<usize>, &mut dyn FnMut(&[T])) -> Result<()> {
    |index, range, see| {
        let (storage, layout) = summands[index].storage_and_layout();
        let Storage::Cpu(storage) = &*storage else { bail!("a summand is not on the processor") };
        see(block_of::<T>(storage, layout.start_offset() + range.start, range.len())?);
        Ok(())
    }
}

/// Reduces the items in `range` of so many summands and hands the results to `push`, block by
/// block, always in the order of the summands.
fn reduce<T: Element>(
    summands: usize,
    reduction: Reduction,
    range: Range<usize>,
    blocks: &Blocks<'_, T>,
    push: &mut dyn FnMut(&[T::Sum]),
) -> Result<()> {
    let combine = combination::<T>(reduction);
    let mut sums = vec![T::Sum::default(); BLOCK.min(range.len())];
    for start in range.clone().step_by(BLOCK) {
        let sums = &mut sums[..BLOCK.min(range.end - start)];
        let block = start..start + sums.len();
        blocks(0, block.clone(), &mut |items| {
            sums.iter_mut().zip(items).for_each(|(sum, item)| *sum = item.widen());
        })?;
        for index in 1..summands {
            blocks(index, block.clone(), &mut |items| combine(sums, items))?;
        }
        if reduction == Reduction::Mean {
            for sum in sums.iter_mut() {
                *sum = T::divide(*sum, summands);
            }
        }
        push(sums);
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

fn block_of<T: WithDType>(storage: &CpuStorage, start: usize, len: usize) -> Result<&[T]> {
    match storage.as_slice::<T>()?.get(start..start + len) {
        Some(items) => Ok(items),
        None => bail!("summands differ in size"),
    }
}
