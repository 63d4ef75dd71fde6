//! Exchange of two tensors' storages. It frees memory that a graph of candle uses, and restores
//! this memory later.

use std::{cell::Cell, mem};

use candle_core::{
    CpuStorage, CudaStorage, DType, Device, Error, InplaceOp1, Layout, MetalStorage, Result,
    Storage, Tensor, bail, op::BackpropOp,
};

/// Swaps the memory of two tensors on one device, including all views of them and the operations
/// that recorded them.
///
/// candle lends the storage of one tensor at a time, to an in-place operation, so the operation on
/// the first tensor runs the operation on the second.
///
/// # Errors
///
/// Returns an error if the tensors are on different kinds of devices.
pub(crate) fn swap_storage(first: &Tensor, second: &Tensor) -> Result<()> {
    first.inplace_op1(&SwapFirst { second })
}

/// Frees the memory of a tensor and of all its views.
///
/// On the CPU the remaining empty storage has a dtype that no operation accepts, so reading the
/// tensor before its memory is [restored](swap_storage) fails. An empty storage of the right dtype
/// would be unsafe: candle multiplies matrices through pointers, and would read out of bounds.
pub(crate) fn free_storage(tensor: &Tensor) -> Result<()> {
    let nothing = match tensor.device() {
        Device::Cpu => {
            let storage = Storage::Cpu(CpuStorage::F4(Vec::new()));
            Tensor::from_storage(storage, 0, BackpropOp::none(), false)
        }
        device => Tensor::zeros(1, DType::U8, device)?,
    };
    swap_storage(tensor, &nothing)
}

/// Returns true if candle failed because it read [freed](free_storage) CPU memory: no tensor of a
/// model has the dtype of the empty storage.
pub(crate) fn reads_freed_memory(error: &Error) -> bool {
    error.to_string().contains(&format!("{:?}", DType::F4))
}

const NAME: &str = "exchange";

struct SwapFirst<'a> {
    second: &'a Tensor,
}

/// The storage of the first tensor; taken when the operation on the second tensor runs.
struct SwapSecond<'a>(Cell<Option<FirstStorage<'a>>>);

enum FirstStorage<'a> {
    Cpu(&'a mut CpuStorage),
    Cuda(&'a mut CudaStorage),
    Metal(&'a mut MetalStorage),
}

impl SwapFirst<'_> {
    fn swap(&self, first: FirstStorage<'_>) -> Result<()> {
        self.second.inplace_op1(&SwapSecond(Cell::new(Some(first))))
    }
}

impl InplaceOp1 for SwapFirst<'_> {
    fn name(&self) -> &'static str {
        NAME
    }

    fn cpu_fwd(&self, first: &mut CpuStorage, _: &Layout) -> Result<()> {
        self.swap(FirstStorage::Cpu(first))
    }

    fn cuda_fwd(&self, first: &mut CudaStorage, _: &Layout) -> Result<()> {
        self.swap(FirstStorage::Cuda(first))
    }

    fn metal_fwd(&self, first: &mut MetalStorage, _: &Layout) -> Result<()> {
        self.swap(FirstStorage::Metal(first))
    }
}

impl InplaceOp1 for SwapSecond<'_> {
    fn name(&self) -> &'static str {
        NAME
    }

    fn cpu_fwd(&self, second: &mut CpuStorage, _: &Layout) -> Result<()> {
        let Some(FirstStorage::Cpu(first)) = self.0.take() else { bail!("{OTHER_DEVICE}") };
        mem::swap(first, second);
        Ok(())
    }

    fn cuda_fwd(&self, second: &mut CudaStorage, _: &Layout) -> Result<()> {
        let Some(FirstStorage::Cuda(first)) = self.0.take() else { bail!("{OTHER_DEVICE}") };
        mem::swap(first, second);
        Ok(())
    }

    fn metal_fwd(&self, second: &mut MetalStorage, _: &Layout) -> Result<()> {
        let Some(FirstStorage::Metal(first)) = self.0.take() else { bail!("{OTHER_DEVICE}") };
        mem::swap(first, second);
        Ok(())
    }
}

const OTHER_DEVICE: &str = "cannot swap memory between different kinds of devices";

#[cfg(test)]
mod tests {
    use candle_core::Var;

    use super::*;

    fn items(tensor: &Tensor) -> Vec<f32> {
        tensor.flatten_all().unwrap().to_vec1().unwrap()
    }

    #[test]
    fn restored_memory_is_used_by_the_graph() {
        let device = Device::Cpu;
        let w = Var::from_vec(vec![1_f32, 2., 3., 4.], (2, 2), &device).unwrap();
        let view = w.t().unwrap();
        let x = Tensor::new(&[[5_f32, 6.]], &device).unwrap();
        let y = x.matmul(&view).unwrap().sqr().unwrap();
        let expected = y.backward().unwrap();
        let kept = w.as_detached_tensor().copy().unwrap();

        free_storage(&w).unwrap();
        for read in [x.matmul(&view), view.sqr(), view.contiguous(), w.add(&w), w.matmul(&w)] {
            assert!(reads_freed_memory(&read.unwrap_err()));
        }
        assert!(y.backward().is_err());
        swap_storage(&w, &kept).unwrap();
        kept.sqr().unwrap_err();
        assert_eq!(items(&w), [1., 2., 3., 4.]);
        let found = y.backward().unwrap();
        assert_eq!(items(found.get(&w).unwrap()), items(expected.get(&w).unwrap()));
    }
}
