//! Copies of tensors on other devices.

use candle_core::{Device, Result, Tensor};

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
