//! Moves of tensors to the devices of a mesh.
//!
//! candle copies from one GPU to another on a stream that it does not wait for, so the memory of
//! the source may be reused for another tensor during the copy. candle also treats two handles of
//! one GPU as different devices: it copies between the two in the same way, or fails on Metal. So a
//! tensor that changes its device goes through host memory: every copy to or from the host is
//! complete when it returns.

use candle_core::{DType, Device, Shape, Tensor, Var};

/// Moves a shard to the device of its replica, and detaches it from the graph, since gradients do
/// not cross a call.
///
/// A shard that is cut in an inner dimension is made contiguous, because some of candle's
/// operations reject strided tensors. A shard that leaves its device is copied first, because
/// candle would move the complete storage under the view.
pub(crate) fn shard_to_device(shard: &Tensor, device: &Device) -> candle_core::Result<Tensor> {
    let shard = shard.detach();
    if shard.device().same_device(device) {
        to_contiguous(&shard)
    } else {
        to_device(&shard, device)
    }
}

/// Moves a tensor to a device; returns the tensor unchanged if it is already on this device.
pub(crate) fn to_device(x: &Tensor, device: &Device) -> candle_core::Result<Tensor> {
    if x.device().same_device(device) { Ok(x.clone()) } else { to_host(x)?.to_device(device) }
}

/// Waits for all pending work on a device, including the work of other threads.
///
/// `Device::synchronize` is not enough on CUDA, because it waits for one stream: for devices of
/// [`Device::new_cuda`], the stream of the calling thread. It does not wait for work of other
/// threads, or of other handles of the same GPU.
pub(crate) fn synchronize_all(device: &Device) -> candle_core::Result<()> {
    match device {
        #[cfg(feature = "cuda")]
        Device::Cuda(cuda) => {
            cuda.cuda_stream().context().synchronize().map_err(candle_core::Error::wrap)
        }
        other => other.synchronize(),
    }
}

/// Returns a contiguous tensor in host memory, where tensors of different devices can be combined.
/// Returns the same tensor if it is already contiguous in host memory.
pub(crate) fn to_host(x: &Tensor) -> candle_core::Result<Tensor> {
    // Copy first, because candle would move the complete storage under a view.
    if x.device().is_cpu() { to_contiguous(x) } else { contiguous_copy(x)?.to_device(&Device::Cpu) }
}

/// Moves a leaf of candle's graph from the host to a device; returns the leaf unchanged if the
/// device is the host.
pub(crate) fn leaf_to_device(leaf: Var, device: &Device) -> candle_core::Result<Tensor> {
    let moved = if device.is_cpu() { leaf } else { Var::from_tensor(&leaf.to_device(device)?)? };
    Ok(moved.into_inner())
}

/// Returns a leaf of candle's graph that is filled from `parts`: pairs of an offset, and the items
/// that begin at this offset.
pub(crate) fn leaf_from_parts<'a>(
    shape: &Shape,
    dtype: DType,
    device: &Device,
    parts: impl IntoIterator<Item = (usize, &'a Tensor)>,
) -> candle_core::Result<Var> {
    let leaf = Var::zeros(shape, dtype, device)?;
    let items = leaf.as_detached_tensor().flatten_all()?;
    for (start, part) in parts {
        items.slice_set(&part.contiguous()?, 0, start)?;
    }
    Ok(leaf)
}

/// Returns the number of bytes of a tensor's items.
pub(crate) fn n_bytes(x: &Tensor) -> usize {
    x.elem_count() * x.dtype().size_in_bytes()
}

/// Returns a contiguous tensor: the same tensor if it is already contiguous and not empty,
/// otherwise a copy.
pub(crate) fn to_contiguous(x: &Tensor) -> candle_core::Result<Tensor> {
    if x.elem_count() == 0 { contiguous_copy(x) } else { x.contiguous() }
}

/// Returns a contiguous copy of a tensor.
pub(crate) fn contiguous_copy(x: &Tensor) -> candle_core::Result<Tensor> {
    // An empty view may begin past the end of its storage, where candle panics.
    if x.elem_count() == 0 {
        Tensor::zeros(x.shape(), x.dtype(), x.device())
    } else {
        x.force_contiguous()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn empty_view_past_the_end_is_copied() {
        let view = Tensor::zeros((0, 5), DType::F32, &Device::Cpu).unwrap();
        let view = view.narrow(1, 2, 3).unwrap();
        let makers = [to_contiguous, contiguous_copy, to_host, |x: &Tensor| {
            shard_to_device(x, &Device::Cpu)
        }];
        for make in makers {
            let made = make(&view).unwrap();
            assert_eq!((made.dims(), made.layout().start_offset()), (&[0, 3][..], 0));
        }
    }
}
