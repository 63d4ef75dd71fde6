//! Moving tensors to the devices of a mesh.

use candle_core::{Device, Tensor};

/// Moves a shard to the device of its replica.
///
/// A shard along an inner dimension is copied, because some of candle's operations refuse tensors
/// with gaps; one that leaves its device is copied first, because candle would move all of the
/// storage that the view looks at.
///
/// The graph stays behind: gradients do not cross a call.
pub(crate) fn place(shard: &Tensor, device: &Device) -> candle_core::Result<Tensor> {
    let shard = shard.detach();
    if shard.device().same_device(device) {
        shard.contiguous()
    } else {
        shard.force_contiguous()?.to_device(device)
    }
}
