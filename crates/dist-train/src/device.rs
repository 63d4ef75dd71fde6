//! Tensors on their way to another device.

use candle_core::{Device, Result, Tensor};

/// The tensor on a device; itself, if it is there.
///
/// From one GPU to another it goes through the host: candle copies on a stream that nobody waits for,
/// while the memory that it reads may be given to the next tensor.
pub(crate) fn moved(x: &Tensor, device: &Device) -> Result<Tensor> {
    if x.device().same_device(device) {
        return Ok(x.clone());
    }
    x.to_device(&Device::Cpu)?.to_device(device)
}
