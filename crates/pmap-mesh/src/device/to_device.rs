//! Moving tensors to the devices of a mesh.
//!
//! candle copies from one GPU to another on a stream that nobody waits for, while the block that is
//! copied may be given to the next tensor; and two devices that were opened for one GPU are
//! different ones for it, between which it copies in the same way, or not at all on Metal. So
//! whatever changes its device goes through the processor's memory, where every copy is complete
//! when it returns.

use candle_core::{DType, Device, Shape, Tensor, Var};

/// Moves a shard to the device of its replica.
///
/// A shard along an inner dimension is copied, because some of candle's operations refuse tensors
/// with gaps; one that leaves its device is copied first, because candle would move all of the
/// storage that the view looks at.
///
/// The graph stays behind: gradients do not cross a call.
pub(crate) fn place(shard: &Tensor, device: &Device) -> candle_core::Result<Tensor> {
    let shard = shard.detach();
    if shard.device().same_device(device) { in_one_piece(&shard) } else { moved(&shard, device) }
}

/// The tensor on a device; itself, if it is there.
pub(crate) fn moved(x: &Tensor, device: &Device) -> candle_core::Result<Tensor> {
    if x.device().same_device(device) { Ok(x.clone()) } else { on_host(x)?.to_device(device) }
}

/// Waits until everything is done that has been begun on a device, by whatever thread.
///
/// On CUDA `Device::synchronize` waits for one stream, which for devices of [`Device::new_cuda`] is
/// that of the calling thread: what another thread, or another device that was opened for the same
/// GPU, has begun is not among it.
pub(crate) fn synchronize_all(device: &Device) -> candle_core::Result<()> {
    match device {
        #[cfg(feature = "cuda")]
        Device::Cuda(cuda) => {
            cuda.cuda_stream().context().synchronize().map_err(candle_core::Error::wrap)
        }
        other => other.synchronize(),
    }
}

/// The tensor in one piece on the processor, where tensors of different devices can meet; itself,
/// if it is.
pub(crate) fn on_host(x: &Tensor) -> candle_core::Result<Tensor> {
    // Copied first: candle moves all of the storage that a view looks at.
    if x.device().is_cpu() { in_one_piece(x) } else { copied(x)?.to_device(&Device::Cpu) }
}

/// A leaf of candle's graph that lies on the processor, as one on this device; itself, if that is
/// where it lies.
pub(crate) fn placed(leaf: Var, device: &Device) -> candle_core::Result<Tensor> {
    let leaf = if device.is_cpu() { leaf } else { Var::from_tensor(&leaf.to_device(device)?)? };
    Ok(leaf.into_inner())
}

/// A leaf of candle's graph with these items, each part of them from its first one on.
pub(crate) fn filled<'a>(
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

/// How many bytes the items of a tensor take.
pub(crate) fn n_bytes(x: &Tensor) -> usize {
    x.elem_count() * x.dtype().size_in_bytes()
}

/// The tensor without gaps; itself, if it has none.
pub(crate) fn in_one_piece(x: &Tensor) -> candle_core::Result<Tensor> {
    if x.elem_count() == 0 { copied(x) } else { x.contiguous() }
}

/// A copy in one piece.
pub(crate) fn copied(x: &Tensor) -> candle_core::Result<Tensor> {
    // A view of nothing may begin behind the end of its storage, where candle panics.
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
    fn a_view_of_nothing_behind_the_end_becomes_a_tensor_of_nothing() {
        let view = Tensor::zeros((0, 5), DType::F32, &Device::Cpu).unwrap();
        let view = view.narrow(1, 2, 3).unwrap();
        let makers = [in_one_piece, copied, on_host, |x: &Tensor| place(x, &Device::Cpu)];
        for make in makers {
            let made = make(&view).unwrap();
            assert_eq!((made.dims(), made.layout().start_offset()), (&[0, 3][..], 0));
        }
    }
}
