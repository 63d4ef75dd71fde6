//! Conversion of tensors to and from the bytes that MPI sends.

use std::ops::Range;

use bytemuck::{Pod, cast_slice, cast_slice_mut, zeroed_vec};
use candle_core::{CpuStorage, DType, Device, Result, Storage, Tensor, Var, WithDType, bail};
use half::{bf16, f16};

/// A receive buffer that becomes a tensor without another copy.
pub(super) trait ReceiveBuffer: Send {
    fn bytes_mut(&mut self) -> &mut [u8];

    /// Converts the buffer to a tensor on the processor.
    fn tensor(self: Box<Self>, dims: &[usize]) -> Result<Tensor>;

    /// Converts the buffer to a leaf of candle's graph on the processor.
    fn leaf(self: Box<Self>, dims: &[usize]) -> Result<Var>;
}

impl<T: WithDType + Pod> ReceiveBuffer for Vec<T> {
    fn bytes_mut(&mut self) -> &mut [u8] {
        cast_slice_mut(self)
    }

    fn tensor(self: Box<Self>, dims: &[usize]) -> Result<Tensor> {
        Tensor::from_vec(*self, dims, &Device::Cpu)
    }

    fn leaf(self: Box<Self>, dims: &[usize]) -> Result<Var> {
        Var::from_vec(*self, dims, &Device::Cpu)
    }
}

/// Items of a type that cannot be cast from bytes.
struct RawItems(Vec<u8>, DType);

impl ReceiveBuffer for RawItems {
    fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.0
    }

    fn tensor(self: Box<Self>, dims: &[usize]) -> Result<Tensor> {
        Tensor::from_raw_buffer(&self.0, self.1, dims, &Device::Cpu)
    }

    fn leaf(self: Box<Self>, dims: &[usize]) -> Result<Var> {
        Var::from_tensor(&self.tensor(dims)?)
    }
}

/// Returns a buffer for items of a dtype, filled with zeros. The system allocates each page of the
/// buffer when the page is first written.
pub(super) fn buffer(dtype: DType, n_items: usize) -> Result<Box<dyn ReceiveBuffer>> {
    Ok(match dtype {
        DType::U8 => Box::new(zeroed_vec::<u8>(n_items)),
        DType::U32 => Box::new(zeroed_vec::<u32>(n_items)),
        DType::I16 => Box::new(zeroed_vec::<i16>(n_items)),
        DType::I32 => Box::new(zeroed_vec::<i32>(n_items)),
        DType::I64 => Box::new(zeroed_vec::<i64>(n_items)),
        DType::BF16 => Box::new(zeroed_vec::<bf16>(n_items)),
        DType::F16 => Box::new(zeroed_vec::<f16>(n_items)),
        DType::F32 => Box::new(zeroed_vec::<f32>(n_items)),
        DType::F64 => Box::new(zeroed_vec::<f64>(n_items)),
        DType::F8E4M3 => Box::new(RawItems(vec![0; n_items], dtype)),
        other => bail!("tensors of type {} cannot be moved between processes", other.as_str()),
    })
}

/// Calls `work` with the bytes of a contiguous tensor on the processor.
pub(super) fn with_bytes<R>(x: &Tensor, work: impl FnOnce(&[u8]) -> Result<R>) -> Result<R> {
    with_part(x, 0..x.elem_count() * x.dtype().size_in_bytes(), work)
}

/// Calls `work` with a range of the bytes of a contiguous tensor on the processor.
pub(super) fn with_part<R>(
    x: &Tensor,
    part: Range<usize>,
    work: impl FnOnce(&[u8]) -> Result<R>,
) -> Result<R> {
    let (storage, layout) = x.storage_and_layout();
    let Storage::Cpu(storage) = &*storage else { bail!("a tensor is not on the processor") };
    let start = layout.start_offset() * x.dtype().size_in_bytes();
    let part = start + part.start..start + part.end;
    let bits: Option<Vec<u8>>;
    let bytes = match storage {
        CpuStorage::U8(items) => cast_slice(items).get(part),
        CpuStorage::U32(items) => cast_slice(items).get(part),
        CpuStorage::I16(items) => cast_slice(items).get(part),
        CpuStorage::I32(items) => cast_slice(items).get(part),
        CpuStorage::I64(items) => cast_slice(items).get(part),
        CpuStorage::BF16(items) => cast_slice(items).get(part),
        CpuStorage::F16(items) => cast_slice(items).get(part),
        CpuStorage::F32(items) => cast_slice(items).get(part),
        CpuStorage::F64(items) => cast_slice(items).get(part),
        CpuStorage::F8E4M3(items) => {
            #[expect(
                clippy::redundant_closure_for_method_calls,
                reason = "the crate that defines the item type is not a dependency"
            )]
            let part_bits =
                items.get(part).map(|items| items.iter().map(|item| item.to_bits()).collect());
            bits = part_bits;
            bits.as_deref()
        }
        _ => bail!("tensors of type {} cannot be moved between processes", x.dtype().as_str()),
    };
    match bytes {
        Some(bytes) => work(bytes),
        None => bail!("a tensor of shape {:?} is not contiguous", x.dims()),
    }
}

/// Calls `work` with the bytes of several tensors, which must have separate storages.
pub(super) fn with_all_bytes<R>(
    x: &[Tensor],
    work: impl FnOnce(&[&[u8]]) -> Result<R>,
) -> Result<R> {
    /// Calls `work` with the bytes in `lent`, followed by the bytes of `x`.
    fn lend<'a, R>(
        x: &[Tensor],
        lent: &[&'a [u8]],
        work: &mut dyn FnMut(&[&[u8]]) -> Result<R>,
    ) -> Result<R> {
        let Some((first, rest)) = x.split_first() else { return work(lent) };
        with_bytes(first, |bytes| lend(rest, &[lent, &[bytes]].concat(), work))
    }
    // `lend` takes an `FnMut`, but calls it only once.
    let mut unused_work = Some(work);
    lend(x, &[], &mut |bytes| match unused_work.take() {
        Some(work) => work(bytes),
        None => bail!("bytes are lent once"),
    })
}
