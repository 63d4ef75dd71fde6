//! Gradients through collectives: the backward pass of each collective is its transpose.

use std::slice;

use candle_core::{
    CpuStorage, CudaStorage, CustomOp1, Layout, MetalStorage, Result, Shape, Storage, Tensor,
    backend::{BackendDevice, BackendStorage},
    bail,
};

use crate::{engine::GroupContext, reduce::Reduction, replica::collectives::Collectives};

/// The operation that turns the gradient of a collective's result into the gradient of its
/// argument.
///
/// Contexts and roots are from the forward call, so errors name the forward operation and its
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
    /// A sum on this rank, and zeros on the other ranks.
    Reduce(Collectives, GroupContext, usize),
}

impl Transpose {
    fn apply(&self, gradient: &Tensor) -> Result<Tensor> {
        match self {
            Self::None(op) => bail!("{op} has no gradient"),
            Self::Identity => Ok(gradient.clone()),
            Self::Scale(factor) => gradient * *factor,
            Self::Psum(collectives, ctx) => {
                let ctx = ctx.backward(gradient);
                let sums = collectives.all_reduce(&ctx, slice::from_ref(gradient), Reduction::Sum);
                Ok(sums?.swap_remove(0))
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

/// Links `result` into candle's graph as the result of an operation on `x` with this transpose.
/// Returns `result` unchanged if `x` has no gradient. If the result is `x` itself, pass `None`,
/// because the storage of `x` must not be locked twice.
///
/// The collective has already run, and candle's operation only copies the result: inside the
/// operation the storage of `x` is locked, so if this thread waited for a peer there, a `Var::set`
/// of the peer could wait for that lock.
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

/// An operation of candle's graph whose result is already computed; `None` stands for the argument.
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
        let Some(result) = &self.result else { return copy_storage(x, layout) };
        let (storage, layout) = result.storage_and_layout();
        let Storage::Cpu(storage) = &*storage else {
            bail!("the result of a collective is on another device")
        };
        copy_storage(storage, layout)
    }

    fn cuda_fwd(&self, x: &CudaStorage, layout: &Layout) -> Result<(CudaStorage, Shape)> {
        let Some(result) = &self.result else { return copy_storage(x, layout) };
        let (storage, layout) = result.storage_and_layout();
        let Storage::Cuda(storage) = &*storage else {
            bail!("the result of a collective is on another device")
        };
        copy_storage(storage, layout)
    }

    fn metal_fwd(&self, x: &MetalStorage, layout: &Layout) -> Result<(MetalStorage, Shape)> {
        let Some(result) = &self.result else { return copy_storage(x, layout) };
        let (storage, layout) = result.storage_and_layout();
        let Storage::Metal(storage) = &*storage else {
            bail!("the result of a collective is on another device")
        };
        copy_storage(storage, layout)
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        self.transpose.apply(gradient).map(Some)
    }
}

/// Returns a contiguous copy of the items of a layout, and its shape.
fn copy_storage<S>(storage: &S, layout: &Layout) -> Result<(S, Shape)>
where
    S: BackendStorage<Device: BackendDevice<Storage = S>>,
{
    let mut copy = storage.device().zeros_impl(layout.shape(), storage.dtype())?;
    storage.copy_strided_src(&mut copy, 0, layout)?;
    Ok((copy, layout.shape().clone()))
}
