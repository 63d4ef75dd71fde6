//! Reduction of several replicas' tensors on the CPU, in rank order.

mod element;
// Compiled in every test build, to compare it with the kernel that it must equal.
#[cfg(any(test, feature = "nccl"))]
pub(crate) mod elementwise;
mod kernel;
pub(crate) mod outputs;
pub(crate) mod parts;
mod shared_buffer;
pub(crate) mod shared_work;

use std::{ops::Range, slice};

use candle_core::{DType, Device, Result, Shape, Tensor, bail};
use core_types::Fingerprint;
use half::{bf16, f16};

use self::{
    element::ReduceElement,
    kernel::{BLOCK, Summands, reduce},
};

/// The operation of a reduction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reduction {
    Sum,
    Mean,
    Max,
    Min,
}

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

/// The dtypes with a kernel.
const REDUCIBLE: [DType; 9] = {
    use DType::{BF16, F16, F32, F64, I16, I32, I64, U8, U32};
    [F32, F64, BF16, F16, U8, U32, I16, I32, I64]
};

/// Returns true if tensors of this dtype can be reduced.
pub(crate) fn has_kernel(dtype: DType) -> bool {
    REDUCIBLE.contains(&dtype)
}

/// Reduces contiguous tensors on the CPU, in this thread.
pub(crate) fn reduce_tensors(summands: &[Tensor], reduction: Reduction) -> Result<Tensor> {
    let [first, ..] = summands else { bail!("nothing to reduce") };
    reduce_item_range(summands, 0..first.elem_count(), first.shape(), reduction)
}

/// Reduces a range of items of contiguous tensors on the CPU, in this thread.
pub(crate) fn reduce_item_range(
    summands: &[Tensor],
    items: Range<usize>,
    shape: &Shape,
    reduction: Reduction,
) -> Result<Tensor> {
    let [first, ..] = summands else { bail!("nothing to reduce") };
    dispatch!(first.dtype(), reduce_item_range_typed(summands, items, shape, reduction))
}

fn reduce_item_range_typed<T: ReduceElement>(
    summands: &[Tensor],
    items: Range<usize>,
    shape: &Shape,
    reduction: Reduction,
) -> Result<Tensor> {
    let mut sums = Vec::with_capacity(items.len());
    reduce::<T>(summands, reduction, items, &mut sums)?;
    Tensor::from_vec(sums, shape, &Device::Cpu)
}

/// Returns true if two contiguous tensors on the CPU have the same bits. They must have the
/// same dtype and size.
pub(crate) fn equal_to_the_bit(left: &Tensor, right: &Tensor) -> Result<bool> {
    dispatch!(left.dtype(), equal_typed(&[left.clone(), right.clone()]))
}

fn equal_typed<T: ReduceElement>(pair: &[Tensor; 2]) -> Result<bool> {
    let len = pair[0].elem_count();
    let mut left: Vec<T> = Vec::with_capacity(BLOCK.min(len));
    for start in (0..len).step_by(BLOCK) {
        let block = start..len.min(start + BLOCK);
        left.clear();
        // Copy the block of the first tensor, because only one tensor may be locked at a time.
        pair.lend(0, block.clone(), |items| left.extend_from_slice(items))?;
        let differ = pair.lend(1, block, |right| {
            // No early exit, so that the loop compiles to vector instructions.
            let pairs = left.iter().zip(right);
            pairs.fold(false, |any, (a, b): (&T, &T)| any | (a.bits() != b.bits()))
        })?;
        if differ {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Adds the items of a contiguous tensor on the CPU to a fingerprint. Each word that is added
/// contains as many items as fit.
pub(crate) fn fingerprint(x: &Tensor, fingerprint: &mut Fingerprint) -> Result<()> {
    dispatch!(x.dtype(), fingerprint_typed(x, fingerprint))
}

fn fingerprint_typed<T: ReduceElement>(x: &Tensor, fingerprint: &mut Fingerprint) -> Result<()> {
    slice::from_ref(x).lend(0, 0..x.elem_count(), |items: &[T]| {
        fingerprint.extend(items.chunks(size_of::<u64>() / size_of::<T>()).map(packed_word));
    })
}

/// Concatenates the bits of as many items as fit 8 bytes, or of fewer.
fn packed_word<T: ReduceElement>(items: &[T]) -> u64 {
    // An item of 8 bytes fills the word; shifting by 64 bits would overflow.
    items.iter().fold(0, |word: u64, item: &T| match size_of::<T>() {
        8 => item.bits(),
        bytes => word << (8 * bytes) | item.bits(),
    })
}

/// Reduces the bytes of several ranks' items of type `dtype`, in rank order, into `sums`.
#[cfg(feature = "mpi")]
pub(crate) fn reduce_raw_items(
    dtype: DType,
    summands: &[&[u8]],
    reduction: Reduction,
    sums: &mut [u8],
) -> Result<()> {
    dispatch!(dtype, reduce_raw_items_typed(summands, reduction, sums))
}

#[cfg(feature = "mpi")]
fn reduce_raw_items_typed<T: ReduceElement + bytemuck::Pod>(
    summands: &[&[u8]],
    reduction: Reduction,
    sums: &mut [u8],
) -> Result<()> {
    let summands: Vec<&[T]> = summands
        .iter()
        .map(|bytes| bytemuck::try_cast_slice(bytes).map_err(candle_core::Error::msg))
        .collect::<Result<_>>()?;
    let mut sums: &mut [T] = bytemuck::try_cast_slice_mut(sums).map_err(candle_core::Error::msg)?;
    reduce::<T>(&summands[..], reduction, 0..sums.len(), &mut sums)
}
