//! Gradients through collectives: each runs backward by its transpose.

use candle_core::{
    CpuStorage, CudaStorage, CustomOp1, Layout, MetalStorage, Result, Shape, Storage, Tensor,
    backend::{BackendDevice, BackendStorage},
    bail,
};

use crate::{engine::GroupContext, reduce::Reduction, replica::collectives::Collectives};

/// The operation that turns the gradient of a collective's result into the gradient of its
/// argument.
///
/// Ranks refer to the forward call; the call in a context names the forward operation and its
/// location.
#[derive(Debug)]
pub(crate) enum Transpose {
    /// The operation has no gradient.
    None(&'static str),
    Identity,
    Scale(f64),
    Psum(Collectives, GroupContext),
    AllGather(Collectives, GroupContext, usize),
    /// Includes the sizes of all parts in this dimension.
    PsumScatter(Collectives, GroupContext, usize, Vec<usize>),
    Permute(Collectives, GroupContext, Vec<(usize, usize)>),
    AllToAll(Collectives, GroupContext, usize, usize),
    /// A sum on one rank, zeros on the others.
    Reduce(Collectives, GroupContext, usize),
}

impl Transpose {
    fn apply(&self, gradient: &Tensor) -> Result<Tensor> {
        match self {
            Self::None(op) => bail!("{op} has no gradient"),
            Self::Identity => Ok(gradient.clone()),
            Self::Scale(factor) => gradient * *factor,
            Self::Psum(collectives, ctx) => {
                collectives.all_reduce(&ctx.backward(gradient), gradient, Reduction::Sum)
            }
            Self::AllGather(collectives, ctx, dim) => {
                Ok(collectives.gather(&ctx.backward(gradient), gradient, *dim)?.0)
            }
            Self::PsumScatter(collectives, ctx, dim, sizes) => {
                collectives.sum_and_scatter(&ctx.backward(gradient), gradient, *dim, sizes)
            }
            Self::Permute(collectives, ctx, pairs) => {
                collectives.permute(&ctx.backward(gradient), gradient, pairs)
            }
            Self::AllToAll(collectives, ctx, split, concat) => {
                collectives.exchange(&ctx.backward(gradient), gradient, *split, *concat)
            }
            Self::Reduce(collectives, ctx, root) => {
                let sum = collectives.sum_for(&ctx.backward(gradient), gradient, *root)?;
                sum.map_or_else(|| gradient.zeros_like(), Ok)
            }
        }
    }
}

/// Links `result` into candle's graph as the result of an operation on `x` with this transpose;
/// returns it unchanged if `x` has no gradient. `None` stands for `x`, whose storage must not be
/// locked twice.
///
/// The collective has already run: inside candle's operation the storage of `x` is locked, and
/// while this thread waited for a peer, the peer's `Var::set` could wait for that lock. So the
/// operation only returns the result, which costs a copy.
pub(crate) fn link_gradient(
    x: &Tensor,
    result: impl Into<Option<Tensor>>,
    transpose: impl FnOnce() -> Transpose,
) -> Result<Tensor> {
    let result = result.into();
    if x.track_op() {
        return x.apply_op1(TransposeOp { result, transpose: transpose() });
    }
    match result {
        Some(result) => Ok(result),
        None => Ok(x.clone()),
    }
}

#[derive(Debug)]
struct TransposeOp {
    result: Option<Tensor>,
    transpose: Transpose,
}

impl CustomOp1 for TransposeOp {
    fn name(&self) -> &'static str {
        "collective"
    }

    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let Some(result) = &self.result else { return copied(x, layout) };
        let (storage, layout) = result.storage_and_layout();
        let Storage::Cpu(storage) = &*storage else {
            bail!("the result of a collective lies on another device")
        };
        copied(storage, layout)
    }

    fn cuda_fwd(&self, x: &CudaStorage, layout: &Layout) -> Result<(CudaStorage, Shape)> {
        let Some(result) = &self.result else { return copied(x, layout) };
        let (storage, layout) = result.storage_and_layout();
        let Storage::Cuda(storage) = &*storage else {
            bail!("the result of a collective lies on another device")
        };
        copied(storage, layout)
    }

    fn metal_fwd(&self, x: &MetalStorage, layout: &Layout) -> Result<(MetalStorage, Shape)> {
        let Some(result) = &self.result else { return copied(x, layout) };
        let (storage, layout) = result.storage_and_layout();
        let Storage::Metal(storage) = &*storage else {
            bail!("the result of a collective lies on another device")
        };
        copied(storage, layout)
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        self.transpose.apply(gradient).map(Some)
    }
}

fn copied<S>(storage: &S, layout: &Layout) -> Result<(S, Shape)>
where
    S: BackendStorage<Device: BackendDevice<Storage = S>>,
{
    let mut copy = storage.device().zeros_impl(layout.shape(), storage.dtype())?;
    storage.copy_strided_src(&mut copy, 0, layout)?;
    Ok((copy, layout.shape().clone()))
}
