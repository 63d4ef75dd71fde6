//! The memory of tensors: copies on other devices, and shared memory.

use std::ptr;

use candle_core::{Device, Result, Storage, Tensor};

/// Returns the tensor on `device`, without a copy if it is there already.
///
/// Between two GPUs the data goes through the host: candle copies on a stream without
/// synchronization, so the source memory may be reused before the copy ends.
pub(crate) fn move_to_device(x: &Tensor, device: &Device) -> Result<Tensor> {
    if x.device().same_device(device) {
        return Ok(x.clone());
    }
    x.to_device(&Device::Cpu)?.to_device(device)
}

/// Returns true if two tensors share their memory, like views.
pub(crate) fn shares_memory(left: &Tensor, right: &Tensor) -> bool {
    address(left) == address(right)
}

/// Returns the address of a tensor's storage. The lock is released before another lock is taken,
/// because a thread that waits for a second read lock can deadlock with a waiting writer.
fn address(tensor: &Tensor) -> *const Storage {
    let (storage, _) = tensor.storage_and_layout();
    ptr::from_ref(&*storage)
}

#[cfg(test)]
mod tests {
    use candle_core::DType;

    use super::*;

    #[test]
    fn only_views_share_memory() {
        let x = Tensor::zeros((2, 3), DType::F32, &Device::Cpu).unwrap();
        assert!(shares_memory(&x, &x.t().unwrap()) && shares_memory(&x.detach(), &x));
        assert!(shares_memory(&x, &x.narrow(1, 1, 1).unwrap()));
        assert!(!shares_memory(&x, &x.copy().unwrap()));
    }
}
