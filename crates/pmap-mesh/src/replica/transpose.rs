//! How gradients run backward through collectives.

use candle_core::{
    CpuStorage, CudaStorage, CustomOp1, Layout, MetalStorage, Result, Shape, Storage, Tensor,
    backend::{BackendDevice, BackendStorage},
    bail,
};

use crate::{engine::Site, reduce::Reduction, replica::collectives::Collectives};

/// What happens to the gradient of a collective's result on its way to the gradient of its
/// argument.
///
/// Ranks are those of the forward call; a site's call names the forward operation and its
/// place.
#[derive(Debug)]
pub(crate) enum Transpose {
    /// Nothing runs backward through this operation.
    None(&'static str),
    Identity,
    Scale(f64),
    Psum(Collectives, Site),
    AllGather(Collectives, Site, usize),
    /// With the sizes of all parts in this dimension.
    PsumScatter(Collectives, Site, usize, Vec<usize>),
    Permute(Collectives, Site, Vec<(usize, usize)>),
    AllToAll(Collectives, Site, usize, usize),
    /// A sum for one rank, zeros for the others.
    Reduce(Collectives, Site, usize),
}

impl Transpose {
    fn of(&self, gradient: &Tensor) -> Result<Tensor> {
        match self {
            Self::None(op) => bail!("{op} has no gradient"),
            Self::Identity => Ok(gradient.clone()),
            Self::Scale(factor) => gradient * *factor,
            Self::Psum(collectives, site) => {
                collectives.all_reduce(&site.backward(gradient), gradient, Reduction::Sum)
            }
            Self::AllGather(collectives, site, dim) => {
                Ok(collectives.gather(&site.backward(gradient), gradient, *dim)?.0)
            }
            Self::PsumScatter(collectives, site, dim, sizes) => {
                collectives.sum_and_scatter(&site.backward(gradient), gradient, *dim, sizes)
            }
            Self::Permute(collectives, site, pairs) => {
                collectives.permute(&site.backward(gradient), gradient, pairs)
            }
            Self::AllToAll(collectives, site, split, concat) => {
                collectives.exchange(&site.backward(gradient), gradient, *split, *concat)
            }
            Self::Reduce(collectives, site, root) => {
                let sum = collectives.sum_for(&site.backward(gradient), gradient, *root)?;
                sum.map_or_else(|| gradient.zeros_like(), Ok)
            }
        }
    }
}

/// `result` as the result of an operation on `x` that has this transpose; as it is, if `x` has no
/// gradient. `None` stands for `x` itself: its storage must not be locked a second time.
///
/// The collective itself has run before: inside candle's operation the storage of `x` is locked,
/// and waiting for a peer there could wait for its `Var::set`. So the operation only hands the
/// result on, at the price of a copy.
pub(crate) fn linked(
    x: &Tensor,
    result: impl Into<Option<Tensor>>,
    transpose: impl FnOnce() -> Transpose,
) -> Result<Tensor> {
    let result = result.into();
    if x.track_op() {
        return x.apply_op1(Link { result, transpose: transpose() });
    }
    match result {
        Some(result) => Ok(result),
        None => Ok(x.clone()),
    }
}

#[derive(Debug)]
struct Link {
    result: Option<Tensor>,
    transpose: Transpose,
}

impl CustomOp1 for Link {
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
        self.transpose.of(gradient).map(Some)
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
