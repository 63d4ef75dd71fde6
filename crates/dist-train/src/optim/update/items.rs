//! Items of CPU tensors, read in blocks for any dtype and strides.

#![allow(clippy::inline_always, reason = "only inlined code has the instructions of its caller")]

use std::ops::Range;

use candle_core::{CpuStorage, Layout, Result, backend::BackendStorage, bail};

use super::numbers::Real;

/// The items of a floating-point tensor, in row-major order.
#[derive(Clone, Copy)]
pub(in crate::optim) struct Items<'a> {
    storage: &'a CpuStorage,
    layout: &'a Layout,
}

impl<'a> Items<'a> {
    /// Borrows the items of a tensor.
    ///
    /// # Errors
    ///
    /// Returns an error unless the dtype is f16, bf16, f32 or f64.
    pub(in crate::optim) fn new(storage: &'a CpuStorage, layout: &'a Layout) -> Result<Self> {
        match storage {
            CpuStorage::F16(_) | CpuStorage::BF16(_) | CpuStorage::F32(_) | CpuStorage::F64(_) => {
                Ok(Self { storage, layout })
            }
            other => bail!("gradients of dtype {:?} are not supported", other.dtype()),
        }
    }

    /// Returns the number of items.
    pub(in crate::optim) fn len(&self) -> usize {
        self.layout.shape().elem_count()
    }

    /// Returns the items in `range` as numbers of type `T`, without a copy if possible, and
    /// otherwise in `buffer`, which must be long enough.
    #[inline(always)]
    pub(in crate::optim) fn read<'b, T: Real>(
        &self,
        range: Range<usize>,
        buffer: &'b mut [T],
    ) -> &'b [T]
    where
        'a: 'b,
    {
        // The dtype is compared first, because candle's error would capture a backtrace.
        if self.storage.dtype() == T::DTYPE
            && let Ok(data) = self.storage.as_slice::<T>()
            && let Some((start, _)) = self.layout.contiguous_offsets()
        {
            return &data[start + range.start..start + range.end];
        }
        let buffer = &mut buffer[..range.len()];
        match self.storage {
            CpuStorage::F16(data) => self.gather(data, range, buffer, |x| T::from_f32(x.to_f32())),
            CpuStorage::BF16(data) => self.gather(data, range, buffer, |x| T::from_f32(x.to_f32())),
            CpuStorage::F32(data) => self.gather(data, range, buffer, T::from_f32),
            CpuStorage::F64(data) => self.gather(data, range, buffer, T::from_f64),
            _ => unreachable!("`new` rejects other dtypes"),
        }
        buffer
    }

    /// Copies the items of `range` into `buffer`.
    #[inline(always)]
    fn gather<S: Copy, T>(
        &self,
        data: &[S],
        range: Range<usize>,
        buffer: &mut [T],
        convert: impl Fn(S) -> T,
    ) {
        if let Some((start, _)) = self.layout.contiguous_offsets() {
            for (into, &item) in buffer.iter_mut().zip(&data[start + range.start..]) {
                *into = convert(item);
            }
            return;
        }
        let (width, stride) = match (self.layout.dims(), self.layout.stride()) {
            ([.., width], [.., stride]) => (*width, *stride),
            _ => (1, 0),
        };
        let mut filled = 0;
        // Copies row by row; the first and last rows may be partial.
        while filled < buffer.len() {
            let item = range.start + filled;
            let len = (width - item % width).min(buffer.len() - filled);
            let first = self.offset(item);
            for (index, into) in buffer[filled..filled + len].iter_mut().enumerate() {
                *into = convert(data[first + index * stride]);
            }
            filled += len;
        }
    }

    /// Returns the offset of an item in the storage.
    fn offset(&self, mut item: usize) -> usize {
        let mut offset = self.layout.start_offset();
        for (&dim, &stride) in self.layout.dims().iter().zip(self.layout.stride()).rev() {
            offset += item % dim * stride;
            item /= dim;
        }
        offset
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device, Storage, Tensor};

    use super::*;

    fn read(tensor: &Tensor, range: Range<usize>) -> Vec<f32> {
        let (storage, layout) = tensor.storage_and_layout();
        let Storage::Cpu(storage) = &*storage else { panic!("the tensor is on the CPU") };
        let items = Items::new(storage, layout).unwrap();
        assert_eq!(items.len(), tensor.elem_count());
        items.read(range, &mut [0.0; 100]).to_vec()
    }

    #[test]
    fn views_are_read_in_row_major_order() {
        let x = Tensor::arange(0_f32, 60., &Device::Cpu).unwrap().reshape((3, 4, 5)).unwrap();
        let views = [
            x.clone(),
            x.transpose(0, 2).unwrap(),
            x.transpose(1, 2).unwrap(),
            x.narrow(1, 1, 2).unwrap(),
            x.narrow(2, 3, 2).unwrap().transpose(0, 1).unwrap(),
            x.narrow(0, 1, 1).unwrap().broadcast_as((2, 4, 5)).unwrap(),
            x.flatten_all().unwrap().narrow(0, 7, 1).unwrap().reshape(()).unwrap(),
            x.narrow(0, 0, 0).unwrap(),
        ];
        for view in views {
            let all = view.flatten_all().unwrap().to_vec1::<f32>().unwrap();
            for dtype in [DType::F32, DType::F64, DType::BF16, DType::F16] {
                let view = view.to_dtype(dtype).unwrap();
                for start in 0..=all.len() {
                    for end in start..=all.len() {
                        assert_eq!(
                            read(&view, start..end),
                            all[start..end],
                            "{view:?} {start}..{end}"
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn integer_gradients_are_rejected() {
        let counts = Tensor::new(&[1_u32], &Device::Cpu).unwrap();
        let (storage, layout) = counts.storage_and_layout();
        let Storage::Cpu(storage) = &*storage else { panic!("the tensor is on the CPU") };
        assert!(Items::new(storage, layout).is_err());
    }
}
