//! Moving tensors to the devices of a mesh.
//!
//! candle copies from one GPU to another on a stream that it does not wait for, while the source
//! block may already be reused for the next tensor. It also treats two handles of one GPU as
//! different devices, and copies between them in the same way, or not at all on Metal. So a tensor
//! that changes its device goes through host memory, where every copy is complete when it returns.

use candle_core::{DType, Device, Shape, Tensor, Var};

/// Moves a shard to the device of its replica, detached from the graph: gradients do not cross a
/// call.
///
/// A shard along an inner dimension is made contiguous, because some of candle's operations reject
/// strided tensors. A shard that leaves its device is copied first, because candle would move the
/// whole storage under the view.
pub(crate) fn shard_to_device(shard: &Tensor, device: &Device) -> candle_core::Result<Tensor> {
    let shard = shard.detach();
    if shard.device().same_device(device) {
        to_contiguous(&shard)
    } else {
        to_device(&shard, device)
    }
}

/// Moves a tensor to a device; returns it unchanged if it is there already.
pub(crate) fn to_device(x: &Tensor, device: &Device) -> candle_core::Result<Tensor> {
    if x.device().same_device(device) { Ok(x.clone()) } else { to_host(x)?.to_device(device) }
}

/// Waits for all pending work on a device, whichever thread started it.
///
/// On CUDA `Device::synchronize` waits for one stream; for devices of [`Device::new_cuda`] it is
/// the calling thread's. It misses work of other threads, and of other handles of the same GPU.
pub(crate) fn synchronize_all(device: &Device) -> candle_core::Result<()> {
    match device {
        #[cfg(feature = "cuda")]
        Device::Cuda(cuda) => {
            cuda.cuda_stream().context().synchronize().map_err(candle_core::Error::wrap)
        }
        other => other.synchronize(),
    }
}

/// Returns a contiguous tensor in host memory, where tensors of different devices can be combined;
/// the same tensor if it already is one.
pub(crate) fn to_host(x: &Tensor) -> candle_core::Result<Tensor> {
    // Copy first: candle moves the whole storage under a view.
    if x.device().is_cpu() { to_contiguous(x) } else { contiguous_copy(x)?.to_device(&Device::Cpu) }
}

/// Moves a leaf of candle's graph from the host to a device; returns it unchanged for the host.
pub(crate) fn leaf_to_device(leaf: Var, device: &Device) -> candle_core::Result<Tensor> {
    let leaf = if device.is_cpu() { leaf } else { Var::from_tensor(&leaf.to_device(device)?)? };
    Ok(leaf.into_inner())
}

/// Returns a leaf of candle's graph filled with `parts`: pairs of an offset and the items from
/// there.
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

/// Returns a contiguous tensor; the same tensor if it already is one.
pub(crate) fn to_contiguous(x: &Tensor) -> candle_core::Result<Tensor> {
    if x.elem_count() == 0 { contiguous_copy(x) } else { x.contiguous() }
}

/// Returns a contiguous copy.
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
